"""10 steps == 5 + save + resume + 5, bitwise; a checkpoint of any rank count loads on any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import lpnet
from lpnet.errors import CheckpointError, UsageError
from lpnet.io.checkpoint import Checkpoint
from lpnet.io.metrics import read

CASES = {
    "adam one-shot, fixed mini-batches": ["--optim.name", "adam", "--data.batch_size", 40, "--optim.clip_norm", 0.5],
    "sgd with momentum, converged": ["--optim.name", "sgd", "--optim.momentum", 0.9, "--data.batch_size", 40,
                                     "--mgrit.forward_iterations", "null", "--mgrit.adjoint_iterations", "null"],
    "lbfgs one-shot, full batch": ["--optim.name", "lbfgs", "--optim.lr", 1.0, "--optim.memory", 3,
                                   "--optim.ddt", 1e-5, "--optim.tikhonov", 1e-5],
}  # fmt: skip
CONFIG = """
method: mgrit
model: {layers: 11, width: 5, activation: tanh, opening: dense}
data: {name: peaks, train_samples: 100, validation_samples: 50}
mgrit: {levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1}
optim: {lr: 0.01}
run: {steps: 10, eval_every: 2, checkpoint_every: 5, keep: 3}
"""


def contents(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names()}


def assert_same(one: Path, two: Path) -> None:
    first, second = contents(one), contents(two)
    assert sorted(first) == sorted(second)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def rows_of(folder: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read(folder / "metrics.jsonl")]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("case", CASES)
def test_resume_is_bitwise(comm, case, config, shared_tmp_path, run_train):
    flags = CASES[case]
    whole, parts = shared_tmp_path / "whole", shared_tmp_path / "parts"
    assert run_train(comm, config, whole, *flags) == 0
    assert run_train(comm, config, parts, *flags, "--run.steps", 5) == 0
    assert run_train(comm, config, parts, *flags, "--resume", "auto") == 0
    if comm.rank == 0:
        assert_same(whole / "checkpoints" / "step-00000005.h5", parts / "checkpoints" / "step-00000005.h5")
        assert_same(whole / "checkpoints" / "step-00000010.h5", parts / "checkpoints" / "step-00000010.h5")
        assert rows_of(whole) == rows_of(parts)
        names = contents(whole / "checkpoints" / "step-00000010.h5")
        assert any(name.startswith("mgrit/state/") for name in names) == ("sgd" not in case)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_any_rank_count_loads_the_same_state(comm, case, config, shared_tmp_path, run_train):
    folder = shared_tmp_path / "four"
    assert run_train(comm, config, folder, *CASES[case], "--run.steps", 5) == 0
    for ranks in (1, 2, 3):
        part = comm.Split(0 if comm.rank < ranks else 1, comm.rank)
        if comm.rank < ranks:
            out = shared_tmp_path / f"again{ranks}"
            flags = [*CASES[case], "--run.steps", 5, "--resume", folder / "checkpoints" / "step-00000005.h5"]
            assert run_train(part, config, out, *flags) == 0  # nothing is left to do; evaluates
            resumed = rows_of(out)[-1] if comm.rank == 0 else None
            if comm.rank == 0:
                assert resumed["val_accuracy"] == rows_of(folder)[-1]["val_accuracy"]
        part.Free()
        comm.barrier()


@pytest.mark.ranks(4)
def test_save_after_load_on_other_rank_counts_gives_the_same_file(comm, shared_tmp_path):
    def make(part):
        stack = lpnet.LayerStack(lpnet.nn.DenseStep(width=4), num_layers=9, final_time=2.0, comm=part, seed=1)
        mgrit = lpnet.MGRIT(coarsening=2, forward_iterations=2, adjoint_iterations=1)
        net = lpnet.LayerParallel(stack, opening=lpnet.nn.ZeroExpand(2, 4), closing=torch.nn.Linear(4, 3), mgrit=mgrit)
        return net, torch.optim.Adam(net.parameters(), lr=0.01)

    torch.manual_seed(0)
    x, y = torch.randn(20, 2), torch.arange(20) % 3
    net, optimizer = make(comm)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x, batch=0), y).backward()
        optimizer.step()
    saved = lpnet.save(shared_tmp_path / "4", net, optimizer, step=3, epoch=3)
    for ranks in (1, 2, 3):
        part = comm.Split(0 if comm.rank < ranks else 1, comm.rank)
        if comm.rank < ranks:
            torch.manual_seed(5)
            net, optimizer = make(part)
            assert lpnet.load(shared_tmp_path / "4", net, optimizer) == (3, 3, None)
            again = lpnet.save(shared_tmp_path / str(ranks), net, optimizer, step=3, epoch=3)
            if comm.rank == 0:
                assert_same(saved, again)
        part.Free()
        comm.barrier()


@pytest.mark.ranks(2)
def test_what_cannot_be_resumed(comm, config, shared_tmp_path, run_train):
    out = shared_tmp_path / "run"
    flags = ["--run.steps", 2]
    assert run_train(comm, config, out, *flags) == 0
    with pytest.raises(UsageError, match=r"already holds a run \(config.yaml\); give another folder"):
        run_train(comm, config, out, *flags)
    with pytest.raises(CheckpointError, match=r"model.activation is tanh in the file and relu in this run"):
        run_train(comm, config, out, *flags, "--resume", "auto", "--model.activation", "relu")
    with pytest.raises(CheckpointError, match=r"optim.name adam, and this run uses sgd"):
        run_train(comm, config, out, *flags, "--resume", "auto", "--optim.name", "sgd")
    with pytest.raises(CheckpointError, match=r"no such checkpoint"):
        run_train(comm, config, shared_tmp_path / "b", "--resume", shared_tmp_path / "nothing.h5")
    assert run_train(comm, config, out, "--run.steps", 3, "--resume", "auto") == 0  # a longer run is another file
    if comm.rank == 0:
        assert sorted(path.name for path in out.glob("config*.yaml")) == ["config-1.yaml", "config.yaml"]
        assert [row["step"] for row in read(out / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.ranks(2)
def test_a_damaged_newest_checkpoint_is_passed_over(comm, config, shared_tmp_path, run_train):
    out, flags = shared_tmp_path / "run", ["--run.checkpoint_every", 2]
    assert run_train(comm, config, out, *flags, "--run.steps", 4) == 0
    if comm.rank == 0:
        newest = out / "checkpoints" / "step-00000004.h5"
        newest.write_bytes(newest.read_bytes()[:-200])
    comm.barrier()
    assert run_train(comm, config, out, *flags, "--run.steps", 6, "--resume", "auto") == 0
    assert run_train(comm, config, shared_tmp_path / "whole", *flags, "--run.steps", 6) == 0
    if comm.rank == 0:
        assert_same(out / "checkpoints" / "step-00000006.h5", shared_tmp_path / "whole/checkpoints/step-00000006.h5")
        text = (out / "log.txt").read_text()
        assert "checkpoint skipped" in text or "going on from" in text
        shutil.rmtree(out)


@pytest.mark.ranks(1)
def test_other_iterations_start_the_kept_states_cold(comm, config, shared_tmp_path, run_train):
    """Another hierarchy has other C-points: the parameters are taken over, the states are not."""
    out = shared_tmp_path / "run"
    assert run_train(comm, config, out, "--run.steps", 2) == 0
    assert run_train(comm, config, out, "--run.steps", 4, "--resume", "auto", "--mgrit.coarsening", 3) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert "another hierarchy" in (out / "log.txt").read_text()
