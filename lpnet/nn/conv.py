"""Convolutional residual steps u + h sigma(conv(u; W) + b), written out.

States lie channels last, (slots, batch, height, width, channels): with few channels that is several times faster
than channels first (drivers/bench/conv.py), and a message is one dense block. Kernels want 8 channels or more: with
fewer, parts of the batch stand side by side as groups of channels, (slots, batch / fold, height, width, fold *
channels), which halves the time of a convolution of 4 or 8 channels. A step sees states as (batch, channels, height,
width). No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lpnet.config import Activation
from lpnet.errors import UsageError
from lpnet.nn.activations import FUNCTIONS, activate_, pull
from lpnet.nn.context import Block
from lpnet.nn.kernels import Op
from lpnet.nn.layerwise import LayerwiseWorkspace, places
from lpnet.nn.steps import Index, corrected


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

    def check(self, shape: Sequence[Any]) -> None:
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

    def fold(self, batch: int) -> int:
        """Parts of a batch that lie side by side as channels."""
        wanted = max(2, 8 // self.channels) if self.channels < 16 and self.groups == 1 else 1
        return 1 if batch % wanted else wanted

    def engine(
        self, parameters: dict[str, Tensor], compute: torch.dtype | None = None, block: Block | None = None
    ) -> ConvEngine:
        """The weights of a block of layers in the layout and precision of the kernels."""
        return ConvEngine(self, parameters["weight"], parameters["bias"], compute or parameters["weight"].dtype)

    def serial_layer(self, parameters: dict[str, Tensor], h: float, layer: int = 0) -> torch.nn.Module:
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
    """Weights channels last, one tensor per layer, and what a folded batch needs of them; follows the parameters.

    Args:
        step: the layer.
        weight: (local layers, channels, channels / groups, kernel, kernel).
        bias: (local layers, channels) or (local layers, channels, height, width).
        compute: precision of the convolutions; states and parameters keep theirs.
    """

    gradient_block = 8

    def __init__(self, step: ConvStep, weight: Tensor, bias: Tensor, compute: torch.dtype) -> None:
        self.step, self.weight, self.bias, self.compute = step, weight, bias, compute
        self._folded: dict[int, tuple[list[Tensor], Tensor]] = {}
        self.weight_gradient = torch.empty_like(weight.detach())
        self.bias_gradient = torch.empty_like(bias.detach())

    @torch.no_grad()
    def folded(self, fold: int) -> tuple[list[Tensor], Tensor]:
        """Kernels and biases, channels last, for batches of which so many parts lie side by side."""
        if fold not in self._folded:
            repeat = (fold, 1, 1, 1)
            kernels = [
                torch.empty_like(w.repeat(repeat), memory_format=torch.channels_last, dtype=self.compute)
                for w in self.weight.detach()
            ]
            biases = self.bias.detach().movedim(1, -1)
            self._folded[fold] = kernels, torch.empty(*biases.shape[:-1], fold * biases.shape[-1]).to(biases)
            self._follow(fold)
        return self._folded[fold]

    def _follow(self, fold: int) -> None:
        kernels, biases = self._folded[fold]
        channels = self.step.channels
        rows = self.weight.unbind(0)
        for part in range(fold):
            mine = slice(part * channels, (part + 1) * channels)
            torch._foreach_copy_([kernel[mine] for kernel in kernels], list(rows))
            biases[..., mine].copy_(self.bias.movedim(1, -1))

    @torch.no_grad()
    def refresh(self) -> tuple[int, ...]:
        """Copy the parameters into the kernels' layout; the stamp tells whether they change before a backward."""
        for fold in self._folded:
            self._follow(fold)
        return self.stamp()

    def stamp(self) -> tuple[int, ...]:
        """Versions of the parameters."""
        return self.weight._version, self.bias._version

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters; new tensors."""
        return {"weight": self.weight_gradient.clone(), "bias": self.bias_gradient.clone()}

    def workspace(
        self, shape: Sequence[Any], *, state_slots: int, layer_slots: int, kept_slots: int, adjoint_slots: int
    ) -> ConvWorkspace:
        """States of `shape` (batch, channels, height, width)."""
        return ConvWorkspace(self, shape, state_slots, layer_slots, kept_slots, adjoint_slots)


class ConvWorkspace(LayerwiseWorkspace):
    """States (slots, batch / fold, height, width, fold * channels), values F and sigma' times adjoints per layer."""

    def __init__(
        self,
        engine: ConvEngine,
        shape: Sequence[int],
        state_slots: int,
        layer_slots: int,
        kept_slots: int,
        adjoint_slots: int,
    ) -> None:
        batch, channels, height, width = shape
        self.fold = fold = engine.step.fold(batch)
        payload = (batch // fold, height, width, fold * channels)
        super().__init__(engine.weight, payload, state_slots, layer_slots, adjoint_slots)
        self.engine = engine
        self.kernels, self.biases = engine.folded(fold)
        self._kept_slots = kept_slots
        self._d: Tensor | None = None

    @property
    def d(self) -> Tensor:
        """sigma' times adjoint per layer, allocated when first used."""
        if self._d is None:
            self._d = self.like.new_empty(self._kept_slots, *self.payload)
        return self._d

    def one_evaluate(self, layer: int, u: int, z: int) -> list[Op]:
        """z = sigma(conv(u; W) + b)."""
        return self._evaluate([layer], self.u[u : u + 1], [z])

    def evaluate(self, layer: Index, u: Index, z: Index) -> list[Op]:
        """z = sigma(conv(u; W) + b); layers side by side as one grouped convolution."""
        if isinstance(layer, int) or isinstance(u, int):
            return super().evaluate(layer, u, z)
        layers, slots, states = places(layer), places(z), self.u[u]
        parts = self._groups(len(layers))
        return [op for p in parts for op in self._evaluate(layers[p], states[p], slots[p])]

    def _groups(self, number: int) -> list[slice]:
        """Layers that make one convolution: as many as fill 16 channels, the width that the kernels are made for."""
        size = 1 if self.fold > 1 else max(1, 16 // self.engine.step.channels)
        return [slice(i, min(i + size, number)) for i in range(0, number, size)]

    def _evaluate(self, layers: list[int], states: Tensor, slots: list[int]) -> list[Op]:
        engine, step, values, number = self.engine, self.engine.step, self.z, len(layers)
        kernels, biases = [self.kernels[layer] for layer in layers], [self.biases[layer] for layer in layers]
        conv, padding, groups = torch.conv2d, step.kernel // 2, step.groups * self.fold * number
        inside = step.bias == "channel" and engine.compute == self.like.dtype  # else added in the precision of states
        scratch = self.like.new_empty(number, *self.payload) if step.activation == "smooth_relu" else states

        def run() -> None:
            image = side_by_side_channels(states, engine.compute)
            kernel = kernels[0] if number == 1 else torch.cat(kernels)
            bias = (biases[0] if number == 1 else torch.cat(biases)) if inside else None
            inner = apart(conv(image, kernel, bias, 1, padding, 1, groups), number, states.dtype)
            for i in range(number if not inside else 0):
                inner[i].add_(biases[i])
            for op in activate_(step.activation, inner, scratch):
                op()
            for i, slot in enumerate(slots):
                values[slot] = inner[i]

        return [run]

    def one_pull(self, layer: int, z: int, d: int, source: Tensor, h: float, out: Tensor) -> list[Op]:
        """out = source + h conv^T(sigma' source); keeps sigma' source."""
        return self._pull([layer], [z], [d], source[None], h, out[None], None, None)

    def pull(
        self,
        layer: Index,
        z: Index,
        d: Index,
        source: Tensor,
        h: float,
        out: Tensor,
        minus: Tensor | None,
        plus: Tensor | None,
    ) -> list[Op]:
        """out = (source + h conv^T(sigma' source)) [- minus] [+ plus]; side by side as one grouped convolution."""
        if isinstance(layer, int):
            return super().pull(layer, z, d, source, h, out, minus, plus)
        a, b, c = places(layer), places(z), places(d)
        ops = [
            self._pull(
                a[p],
                b[p],
                c[p],
                source[p],
                h,
                out[p],
                None if minus is None else minus[p],
                None if plus is None else plus[p],
            )
            for p in self._groups(len(a))
        ]
        return [op for part in ops for op in part]

    def _pull(
        self,
        layers: list[int],
        z: list[int],
        d: list[int],
        source: Tensor,
        h: float,
        out: Tensor,
        minus: Tensor | None,
        plus: Tensor | None,
    ) -> list[Op]:
        engine, step, values, number = self.engine, self.engine.step, self.z, len(layers)
        kernels, backward = [self.kernels[layer] for layer in layers], torch.ops.aten.convolution_backward
        inner = self.d[d[0] : d[-1] + 1 : d[1] - d[0] if number > 1 else 1]
        padding, groups = step.kernel // 2, step.groups * self.fold * number
        where = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], groups, [True, False, False])
        to = out if minus is None or plus is None else self.scratch(out)

        def run() -> None:
            for i in range(number):
                value = values[z[i]]
                assert value is not None
                for op in pull(step.activation, source[i], value, inner[i]):
                    op()
            image = side_by_side_channels(inner, engine.compute)
            kernel = kernels[0] if number == 1 else torch.cat(kernels)
            product = apart(backward(image, image, kernel, None, *where)[0], number, source.dtype)
            torch.add(source, product, alpha=h, out=to)

        return [run, *corrected(to, minus, plus, out)]

    def one_gradient(self, layer: int, u: int, d: int, h: float) -> list[Op]:
        """Gradients of weight and bias."""
        step, engine = self.engine.step, self.engine
        state, inner, kernel, padding = self.u[u : u + 1], self.d[d : d + 1], self.kernels[layer], step.kernel // 2
        weight, bias, fold = engine.weight_gradient[layer], engine.bias_gradient[layer], self.fold
        dims, backward = (0, 1) if step.bias == "image" else (0, 1, 2, 3), torch.ops.aten.convolution_backward
        where = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], step.groups * fold, [False, True, False])

        def run() -> None:
            left = side_by_side_channels(inner, engine.compute)
            right = side_by_side_channels(state, engine.compute)
            found = backward(left, right, kernel, None, *where)[1]
            weight.copy_(found if fold == 1 else found.unflatten(0, (fold, -1)).sum(0))
            weight.mul_(h)
            found = torch.sum(inner, dims).unflatten(-1, (fold, -1)).sum(-2)
            torch.mul(found.movedim(-1, 0), h, out=bias)

        return [run]

    def pack(self, u: Tensor, out: Tensor, point: int = 0) -> None:
        """Write a state (batch, channels, height, width) into a payload."""
        out.copy_(folded(u, self.fold))

    def unpack(self, payload: Tensor, point: int = 0) -> Tensor:
        """A payload, or several, as states (..., batch, channels, height, width); a copy."""
        return unfolded(payload, self.fold).clone(memory_format=torch.contiguous_format)


def folded(u: Tensor, fold: int) -> Tensor:
    """(batch, channels, height, width) as (batch / fold, height, width, fold * channels); differentiable."""
    if fold == 1:
        return u.permute(0, 2, 3, 1)
    return u.unflatten(0, (fold, -1)).permute(1, 3, 4, 0, 2).flatten(-2)


def unfolded(payload: Tensor, fold: int) -> Tensor:
    """The inverse of `folded`, of one payload or several; differentiable."""
    if fold == 1:
        return payload.movedim(-1, -3)
    return payload.unflatten(-1, (fold, -1)).movedim((-2, -1), (-5, -3)).flatten(-5, -4)


def side_by_side_channels(payloads: Tensor, dtype: torch.dtype) -> Tensor:
    """(number, batch, height, width, channels) as (batch, number * channels, height, width), channels last."""
    number, batch, height, width, channels = payloads.shape
    if payloads.dtype != dtype:
        payloads = payloads.to(dtype)
    if number == 1:
        return payloads[0].permute(0, 3, 1, 2)
    out = payloads.new_empty(batch, height, width, number, channels)
    _wide(out).copy_(_wide(payloads).movedim(0, 3))
    return out.view(batch, height, width, number * channels).permute(0, 3, 1, 2)


def apart(image: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `side_by_side_channels`."""
    dense = image.permute(0, 2, 3, 1).contiguous()
    batch, height, width, channels = dense.shape
    if number == 1:
        return dense[None].to(dtype)
    parts = dense.view(batch, height, width, number, channels // number)
    out = parts.new_empty(number, batch, height, width, channels // number)
    _wide(out).copy_(_wide(parts).movedim(3, 0))
    return out.to(dtype)


def _wide(payload: Tensor) -> Tensor:
    """Pixels seen as few wide numbers: four channels are copied ten times faster as one of 16 bytes."""
    size = payload.shape[-1] * payload.element_size()
    return payload.view(torch.complex128 if size % 16 == 0 else torch.float64) if size % 8 == 0 else payload
