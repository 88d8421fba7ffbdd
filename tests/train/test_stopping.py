"""Stops: signals, the file STOP, the end of a job's time; heard between steps, trials and parts of an evaluation."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from run_case import differences

from lpnet.io.metrics import read
from lpnet.parallel import signals
from lpnet.train import evaluation, progress
from lpnet.train.stopping import Stopping

CONFIG = """
seed: 3
method: mgrit
model: {layers: 9, width: 5, activation: tanh, opening: dense}
data: {name: peaks, train_samples: 100, validation_samples: 50, batch_size: 50}
mgrit: {levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1}
optim: {name: adam, lr: 0.01}
run: {steps: 12, eval_every: 4, checkpoint_every: 0}
"""
LBFGS = ["--optim.name", "lbfgs", "--data.batch_size", "null", "--optim.memory", 3, "--optim.ddt", 1e-5]
LAST = "checkpoints/step-00000012.h5"


@pytest.fixture
def listening():
    signals.install()
    yield
    signals.restore()


def after_step(step, monkeypatch, work):
    """Call `work` on this rank when a step has been made, once."""
    update = progress.Progress.update

    def then(self, at, report, scores):
        update(self, at, report, scores)
        if at == step:
            work()

    monkeypatch.setattr(progress.Progress, "update", then)


# reasons


def test_signals_are_noted_and_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals.install()
    signals.install()
    assert signals.received() is None
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received() == "SIGUSR1"
    signals.restore()
    assert signals.received() is None and signal.getsignal(signal.SIGUSR1) is before


def test_the_end_of_a_job(tmp_path: Path) -> None:
    now = [1000.0]
    stopping = Stopping(tmp_path, margin_s=10, environ={"SLURM_JOB_END_TIME": "1200"}, clock=lambda: now[0])
    for seconds in (0, 50, 5, 7, 6):  # the first step starts cold
        now[0] += seconds
        assert not stopping.begin_step()
    stopping.saved(3)
    now[0] = 1200 - (10 + 2 * 7 + 3) - 0.5
    assert not stopping.requested()
    now[0] += 1
    assert stopping.begin_step() and "s are left of the job's time, and" in str(stopping.reason)
    assert not Stopping(tmp_path, rank=1, environ={"SLURM_JOB_END_TIME": "1"}, clock=lambda: 5.0).requested()
    for word in ("", "N/A", "-1"):
        assert not Stopping(tmp_path, environ={"SLURM_JOB_END_TIME": word}, clock=lambda: 5.0).requested()


def test_the_file(tmp_path: Path) -> None:
    (tmp_path / "STOPPED").touch()
    assert not Stopping(tmp_path, environ={}).requested()
    assert not (tmp_path / "STOPPED").exists()
    (tmp_path / "STOP").write_text("hold\n")
    assert not Stopping(tmp_path, rank=1, environ={}).requested()
    stopping = Stopping(tmp_path, environ={})
    assert stopping.requested() and stopping.reason == f"found {tmp_path / 'STOP'}"
    stopping.done()
    assert (tmp_path / "STOPPED").read_text() == "hold\n" and not (tmp_path / "STOP").exists()


# all ranks stop at the same step, and go on from there


@pytest.mark.ranks(3)
@pytest.mark.parametrize("flags", [[], LBFGS], ids=["adam", "lbfgs"])
def test_a_signal_to_one_rank(comm, flags, config, shared_tmp_path, run_train, monkeypatch, listening):
    whole, parts = shared_tmp_path / "whole", shared_tmp_path / "parts"
    assert run_train(comm, config, whole, *flags) == 0
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            after_step(4, patch, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        assert run_train(comm, config, parts, *flags) == 75
    signals.restore()
    comm.barrier()
    if comm.rank == 0:
        assert [path.name for path in parts.glob("checkpoints/*.h5")] == ["step-00000006.h5"]
        assert [row["step"] for row in read(parts / "metrics.jsonl")] == list(range(7))
    comm.barrier()
    assert run_train(comm, config, parts, *flags, "--resume", "auto") == 0
    if comm.rank == 0:
        assert differences(whole / LAST, parts / LAST) == []
        rows = [read(folder / "metrics.jsonl") for folder in (whole, parts)]
        assert [{**row, "seconds": 0} for row in rows[0]] == [{**row, "seconds": 0} for row in rows[1]]


@pytest.mark.ranks(2)
def test_a_stop_within_an_evaluation(comm, config, shared_tmp_path, run_train, monkeypatch):
    whole, parts = shared_tmp_path / "whole", shared_tmp_path / "parts"
    assert run_train(comm, config, whole) == 0
    asked, requested = [], Stopping.requested

    def in_the_second_evaluation(self):
        asked.append(1)
        if comm.rank == 1 and len(asked) == 12 + 4 + 7:  # parts of an evaluation, steps, parts
            self.reason = "a test"
        return requested(self)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "CHUNK", 13)
        patch.setattr(Stopping, "requested", in_the_second_evaluation)
        assert run_train(comm, config, parts) == 75
    if comm.rank == 0:
        assert [path.name for path in parts.glob("checkpoints/*.h5")] == ["step-00000004.h5"]
    comm.barrier()
    assert run_train(comm, config, parts, "--resume", "auto") == 0
    if comm.rank == 0:
        assert differences(whole / LAST, parts / LAST) == []


@pytest.mark.ranks(2)
def test_a_stop_within_a_line_search(comm, config, shared_tmp_path, run_train, monkeypatch):
    """The iteration is given up after a rejected trial, and made from the start by the run that goes on."""
    from lpnet.train.strategies import LBFGSSteps

    flags = [*LBFGS, "--optim.lr", 1e4, "--run.steps", 4]
    whole, parts = shared_tmp_path / "whole", shared_tmp_path / "parts"
    assert run_train(comm, config, whole, *flags) == 0
    evaluate, calls = LBFGSSteps.evaluate, []

    def ask(self):
        calls.append(1)
        self.stop_requested |= comm.rank == 1 and self.steps == 2
        return evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(LBFGSSteps, "evaluate", ask)
        assert run_train(comm, config, parts, *flags) == 75
    if comm.rank == 0:
        assert [path.name for path in parts.glob("checkpoints/*.h5")] == ["step-00000002.h5"]
    comm.barrier()
    assert run_train(comm, config, parts, *flags, "--resume", "auto") == 0
    if comm.rank == 0:
        assert differences(whole / "checkpoints/step-00000004.h5", parts / "checkpoints/step-00000004.h5") == []
        assert any(row["step_size"] < 1e4 for row in read(whole / "metrics.jsonl"))  # trials are rejected


def test_a_study_stops_between_two_cells_and_goes_on(tmp_path: Path, capsys) -> None:
    from lpnet import cli

    (tmp_path / "study.yaml").write_text(
        "name: test\nscaling: strong\nsteps: 1\n"
        "base: {model: {width: 3, layers: 8}, data: {train_samples: 20, validation_samples: 10}}\n"
        "grid: {ranks: [2], levels: 2, coarsening: 2}\n"
    )
    words = ["study", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "STOP").touch()
    assert cli.main(words) == 75
    assert "stopped early after 0 of 2 cells: found" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert len(list((tmp_path / "out" / "cells").glob("*.json"))) == 2
