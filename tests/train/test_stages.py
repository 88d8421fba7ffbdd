"""Nested iteration in depth: stages of a run, resume within them, checkpoints refined by command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lpnet
from lpnet.cli import main
from lpnet.configfile import parse
from lpnet.errors import CheckpointError, ConfigError, SaveError, UsageError
from lpnet.io.checkpoint import Checkpoint
from lpnet.io.metrics import read
from lpnet.train import evaluate, stages
from lpnet.train.build import check

CONFIG = """
seed: 3
method: mgrit
model: {layers: 12, width: 5, activation: tanh, opening: dense, dtype: float64}
data: {name: peaks, train_samples: 100, validation_samples: 50, batch_size: 40}
mgrit: {levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1}
optim: {name: adam, lr: 0.01, tikhonov: 1e-4, ddt: 1e-4}
train: {stages: [3, 6, 12], stage_steps: [4, 5]}
run: {steps: 13, eval_every: 4, checkpoint_every: 1, keep: 20}
"""
STAGED = ["--train.stages", "[3, 6, 12]", "--train.stage_steps", "[4, 5]"]
LBFGS = ["--optim.name", "lbfgs", "--optim.lr", 1.0, "--data.batch_size", "null", "--optim.memory", 3]


def file_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}.h5"


def contents(path: Path, *sections: str) -> dict[str, torch.Tensor]:
    with Checkpoint.open(path) as checkpoint:
        names = [name for section in sections for name in checkpoint.names(section)] if sections else checkpoint.names()
        return {name: checkpoint.read(name) for name in names}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("flags", [[], ["--optim.name", "sgd", "--optim.momentum", 0.9], LBFGS],
                         ids=["adam", "sgd", "lbfgs"])
def test_a_run_resumes_bitwise_within_a_stage_and_between_two(comm, flags, config, shared_tmp_path, run_train):
    whole = shared_tmp_path / "whole"
    assert run_train(comm, config, whole, *flags) == 0
    for step in (4, 6, 9):  # between stages 1 and 2, in the middle of 2, between 2 and 3
        again = shared_tmp_path / f"from-{step}"
        assert run_train(comm, config, again, *flags, "--resume", file_of(whole, step)) == 0
        if comm.rank == 0:
            assert same(contents(file_of(whole, 13)), contents(file_of(again, 13)))
    if comm.rank == 0:
        layers = [contents(file_of(whole, step))["model/stack.weight"].shape[0] for step in (1, 4, 5, 9, 10, 13)]
        assert layers == [3, 3, 6, 6, 12, 12]
        assert len(read(whole / "metrics.jsonl")) == 14


@pytest.mark.ranks(3)
def test_any_rank_count_gives_the_same_run(comm, config, shared_tmp_path, run_train):
    flags = ["--mgrit.levels", 1, "--run.checkpoint_every", 0]
    assert run_train(comm, config, shared_tmp_path / "three", *flags) == 0
    if comm.rank == 0:
        assert run_train(None, config, shared_tmp_path / "one", *flags) == 0
        assert same(*(contents(file_of(shared_tmp_path / name, 13)) for name in ("three", "one")))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("interpolation", ["linear", "constant"])
def test_stages_are_runs_whose_checkpoints_are_refined_by_hand(comm, interpolation, config, shared_tmp_path, run_train,
                                                               capsys):
    """Converged, so that the kept states, which a refinement leaves out, make no difference."""
    flags = ["--mgrit.levels", 1, "--optim.name", "sgd", "--optim.momentum", 0.9]
    staged = shared_tmp_path / "staged"
    assert run_train(comm, config, staged, *flags, "--train.interpolation", interpolation) == 0
    plain = [*flags, "--train.stages", "[]", "--train.stage_steps", "[]"]
    before = None
    for layers, steps in ((3, 4), (6, 9), (12, 13)):
        folder, resume = shared_tmp_path / f"hand-{layers}", []
        if before is not None:
            if comm.rank == 0:
                words = ["export", str(before), str(shared_tmp_path / f"to-{layers}"), "--refine", "2",
                         "--interpolation", interpolation]  # fmt: skip
                assert main(words) == 0
                assert f"step-{before.name[5:13]}.h5" in capsys.readouterr().out
            comm.barrier()
            resume = ["--resume", shared_tmp_path / f"to-{layers}" / before.name]
        assert run_train(comm, config, folder, *plain, "--model.layers", layers, "--run.steps", steps, *resume) == 0
        before = file_of(folder, steps)
    if comm.rank == 0:
        one, two = (contents(path, "model", "optim") for path in (before, file_of(staged, 13)))
        for found in (one, two):  # what a controller counts begins anew with a run
            found.pop("optim/control/state", None)
        assert same(one, two)


@pytest.mark.ranks(4)
def test_stages_with_replicas(comm, config, shared_tmp_path, run_train):
    flags = ["--mgrit.forward_iterations", "null", "--mgrit.adjoint_iterations", "null", "--run.checkpoint_every", 0]
    assert run_train(comm, config, shared_tmp_path / "grid", *flags, "--parallel.replicas", 2) == 0
    if comm.rank == 0:
        assert run_train(None, config, shared_tmp_path / "one", *flags) == 0
        one, two = (contents(file_of(shared_tmp_path / name, 13), "model", "optim") for name in ("grid", "one"))
        for name in (name for name in one if "/control/" not in name):
            torch.testing.assert_close(one[name], two[name], rtol=1e-7, atol=1e-9)


@pytest.mark.ranks(1)
def test_a_checkpoint_of_a_coarse_stage_is_evaluated(comm, config, shared_tmp_path, run_train, capsys):
    from lpnet.parallel.comm import Comm

    assert run_train(None, config, shared_tmp_path / "run") == 0
    rows = {row["step"]: row for row in read(shared_tmp_path / "run" / "metrics.jsonl")}
    assert evaluate(file_of(shared_tmp_path / "run", 8), Comm()) == 0
    assert f"accuracy {rows[8]['val_accuracy']:6.2f} %" in capsys.readouterr().out


@pytest.mark.ranks(1)
def test_a_network_of_several_stacks_is_refined_stack_by_stack(comm, shared_tmp_path):
    net = lpnet.LayerParallel(lpnet.models.ode_resnet_cifar(6, widths=(4, 4, 4), norm=None, seed=2))
    lpnet.save(shared_tmp_path / "coarse", net, torch.optim.Adam(net.parameters()), step=7)
    path = lpnet.refine_checkpoint(shared_tmp_path / "coarse", shared_tmp_path / "fine", 3, interpolation="constant")
    fine = lpnet.LayerParallel(lpnet.models.ode_resnet_cifar(18, widths=(4, 4, 4), norm=None, seed=9))
    assert lpnet.load(path, fine).step == 7
    for name, tensor in net.stack.named_parameters():
        wanted = tensor.repeat_interleave(3, 0) if name.startswith("stack") else tensor
        assert torch.equal(dict(fine.stack.named_parameters())[name], wanted), name
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.attributes["layers"] == 20
        assert checkpoint.attributes["parts"] == "stack0:0 transition0:6 stack1:7 transition1:13 stack2:14"
    with pytest.raises(SaveError, match=r"step-00000007.h5 exists; give another folder"):
        lpnet.refine_checkpoint(path, shared_tmp_path / "fine", 2)
    with pytest.raises(UsageError, match="factor of a refinement is 0"):
        lpnet.refine_checkpoint(path, shared_tmp_path / "other", 0)


def refused(*words: object) -> None:
    check(parse([str(word) for word in ("--method", "mgrit", "--model.layers", 12, *words)]).config, 2)


def test_stages_that_cannot_be_are_refused():
    for words, text in [
        (["--train.stages", "[3, 7]", "--train.stage_steps", "[1]"], "7 is no multiple of 3"),
        (["--train.stages", "[3, 6]"], r"stage_steps has 0 entries and train.stages 2; .*: 1"),
        (["--train.stages", "[3, 6]", "--train.stage_steps", "[1]"], "ends with 6 layers, and model.layers is 12"),
        ([*STAGED, "--run.steps", 9], r"take 9 of 9 run.steps; the last stage needs at least 1"),
        ([*STAGED, "--mgrit.batching", "auto"], "holds for one number of layers"),
        ([*STAGED, "--method", "fdg"], "not method fdg with model.name dense"),
        (["--train.stages", "[1, 12]", "--train.stage_steps", "[1]"], "has 1 layers, which 2 ranks cannot share"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            refused(*words)


@pytest.mark.ranks(1)
def test_a_checkpoint_of_no_stage_is_refused(comm, config, shared_tmp_path, run_train):
    assert run_train(None, config, shared_tmp_path / "run") == 0
    with Checkpoint.open(file_of(shared_tmp_path / "run", 13)) as checkpoint, pytest.raises(
        CheckpointError, match=r"has 12 layers, and train.stages is \[4, 8\]"
    ):
        stages.stage_of(checkpoint, parse(["--train.stages", "[4, 8]", "--train.stage_steps", "[1]"]).config)
