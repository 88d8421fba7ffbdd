"""Every optimiser a configuration can name: built, saved as shards, loaded back, and the next step bitwise the same."""

from __future__ import annotations

import pytest
import torch

from lpnet.config import OptimConfig
from lpnet.errors import CheckpointError, ConfigError
from lpnet.optim.select import load_optimizer, optimizer_shards, torch_optimizer
from lpnet.parallel.shard import Shard


def make_shards() -> list[Shard]:
    torch.manual_seed(1)
    buffer = Shard("closing.count", torch.zeros(1))
    return [
        Shard("stack.weight", torch.randn(4, 3, 3, requires_grad=True), (2, 6), 8),
        Shard("closing.weight", torch.randn(2, 3, requires_grad=True)),
        buffer,
    ]


def take_step(optimizer: torch.optim.Optimizer, shards: list[Shard]) -> None:
    for shard in shards[:2]:
        shard.tensor.grad = torch.cos(shard.tensor.detach())
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("sgd", {"momentum_buffer"}),
        ("adam", {"step", "exp_avg", "exp_avg_sq"}),
        ("adamw", {"step", "exp_avg", "exp_avg_sq"}),
        ("rmsprop", {"step", "square_avg", "momentum_buffer"}),
        ("adagrad", {"step", "sum"}),
    ],
)
def test_state_comes_back(name, slots):
    config = OptimConfig(name=name, lr=0.1, momentum=0.5, weight_decay=0.01)
    shards = make_shards()
    optimizer = torch_optimizer(config, shards)
    take_step(optimizer, shards)
    state = {shard.name: shard for shard in optimizer_shards(optimizer, shards, rank=0)}
    assert {name.split("/")[1] for name in state} == slots
    assert {name.split("/")[0] for name in state} == {"stack.weight", "closing.weight"}
    stacked = {key for key, shard in state.items() if shard.rows == (2, 6) and shard.layers == 8}
    assert stacked == {f"stack.weight/{slot}" for slot in slots - {"step"}}
    elsewhere = {shard.name for shard in optimizer_shards(optimizer, shards, rank=1)}
    assert set(state) - elsewhere == ({"stack.weight/step"} if "step" in slots else set())

    again = make_shards()
    for mine, theirs in zip(again, shards, strict=True):
        mine.tensor.data.copy_(theirs.tensor.data)
    other = torch_optimizer(config, again)
    load_optimizer(other, again, list(state), lambda shard: state[shard.name].tensor.clone())
    for _ in range(2):
        take_step(optimizer, shards)
        take_step(other, again)
    assert all(torch.equal(one.tensor, two.tensor) for one, two in zip(shards, again, strict=True))


def test_what_cannot_be_built_or_loaded():
    shards = make_shards()
    with pytest.raises(ConfigError, match=r"lbfgs is not one of torch.optim; use sgd"):
        torch_optimizer(OptimConfig(name="lbfgs"), shards)
    optimizer = torch.optim.SGD([shards[0].tensor], lr=0.1)
    with pytest.raises(CheckpointError, match=r"has no parameter closing.weight; give it net.parameters"):
        load_optimizer(optimizer, shards, [], lambda shard: shard.tensor)
