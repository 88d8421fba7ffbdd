"""Kills, errors and a full disk during a save: whole jobs under mpirun; the checkpoint before stays valid."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from io_case import numbers, shards_of

from lpnet.io import checkpoint
from lpnet.parallel.comm import Comm

PROGRAM = Path(__file__).parents[1] / "io_case.py"
Mpirun = Callable[..., "subprocess.CompletedProcess[str]"]


def save(folder: Path, step: int) -> None:
    checkpoint.save(folder, Comm(), step=step, shards=shards_of(numbers(step), 0, 1), attributes={})


def assert_newest_is(folder: Path, step: int) -> None:
    with checkpoint.open_newest(folder) as file:  # type: ignore[union-attr]
        assert file.step == step
        for name, tensor in numbers(step).items():
            assert torch.equal(file.read(name), tensor)


def run(mpirun: Mpirun, folder: Path, moment: str, who: int) -> tuple[int, str]:
    """Exit status and output of three ranks that save step 2; the status of a killed job is not that of `timeout`."""
    root = Path(__file__).parents[2]
    words = [sys.executable, PROGRAM, folder, 2, moment, who]
    script = 'mpirun -n 3 "$@" 2>&1; echo "status $?"'
    done = mpirun(0, "bash", "-c", script, "bash", *words, env={"PYTHONPATH": f"{root}:{root / 'tests'}"})
    text, _, status = done.stdout.rpartition("status ")
    return int(status), text


@pytest.mark.parametrize(
    ("moment", "who", "newest"),
    [("build", 0, 1), ("write", 1, 1), ("read", 2, 1), ("sidecar", 0, 1), ("renamed", 0, 2)],
)
def test_sigkill_during_a_save(mpirun: Mpirun, tmp_path: Path, moment: str, who: int, newest: int) -> None:
    save(tmp_path, 1)
    status, text = run(mpirun, tmp_path, moment, who)
    assert status != 0 and "saved" not in text
    assert_newest_is(tmp_path, newest)
    save(tmp_path, 3)
    assert not list(tmp_path.glob("*.partial"))
    assert_newest_is(tmp_path, 3)


def test_an_exception_inside_mpi_io_is_told_to_all_ranks(mpirun: Mpirun, tmp_path: Path) -> None:
    save(tmp_path, 1)
    status, text = run(mpirun, tmp_path, "write-raise", 1)
    assert status == 0
    assert text.count("checkpoint not written: came to grief; step-00000001.h5 is intact") == 3
    assert not list(tmp_path.glob("*.partial"))
    assert_newest_is(tmp_path, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs to mount a small tmpfs, as root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(mpirun: Mpirun, small_disk: Path) -> None:
    save(small_disk, 1)
    status, text = run(mpirun, small_disk, "big", 0)
    assert status == 0
    assert text.count("No space left on device; step-00000001.h5 is intact; free space in") == 3
    assert not list(small_disk.glob("*.partial"))
    assert_newest_is(small_disk, 1)
    save(small_disk, 2)
    assert_newest_is(small_disk, 2)
