"""Parts of a batch that follow each other through the ranks: the gradient of the whole batch, whatever the split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lpnet
from lpnet.configfile import from_yaml
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import load
from lpnet.nn.models import DTYPES
from lpnet.parallel.comm import Comm
from lpnet.train.build import build

CONFIG = """
method: mgrit
model: {{layers: 8, width: 5, dtype: float64}}
data: {{name: peaks, train_samples: 25, validation_samples: 10}}
mgrit: {{levels: 1, microbatches: {parts}}}
optim: {{name: {optimiser}, lr: 0.01, tikhonov: 1.0e-3}}
parallel: {{replicas: {replicas}}}
"""


def train(comm: Comm, parts: int = 1, replicas: int = 1, optimiser: str = "adam", steps: int = 3) -> Any:
    """Losses and this rank's parameters after some steps."""
    config = from_yaml(CONFIG.format(parts=parts, replicas=replicas, optimiser=optimiser), "test")
    data = load(config.data, config.seed, DTYPES[config.model.dtype])
    net, strategy, _ = build(config, data, BatchOrder(len(data.train), None, 0, "fixed"), comm)
    losses = [strategy.step(data.train, 0).loss for _ in range(steps)]
    rows = {shard.name: shard.tensor.detach().numpy().copy() for shard in net.shards() if shard.rows is not None}
    return losses, rows


@pytest.mark.parametrize("optimiser", ["adam", "lbfgs"])
def test_any_split_has_the_gradient_of_the_whole_batch(optimiser: str) -> None:
    losses, rows = train(Comm(), optimiser=optimiser)
    for parts, ranks, replicas in ((4, 1, 1), (3, 4, 1), (100, 2, 1), (2, 4, 2)):
        found = lpnet.emulate(lambda c, p=parts, r=replicas: train(c, p, r, optimiser), ranks=ranks).results  # type: ignore[misc]
        np.testing.assert_allclose(found[0][0], losses, rtol=1e-12)
        for name, expected in rows.items():
            whole = np.concatenate([own[name] for _, own in found[: ranks // replicas]])
            np.testing.assert_allclose(whole, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2, 4)
def test_emulated_as_under_mpi_bit_for_bit(comm: Any) -> None:
    replicas = comm.size // 2
    everyone = comm.gather(train(Comm(comm), 3, replicas))
    if comm.rank == 0:
        emulated = lpnet.emulate(lambda c: train(c, 3, replicas), ranks=comm.size).results
        for (losses, rows), (mine, own) in zip(everyone, emulated, strict=True):
            assert losses == mine and all(np.array_equal(rows[name], own[name]) for name in rows)


def test_parts_let_the_ranks_work_at_once() -> None:
    """Latencies of three steps with free layers: one behind the other, eight parts would cost 8 x 3 x 14 of them."""
    slow = lpnet.NetworkModel(name="slow", inter_latency_s=1.0, intra_latency_s=1.0, send_overhead_s=0.0)
    one, many = (
        max(lpnet.emulate(lambda c, p=parts: train(c, p), ranks=8, network=slow, compute="none").seconds)  # type: ignore[misc]
        for parts in (1, 8)
    )
    assert many < one + 20  # the shape of a part is agreed upon once


def test_multigrid_keeps_the_batch_whole() -> None:
    with pytest.raises(lpnet.LpnetError, match="microbatches is 2 with 3 levels; .*set mgrit.levels 1"):
        from_yaml("method: mgrit\nmgrit: {levels: 3, microbatches: 2}\n", "test")
