"""Tikhonov and d theta/dt regularisation of the objective, and its gradient.

The terms of Günther, Ruthotto, Schroder, Cyr, Gauger, SIMODS 2(1), 2020, section 2:

    gamma_tik/2 (sum ||theta_i||^2 + ||theta_opening||^2) + gamma_class/2 ||theta_closing||^2
    + gamma_ddt/2 sum_{i>=1} ||(theta_i - theta_{i-1})/h||^2

The last one couples neighbouring ranks: each exchanges one boundary layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from lpnet.errors import UsageError
from lpnet.optim.rows import RowSum, dots, squares, trainable
from lpnet.parallel.comm import wait_all
from lpnet.parallel.shard import Shard

if TYPE_CHECKING:
    from lpnet.mgrit.layer_parallel import LayerParallel

_TO_LEFT, _TO_RIGHT = 71, 72  # message tags


class Regularization:
    """The regularisation terms of a distributed network.

    `value` and `add_gradient` are called by all ranks alike.

    Args:
        net: the network.
        tikhonov: gamma_tik, on layers and opening.
        classifier_tikhonov: gamma_class, on the closing.
        ddt: gamma_ddt, on the difference quotients of the layers in time.
    """

    def __init__(
        self, net: LayerParallel, *, tikhonov: float = 0.0, classifier_tikhonov: float = 0.0, ddt: float = 0.0
    ) -> None:
        if ddt and net.stack.starts is not None:
            raise UsageError("optim.ddt couples the layers of one stack; a network of several takes ddt 0")
        shards, comm, partition, h = net.shards(), net.comm, net.partition, net.stack.h
        self._shards = trainable(shards)
        self._stacked = [shard for shard in self._shards if shard.rows is not None]
        self._comm, self._h, self._ddt = comm, h, ddt
        self._gammas = [
            classifier_tikhonov if shard.name.startswith("closing.") else tikhonov for shard in self._shards
        ]
        self.rows = RowSum(self._shards, partition, starts=net.stack.starts)
        self.active = bool(tikhonov or classifier_tikhonov or ddt)
        self._boundary: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
        self._versions: list[int] = []

    def value(self) -> float:
        """This rank's share; the sum over the ranks is the regularisation. Neighbour messages only (ddt)."""
        return float(sum(float(term.sum()) for term in self.terms()))

    def terms(self) -> list[np.ndarray]:
        """The same as terms for `RowSum.pack`, whose total does not depend on the number of ranks.

        Neighbour messages only (ddt).
        """
        if not self.active:
            return squares([None] * len(self._shards), self._shards)
        values = squares(
            [shard.tensor if gamma else None for shard, gamma in zip(self._shards, self._gammas, strict=True)],
            self._shards,
        )
        for value, gamma in zip(values, self._gammas, strict=True):
            value *= 0.5 * gamma
        if self._ddt and self._stacked:
            left, _ = self._boundary = self._exchange()
            self._versions = [shard.tensor._version for shard in self._stacked]
            for index, shard in enumerate(self._shards):
                if shard.rows is not None:
                    slopes = self._differences(shard, left)
                    values[index] += 0.5 * self._ddt * dots(slopes[None], slopes, stacked=True)
        return values

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the gradient to .grad of the local parameters. Neighbour messages only (ddt, without `value` before)."""
        if not self.active:
            return
        for shard, gamma in zip(self._shards, self._gammas, strict=True):
            if shard.tensor.grad is None:
                shard.tensor.grad = torch.zeros_like(shard.tensor)
            if gamma:
                shard.tensor.grad.add_(shard.tensor, alpha=gamma)
        if self._ddt and self._stacked:
            if self._boundary is not None and self._versions != [shard.tensor._version for shard in self._stacked]:
                raise UsageError(
                    "parameters changed between Regularization.value and add_gradient; call value again first"
                )
            left, right = self._boundary or self._exchange()
            self._boundary = None
            for shard in self._stacked:
                assert shard.tensor.grad is not None
                slopes = self._differences(shard, left)
                shard.tensor.grad.add_(slopes, alpha=self._ddt / self._h)
                shard.tensor.grad[:-1].add_(slopes[1:], alpha=-self._ddt / self._h)
                if right is not None:  # in this order, so that the bits do not depend on the number of ranks
                    beyond = (self._row(right, shard) - shard.tensor[-1]).div_(self._h)
                    shard.tensor.grad[-1].add_(beyond, alpha=-self._ddt / self._h)

    def _differences(self, shard: Shard, left: torch.Tensor | None) -> torch.Tensor:
        """(theta_i - theta_{i-1}) / h of the local layers; layer 0 has none, and counts as zero in the value."""
        tensor = shard.tensor.detach()
        slopes = torch.zeros_like(tensor)
        torch.sub(tensor[1:], tensor[:-1], out=slopes[1:])
        if left is not None:
            torch.sub(tensor[0], self._row(left, shard), out=slopes[0])
        return slopes.div_(self._h)

    def _row(self, packed: torch.Tensor, shard: Shard) -> torch.Tensor:
        """One parameter's part of a packed boundary layer."""
        start = sum(other.tensor[0].numel() for other in self._stacked[: self._stacked.index(shard)])
        return packed[start : start + shard.tensor[0].numel()].view(shard.tensor.shape[1:])

    def _exchange(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The last layer of the left neighbour and the first of the right one. Neighbour messages only."""
        comm = self._comm
        ends: list[torch.Tensor | None] = []
        pack = [torch.cat([shard.tensor.detach()[row].reshape(-1) for shard in self._stacked]) for row in (0, -1)]
        requests = []
        for neighbour, mine, send_tag, receive_tag in (
            (comm.rank - 1, pack[0], _TO_LEFT, _TO_RIGHT),
            (comm.rank + 1, pack[1], _TO_RIGHT, _TO_LEFT),
        ):
            if not 0 <= neighbour < comm.size:
                ends.append(None)
                continue
            theirs = torch.empty_like(mine)
            ends.append(theirs)
            requests.append(comm.irecv(theirs, neighbour, receive_tag))
            requests.append(comm.isend(mine, neighbour, send_tag))
        wait_all(requests)
        return ends[0], ends[1]
