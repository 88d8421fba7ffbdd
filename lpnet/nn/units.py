"""Units of image networks: stem, residual blocks, head, and how their weights are drawn.

He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016, doi:10.1109/CVPR.2016.90, figure 5 and
section 4.2; Zagoruyko, Komodakis, "Wide residual networks", BMVC 2016, arXiv 1605.07146. A unit takes one tensor and
returns one; what it changes in place is always a tensor of its own, never its input, so that a network may be cut
between any two units. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.seeding import generator_for

Norm = Literal["batch", "group"]
Shortcut = Literal["pad", "projection"]
_GROUPS = 8


class BasicBlock(torch.nn.Module):
    """relu(x + norm(conv(relu(norm(conv x))))), two 3 x 3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, shortcut: Shortcut, norm: Norm) -> None:
        super().__init__()
        self.conv1 = Convolution(channels, width, 3, stride)
        self.norm1 = normalisation(width, norm)
        self.conv2 = Convolution(width, width, 3)
        self.norm2 = normalisation(width, norm)
        self.shortcut = _shortcut(channels, width, stride, shortcut, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, width, height / stride, width / stride)."""
        out = self.norm1(self.conv1(x)).relu_()  # in place on a tensor of this unit's own, never on its input
        return (self.norm2(self.conv2(out)) + self.shortcut(x)).relu_()


class Bottleneck(torch.nn.Module):
    """relu(x + F x) with F of three convolutions, 1 x 1, 3 x 3 and 1 x 1, four times as wide outside as inside."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, shortcut: Shortcut, norm: Norm) -> None:
        super().__init__()
        wide = self.expansion * width
        self.conv1 = Convolution(channels, width, 1)
        self.norm1 = normalisation(width, norm)
        self.conv2 = Convolution(width, width, 3, stride)
        self.norm2 = normalisation(width, norm)
        self.conv3 = Convolution(width, wide, 1)
        self.norm3 = normalisation(wide, norm)
        self.shortcut = _shortcut(channels, wide, stride, shortcut, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, 4 width, height / stride, width / stride)."""
        out = self.norm1(self.conv1(x)).relu_()
        out = self.norm2(self.conv2(out)).relu_()
        return (self.norm3(self.conv3(out)) + self.shortcut(x)).relu_()


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


class PadShortcut(torch.nn.Module):
    """Option A: every `stride`-th pixel, and zeros in the new channels, half of them in front."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.front = stride, (width - channels) // 2
        self.back = width - channels - self.front

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, width, height / stride, width / stride)."""
        thinned = x[:, :, :: self.stride, :: self.stride]
        return torch.nn.functional.pad(thinned, (0, 0, 0, 0, self.front, self.back))


class Head(torch.nn.Module):
    """Mean over all pixels, then W u + b; before it norm and relu where the blocks have left them out.

    Args:
        channels: channels of the state.
        classes: logits.
        norm: for networks whose blocks begin with norm and relu; None: neither.
    """

    def __init__(self, channels: int, classes: int, *, norm: Norm | None = None) -> None:
        super().__init__()
        if classes < 1:
            raise UsageError(f"the network shall tell {classes} classes apart; give 1 or more")
        self.norm = None if norm is None else normalisation(channels, norm)
        self.linear = Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, classes)."""
        if self.norm is not None:
            x = self.norm(x).relu_()
        return self.linear(x.mean((2, 3)))


class Convolution(torch.nn.Conv2d):
    """A convolution without bias that keeps height and width at stride 1; `initialise` gives it its weights."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels, width, kernel, stride, kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: torch's own draw would advance the global generator."""


class Linear(torch.nn.Linear):
    """W u + b; `initialise` gives it its weights."""

    def reset_parameters(self) -> None:
        """Nothing: torch's own draw would advance the global generator."""


def stem_unit(
    channels: int, width: int, norm: Norm | None, *, kernel: int = 3, stride: int = 1, pool: bool = False
) -> torch.nn.Module:
    """The first unit: convolution, norm and relu, and max-pooling for large images. No communication.

    Args:
        channels: channels of the images.
        width: channels of the state.
        norm: kind of normalisation; None: neither norm nor relu, for networks whose blocks begin with them.
        kernel: width of the convolution.
        stride: of the convolution.
        pool: halve the result by 3 x 3 max-pooling.

    Raises:
        UsageError: no channels, or an unknown norm.
    """
    if min(channels, width) < 1:
        raise UsageError(f"the images have {channels} channels and the first stage {width}; both must be 1 or more")
    stem = torch.nn.Sequential()
    stem.add_module("conv", Convolution(channels, width, kernel, stride))
    if norm is not None:
        stem.add_module("norm", normalisation(width, norm))
        stem.add_module("relu", torch.nn.ReLU(inplace=True))
    if pool:
        stem.add_module("pool", torch.nn.MaxPool2d(3, 2, 1))
    return stem


def normalisation(channels: int, norm: Norm) -> torch.nn.Module:
    """Normalisation of (batch, channels, height, width). No communication.

    Raises:
        UsageError: an unknown kind, or channels that 8 groups cannot share.
    """
    one_of("norm", norm, get_args(Norm))
    if norm == "batch":
        return torch.nn.BatchNorm2d(channels)
    if channels % _GROUPS:
        raise UsageError(f"norm group makes {_GROUPS} groups of {channels} channels; use a multiple of {_GROUPS}")
    return torch.nn.GroupNorm(_GROUPS, channels)


def assemble(units: Sequence[torch.nn.Module], *, seed: int) -> torch.nn.Sequential:
    """Stem, blocks and head under their global names, with initial weights. No communication.

    Args:
        units: the first becomes "stem", the last "head", those between "block0", "block1", ...
        seed: seed of the initial weights.
    """
    names = ["stem", *(f"block{k}" for k in range(len(units) - 2)), "head"]
    network = torch.nn.Sequential()
    for name, unit in zip(names, units, strict=True):
        network.add_module(name, unit)
    initialise(network, seed=seed)
    return network


def initialise(network: torch.nn.Module, *, seed: int) -> None:
    """Draw the weights of convolutions and linear maps, each from a stream of its own name. No communication.

    He, Zhang, Ren, Sun, "Delving deep into rectifiers", ICCV 2015, equation 10: standard deviation sqrt(2 / fan in)
    for a convolution; sqrt(1 / fan in) for a linear map, which no relu follows; biases zero. Drawn in float64 and
    rounded, so that networks of two precisions start at the same weights.

    Args:
        network: its module names, such as "block0.conv1", name the streams.
        seed: seed of the run.
    """
    with torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                gain = 2.0 if isinstance(module, torch.nn.Conv2d) else 1.0
                fan_in = module.weight[0].numel()
                generator = generator_for(seed, f"model/{name}.weight")
                drawn = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)
                module.weight.copy_(drawn.mul_((gain / fan_in) ** 0.5))
                if module.bias is not None:
                    module.bias.zero_()


def _shortcut(channels: int, width: int, stride: int, shortcut: Shortcut, norm: Norm) -> torch.nn.Module:
    """The identity, or what fits it to another size."""
    if channels == width and stride == 1:
        return torch.nn.Identity()
    if shortcut == "pad":
        return PadShortcut(channels, width, stride)
    projection = torch.nn.Sequential()
    projection.add_module("conv", Convolution(channels, width, 1, stride))
    projection.add_module("norm", normalisation(width, norm))
    return projection


def one_of(option: str, value: str, known: Sequence[str]) -> None:
    """Refuse an option that is none of the known words. No communication.

    Raises:
        UsageError: names the option and the words.
    """
    if value not in known:
        raise UsageError(f"{option} is {value!r}; it must be one of {', '.join(known)}")
