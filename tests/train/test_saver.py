"""Checkpoints written beside the training, and those that cannot be written."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

import pytest
from run_case import differences

from lpnet.errors import NumericsError, SaveError
from lpnet.io import checkpoint_write
from lpnet.train import async_saving, saver

CONFIG = """
seed: 3
method: mgrit
model: {layers: 9, width: 5, activation: tanh, opening: dense}
data: {name: peaks, train_samples: 100, validation_samples: 50, batch_size: 50}
mgrit: {levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1}
optim: {name: adam, lr: 0.01}
run: {steps: 12, eval_every: 4, checkpoint_every: 2, keep: 10}
"""
MODES = ["off", "thread", "step"]


def steps_in(out: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in out.glob("checkpoints/step-*.h5"))


@pytest.mark.ranks(1, 3)
def test_all_modes_write_the_same_files(comm, config, shared_tmp_path, run_train):
    for mode in MODES:
        assert run_train(comm, config, shared_tmp_path / mode, "--run.async_save", mode) == 0
    if comm.rank == 0:
        for mode in MODES:
            assert steps_in(shared_tmp_path / mode) == [2, 4, 6, 8, 10, 12]
            for step in steps_in(shared_tmp_path / mode):
                name = f"checkpoints/step-{step:08d}.h5"
                assert differences(shared_tmp_path / mode / name, shared_tmp_path / "off" / name) == []


@pytest.mark.ranks(2)
def test_without_thread_multiple_a_thread_becomes_steps(comm, config, shared_tmp_path, run_train, monkeypatch):
    monkeypatch.setattr(saver, "threads_may_send", lambda: comm.rank == 0)
    made = []
    monkeypatch.setattr(saver, "StepWriter", lambda comm: made.append(1) or async_saving.StepWriter(comm))
    assert run_train(comm, config, shared_tmp_path / "run", "--run.async_save", "thread") == 0
    assert made == [1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["thread", "step"])
def test_one_at_a_time(comm, mode, config, shared_tmp_path, run_train, monkeypatch):
    """A save that is slower than the steps holds them up: the next one waits for it."""
    read_back = checkpoint_write.read_back
    under_way, most = [], []

    def slow(*arguments):
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.25)
        read_back(*arguments)
        under_way.pop()

    monkeypatch.setattr(checkpoint_write, "read_back", slow)
    began = time.monotonic()
    flags = ["--run.async_save", mode, "--run.checkpoint_every", 1, "--run.steps", 5]
    assert run_train(comm, config, shared_tmp_path / "run", *flags) == 0
    assert time.monotonic() - began > 5 * 0.25 and set(most) == {1}
    if comm.rank == 0:
        assert steps_in(shared_tmp_path / "run") == [1, 2, 3, 4, 5]
        text = (shared_tmp_path / "run" / "log.txt").read_text()
        assert "for the checkpoint of step 1 to be written; raise run.checkpoint_every" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_save_that_fails(comm, mode, config, shared_tmp_path, run_train, monkeypatch, caplog):
    publish, calls = checkpoint_write.publish, []

    def full(*arguments):
        calls.append(1)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(*arguments)

    monkeypatch.setattr(checkpoint_write, "publish", full)
    out = shared_tmp_path / "goes on"
    flags = ["--run.async_save", mode]
    assert run_train(comm, config, out, *flags, "--run.on_save_error", "continue") == 0
    comm.barrier()
    assert steps_in(out) == [2, 8, 10, 12]
    assert not list(out.glob("checkpoints/*.partial"))
    if comm.rank == 0:
        text = (out / "log.txt").read_text()
        assert text.count("checkpoint not written: No space left on device; step-00000002.h5 is intact") == 2
    calls.clear()
    out = shared_tmp_path / "stops"
    with pytest.raises(SaveError, match="step-00000004.h5: checkpoint not written: No space left on device"):
        run_train(comm, config, out, *flags)
    comm.barrier()
    assert steps_in(out) == [2]
    calls.extend([1, 1])
    assert run_train(comm, config, out, *flags, "--resume", "auto", "--run.steps", 6) == 0


@pytest.mark.ranks(2)
def test_the_last_one_must_be_written(comm, config, shared_tmp_path, run_train, monkeypatch):
    def full(*arguments):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(checkpoint_write, "publish", full)
    flags = ["--run.on_save_error", "continue", "--run.async_save", "thread"]
    with pytest.raises(SaveError, match="step-00000012.h5: checkpoint not written: Disk quota exceeded; .*there was"):
        run_train(comm, config, shared_tmp_path / "run", *flags)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["thread", "step"])
def test_numbers_that_are_not_finite_leave_the_save_before_them(comm, mode, config, shared_tmp_path, run_train):
    flags = ["--optim.name", "sgd", "--optim.lr", 1e12, "--run.checkpoint_every", 1, "--run.async_save", mode]
    with pytest.raises(NumericsError):
        run_train(comm, config, shared_tmp_path / "run", *flags, "--model.activation", "relu")
    assert steps_in(shared_tmp_path / "run")[-1:] == [len(steps_in(shared_tmp_path / "run"))]


@pytest.mark.ranks(1)
def test_what_has_stepped_aside_is_pruned(comm, config, shared_tmp_path, run_train, caplog):
    out = shared_tmp_path / "run"
    assert run_train(comm, config, out) == 0
    for step in (8, 10, 12):
        with (out / f"checkpoints/step-{step:08d}.h5").open("r+b") as file:
            file.truncate(3000)
    flags = ["--resume", "auto", "--run.keep", 2, "--run.checkpoint_every", 1]
    with caplog.at_level(logging.WARNING):
        assert run_train(comm, config, out, *flags, "--run.steps", 7) == 0
    names = sorted(path.name for path in out.glob("checkpoints/*.superseded"))
    assert names == ["step-00000010.h5.superseded", "step-00000012.h5.superseded"]
    assert run_train(comm, config, out, *flags, "--run.steps", 11) == 0
    assert [path.name for path in out.glob("checkpoints/*.superseded")] == ["step-00000012.h5.superseded"]
    assert run_train(comm, config, out, *flags, "--run.steps", 12) == 0
    assert sorted(path.name for path in out.glob("checkpoints/*")) == [
        "latest", "step-00000011.h5", "step-00000011.h5.sha256", "step-00000012.h5", "step-00000012.h5.sha256",
    ]  # fmt: skip
