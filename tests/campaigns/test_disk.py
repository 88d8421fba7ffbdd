"""A full disk, a quota, a failing or read-only file system, a lost folder: in one run that goes on, and one that stops.

Full and read-only are a small tmpfs (root); errors of the device come from a library that stands before the C library's
writes (fault.c), on one rank only.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_case import Launch, Run, differences, steps_of

from lpnet.io.checkpoint import Checkpoint

CONFIG = """
method: mgrit
model: {layers: 12, width: 16, activation: tanh}
data: {name: peaks, train_samples: 60, validation_samples: 20}
mgrit: {levels: 2, coarsening: 2, relative_tolerance: 1e-9}
optim: {name: lbfgs, lr: 0.02, memory: 5, tikhonov: 1e-3, ddt: 1e-3}
run: {steps: 100000, eval_every: 0, checkpoint_every: 4, plots: false}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A run folder whose checkpoints lie on a file system of 3 MiB."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs to mount a small tmpfs, as root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fault.c, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("fault") / "fault.so"
    source = Path(__file__).parent / "fault.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl"], check=True)
    return target


def faults(library: Path, file: Path) -> dict[str, str]:
    return {"LD_PRELOAD": str(library), "FAULT_PATH": ".h5.partial", "FAULT_FILE": str(file)}


def newest(out: Path) -> Path:
    return max(out.glob("checkpoints/step-*.h5"))


def refused(run: Run, reason: str) -> int:
    """Wait until a checkpoint could not be written for a reason; how many such lines there are."""
    line = re.compile(rf"checkpoint not written: {reason}.*; step-\d+\.h5 is intact; .*the run goes on")
    assert run.until(lambda: line.search(run.text())), run.text()
    return len(line.findall(run.text()))


def saves_again(run: Run) -> None:
    """Wait for a checkpoint that is newer than what there is."""
    last = newest(run.out).name
    assert run.until(lambda: newest(run.out).name > last), run.text()


def test_a_run_that_goes_on(launch: Launch, config: Path, disk: Path, library: Path, tmp_path: Path) -> None:
    fault, out = tmp_path / "fault", tmp_path / "run"
    flags = [config, "--resume", "auto", "--run.on_save_error", "continue"]
    run = launch(2, out, *flags, pace=0.02, env=faults(library, fault))
    assert run.until(lambda: any(disk.glob("step-*.h5"))), run.text()
    # full
    with (disk / "ballast").open("wb") as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 16))
                ballast.flush()
        except OSError as full:
            assert full.errno == errno.ENOSPC
    refused(run, "No space left on device")
    (disk / "ballast").unlink()
    saves_again(run)
    # a device that fails, on rank 1 within MPI-IO, and on rank 0 while it builds the file
    for call, rank, number, reason in (
        ("pwrite", 1, errno.EIO, ".*(Input/output error|input/output error|file write failed|read back)"),
        ("fsync", 1, errno.EIO, "Input/output error"),
        ("pwrite", 0, errno.EDQUOT, "Disk quota exceeded"),
    ):
        before = run.text().count("checkpoint not written")
        fault.write_text(f"{call} {rank} {number}")
        assert run.until(lambda before=before: run.text().count("checkpoint not written") > before), run.text()
        refused(run, reason)
        fault.unlink()
        saves_again(run)
    # read-only
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    refused(run, "Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    saves_again(run)
    # gone: what has been saved is lost, the run is not
    for path in disk.iterdir():
        path.unlink(missing_ok=True)  # the run removes old ones too
    assert run.until(lambda: any(disk.glob("step-*.h5"))), run.text()
    run.process.send_signal(signal.SIGUSR1)  # mpirun hands it on
    assert run.wait() == 75, run.text()
    assert not list(disk.glob("*.partial"))
    last = newest(out)
    assert steps_of(out) == list(range(int(last.name[5:13]) + 1))
    whole = launch(2, tmp_path / "whole", config, "--run.steps", int(last.name[5:13]), "--run.checkpoint_every", 0)
    assert whole.wait() == 0, whole.text()
    assert differences(last, newest(tmp_path / "whole")) == []


@pytest.mark.parametrize("mode", ["off", "thread"])
def test_a_run_that_stops(launch: Launch, config: Path, library: Path, tmp_path: Path, mode: str) -> None:
    fault, out = tmp_path / "fault", tmp_path / "run"
    flags = [config, "--resume", "auto", "--run.async_save", mode]
    run = launch(2, out, *flags, pace=0.02, env=faults(library, fault))
    assert run.until(lambda: any(out.glob("checkpoints/step-*.h5"))), run.text()
    fault.write_text(f"fsync 1 {errno.EIO}")
    assert run.wait() == 1
    lines = [line for line in run.text().splitlines() if " ERROR] " in line]
    assert len(lines) == 1 and "checkpoint not written: Input/output error; step-" in lines[0], run.text()
    assert "Traceback" not in run.text() and not list(out.glob("checkpoints/*.partial"))
    assert newest(out).name in lines[0]
    Checkpoint.open(newest(out)).close()
