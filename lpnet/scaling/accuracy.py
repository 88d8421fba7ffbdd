"""How far an inexact gradient is from the exact one, in the middle of a training run on one rank.

At random initialisation everything looks perfect and proves nothing; so the comparison follows some warm steps.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from lpnet.config import Config
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import Data, Samples, load
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.mgrit.network import build_network
from lpnet.nn.models import DTYPES
from lpnet.optim.rows import trainable
from lpnet.parallel.comm import Comm
from lpnet.train.build import build
from lpnet.train.decoupled import DecoupledNet
from lpnet.train.strategies import make_strategy


def gradient_error(config: Config, *, steps: int = 10, most: int = 500) -> tuple[float, float]:
    """Relative error and cosine of the gradient after some steps on one batch, on one rank; any ranks have the same.

    Args:
        config: the run.
        steps: training steps before the comparison.
        most: samples of the batch that are used.
    """
    data, samples = _few(config, most)
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


def steps_to_loss(config: Config, *, steps: int = 20, most: int = 500) -> float | None:
    """Steps in which inexact training reaches the loss of `steps` exact steps on one batch, relative to these.

    On one rank; any ranks have the same. None where it is not reached in four times as many.

    Args:
        config: the run.
        steps: of exact training.
        most: samples of the batch that are used.
    """
    data, samples = _few(config, most)

    def losses(run: Config, count: int, until: float) -> list[float]:
        strategy = make_strategy(build_network(run, data), run.optim)
        found: list[float] = []
        while len(found) <= count and (not found or found[-1] > until):
            found.append(strategy.step(samples, 0).loss or 0.0)
        return found

    wanted = losses(replace(config, method="serial"), steps, -1.0)[-1]
    found = losses(config, 4 * steps, wanted)
    if found[-1] > wanted:
        return None
    if len(found) < 2:
        return 1 / steps
    # between two steps the loss is taken to fall evenly
    part = (found[-2] - wanted) / (found[-2] - found[-1])
    return (len(found) - 2 + part) / steps


def stale_error(config: Config, *, most: int = 128) -> tuple[float, float]:
    """Relative error and cosine of delayed gradients on the module where they are worst, all modules on one rank.

    A gradient that lands is compared with that of backpropagation for the weights of that tick; it differs in direction
    alone as much as the cosine says.

    Args:
        config: the run, method fdg.
        most: samples of the batch that are used.
    """
    data, samples = _few(config, most)
    config = replace(config, fdg=replace(config.fdg, staleness_every=1))
    order = BatchOrder(len(samples), None, config.seed, "fixed")
    net, strategy, _ = build(config, replace(data, train=samples), order, Comm())
    assert isinstance(net, DecoupledNet)
    found: list[float] = []
    for _ in range(4 * net.inner.modules + 4):
        measured = strategy.step(samples, 0).measured
        found += [cosine for cosine in measured.cosine if math.isfinite(cosine)] if measured is not None else []
    worst = min(found, default=1.0)
    return math.sqrt(max(2 - 2 * worst, 0.0)), worst


def _few(config: Config, most: int) -> tuple[Data, Samples]:
    """The data, and the first samples of the first batch."""
    data = load(config.data, config.seed, DTYPES[config.model.dtype])
    order = BatchOrder(len(data.train), config.data.batch_size, config.seed, "fixed")
    return data, data.train.take(order.at(0).indices[:most])


def _gradient(net: LayerParallel, x: torch.Tensor, y: torch.Tensor, batch: int | None) -> torch.Tensor:
    shards = trainable(net.shards())
    for shard in shards:
        shard.tensor.grad = None
    torch.nn.functional.cross_entropy(net(x, batch=batch), y).backward()
    grads = [shard.tensor.grad for shard in shards]
    return torch.cat([grad.reshape(-1).double() for grad in grads if grad is not None])
