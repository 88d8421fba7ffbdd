"""Residual blocks as two units each, so that a network can be cut within a block and shares be more equal.

What passes between the two is one tensor: the shortcut's output and the branch's, which have one shape, one above the
other along the batch axis. Parameters, their initial values and all results are those of the whole block. No
communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.nn.units import BasicBlock

PLACES = ("conv1", "conv2")


class BlockStart(torch.nn.Module):
    """A block up to one of its convolutions: (batch, ...) to (2 batch, width, ...).

    Args:
        block: whose layers this takes over.
        after: conv1 | conv2: the last layer of this half.
    """

    def __init__(self, block: BasicBlock, after: str) -> None:
        super().__init__()
        self.conv1 = block.conv1
        self.norm1 = block.norm1 if after == "conv2" else None
        self.conv2 = block.conv2 if after == "conv2" else None
        self.shortcut = block.shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Shortcut and branch, one above the other."""
        out: Tensor = self.conv1(x)
        if self.norm1 is not None and self.conv2 is not None:
            out = self.conv2(self.norm1(out).relu_())
        return torch.cat([self.shortcut(x), out])


class BlockEnd(torch.nn.Module):
    """The rest of a block: (2 batch, width, ...) to (batch, width, ...).

    Args:
        block: whose layers this takes over.
        after: as in `BlockStart`.
    """

    def __init__(self, block: BasicBlock, after: str) -> None:
        super().__init__()
        self.norm1 = block.norm1 if after == "conv1" else None
        self.conv2 = block.conv2 if after == "conv1" else None
        self.norm2 = block.norm2

    def forward(self, state: Tensor) -> Tensor:
        """relu(shortcut + the branch's end)."""
        skip, out = state.chunk(2)
        if self.norm1 is not None and self.conv2 is not None:
            out = self.conv2(self.norm1(out).relu_())
        return (self.norm2(out) + skip).relu_()


def halved(network: torch.nn.Sequential, split: Sequence[str]) -> torch.nn.Sequential:
    """A network some of whose blocks are two units, "block2a" and "block2b"; it takes the units over.

    Args:
        network: units by name, such as "block2".
        split: where to, such as "block2.conv2": after that layer of that block.

    Raises:
        UsageError: no such block or layer, a block without two convolutions, or one that is named twice.
    """
    places: dict[str, str] = {}
    for where in split:
        unit, _, layer = where.partition(".")
        if unit in places:
            raise UsageError(f"split names {unit} twice, at {places[unit]} and at {layer}; keep one")
        if layer not in PLACES or not isinstance(network._modules.get(unit), BasicBlock):
            blocks = [name for name, module in network.named_children() if isinstance(module, BasicBlock)]
            known = f"{blocks[0]} to {blocks[-1]}" if blocks else "none"
            raise UsageError(
                f"split names {where!r}; give BLOCK.conv1 or BLOCK.conv2 for blocks of two convolutions (here: {known})"
            )
        places[unit] = layer
    units = torch.nn.Sequential()
    for name, unit_module in network.named_children():
        if name in places and isinstance(unit_module, BasicBlock):
            units.add_module(f"{name}a", BlockStart(unit_module, places[name]))
            units.add_module(f"{name}b", BlockEnd(unit_module, places[name]))
        else:
            units.add_module(name, unit_module)
    return units
