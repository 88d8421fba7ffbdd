"""Wide residual networks for CIFAR, WRN-d-k, as sequences of named units.

Zagoruyko, Komodakis, "Wide residual networks", BMVC 2016, arXiv 1605.07146: norm and relu come before every
convolution, and a stage is k times as wide as in the CIFAR ResNet. No communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.nn.resnet import blocks_per_stage
from lpnet.nn.units import Convolution, Head, Norm, assemble, normalisation, stem_unit


def wide_resnet(
    depth: int = 28,
    widen: int = 10,
    *,
    seed: int = 0,
    classes: int = 10,
    channels: int = 3,
    dropout: float = 0.0,
    norm: Norm = "batch",
) -> torch.nn.Sequential:
    """WRN-depth-widen: (batch, channels, height, width) to (batch, classes). No communication.

    Args:
        depth: 6n + 4, such as 16, 28 or 40.
        widen: k; the three stages have 16k, 32k and 64k channels.
        seed: seed of the initial weights.
        classes: logits.
        channels: channels of the images.
        dropout: share of the numbers that is dropped between a block's convolutions.
        norm: batch, or group (8 groups).

    Raises:
        UsageError: a depth that is not 6n + 4, or another option out of range.
    """
    blocks = blocks_per_stage(depth, 4, "a wide ResNet")
    if widen < 1:
        raise UsageError(f"widen is {widen}; it must be 1 or more")
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is {dropout}; it must be 0 or more and less than 1")
    units = [stem_unit(channels, 16, None)]
    before = 16
    for width, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
        for k in range(blocks):
            units.append(WideBlock(before, width, stride if k == 0 else 1, dropout=dropout, norm=norm))
            before = width
    return assemble([*units, Head(before, classes, norm=norm)], seed=seed)


class WideBlock(torch.nn.Module):
    """x + conv(drop(relu(norm(conv(relu(norm x)))))), two 3 x 3 convolutions.

    Where the size changes, the shortcut is a 1 x 1 convolution of relu(norm x).
    """

    def __init__(self, channels: int, width: int, stride: int, *, dropout: float, norm: Norm) -> None:
        super().__init__()
        self.norm1 = normalisation(channels, norm)
        self.conv1 = Convolution(channels, width, 3, stride)
        self.norm2 = normalisation(width, norm)
        self.dropout = torch.nn.Dropout(dropout) if dropout else None
        self.conv2 = Convolution(width, width, 3)
        same = channels == width and stride == 1
        self.shortcut = None if same else Convolution(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, width, height / stride, width / stride)."""
        active = self.norm1(x).relu_()  # in place on what norm has made, never on the unit's input
        out = self.norm2(self.conv1(active)).relu_()
        if self.dropout is not None:
            out = self.dropout(out)
        return self.conv2(out) + (x if self.shortcut is None else self.shortcut(active))
