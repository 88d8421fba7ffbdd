"""Dropout whose masks are a function of (seed, step, micro-batch, layer, global sample), not of a generator's state.

Every evaluation of a layer in one pass, on any level and by any rank, sees the same mask; another split of the batch
over ranks or replicas does too. The bits come from the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014, doi:10.1145/2660193.2660195) applied to a counter.
torch's global generator is left alone. No communication.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.nn.context import MaskKey
from lpnet.seeding import stream_seed

_GAMMA, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS = 53
Masks = MutableMapping[tuple[int, int], Tensor]


@dataclass(frozen=True)
class MaskSource:
    """The masks of one evaluation of one layer.

    Args:
        seed: of this dropout module in this layer and pass.
        first: global index of the first sample.
        batch: samples.
        masks: masks made in this pass, to be used again.
    """

    seed: int
    first: int
    batch: int
    masks: Masks

    def mask(self, call: int, u: Tensor, p: float, channels: bool) -> Tensor:
        """What is kept (True), in the shape of u, or (samples, channels, 1, ...)."""
        key = (self.seed, call)
        if key not in self.masks:
            if u.dim() < 1 or u.shape[0] % self.batch:
                raise UsageError(
                    f"dropout needs the samples along the first axis: {self.batch} samples, the tensor has the shape "
                    f"{tuple(u.shape)}"
                )
            shape = (*u.shape[:2], *([1] * (u.dim() - 2))) if channels else tuple(u.shape)
            numbers = torch.Size(shape).numel() // self.batch
            kept = _kept(self.seed + call, self.first, self.batch, numbers, p)
            self.masks[key] = torch.from_numpy(kept).view(shape).to(u.device)
        return self.masks[key]


class Dropout(torch.nn.Module):
    """Zeros numbers with probability p and scales the others by 1 / (1 - p), in train mode.

    Samples lie along the first axis. Outside lpnet's networks it is torch's dropout.

    Args:
        p: probability.
        channels: drop whole channels of (samples, channels, ...).
    """

    def __init__(self, p: float = 0.5, *, channels: bool = False) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout's p is {p}; it must be 0 or more and less than 1")
        self.p, self.channels = p, channels
        self._source: MaskSource | None = None
        self._calls = 0

    def extra_repr(self) -> str:
        """Settings."""
        return f"p={self.p}" + (", channels=True" if self.channels else "")

    def begin(self, source: MaskSource | None) -> None:
        """Draw from this source, from its first mask on."""
        self._source, self._calls = source, 0

    def forward(self, u: Tensor) -> Tensor:
        """Same shape."""
        if not self.training or self.p == 0:
            return u
        if self._source is None:
            return torch.nn.functional.dropout(u, self.p, True)
        mask = self._source.mask(self._calls, u, self.p, self.channels)
        self._calls += 1
        return torch.where(mask, u * (1 / (1 - self.p)), 0)


def dropouts(module: torch.nn.Module) -> list[tuple[str, Dropout]]:
    """The dropout modules in a module, with their names."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Dropout)]


def begin(
    parts: Iterable[tuple[str, Dropout]], key: MaskKey | None, masks: Masks, *, seed: int, layer: int, batch: int
) -> None:
    """Give the dropout modules of one layer the masks of a pass; no key: torch's own dropout.

    Args:
        parts: from `dropouts`.
        key: of the pass.
        masks: made in this pass before.
        seed: of the run.
        layer: global index; -1: opening, N: closing.
        batch: samples.
    """
    for name, part in parts:
        if key is None:
            part.begin(None)
        else:
            drawn = stream_seed(seed, f"dropout/{name}/{key.micro}", layer=layer, step=key.step)
            part.begin(MaskSource(drawn, key.first, batch, masks))


def replace(module: torch.nn.Module) -> torch.nn.Module:
    """The module with torch's dropout modules replaced by lpnet's, in place."""
    if type(module) is torch.nn.Dropout:
        return Dropout(module.p)
    if isinstance(module, torch.nn.Dropout1d | torch.nn.Dropout2d | torch.nn.Dropout3d):
        return Dropout(module.p, channels=True)
    for name, child in module.named_children():
        new = replace(child)
        if new is not child:
            setattr(module, name, new)
    return module


def _kept(seed: int, first: int, batch: int, numbers: int, p: float) -> np.ndarray:
    """(batch, numbers) of bool; a row depends on its global sample only."""
    with np.errstate(over="ignore"):
        samples = np.arange(first, first + batch, dtype=np.uint64)
        rows = _mixed(np.uint64(seed) + (samples + np.uint64(1)) * _GAMMA)
        words = _mixed(rows[:, None] + (np.arange(numbers, dtype=np.uint64) + np.uint64(1)) * _GAMMA)
    kept: np.ndarray = (words >> np.uint64(64 - _BITS)) >= np.uint64(round(p * 2**_BITS))
    return kept


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
