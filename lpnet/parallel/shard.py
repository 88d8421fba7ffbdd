"""How one rank's part of a distributed tensor is described: its global name and its rows. No communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """The local part of a parameter, buffer or optimiser slot.

    Args:
        name: global name, such as "stack.weight".
        tensor: the local part: (local layers, ...) where stacked, the whole tensor otherwise.
        rows: global rows [lo, hi) held here where stacked over layers; None for a whole tensor, on one rank.
        layers: number of rows on all ranks together; None for a whole tensor.
    """

    name: str
    tensor: torch.Tensor
    rows: tuple[int, int] | None = None
    layers: int | None = None
