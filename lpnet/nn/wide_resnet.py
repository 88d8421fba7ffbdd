"""Wide residual networks for CIFAR, WRN-d-k, as sequences of named units.

Zagoruyko, Komodakis, "Wide residual networks", BMVC 2016, arXiv 1605.07146: norm and relu come before every
convolution, and a stage is k times as wide as in the CIFAR ResNet. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lpnet.errors import UsageError
from lpnet.nn.halves import halved
from lpnet.nn.resnet import blocks_per_stage
from lpnet.nn.units import Head, Norm, WideBlock, assemble, stem_unit


def wide_resnet(
    depth: int = 28,
    widen: int = 10,
    *,
    seed: int = 0,
    classes: int = 10,
    channels: int = 3,
    dropout: float = 0.0,
    norm: Norm = "batch",
    split: Sequence[str] = (),
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
        split: blocks that are two units each, such as "block2.conv1": see `lpnet.nn.halves`.

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
    return halved(assemble([*units, Head(before, classes, norm=norm)], seed=seed), split)
