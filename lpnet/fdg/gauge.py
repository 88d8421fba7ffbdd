"""What one module keeps of a batch whose staleness is measured (see `lpnet.fdg.staleness`). No communication."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


class Gauge:
    """Weights of the forward, then the fresh gradient, then two numbers: cosine and drift."""

    def __init__(self) -> None:
        self.cosine = self.drift = math.nan
        self._weights: dict[str, Tensor] = {}
        self._fresh: dict[str, Tensor] = {}

    def forward(self, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights that the batch goes forward with."""
        self._weights = {name: tensor.detach().clone() for name, tensor in weights.items()}

    def compare(self, fresh: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Keep the fresh gradient, and how far the weights have moved."""
        self._fresh = dict(fresh)
        if not self._weights:  # no parameters, or a module whose forward comes later in this tick: nothing has moved
            self.drift = 0.0 if weights else math.nan
            return
        moved = {name: tensor.detach() - self._weights[name] for name, tensor in weights.items()}
        size = math.sqrt(_dot(weights, weights))
        self.drift = math.sqrt(_dot(moved, moved)) / size if size else math.nan

    def land(self, gradients: Mapping[str, Tensor]) -> None:
        """Compare the gradient that lands with the fresh one."""
        norms = math.sqrt(_dot(gradients, gradients) * _dot(self._fresh, self._fresh))
        self.cosine = _dot(gradients, self._fresh) / norms if norms else math.nan
        self._weights, self._fresh = {}, {}


def _dot(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Sum over the tensors that both have, in double precision."""
    return math.fsum(
        float((one[name].detach().double() * two[name].detach().double()).sum()) for name in one if name in two
    )
