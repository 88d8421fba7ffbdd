"""Global-norm clipping of distributed gradients, equal on any number of ranks.

Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lpnet.optim.rows import RowSum, squares, trainable
from lpnet.parallel.shard import Shard

if TYPE_CHECKING:
    from lpnet.mgrit.layer_parallel import LayerParallel


def norm_terms(shards: Sequence[Shard]) -> list[np.ndarray]:
    """Squared gradient norms of the shards, as terms for `RowSum.pack`. No communication."""
    return squares([shard.tensor.grad for shard in shards], shards)


@torch.no_grad()
def scale_gradients(shards: Sequence[Shard], norm: float, max_norm: float) -> float:
    """Scale the local gradients by min(1, max_norm / norm), the norm being that over all ranks. No communication.

    Returns:
        The factor.
    """
    factor = min(1.0, max_norm / (norm + 1e-6))
    gradients = [shard.tensor.grad for shard in shards if shard.tensor.grad is not None]
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
    return factor


def clip_grad_norm(net: LayerParallel, max_norm: float) -> float:
    """`torch.nn.utils.clip_grad_norm_` for a distributed network. Collective over net.comm, one reduction.

    The bits do not depend on the number of ranks.

    Args:
        net: the network, after backward.
        max_norm: largest global norm.

    Returns:
        The global norm before clipping, on every rank.
    """
    shards = trainable(net.shards())
    rows = RowSum(shards, net.partition, starts=net.stack.starts)
    norm = float(np.sqrt(rows.total(net.comm.sum(rows.pack(norm_terms(shards))))[0]))
    scale_gradients(shards, norm, max_norm)
    return norm
