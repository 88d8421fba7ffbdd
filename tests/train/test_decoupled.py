"""Decoupled modules and the pipeline through the trainer: rank counts, resume, drain, plan, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lpnet.errors import CheckpointError, ConfigError
from lpnet.io.checkpoint import Checkpoint
from lpnet.io.metrics import read

CONFIG = """
method: fdg
model: {layers: 5, width: 6, activation: tanh, opening: dense, dtype: float64}
data: {name: peaks, train_samples: 100, validation_samples: 50, batch_size: 40}
fdg: {modules: 3, cuts: [2, 5], shrink: 0.7, prediction: full}
optim: {name: sgd, lr: 0.1, momentum: 0.9, decay_epochs: [2], decay: 0.5}
run: {steps: 12, eval_every: 4, checkpoint_every: 6, keep: 4}
"""


def contents(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names()}


def same(one: Path, two: Path) -> list[str]:
    """Names of entries that differ."""
    first, second = contents(one), contents(two)
    assert sorted(first) == sorted(second)
    return [name for name in first if not torch.equal(first[name], second[name])]


def rows_of(folder: Path) -> list[dict]:
    timed = ("seconds", "wait_seconds", "modules")
    return [{key: value for key, value in row.items() if key not in timed} for row in read(folder / "metrics.jsonl")]


CASES = {
    "fdg": [],
    "recompute, accumulated": ["--fdg.backward", "recompute", "--fdg.prediction", "null", "--fdg.accumulate", 2],
    "mixed": ["--fdg.backward", "mixed", "--fdg.prediction", "null"],
    "ddg": ["--fdg.schedule", "ddg", "--fdg.prediction", "null"],
    "pipeline": ["--method", "pipeline", "--fdg.microbatches", 3],
}


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("case", CASES)
def test_resume_equals_the_uninterrupted_run_bit_for_bit(comm, config, shared_tmp_path, run_train, case):
    whole, half = shared_tmp_path / "whole", shared_tmp_path / "half"
    assert run_train(comm, config, whole, *CASES[case]) == 0
    if comm.rank == 0:
        half.mkdir()
        (half / "checkpoints").mkdir()
        for path in (whole / "checkpoints").glob("step-00000006*"):
            shutil.copy(path, half / "checkpoints")
        for name in ("config.yaml", "metrics.jsonl"):
            shutil.copy(whole / name, half)
    comm.barrier()
    assert run_train(comm, config, half, *CASES[case], "--run.resume", "auto") == 0
    if comm.rank == 0:
        last = "checkpoints/step-00000012.h5"
        different = same(whole / last, half / last)
        # where nothing is in flight the clock counts ticks from the resume on; nothing that is computed depends on it
        assert [name for name in different if case not in ("mixed", "pipeline") or not name.endswith("/clock")] == []
        assert rows_of(whole) == rows_of(half)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES)
def test_three_ranks_equal_one_bit_for_bit(comm, config, shared_tmp_path, run_train, case):
    alone, together = shared_tmp_path / "alone", shared_tmp_path / "together"
    single = comm.Split(comm.rank)
    if comm.rank == 0:
        assert run_train(None, config, alone, *CASES[case]) == 0
    single.Free()
    comm.barrier()
    assert run_train(comm, config, together, *CASES[case]) == 0
    if comm.rank == 0:
        last = "checkpoints/step-00000012.h5"
        assert same(alone / last, together / last) == []
        first, second = rows_of(alone), rows_of(together)
        assert [row["loss"] for row in first] == [row["loss"] for row in second]
        assert [row["val_accuracy"] for row in first] == [row["val_accuracy"] for row in second]


@pytest.mark.ranks(1, 2)
def test_a_drained_checkpoint_goes_on_with_another_number_of_modules(comm, config, shared_tmp_path, run_train):
    """The end of a run is drained; work in flight of another number of modules is refused."""
    first, other = shared_tmp_path / "first", ["--fdg.modules", 2, "--fdg.cuts", "[3]"]
    if comm.rank == 0:
        assert run_train(None, config, first) == 0
    comm.barrier()
    files = sorted((first / "checkpoints").glob("*.h5"))
    drained, flying = files[-1], files[0]
    go_on = ["--run.steps", 14, "--run.resume", drained]
    assert run_train(comm, config, shared_tmp_path / "second", *other, *go_on) == 0
    with pytest.raises(CheckpointError, match="3 modules"):
        run_train(comm, config, shared_tmp_path / "third", *other, "--run.resume", flying)


@pytest.mark.ranks(1)
def test_one_module_equals_serial_training_of_the_same_layers(comm, config, shared_tmp_path, run_train):
    """K = 1 is plain SGD: to rounding that of method serial, whose layers are computed in another layout."""
    flags = ["--optim.decay_epochs", "[]", "--run.checkpoint_every", 0]
    one, serial = shared_tmp_path / "one", shared_tmp_path / "serial"
    for out, more in (
        (one, ["--fdg.modules", 1, "--fdg.cuts", "[]", "--fdg.shrink", 1, "--fdg.prediction", "null"]),
        (serial, ["--method", "serial"]),
    ):
        assert run_train(comm, config, out, *flags, *more) == 0
    losses = [[row["loss"] for row in rows_of(folder)][:12] for folder in (one, serial)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--optim.name", "lbfgs", "--optim.decay_epochs", "[]", "--data.batch_size", "null"],
            "lbfgs needs one objective",
        ),
        (["--optim.tikhonov", 0.1], "weight_decay"),
        (["--method", "mgrit", "--model.name", "resnet_cifar"], "method fdg or pipeline"),
        (["--model.name", "resnet_cifar"], "takes images"),
    ],
)
def test_what_cannot_work_is_refused(comm, config, shared_tmp_path, run_train, flags, message):
    with pytest.raises(ConfigError, match=message):
        run_train(comm, config, shared_tmp_path / "out", *flags)


def test_the_plan_prints_schedule_shares_and_memory(tmp_path, capsys):
    from lpnet.cli import main

    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert main(["plan", str(path)]) == 0
    text = capsys.readouterr().out
    assert "module 1     F0    F1    F2    F3    F4B0" in text
    assert "cuts [2, 5]: predicted speed-up" in text
