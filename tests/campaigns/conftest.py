"""Campaigns: many runs that come to grief, as whole processes; short here, long behind environment variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from run_case import Launch, Run, start_run


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """launch(ranks, out, *flags, pace=s, env={}): a training under mpirun, ended with the test if need be."""
    running: list[Run] = []

    def start(ranks: int, out: Path, *flags: object, pace: float = 0.0, env: dict[str, str] | None = None) -> Run:
        running.append(start_run(tmp_path, ranks, out, *flags, pace=pace, env=env))
        return running[-1]

    yield start
    for run in running:
        if run.process.poll() is None:
            for child in psutil.Process(run.process.pid).children(recursive=True):
                child.kill()
            run.process.kill()
            run.process.wait()
