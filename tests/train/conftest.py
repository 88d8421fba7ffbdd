"""Small runs through the trainer, in this process: a configuration file with flags, on the ranks of `comm`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_train() -> Callable[..., int]:
    """train(comm, out, *flags): `lpnet train CONFIG --run.out OUT flags`, in this process. Collective over comm."""

    def run(comm: Any, config: str | Path, out: Path, *flags: object) -> int:
        from lpnet.configfile import parse
        from lpnet.parallel.comm import Comm
        from lpnet.train.trainer import train

        words = [str(word) for word in flags]
        path = config if Path(config).is_absolute() else ROOT / "drivers" / "configs" / config
        mine = Comm(comm)
        try:
            return train(parse([str(path), "--run.out", str(out), "--run.plots", "false", *words]).config, mine)
        finally:
            if sys.exc_info()[0] is None:
                mine.free()

    return run


@pytest.fixture
def config(request: pytest.FixtureRequest, shared_tmp_path: Path, comm: Any) -> Path:
    """The module's CONFIG as a file that all ranks see; a module with another one has a fixture of its own."""
    path = shared_tmp_path / "config.yaml"
    if comm.rank == 0:
        path.write_text(request.module.CONFIG)
    comm.barrier()
    return path
