"""Grids of ranks in the trainer: replicas x modules x layer ranks give one run, and share their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lpnet.errors import ConfigError, UsageError
from lpnet.io.checkpoint import Checkpoint
from lpnet.io.metrics import read
from lpnet.parallel.comm import Comm
from lpnet.train import evaluate

CONFIG = """
seed: 3
method: mgrit
model: {layers: 9, width: 5, activation: tanh, opening: dense, dtype: float64}
data: {name: peaks, train_samples: 105, validation_samples: 50, batch_size: 20}
mgrit: {levels: 2, coarsening: 2}
optim: {name: adam, lr: 0.01}
run: {steps: 8, eval_every: 3, checkpoint_every: 4}
"""
REPLICAS = ["--parallel.replicas", 2]
MODULES = ["--method", "fdg", "--parallel.modules", 2]
CASES = {  # flags of the grid, flags of both, ranks of the other run
    "replicas x layers": (REPLICAS, ["--optim.tikhonov", 1e-3, "--optim.ddt", 1e-4, "--optim.clip_norm", 0.1], 2),
    "replicas x layers, one-shot": (REPLICAS, ["--mgrit.forward_iterations", 2, "--mgrit.adjoint_iterations", 1], 1),
    "replicas x layers, lbfgs": (REPLICAS, ["--optim.name", "lbfgs", "--optim.lr", 1.0, "--data.batch_size", "null",
                                            "--optim.memory", 3], 1),
    "modules x layers": ([], [*MODULES, "--optim.clip_norm", 0.5], 1),  # the other run propagates serially
    "replicas x modules": ([*REPLICAS], MODULES, 2),
    "replicas x plain modules": ([*REPLICAS], ["--method", "fdg", "--fdg.modules", 2, "--fdg.cuts", "[5]"], 2),
    "replicas x pipeline": ([*REPLICAS], ["--method", "pipeline", "--parallel.modules", 2, "--fdg.microbatches", 1,
                                          "--fdg.cuts", "[5]"], 2),
}  # fmt: skip


def contents(folder: Path, step: int = 8, sections=("model", "optim")) -> dict[str, torch.Tensor]:
    with Checkpoint.open(folder / "checkpoints" / f"step-{step:08d}.h5") as checkpoint:
        return {name: checkpoint.read(name) for section in sections for name in checkpoint.names(section)}


def assert_near(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    """But for what a controller counts: a cold solve may take one iteration more where sums round otherwise."""
    assert sorted(one) == sorted(two)
    for name in (name for name in one if not name.startswith("optim/control/")):
        torch.testing.assert_close(one[name], two[name], rtol=1e-7, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def on(comm, ranks):
    """The first `ranks` ranks of comm as a communicator; None on the others. Collective."""
    from mpi4py import MPI

    part = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank)
    return None if part == MPI.COMM_NULL else part


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_a_grid_of_four_ranks_gives_the_run_of_fewer(comm, case, config, shared_tmp_path, run_train):
    """The last batch of an epoch is short and odd, so that replicas have parts of different sizes."""
    grid, both, ranks = CASES[case]
    assert run_train(comm, config, shared_tmp_path / "grid", *grid, *both) == 0
    fewer = on(comm, ranks)
    if fewer is not None:
        serial = ["--mgrit.levels", 1] if case == "modules x layers" else []
        assert run_train(fewer, config, shared_tmp_path / "fewer", *both, *serial) == 0
    comm.barrier()
    if comm.rank == 0:
        assert_near(contents(shared_tmp_path / "grid"), contents(shared_tmp_path / "fewer"))
        rows = [read(shared_tmp_path / name / "metrics.jsonl") for name in ("grid", "fewer")]
        for one, two in zip(*rows, strict=True):
            for key in ("loss", "objective", "grad_norm", "train_accuracy", "val_accuracy", "forward_residuals"):
                assert one[key] == (None if two[key] is None else pytest.approx(two[key], rel=1e-6, abs=1e-8)), key


@pytest.mark.ranks(4)
@pytest.mark.parametrize("flags", [
    [*REPLICAS, "--mgrit.forward_iterations", 2, "--mgrit.adjoint_iterations", 1],
    [*REPLICAS, *MODULES],
    [*MODULES, "--optim.name", "sgd", "--optim.momentum", 0.9],
], ids=["replicas x layers, one-shot", "replicas x modules", "modules x layers"])  # fmt: skip
def test_a_grid_resumes_bitwise(comm, flags, config, shared_tmp_path, run_train):
    whole, parts = shared_tmp_path / "whole", shared_tmp_path / "parts"
    assert run_train(comm, config, whole, *flags) == 0
    assert run_train(comm, config, parts, *flags, "--resume", whole / "checkpoints" / "step-00000004.h5") == 0
    if comm.rank == 0:
        one, two = (contents(folder, sections=("model", "optim", "mgrit")) for folder in (whole, parts))
        assert sorted(one) == sorted(two)
        assert not [name for name in one if not torch.equal(one[name], two[name])]


@pytest.mark.ranks(4)
def test_checkpoints_move_between_grids(comm, config, shared_tmp_path, run_train, capsys):
    """Converged runs, drained at their end: any grid goes on from the file of any other with the same numbers."""
    grids = {  # ranks, flags
        "2 x 1 x 2": (4, REPLICAS),
        "1 x 1 x 3": (3, []),
        "4 x 1 x 1": (4, ["--parallel.replicas", 4]),
        "1 x 1 x 1": (1, []),
    }
    last = None
    for step, (ranks, flags) in enumerate(grids.values(), 1):
        part = on(comm, ranks)
        if part is not None:
            more = ["--run.steps", 2 * step, "--run.checkpoint_every", 0, "--resume", "auto"]
            assert run_train(part, config, shared_tmp_path / "moved", *flags, *more) == 0
        comm.barrier()
    if comm.rank == 0:
        assert run_train(None, config, shared_tmp_path / "still", "--run.checkpoint_every", 0) == 0
        assert_near(contents(shared_tmp_path / "moved"), contents(shared_tmp_path / "still"))
    decoupled = {"2 x 2 x 1": (4, [*REPLICAS, *MODULES]), "1 x 2 x 2": (4, MODULES), "1 x 2 x 1": (2, MODULES)}
    for step, (ranks, flags) in enumerate(decoupled.values(), 1):
        part = on(comm, ranks)
        if part is not None:
            more = ["--run.steps", 3 * step, "--run.checkpoint_every", 0, "--resume", "auto"]
            assert run_train(part, config, shared_tmp_path / "cut", *flags, *more) == 0
            last = shared_tmp_path / "cut"
        comm.barrier()
    mine = Comm(comm)
    assert evaluate(shared_tmp_path / "cut", mine) == 0  # by exact propagation over all ranks
    mine.free()
    if comm.rank == 0:
        rows = [row for row in read(last / "metrics.jsonl") if row["val_accuracy"] is not None]
        assert f"accuracy {rows[-1]['val_accuracy']:6.2f} %" in capsys.readouterr().out


@pytest.mark.ranks(4)
def test_grids_that_do_not_fit_are_refused_before_anything_is_written(comm, config, shared_tmp_path, run_train):
    out = shared_tmp_path / "run"
    for flags, error, text in [
        (["--parallel.replicas", 3], UsageError, r"3 replicas x 1 modules do not fit 4 ranks; the nearest grid is 2"),
        (["--parallel.layers", 3], UsageError, r"3 layer ranks do not fit 4 ranks; .*or start 3 ranks"),
        (["--parallel.modules", 2], ConfigError, r"parallel.modules is 2, and method mgrit"),
        ([*MODULES, "--fdg.modules", 3], ConfigError, r"parallel.modules is 2 and fdg.modules is 3"),
        ([*MODULES, "--fdg.backward", "stash"], ConfigError, r"keep no old weights; set it to recompute"),
        ([*MODULES, "--fdg.cuts", "[8]"], UsageError, r"module 2 has 1 layers, which 2 ranks cannot share"),
        (["--method", "fdg", "--fdg.modules", 2, "--parallel.layers", 2], ConfigError, r"parallel.layers is 2"),
        ([*REPLICAS, *MODULES, "--parallel.layers", 2], UsageError, r"do not fit 4 ranks; .*start 8 ranks"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            run_train(comm, config, out, *flags)
        assert not out.exists()
