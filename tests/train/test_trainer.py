"""The trainer: the same numbers on any rank count, errors before any message, faults, what a run leaves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

import lpnet
from lpnet.errors import ConfigError, NumericsError, SaveError, UsageError
from lpnet.io.checkpoint import Checkpoint
from lpnet.io.metrics import read
from lpnet.parallel.comm import Comm
from lpnet.train import evaluate, export_checkpoint

CONFIG = """
seed: 3
method: mgrit
model: {layers: 9, width: 5, activation: tanh, opening: dense}
data: {name: peaks, train_samples: 100, validation_samples: 50}
mgrit: {levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1}
optim: {name: adam, lr: 0.01, tikhonov: 1e-4, classifier_tikhonov: 1e-4, ddt: 1e-4}
run: {steps: 4, eval_every: 2, checkpoint_every: 0}
"""


WITH_LBFGS = CONFIG.replace("name: adam, lr: 0.01", "name: lbfgs, lr: 1.0")  # starts 2 s sooner than torch.optim


def parameters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    with Checkpoint.open(folder / "checkpoints" / f"step-{step:08d}.h5") as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names("model") + checkpoint.names("optim")}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    "flags",
    [
        ["--mgrit.levels", 1],
        ["--mgrit.levels", 1, "--optim.name", "lbfgs", "--optim.lr", 1.0, "--optim.memory", 3],
        ["--optim.clip_norm", 0.1, "--data.batch_size", 30, "--mgrit.relaxation", "FCF"],
        ["--optim.name", "sgd", "--optim.momentum", 0.9, "--model.bias", "scalar", "--model.dtype", "float64"],
    ],
    ids=["adam, one level", "lbfgs, one level", "adam, clipped, mini-batches", "sgd, scalar bias"],
)
def test_any_rank_count_gives_the_same_run(comm, flags, config, shared_tmp_path, run_train):
    assert run_train(comm, config, shared_tmp_path / "many", *flags) == 0
    if comm.rank == 0:
        assert run_train(None, config, shared_tmp_path / "one", *flags) == 0
        many, one = read(shared_tmp_path / "many" / "metrics.jsonl"), read(shared_tmp_path / "one" / "metrics.jsonl")
        for row in (*many, *one):
            del row["seconds"]
        assert many == one
        first, second = parameters(shared_tmp_path / "many", 4), parameters(shared_tmp_path / "one", 4)
        assert sorted(first) == sorted(second)
        assert not [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.ranks(1, 3)
def test_gradient_of_the_objective_equals_finite_differences(comm):
    from lpnet.config import MGRIT, Config, DataConfig, ModelConfig, OptimConfig
    from lpnet.data.samples import load
    from lpnet.mgrit.network import build_network
    from lpnet.train.strategies import GradientSteps

    optim = OptimConfig(name="sgd", lr=1e-300, tikhonov=1e-2, classifier_tikhonov=2e-2, ddt=3e-3)
    config = Config(
        method="mgrit", model=ModelConfig(layers=7, width=4, opening="dense", dtype="float64"), optim=optim,
        data=DataConfig(train_samples=20, validation_samples=5), mgrit=MGRIT(coarsening=2),
    )  # fmt: skip
    mine = Comm(comm)
    data = load(config.data, 0, torch.float64)
    net = build_network(config, data, mine)
    steps = GradientSteps(net, optim)
    report = steps.step(data.train, None)
    parts = mine.all_gather_objects([(s.name, s.rows, s.tensor.grad.clone()) for s in net.shards()])
    gradients = [entry for part in parts for entry in part]
    square = sum(float((gradient**2).sum()) for _, _, gradient in gradients)
    assert report.grad_norm == pytest.approx(square**0.5, rel=1e-12)
    eps = 1e-6
    places = [("opening.weight", 0, 3), ("opening.bias", 0, 1), ("stack.weight", 0, 5), ("stack.weight", 3, 2),
              ("stack.bias", 2, 1), ("stack.bias", 6, 0), ("closing.weight", 0, 7), ("closing.bias", 0, 2)]  # fmt: skip
    for name, layer, index in places:
        values = []
        for shift in (eps, -2 * eps):
            for shard in net.shards():
                if shard.name == name and (shard.rows is None or shard.rows[0] <= layer < shard.rows[1]):
                    with torch.no_grad():
                        row = shard.tensor if shard.rows is None else shard.tensor[layer - shard.rows[0]]
                        row.view(-1)[index] += shift
            values.append(steps.step(data.train, None).objective)
        for shard in net.shards():
            if shard.name == name and (shard.rows is None or shard.rows[0] <= layer < shard.rows[1]):
                with torch.no_grad():
                    (shard.tensor if shard.rows is None else shard.tensor[layer - shard.rows[0]]).view(-1)[index] += eps
        found = next(
            (g if rows is None else g[layer - rows[0]]).reshape(-1)[index]
            for n, rows, g in gradients
            if n == name and (rows is None or rows[0] <= layer < rows[1])
        )
        assert (values[0] - values[1]) / (2 * eps) == pytest.approx(float(found), rel=1e-6, abs=1e-9), name
    mine.free()


@pytest.mark.ranks(2)
def test_one_reduction_per_step(comm, config):
    from lpnet.configfile import parse
    from lpnet.data.samples import load
    from lpnet.mgrit.network import build_network
    from lpnet.train.strategies import make_strategy

    mine = Comm(comm)
    for name, lr, first, later in (("adam", 0.01, 1, 1), ("lbfgs", 1e-3, 4, 2)):
        settings = parse([str(config), "--optim.name", name, "--optim.lr", str(lr)]).config
        data = load(settings.data, 0, torch.float32)
        net = build_network(settings, data, mine)
        strategy = make_strategy(net, settings.optim)
        strategy.step(data.train, 0)  # cold: the solves reduce too
        cold = net.comm.traffic.reductions
        assert cold >= first
        strategy.stop_requested = comm.rank == 1
        report = strategy.step(data.train, 0)
        assert net.comm.traffic.reductions - cold == later and net.comm.traffic.broadcasts == 0
        assert report.stop and report.forward is not None
    mine.free()


@pytest.mark.ranks(3)
def test_a_stop_asked_for_on_one_rank_stops_all_with_a_checkpoint(comm, config, shared_tmp_path):
    from lpnet.configfile import parse
    from lpnet.train.run_folder import RunFolder
    from lpnet.train.trainer import EXIT_STOPPED, Trainer

    mine = Comm(comm)
    settings = parse([str(config), "--run.out", str(shared_tmp_path / "run"), "--run.steps", "50"]).config
    trainer = Trainer(settings, mine, RunFolder.open(settings, mine))
    trainer.strategy.stop_requested = comm.rank == 1
    assert trainer.run() == EXIT_STOPPED == 75
    assert trainer.step == 1
    assert (shared_tmp_path / "run" / "checkpoints" / "step-00000001.h5").exists()
    mine.free()


@pytest.mark.ranks(3)
def test_a_loss_that_is_not_finite(comm, config, shared_tmp_path, run_train):
    for name, lr in (("sgd", 1e30), ("lbfgs", 1.0)):
        flags = ["--optim.name", name, "--optim.lr", lr, "--model.activation", "relu"]
        if name == "lbfgs":
            flags += ["--model.init_scale", 1e30]
        with pytest.raises(NumericsError, match=r"step [0-4]: the .* not finite; .*(layer|opening)") as caught:
            run_train(comm, config, shared_tmp_path / name, *flags)
        assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.ranks(2)
def test_a_line_search_that_fails_ends_the_run_with_a_reason(comm, config, shared_tmp_path, run_train):
    flags = ["--optim.name", "lbfgs", "--optim.lr", 1e6, "--optim.line_search_trials", 2]
    assert run_train(comm, config, shared_tmp_path / "run", *flags) == 0
    if comm.rank == 0:
        text = (shared_tmp_path / "run" / "log.txt").read_text()
        assert "stopped at step 0: no decrease along steepest descent, 2 trials in all" in text
        (row,) = read(shared_tmp_path / "run" / "metrics.jsonl")
        assert row["step"] == 0 and row["objective"] is not None and row["val_accuracy"] is not None


@pytest.mark.ranks(2)
def test_what_cannot_run_is_refused_on_every_rank(comm, config, shared_tmp_path, run_train):
    out = shared_tmp_path / "run"
    with pytest.raises(UsageError, match=r"method serial runs on one rank, and there are 2; use --method mgrit"):
        run_train(comm, config, out, "--method", "serial")
    assert not out.exists()
    with pytest.raises(ConfigError, match=r"lbfgs needs the full batch of 100 samples, and data.batch_size is 30"):
        run_train(comm, config, out, "--optim.name", "lbfgs", "--data.batch_size", 30)
    with pytest.raises(UsageError, match=r"cannot be made"):
        run_train(comm, config, Path("/proc/nothing/here"))


def test_what_a_run_leaves(mpirun, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(WITH_LBFGS)
    out = tmp_path / "run"
    done = mpirun(2, "lpnet", "train", path, "--run.out", out, "--run.trace", "true", "--run.checkpoint_every", "2")
    assert done.returncode == 0, done.stderr
    assert "[lpnet 0/2 INFO] step 0/4: loss" in done.stderr and "validation accuracy" in done.stderr
    names = {entry.name for entry in out.iterdir()}
    assert names == {"config.yaml", "env.json", "metrics.jsonl", "log.txt", "checkpoints", "trace.json", "curves.png",
                     "residuals.png", "decision_regions.png"}  # fmt: skip
    assert sorted(os.listdir(out / "checkpoints")) == [
        "latest", "step-00000002.h5", "step-00000002.h5.sha256", "step-00000004.h5", "step-00000004.h5.sha256",
    ]  # fmt: skip
    rows = read(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["val_accuracy"] is not None for row in rows] == [True, False, True, False, True]
    assert len(rows[1]["forward_residuals"]) == 3 and len(rows[1]["adjoint_residuals"]) == 2
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert len(json.loads((out / "env.json").read_text())["ranks"]) == 2
    assert evaluate(out, Comm()) == 0  # on another number of ranks
    assert f"accuracy {rows[-1]['val_accuracy']:6.2f} %" in capsys.readouterr().out
    export_checkpoint(out, tmp_path / "net.pt")
    with pytest.raises(SaveError, match="cannot be written"):
        export_checkpoint(out, tmp_path / "nowhere" / "net.pt")
    check_export(tmp_path / "net.pt", out / "checkpoints" / "step-00000004.h5")


def check_export(file: Path, checkpoint: Path) -> None:
    """A serial module written here loads the state_dict and gives the logits of the layer-parallel network."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.opening = torch.nn.Linear(2, 5)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5) for _ in range(9)])
            self.closing = torch.nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            u = torch.tanh(self.opening(x))
            for layer in self.layers:
                u = u + 5.0 / 9 * torch.tanh(layer(u))
            return self.closing(u)

    plain = Plain()
    plain.load_state_dict(torch.load(file, weights_only=True))
    stack = lpnet.LayerStack(lpnet.nn.DenseStep(width=5), num_layers=9, final_time=5.0)
    net = lpnet.LayerParallel(stack, opening=lpnet.nn.DenseOpening(2, 5), closing=torch.nn.Linear(5, 5))
    lpnet.load(checkpoint, net)
    x = torch.linspace(-3, 3, 40).reshape(20, 2)
    torch.testing.assert_close(plain(x), net(x), rtol=1e-5, atol=1e-5)
    state = lpnet.gather_state_dict(net)
    assert state is not None and all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


FAULT = """
import pathlib, sys, time
from mpi4py import MPI
import lpnet.cli
where, at = sys.argv.pop(1), pathlib.Path(sys.argv.pop(1))
if MPI.COMM_WORLD.rank == 1:
    def fail(*args, **kwargs):
        at.write_text(str(time.time()))
        raise ValueError(f"made to fail in {where}")
    if where == "solve":
        import lpnet.mgrit.solver as module
        solve, calls = module.Solver.solve, []
        def second(self, *args, **kwargs):
            calls.append(1)
            return fail() if len(calls) == 4 else solve(self, *args, **kwargs)
        module.Solver.solve = second
    elif where == "loader":
        import lpnet.train.trainer as module
        module.load_data = fail
    else:
        import lpnet.io.checkpoint_write as module
        module.prepare = fail
sys.exit(lpnet.cli.main())
"""


@pytest.mark.parametrize("where", ["solve", "loader", "save"])
def test_a_fault_on_one_rank_ends_the_job(where, mpirun, tmp_path):
    (tmp_path / "config.yaml").write_text(WITH_LBFGS)
    (tmp_path / "fault.py").write_text(FAULT)
    flags = ["--run.out", tmp_path / "run", "--run.plots", "false"]
    words = [where, tmp_path / "at", "train", tmp_path / "config.yaml", *flags]
    done = mpirun(2, "python", tmp_path / "fault.py", *words)
    ended = time.time()
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "[lpnet 1/2 ERROR] ValueError: made to fail in" in done.stderr and "Traceback" in done.stderr
    assert ended - float((tmp_path / "at").read_text()) < 60


@pytest.mark.ranks(1)
def test_trained_by_hand_equals_the_trainer(comm, config, shared_tmp_path, run_train):
    """An ordinary torch loop with lpnet's network is what the trainer does."""
    flags = ["--optim.tikhonov", 0, "--optim.classifier_tikhonov", 0, "--optim.ddt", 0]
    assert run_train(comm, config, shared_tmp_path / "run", *flags) == 0
    from lpnet.configfile import parse
    from lpnet.data.samples import load
    from lpnet.mgrit.network import build_network

    settings = parse([str(config)]).config
    data = load(settings.data, settings.seed, torch.float32)
    net = build_network(settings, data)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for row in read(shared_tmp_path / "run" / "metrics.jsonl")[:4]:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(data.train.x, batch=0), data.train.y)
        loss.backward()
        optimizer.step()
        assert float(loss.detach()) == row["loss"]


def test_sixteen_ranks_and_large_messages_equal_one_rank(mpirun, tmp_path):
    text = WITH_LBFGS.replace("layers: 9, width: 5", "layers: 18, width: 40")
    text = text.replace("train_samples: 100", "train_samples: 8000")
    (tmp_path / "config.yaml").write_text(text)  # a state is 40 x 8000 x 4 bytes = 1.28 MB
    for ranks in (16, 0):
        out = tmp_path / f"run{ranks}"
        flags = ["--run.out", out, "--run.steps", "2", "--run.eval_every", "0", "--run.plots", "false"]
        done = mpirun(ranks, "lpnet", "train", tmp_path / "config.yaml", *flags)
        assert done.returncode == 0, done.stderr
    many, one = read(tmp_path / "run16" / "metrics.jsonl"), read(tmp_path / "run0" / "metrics.jsonl")
    for row, wanted in zip(many, one, strict=True):
        assert row["loss"] == wanted["loss"] and row["val_accuracy"] == wanted["val_accuracy"]
        if row["forward_residuals"] is not None:
            assert row["forward_residuals"] == pytest.approx(wanted["forward_residuals"], rel=1e-6)
    first, second = parameters(tmp_path / "run16", 2), parameters(tmp_path / "run0", 2)
    assert not [name for name in first if not torch.equal(first[name], second[name])]
