"""Residual networks for images as sequences of named units, ready to be cut: CIFAR, ImageNet and MNIST families.

He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016, doi:10.1109/CVPR.2016.90 (section 4.1
ImageNet, 4.2 CIFAR). A network is one torch.nn.Sequential of units "stem", "block0", "block1", ..., "head". Initial
weights are drawn per unit and parameter name, so they depend neither on where the network is cut nor on how many ranks
share it. No communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch

from lpnet.errors import UsageError
from lpnet.nn.halves import halved
from lpnet.nn.units import BasicBlock, Bottleneck, Head, Norm, Shortcut, assemble, one_of, stem_unit

StemKind = Literal["cifar", "imagenet"]
# depth: (bottleneck, blocks of the four stages), table 1 of the paper
_STAGES = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}


def resnet_cifar(
    depth: int = 20,
    *,
    seed: int = 0,
    classes: int = 10,
    channels: int = 3,
    width: int = 16,
    shortcut: Shortcut = "pad",
    norm: Norm = "batch",
    split: Sequence[str] = (),
) -> torch.nn.Sequential:
    """The CIFAR ResNet with 6n + 2 layers: (batch, channels, height, width) to (batch, classes). No communication.

    Args:
        depth: 20, 32, 44, 56, 110, 1202, or any other 6n + 2.
        seed: seed of the initial weights.
        classes: logits.
        channels: channels of the images.
        width: channels of the first stage; the second and third have twice and four times as many.
        shortcut: where the size changes: pad is option A (every second pixel, channels filled with zeros, no
            parameters); projection is option B (a 1 x 1 convolution).
        norm: batch, or group (8 groups, the same for any split of a batch).
        split: blocks that are two units each, such as "block2.conv2": see `lpnet.nn.halves`.

    Raises:
        UsageError: a depth that is not 6n + 2, or another option out of range.
    """
    blocks = blocks_per_stage(depth, 2, "a CIFAR ResNet")
    stages = ((width, blocks, 1), (2 * width, blocks, 2), (4 * width, blocks, 2))
    middle = _stages(width, stages, shortcut, norm)
    return halved(assemble([stem_unit(channels, width, norm), *middle, Head(4 * width, classes)], seed=seed), split)


def resnet(
    depth: int = 18,
    *,
    seed: int = 0,
    classes: int = 10,
    stem: StemKind = "cifar",
    channels: int = 3,
    norm: Norm = "batch",
    split: Sequence[str] = (),
) -> torch.nn.Sequential:
    """The ImageNet ResNet, for small images as well: (batch, channels, height, width) to (batch, classes).

    Projection shortcuts (option B); bottlenecks from depth 50 on, with the stride in their 3 x 3 convolution as is
    common since. No communication.

    Args:
        depth: 18, 34, 50, 101 or 152.
        seed: seed of the initial weights.
        classes: logits.
        stem: imagenet: 7 x 7 convolution with stride 2, then max-pooling with stride 2; cifar: 3 x 3 with stride 1.
        channels: channels of the images.
        norm: batch, or group (8 groups).
        split: blocks that are two units each; not bottlenecks.

    Raises:
        UsageError: another depth or option.
    """
    if depth not in _STAGES:
        raise UsageError(f"there is no ResNet-{depth} in this family; use a depth of {_listed(_STAGES)}")
    one_of("stem", stem, get_args(StemKind))
    bottleneck, blocks = _STAGES[depth]
    large = stem == "imagenet"
    first = stem_unit(channels, 64, norm, kernel=7 if large else 3, stride=2 if large else 1, pool=large)
    stages = [(64 * 2**k, count, 1 if k == 0 else 2) for k, count in enumerate(blocks)]
    middle = _stages(64, stages, "projection", norm, bottleneck=bottleneck)
    head = Head(512 * (Bottleneck.expansion if bottleneck else 1), classes)
    return halved(assemble([first, *middle, head], seed=seed), split)


def resnet_mnist(
    depth: int = 8,
    *,
    seed: int = 0,
    classes: int = 10,
    width: int = 8,
    norm: Norm = "batch",
    split: Sequence[str] = (),
) -> torch.nn.Sequential:
    """A small ResNet for (batch, 1, 28, 28): `resnet_cifar` whose stem halves the image first. No communication.

    Args:
        depth: 6n + 2.
        seed: seed of the initial weights.
        classes: logits.
        width: channels of the first stage.
        norm: batch, or group (8 groups).
        split: blocks that are two units each.

    Raises:
        UsageError: a depth that is not 6n + 2, or another option out of range.
    """
    blocks = blocks_per_stage(depth, 2, "a ResNet for MNIST")
    stages = ((width, blocks, 1), (2 * width, blocks, 2), (4 * width, blocks, 2))
    middle = _stages(width, stages, "pad", norm)
    return halved(assemble([stem_unit(1, width, norm, stride=2), *middle, Head(4 * width, classes)], seed=seed), split)


def blocks_per_stage(depth: int, ends: int, what: str) -> int:
    """n of a network with 6n + ends layers: blocks in each of its three stages. No communication.

    Raises:
        UsageError: a depth that is not 6n + ends; names the nearest that are.
    """
    blocks, rest = divmod(depth - ends, 6)
    if rest or blocks < 1:
        near = sorted({6 * max(1, blocks) + ends, 6 * max(1, blocks + 1) + ends})
        raise UsageError(f"{what} has 6n + {ends} layers; a depth of {depth} is none, use {_listed(near)}")
    return blocks


def _stages(
    channels: int, stages: Sequence[tuple[int, int, int]], shortcut: Shortcut, norm: Norm, *, bottleneck: bool = False
) -> list[torch.nn.Module]:
    """The blocks of stages (width, blocks, stride of the first block)."""
    one_of("shortcut", shortcut, get_args(Shortcut))
    kind = Bottleneck if bottleneck else BasicBlock
    blocks: list[torch.nn.Module] = []
    for width, count, stride in stages:
        for k in range(count):
            blocks.append(kind(channels, width, stride if k == 0 else 1, shortcut, norm))
            channels = kind.expansion * width
    return blocks


def _listed(numbers: Iterable[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
