"""Convolutional residual steps u + h sigma(conv(u; W) + b), written out.

States lie channels last, (slots, batch, height, width, channels): with few channels that is several times faster
than channels first (drivers/bench/conv.py), and a message is one dense block. A step sees them as (batch, channels,
height, width). No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lpnet.config import Activation
from lpnet.errors import UsageError
from lpnet.nn.activations import FUNCTIONS, activate_, pull
from lpnet.nn.kernels import Op
from lpnet.nn.layerwise import LayerwiseWorkspace


@dataclass(frozen=True)
class ConvStep:
    """u + h sigma(conv(u; W) + b) with an odd kernel and zero padding.

    Args:
        channels: channels of the state (batch, channels, height, width).
        kernel: odd width of the kernel.
        groups: groups of channels.
        activation: sigma.
        bias: one number per channel, or one per channel and pixel ("image", needs `size`).
        size: (height, width) of the state, for an image-sized bias.
        init_scale: standard deviation of the initial weights times sqrt(fan in); biases start at zero.
    """

    channels: int
    kernel: int = 3
    groups: int = 1
    activation: Activation = "tanh"
    bias: Literal["channel", "image"] = "channel"
    size: tuple[int, int] | None = None
    init_scale: float = 0.3

    def __post_init__(self) -> None:
        if self.channels < 1 or self.groups < 1 or self.channels % self.groups:
            raise ValueError(f"{self.channels} channels cannot be split into {self.groups} groups; use a divisor")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}; it must be odd, so that the state keeps its size")
        if self.activation not in FUNCTIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {', '.join(FUNCTIONS)}")
        if self.bias not in ("channel", "image"):
            raise ValueError(f"bias is {self.bias!r}; it must be channel or image")
        if self.bias == "image" and self.size is None:
            raise ValueError("an image-sized bias needs size=(height, width)")

    def state_shape(self, batch: int) -> tuple[int, ...] | None:
        """Shape of a state; None where the opening decides."""
        return None if self.size is None else (batch, self.channels, *self.size)

    def check(self, shape: Sequence[int]) -> None:
        """Refuse a state that does not fit.

        Raises:
            UsageError: with both shapes.
        """
        size = ("height", "width") if self.size is None else self.size
        if len(shape) != 4 or shape[1] != self.channels or (self.size is not None and tuple(shape[2:]) != self.size):
            raise UsageError(
                f"the opening makes a state of shape {tuple(shape)}; "
                f"the stack needs (batch, {self.channels}, {size[0]}, {size[1]})"
            )

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters of one layer in float64: weight (channels, channels / groups, kernel, kernel), bias."""
        fan_in = self.channels // self.groups * self.kernel**2
        weight = torch.randn(
            self.channels,
            self.channels // self.groups,
            self.kernel,
            self.kernel,
            generator=generator,
            dtype=torch.float64,
        )
        bias = torch.zeros(self.channels, *(self.size or ()) if self.bias == "image" else (), dtype=torch.float64)
        return {"weight": weight * (self.init_scale / fan_in**0.5), "bias": bias}

    def engine(self, parameters: dict[str, Tensor]) -> ConvEngine:
        """The weights of a block of layers in the layout of the kernels."""
        return ConvEngine(self, parameters["weight"], parameters["bias"])

    def serial_layer(self, parameters: dict[str, Tensor], h: float) -> torch.nn.Module:
        """One layer as an ordinary torch module with parameters of its own."""
        return SerialConvLayer(self, parameters, h)


class SerialConvLayer(torch.nn.Module):
    """One convolutional residual layer as plain torch, (batch, channels, height, width) to the same."""

    def __init__(self, step: ConvStep, parameters: dict[str, Tensor], h: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(parameters["weight"].detach().clone())
        self.bias = torch.nn.Parameter(parameters["bias"].detach().clone())
        self.step, self.h = step, h

    def forward(self, u: Tensor) -> Tensor:
        """One layer."""
        step = self.step
        bias = self.bias if self.bias.dim() == 3 else self.bias[:, None, None]
        inner = torch.nn.functional.conv2d(u, self.weight, None, 1, step.kernel // 2, 1, step.groups) + bias
        return u + self.h * FUNCTIONS[step.activation](inner)


class ConvEngine:
    """Weights channels last, one tensor per layer; follows the parameters.

    Args:
        step: the layer.
        weight: (local layers, channels, channels / groups, kernel, kernel).
        bias: (local layers, channels) or (local layers, channels, height, width).
    """

    def __init__(self, step: ConvStep, weight: Tensor, bias: Tensor) -> None:
        self.step, self.weight, self.bias = step, weight, bias
        last = torch.channels_last
        self.kernels = [torch.empty_like(w, memory_format=last) for w in weight.detach()]
        self.weight_gradient = torch.empty_like(weight.detach())
        self.bias_gradient = torch.empty_like(bias.detach())
        images = bias.detach() if step.bias == "image" else None
        self.images = None if images is None else [torch.empty_like(b[None], memory_format=last) for b in images]

    def refresh(self) -> tuple[int, ...]:
        """Copy the parameters into the kernels' layout; the stamp tells whether they change before a backward."""
        with torch.no_grad():
            torch._foreach_copy_(self.kernels, list(self.weight.unbind(0)))
            if self.images is not None:
                torch._foreach_copy_(self.images, [b[None] for b in self.bias.unbind(0)])
        return self.stamp()

    def stamp(self) -> tuple[int, ...]:
        """Versions of the parameters."""
        return self.weight._version, self.bias._version

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters; new tensors."""
        return {"weight": self.weight_gradient.clone(), "bias": self.bias_gradient.clone()}

    def workspace(self, shape: Sequence[int], *, state_slots: int, layer_slots: int) -> ConvWorkspace:
        """States of `shape` (batch, channels, height, width)."""
        return ConvWorkspace(self, shape, state_slots, layer_slots)


class ConvWorkspace(LayerwiseWorkspace):
    """States (slots, batch, height, width, channels), values F and sigma' times adjoints per layer."""

    def __init__(self, engine: ConvEngine, shape: Sequence[int], state_slots: int, layer_slots: int) -> None:
        batch, channels, height, width = shape
        super().__init__(engine.weight, (batch, height, width, channels), state_slots, layer_slots)
        self.engine = engine
        self._d: list[Tensor] | None = None
        self._scratch = self.like.new_empty(self.payload)

    @property
    def d(self) -> list[Tensor]:
        """sigma' times adjoint per layer, allocated when first used."""
        if self._d is None:
            self._d = list(self.like.new_empty(len(self.z), *self.payload).unbind(0))
        return self._d

    def one_evaluate(self, layer: int, u: int, z: int) -> Op:
        """z = sigma(conv(u; W) + b)."""
        engine, step, values = self.engine, self.engine.step, self.z
        state, kernel, padding, groups = _image(self.u[u]), engine.kernels[layer], step.kernel // 2, step.groups
        bias = engine.bias.detach()[layer] if engine.images is None else None
        image = None if engine.images is None else engine.images[layer]
        conv, name, scratch = torch.conv2d, step.activation, self._scratch

        def run() -> None:
            inner = conv(state, kernel, bias, 1, padding, 1, groups)
            if image is not None:
                inner.add_(image)
            value = inner.permute(0, 2, 3, 1)
            activate_(name, value, scratch)()
            values[z] = value

        return run

    def one_pull(self, layer: int, z: int, d: int, source: Tensor, h: float, out: Tensor) -> Op:
        """out = source + h conv^T(sigma' source); keeps sigma' source."""
        step, values, inner = self.engine.step, self.z, self.d[d]
        kernel, gradient, padding = self.engine.kernels[layer], _image(inner), step.kernel // 2
        state, backward = _image(self.u[0]), torch.ops.aten.convolution_backward
        where = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], step.groups, [True, False, False])

        def run() -> None:
            value = values[z]
            assert value is not None
            pull(step.activation, source, value, inner)()
            product = backward(gradient, state, kernel, None, *where)[0]
            torch.add(source, product.permute(0, 2, 3, 1), alpha=h, out=out)

        return run

    def one_gradient(self, layer: int, u: int, d: int, h: float) -> Op:
        """Gradients of weight and bias."""
        step, engine = self.engine.step, self.engine
        state, inner, kernel, padding = _image(self.u[u]), _image(self.d[d]), engine.kernels[layer], step.kernel // 2
        weight, bias = engine.weight_gradient[layer], engine.bias_gradient[layer]
        dims, backward = (0, 2, 3) if step.bias == "channel" else (0,), torch.ops.aten.convolution_backward
        where = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], step.groups, [False, True, False])

        def run() -> None:
            torch.mul(backward(inner, state, kernel, None, *where)[1], h, out=weight)
            torch.mul(torch.sum(inner, dims), h, out=bias)

        return run

    def pack(self, u: Tensor, out: Tensor) -> None:
        """Write a state (batch, channels, height, width) into a payload."""
        out.copy_(u.permute(0, 2, 3, 1))

    def unpack(self, payload: Tensor) -> Tensor:
        """A payload, or several, as states (..., batch, channels, height, width); a copy."""
        return payload.movedim(-1, -3).clone()


def _image(payload: Tensor) -> Tensor:
    """(batch, height, width, channels) seen as (batch, channels, height, width), channels last."""
    return payload.permute(0, 3, 1, 2)
