"""How far an inexact gradient is from the exact one, in the middle of a training run on one rank.

At random initialisation everything looks perfect and proves nothing; so the comparison follows some warm steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lpnet.config import Config
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import load
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.mgrit.network import build_network
from lpnet.nn.models import DTYPES
from lpnet.optim.rows import trainable
from lpnet.train.strategies import make_strategy


def gradient_error(config: Config, *, steps: int = 10, most: int = 500) -> tuple[float, float]:
    """Relative error and cosine of the gradient after some steps on one batch, on one rank; any ranks have the same.

    Args:
        config: the run.
        steps: training steps before the comparison.
        most: samples of the batch that are used.
    """
    data = load(config.data, config.seed, DTYPES[config.model.dtype])
    order = BatchOrder(len(data.train), config.data.batch_size, config.seed, "fixed")
    samples = data.train.take(order.at(0).indices[:most])
    net = build_network(config, data)
    strategy = make_strategy(net, config.optim)
    for _ in range(steps):
        strategy.step(samples, 0)
    exact_net = build_network(replace(config, method="serial"), data)
    with torch.no_grad():
        for mine, other in zip(exact_net.shards(), net.shards(), strict=True):
            mine.tensor.copy_(other.tensor)
    found = _gradient(net, samples.x, samples.y, 0)
    exact = _gradient(exact_net, samples.x, samples.y, None)
    error = float((found - exact).norm() / exact.norm())
    return error, float(found @ exact / (found.norm() * exact.norm()))


def _gradient(net: LayerParallel, x: torch.Tensor, y: torch.Tensor, batch: int | None) -> torch.Tensor:
    shards = trainable(net.shards())
    for shard in shards:
        shard.tensor.grad = None
    torch.nn.functional.cross_entropy(net(x, batch=batch), y).backward()
    grads = [shard.tensor.grad for shard in shards]
    return torch.cat([grad.reshape(-1).double() for grad in grads if grad is not None])
