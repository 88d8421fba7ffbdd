"""Networks of the papers by configuration: the CIFAR ODE-ResNet and the Indian Pines dense net, any ranks, plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lpnet.configfile import parse
from lpnet.errors import ConfigError, UsageError
from lpnet.io.checkpoint import Checkpoint
from lpnet.io.metrics import read
from lpnet.mgrit.plan import memory_bytes, partition_of, plan_text
from lpnet.train import export_checkpoint

CONFIG = """
seed: 1
method: mgrit
model: {name: ode_resnet, layers: 6, width: 4, final_time: 1.0, norm: none, dtype: float64}
data: {name: cifar10, root: ROOT, train_samples: 20, validation_samples: 10, batch_size: 8}
mgrit: {levels: 2, coarsening: 2}
optim: {name: sgd, lr: 0.05, momentum: 0.9, tikhonov: 1e-3, clip_norm: 1.0}
run: {steps: 4, eval_every: 2, checkpoint_every: 2}
"""


@pytest.fixture
def config(shared_tmp_path, comm) -> Path:
    """A small CIFAR-10 in the python version's format, and a configuration. Collective over comm."""
    import pickle

    path, folder = shared_tmp_path / "config.yaml", shared_tmp_path / "cifar"
    if comm.rank == 0:
        folder.mkdir()
        generator = np.random.default_rng(0)
        for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
            rows = {b"data": generator.integers(0, 256, (10, 3072), dtype=np.uint8), b"labels": list(range(10))}
            (folder / name).write_bytes(pickle.dumps(rows, protocol=2))
        names = {b"label_names": [b"c%d" % k for k in range(10)]}
        (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
        path.write_text(CONFIG.replace("ROOT", str(folder)))
    comm.barrier()
    return path


def contents(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(folder / "checkpoints" / "step-00000004.h5") as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_an_ode_resnet_trains_on_any_ranks_and_grids(comm, norm, config, shared_tmp_path, run_train):
    many, one = shared_tmp_path / "many", shared_tmp_path / "one"
    grid = ["--parallel.replicas", 2] if comm.size == 4 and norm == "none" else []
    flags = ["--model.norm", norm]
    assert run_train(comm, config, many, *flags, *grid) == 0
    if comm.rank == 0:
        assert run_train(None, config, one, *flags) == 0
        first, second = (contents(folder) for folder in (many, one))
        for name in (n for n in second if n.startswith(("model", "optim")) and "/control/" not in n):
            torch.testing.assert_close(first[name], second[name], rtol=1e-7, atol=1e-9)
        exported = torch.load(export_checkpoint(many, shared_tmp_path / "out.pt"), weights_only=True)
        layers = {name.split(".")[1] for name in exported if name.startswith("layers.")}
        assert layers == {str(k) for k in range(8)}  # two transitions among them
        a, b = (read(folder / "metrics.jsonl")[-1] for folder in (many, one))
        assert (a["val_accuracy"], a["train_accuracy"]) == (b["val_accuracy"], b["train_accuracy"])
    comm.barrier()
    again = shared_tmp_path / "again"
    middle = many / "checkpoints" / "step-00000002.h5"
    assert run_train(comm, config, again, *flags, *grid, "--resume", middle) == 0
    if comm.rank == 0:
        whole, resumed = contents(many), contents(again)
        assert not [name for name in whole if not torch.equal(whole[name], resumed[name])]


def test_the_plan_of_an_ode_resnet():
    words = ["--method", "mgrit", "--model.name", "ode_resnet", "--model.layers", "24", "--model.width", "16",
             "--mgrit.coarsening", "4"]  # fmt: skip
    config = parse(words).config
    text = plan_text(config, 4)
    assert "26 layers (stacks and transitions of 8, 1, 8, 1, 8 layers) on 4 ranks: 6 to 7 layers a rank" in text
    assert "point  0 4 8 9 13 17 18 22 26" in text
    replicas = plan_text(parse([*words, "--parallel.replicas", "2", "--data.batch_size", "9"]).config, 4)
    assert "grid: 4 ranks = 2 replicas x 1 modules x 2 layer ranks" in replicas
    assert "a batch of 9 samples is shared by the replicas, 5 each" in replicas
    spatial = plan_text(parse([*words, "--mgrit.spatial", "average", "--mgrit.levels", "3"]).config, 1)
    assert "spatial coarsening (average): levels 1 to 2 by 2, 2" in spatial
    states = [memory_bytes(config, partition_of(config, ranks), 100)[0] for ranks in (1, 2, 4)]
    assert states[0] > 1.6 * states[1] > 2.4 * states[2]


def test_what_an_ode_resnet_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=r"10 layers among 3 stacks.*multiple of 3, such as 9"):
        parse(["--model.name", "ode_resnet", "--model.layers", "10"])
    with pytest.raises(ConfigError, match="norm none is for ode_resnet, not for resnet_cifar"):
        parse(["--model.name", "resnet_cifar", "--model.norm", "none"])
    with pytest.raises(UsageError, match="26 layers cannot be shared by 27 ranks"):
        plan_text(parse(["--method", "mgrit", "--model.name", "ode_resnet", "--model.layers", "24"]).config, 27)


@pytest.mark.ranks(2)
def test_the_indian_pines_net_on_its_published_spectra(comm, data_root, shared_tmp_path, run_train):
    """695 real spectra, 200 bands, 16 classes, tanh, T=20; converged on two ranks it equals one rank."""
    flags = ["--data.root", data_root / "indian_pines", "--run.steps", 3, "--run.eval_every", 0, "--model.dtype",
             "float64", "--model.layers", 8, "--mgrit.forward_iterations", "null", "--mgrit.adjoint_iterations", "null",
             "--mgrit.tolerance", 1e-12, "--run.checkpoint_every", 0]  # fmt: skip
    assert run_train(comm, "indian_pines_mgrit.yaml", shared_tmp_path / "two", *flags) == 0
    if comm.rank == 0:
        assert run_train(None, "indian_pines_mgrit.yaml", shared_tmp_path / "one", *flags, "--mgrit.levels", 1) == 0
        losses = [[row["loss"] for row in read(shared_tmp_path / name / "metrics.jsonl")] for name in ("two", "one")]
        assert losses[0][:3] == pytest.approx(losses[1][:3], rel=1e-9)
