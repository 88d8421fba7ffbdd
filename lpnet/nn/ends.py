"""Openings and closings: what comes before the first layer and after the last. No communication."""

from __future__ import annotations

import torch
from torch import Tensor

from lpnet.config import Activation
from lpnet.errors import UsageError
from lpnet.nn.activations import FUNCTIONS


class ZeroExpand(torch.nn.Module):
    """Pads features (batch, features, ...) with zeros to (batch, width, ...); no parameters.

    Raises:
        UsageError: fewer state features than input features.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        if width < features:
            raise UsageError(f"zero_expand pads {features} features to {width}; the width must be {features} or more")
        self.features, self.width = features, width

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features, ...) to (batch, width, ...)."""
        return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, self.width - self.features))


class DenseOpening(torch.nn.Module):
    """sigma(W x + b), (batch, features) to (batch, width).

    Args:
        features: input features.
        width: state features.
        activation: sigma.
        generator: draws the initial weights, standard deviation 1/sqrt(features); the bias starts at zero.
    """

    def __init__(
        self, features: int, width: int, *, activation: Activation = "tanh", generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        weight = torch.randn(width, features, generator=generator, dtype=torch.float64) / features**0.5
        self.weight = torch.nn.Parameter(weight.to(torch.get_default_dtype()))
        self.bias = torch.nn.Parameter(torch.zeros(width))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) to (batch, width)."""
        return FUNCTIONS[self.activation](torch.nn.functional.linear(x, self.weight, self.bias))


class Classifier(torch.nn.Linear):
    """W u + b, (batch, width) to (batch, classes), with initial weights from a generator and zero bias."""

    def __init__(self, width: int, classes: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__(width, classes)
        weight = torch.randn(classes, width, generator=generator, dtype=torch.float64) / width**0.5
        with torch.no_grad():
            self.weight.copy_(weight)
            self.bias.zero_()


class Replicate(torch.nn.Module):
    """Copies an image (batch, 1, height, width) to all channels (batch, channels, height, width); no parameters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """One channel to all."""
        return x.expand(-1, self.channels, -1, -1)


class ConvOpening(torch.nn.Module):
    """sigma(conv(x; W) + b), (batch, in_channels, height, width) to (batch, channels, height, width).

    Args:
        in_channels: channels of the image.
        channels: channels of the state.
        kernel: odd width of the kernel.
        activation: sigma.
        generator: draws the initial weights, standard deviation 1/sqrt(fan in); the bias starts at zero.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        kernel: int = 3,
        activation: Activation = "tanh",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        weight = torch.randn(channels, in_channels, kernel, kernel, generator=generator, dtype=torch.float64)
        self.weight = torch.nn.Parameter((weight / (in_channels * kernel**2) ** 0.5).to(torch.get_default_dtype()))
        self.bias = torch.nn.Parameter(torch.zeros(channels))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Images to states."""
        padding = self.weight.shape[-1] // 2
        return FUNCTIONS[self.activation](torch.nn.functional.conv2d(x, self.weight, self.bias, padding=padding))


class ImageClassifier(Classifier):
    """W u + b of a state (batch, channels, height, width): of every pixel, or of the mean of every channel.

    Args:
        shape: (channels, height, width).
        classes: logits.
        pooling: see the mean of every channel.
        generator: as for Classifier.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        pooling: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        channels, height, width = shape
        super().__init__(channels if pooling else channels * height * width, classes, generator=generator)
        self.pooling = pooling

    def forward(self, u: Tensor) -> Tensor:
        """States to logits."""
        return super().forward(u.mean((2, 3)) if self.pooling else u.flatten(1))
