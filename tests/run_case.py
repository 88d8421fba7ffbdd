"""Runs as whole processes under mpirun that tests do things to: their ranks, and what their checkpoints hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from lpnet.io.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = ("OMPI_COMM_", "OMPI_MCA_orte_", "PMIX_", "PMI_")

# lpnet with a pause in every step, so that there is time to do things to it
PACED = """
import sys, time
from lpnet.parallel import signals
signals.install()
from lpnet import cli
from lpnet.train.stopping import Stopping
seconds, begin_step = float(sys.argv.pop(1)), Stopping.begin_step
def pause(self):
    time.sleep(seconds)
    return begin_step(self)
Stopping.begin_step = pause
sys.exit(cli.main())
"""


@dataclass
class Run:
    """A training under mpirun that is under way."""

    ranks: int
    out: Path
    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def rows(self) -> int:
        """Rows in metrics.jsonl."""
        try:
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def until(self, what: Callable[[], object], timeout: float = 240) -> bool:
        """Wait until something holds; False where the run has ended before."""
        end = time.monotonic() + timeout
        while not what():
            if self.process.poll() is not None:
                return bool(what())
            assert time.monotonic() < end, f"nothing happens:\n{self.text()}"
            time.sleep(0.001)
        return True

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if child.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
                    return child
            except psutil.Error:
                continue
        raise AssertionError(f"there is no rank {rank}:\n{self.text()}")

    def wait(self, timeout: float = 240) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"does not end within {timeout} s:\n{self.text()[-6000:]}")

    def starts_from(self) -> int:
        """The step that it went on from."""
        found = [line.rsplit(" ", 1)[1] for line in self.text().splitlines() if "going on from" in line]
        return int(found[0]) if found else 0


Launch = Callable[..., Run]


def start_run(folder: Path, ranks: int, out: Path, *flags: object, pace: float, env: dict[str, str] | None) -> Run:
    """A training under mpirun, whose program and output are kept in a folder."""
    program, number = folder / "paced.py", len(list(folder.glob("log-*.txt")))
    program.write_text(PACED)
    words = [sys.executable, str(program), str(pace), "train", *map(str, flags), "--run.out", str(out)]
    script = ["bash", "-c", '. "$0"; exec mpirun "$@"', str(ROOT / "jobscripts" / "mpi_env.sh")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    quiet = {"OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONPATH": str(ROOT)}
    log = folder / f"log-{number}.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*script, "-n", str(ranks), *words],
            env={**inherited, **quiet, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Run(ranks, out, process, log)


def contents(path: Path) -> dict[str, torch.Tensor]:
    """All numbers of a checkpoint."""
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names()}


def differences(one: Path, two: Path) -> list[str]:
    """Names of what two checkpoints do not have in common, bit for bit."""
    first, second = contents(one), contents(two)
    names = sorted({*first, *second})
    return [name for name in names if name not in first or name not in second or not _same(first[name], second[name])]


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return one.contiguous().numpy().tobytes() == two.contiguous().numpy().tobytes()


def steps_of(out: Path) -> list[int]:
    """The steps of metrics.jsonl."""
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
