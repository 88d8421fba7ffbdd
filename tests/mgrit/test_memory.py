"""What a rank holds falls with the number of ranks, as the plan says: tensors counted, no clock and no allocator."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

import lpnet
from lpnet.config import Config, DataConfig, ModelConfig, OptimConfig
from lpnet.mgrit.plan import memory_bytes, partition_of
from lpnet.nn import ConvStep, DenseStep, Replicate, ZeroExpand

LAYERS, BATCH = 96, 20
SETTINGS = {"forward_iterations": 2, "adjoint_iterations": 1, "coarsening": 4}


def storages():
    """Bytes of every tensor's memory, by its place."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}


def held(kind, comm, storage):
    """Bytes that a network holds after two training steps, the optimiser's included."""
    before = storages()
    settings = lpnet.MGRIT(levels=2, storage=storage, **SETTINGS)
    step, opening = (DenseStep(8), ZeroExpand(2, 8)) if kind == "dense" else (ConvStep(4), Replicate(4))
    x = torch.randn(BATCH, 2) if kind == "dense" else torch.randn(BATCH, 1, 28, 28)
    size = 8 if kind == "dense" else 4 * 28 * 28
    closing = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(size, 5))
    stack = lpnet.LayerStack(step, num_layers=LAYERS, final_time=2.0, comm=comm, seed=0)
    net = lpnet.LayerParallel(stack, opening=opening, closing=closing, mgrit=settings)
    optimizer = torch.optim.Adam(net.stack.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(x, batch=0), torch.arange(BATCH) % 5).backward()
        optimizer.step()
    after = storages()
    ends = sum(p.numel() * 8 for module in (net.closing,) if module is not None for p in module.parameters())
    used = sum(size for place, size in after.items() if place not in before) - ends - x.numel() * 4
    net.comm.free()
    return used


def planned(kind, ranks, storage):
    """Bytes of the fullest rank by the plan."""
    model = ModelConfig(layers=LAYERS, width=8) if kind == "dense" else ModelConfig("conv", layers=LAYERS, width=4)
    data = DataConfig(train_samples=BATCH) if kind == "dense" else DataConfig("mnist", root=".", train_samples=BATCH)
    config = Config(method="mgrit", model=model, data=data, mgrit=lpnet.MGRIT(levels=2, storage=storage, **SETTINGS),
                    optim=OptimConfig(name="adam"))
    return sum(memory_bytes(config, partition_of(config, ranks), BATCH))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind, storage", [("dense", "all"), ("conv", "all"), ("conv", "c_points")])
def test_a_rank_holds_what_the_plan_says(comm, kind, storage):
    used = max(comm.allgather(held(kind, comm, storage)))
    plan = planned(kind, comm.size, storage)
    assert used == pytest.approx(plan, rel=0.2), f"{used} counted, {plan} planned"
    if comm.size > 1:  # about one P-th, and what every rank has a little of
        assert plan < planned(kind, 1, storage) * (1.35 / comm.size)
