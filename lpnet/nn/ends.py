"""Openings and closings: what comes before the first layer and after the last. No communication."""

from __future__ import annotations

import torch
from torch import Tensor

from lpnet.config import Activation
from lpnet.errors import UsageError
from lpnet.nn.activations import FUNCTIONS


class ZeroExpand(torch.nn.Module):
    """Pads (batch, features) with zeros to (batch, width); no parameters.

    Raises:
        UsageError: fewer state features than input features.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        if width < features:
            raise UsageError(f"zero_expand pads {features} features to {width}; the width must be {features} or more")
        self.features, self.width = features, width

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) to (batch, width)."""
        return torch.nn.functional.pad(x, (0, self.width - self.features))


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
