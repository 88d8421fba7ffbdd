"""Residual blocks as two units each, so that a network can be cut within a block and shares be more equal.

What passes between the two is one tensor: the shortcut's output and the branch's, which have one shape, one above the
other along the batch axis. Parameters, their initial values and all results are those of the whole block; masks of
dropout belong to units, and are others. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.nn.units import BasicBlock, WideBlock


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


class WideStart(torch.nn.Module):
    """A wide block up to its first convolution: (batch, ...) to (2 batch, width, ...).

    Args:
        block: whose layers this takes over.
    """

    def __init__(self, block: WideBlock) -> None:
        super().__init__()
        self.norm1, self.conv1, self.shortcut = block.norm1, block.conv1, block.shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Shortcut and branch, one above the other."""
        active = self.norm1(x).relu_()
        out = self.conv1(active)
        return torch.cat([x if self.shortcut is None else self.shortcut(active), out])


class WideEnd(torch.nn.Module):
    """The rest of a wide block: (2 batch, width, ...) to (batch, width, ...).

    Args:
        block: whose layers this takes over.
    """

    def __init__(self, block: WideBlock) -> None:
        super().__init__()
        self.norm2, self.dropout, self.conv2 = block.norm2, block.dropout, block.conv2

    def forward(self, state: Tensor) -> Tensor:
        """The branch's end + shortcut."""
        skip, out = state.chunk(2)
        out = self.norm2(out).relu_()
        if self.dropout is not None:
            out = self.dropout(out)
        return self.conv2(out) + skip  # type: ignore[no-any-return]


PLACES = {BasicBlock: ("conv1", "conv2"), WideBlock: ("conv1",)}
"""Layers after which a block can be cut; beyond the second convolution of a wide one there is only a sum."""


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
        if layer not in _places(network._modules.get(unit)):
            blocks = {name: found for name, module in network.named_children() if (found := _places(module))}
            names = list(blocks)
            known = f"{names[0]} to {names[-1]}" if names else "none"
            how = " or ".join(f"BLOCK.{place}" for place in (blocks[names[0]] if names else PLACES[BasicBlock]))
            raise UsageError(f"split names {where!r}; give {how} for blocks of two convolutions (here: {known})")
        places[unit] = layer
    units = torch.nn.Sequential()
    for name, module in network.named_children():
        if name in places and isinstance(module, WideBlock):
            units.add_module(f"{name}a", WideStart(module))
            units.add_module(f"{name}b", WideEnd(module))
        elif name in places and isinstance(module, BasicBlock):
            units.add_module(f"{name}a", BlockStart(module, places[name]))
            units.add_module(f"{name}b", BlockEnd(module, places[name]))
        else:
            units.add_module(name, module)
    return units


def _places(module: torch.nn.Module | None) -> tuple[str, ...]:
    return next((places for kind, places in PLACES.items() if isinstance(module, kind)), ())
