"""Residual steps u + h F(u, theta): forward, vjp and parameter gradient written out.

A step describes one layer; its workspace holds the states of one rank's block of layers in the memory
layout that is fastest for it and hands out operations bound to views of them. Binding happens once, running
many times: an operation is a closure of two or three kernel launches with preallocated outputs.

Dense layout: features first, (point, width + 1, batch) with a constant last row, so that the bias is a
column of the weights (layer, width, width + 1) and a layer is one matrix product. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lpnet.config import Activation
from lpnet.errors import UsageError
from lpnet.nn.activations import FUNCTIONS, activate_, slope_
from lpnet.nn.context import Block, Context
from lpnet.nn.kernels import Op, add, product, times

Index = int | slice
CACHED = 64 * 1024  # numbers that stay in a core's second cache


class Workspace(Protocol):
    """States of one block of layers and operations on them.

    Indices are slots; an int is one of them, a slice several side by side. A payload is what a neighbour gets of a
    state: dense, without constant rows.
    """

    def begin(self, context: Context) -> None:
        """A pass begins: what all its evaluations see."""

    def commit(self) -> None:
        """The states are found: buffers take the values of the latest evaluations."""

    def state(self, slot: Index) -> Tensor:
        """Payload of a state."""

    def adjoint(self, slot: Index) -> Tensor:
        """Payload of an adjoint state."""

    def rows(self, count: int) -> Tensor:
        """A new array of `count` payloads."""

    def fitted(self, rows: Tensor, point: int) -> Tensor:
        """Rows of `rows` as payloads of a point, given by its global index."""

    def region(self, point: int) -> int:
        """Points of the same region lie in one array."""

    def evaluate(self, layer: Index, u: Index, z: Index) -> list[Op]:
        """z = F(u)."""

    def advance(self, u: Index, z: Index, h: float, out: Tensor, minus: Tensor | None, plus: Tensor | None) -> list[Op]:
        """out = (u + h z) [- minus] [+ plus], in this order."""

    def linearise(self, z: slice) -> list[Op]:
        """Values become what `pull` needs of them, once after the last evaluation of a forward; a workspace whose
        values serve as they are does nothing."""

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
        """out = (source + h F'^T source) [- minus] [+ plus]; keeps in d what the gradient needs."""

    def gradient(self, layers: slice, u: slice, d: slice, h: float) -> list[Op]:
        """Gradients of a run of layers."""

    def pack(self, u: Tensor, out: Tensor, point: int = 0) -> None:
        """Write a state (batch, ...) into a payload."""

    def unpack(self, payload: Tensor, point: int = 0) -> Tensor:
        """A payload of a point, or several, as states (..., batch, width); a copy."""


class Engine(Protocol):
    """The parameters of a block of layers in the layout of the kernels.

    gradient_block: layers whose gradients are best made together during the last adjoint sweep, while what they need
    is in the cache; 0: all of them after it.
    """

    gradient_block: int

    def refresh(self) -> tuple[int, ...]:
        """Follow the parameters; a stamp of their versions."""

    def stamp(self) -> tuple[int, ...]:
        """Versions of the parameters now."""

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters; new tensors."""

    def workspace(
        self, shape: Sequence[Any], *, state_slots: int, layer_slots: int, kept_slots: int, adjoint_slots: int
    ) -> Workspace:
        """Memory for states of `shape` (batch, ...)."""


class Step(Protocol):
    """One residual layer u + h F(u, theta)."""

    def state_shape(self, batch: int) -> tuple[int, ...] | None:
        """Shape of a state; None where the opening decides."""

    def check(self, shape: Sequence[Any]) -> None:
        """Refuse a state that does not fit."""

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters of one layer."""

    def engine(
        self, parameters: dict[str, Tensor], compute: torch.dtype | None = None, block: Block | None = None
    ) -> Engine:
        """Engine of a block of layers, from stacked parameters; F is computed in precision `compute`."""

    def serial_layer(self, parameters: dict[str, Tensor], h: float, layer: int = 0) -> torch.nn.Module:
        """One layer as an ordinary torch module."""


@dataclass(frozen=True)
class DenseStep:
    """u + h sigma(W u + b).

    Args:
        width: features of the state (batch, width).
        activation: sigma.
        bias: one number per layer (scalar) or one per feature (vector).
        init_scale: standard deviation of the initial weights times sqrt(width); biases start at zero.
    """

    width: int
    activation: Activation = "tanh"
    bias: Literal["scalar", "vector"] = "vector"
    init_scale: float = 0.3

    def __post_init__(self) -> None:
        if self.activation not in FUNCTIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {', '.join(FUNCTIONS)}")
        if self.bias not in ("scalar", "vector"):
            raise ValueError(f"bias is {self.bias!r}; it must be scalar or vector")
        if self.width < 1:
            raise ValueError(f"width is {self.width}; it must be 1 or more")

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters of one layer: weight (width, width), bias (width,) or (1,), in float64."""
        weight = torch.randn(self.width, self.width, generator=generator, dtype=torch.float64)
        return {
            "weight": weight * (self.init_scale / self.width**0.5),
            "bias": torch.zeros(self.width if self.bias == "vector" else 1, dtype=torch.float64),
        }

    def state_shape(self, batch: int) -> tuple[int, ...] | None:
        """Shape of a state."""
        return batch, self.width

    def check(self, shape: Sequence[Any]) -> None:
        """Refuse a state that does not fit.

        Raises:
            UsageError: with both shapes.
        """
        if len(shape) != 2 or shape[1] != self.width:
            raise UsageError(
                f"the opening makes a state of shape {tuple(shape)}; the stack needs (batch, {self.width})"
            )

    def engine(
        self, parameters: dict[str, Tensor], compute: torch.dtype | None = None, block: Block | None = None
    ) -> DenseEngine:
        """The fused weights of a block of layers, in the precision of the products."""
        weight, bias = parameters["weight"], parameters["bias"]
        return DenseEngine(self, weight, bias, compute or weight.dtype, (block or Block()).h)

    def serial_layer(self, parameters: dict[str, Tensor], h: float, layer: int = 0) -> torch.nn.Module:
        """One layer as an ordinary torch module with parameters of its own."""
        return SerialDenseLayer(self, parameters, h)


class SerialDenseLayer(torch.nn.Module):
    """One dense residual layer as plain torch, (batch, width) to (batch, width)."""

    def __init__(self, step: DenseStep, parameters: dict[str, Tensor], h: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(parameters["weight"].detach().clone())
        self.bias = torch.nn.Parameter(parameters["bias"].detach().clone())
        self.activation = step.activation
        self.h = h

    def forward(self, u: Tensor) -> Tensor:
        """One layer."""
        return u + self.h * FUNCTIONS[self.activation](u @ self.weight.t() + self.bias)


class DenseEngine:
    """Weights with the bias as last column, (local layers, width, width + 1), and h W^T for the way back; follows the
    parameters.

    Args:
        step: the layer.
        weight: (local layers, width, width).
        bias: (local layers, width) or (local layers, 1).
        compute: precision of the products W u; states and parameters keep theirs.
        h: step in layer time of a layer.
    """

    gradient_block = 32

    def __init__(self, step: DenseStep, weight: Tensor, bias: Tensor, compute: torch.dtype, h: float) -> None:
        self.step, self.h = step, h
        self.weight, self.bias = weight, bias
        layers, width = weight.shape[0], step.width
        self.fused = torch.empty(layers, width, width + 1, dtype=compute, device=weight.device)
        self.back = torch.empty(layers, width, width, dtype=compute, device=weight.device)
        self.fused_gradient = torch.empty_like(self.fused, dtype=weight.dtype)

    def refresh(self) -> tuple[int, ...]:
        """Copy the parameters into the fused weights; the stamp tells whether they change before a backward.

        Always copied: writing through `.data` changes a parameter without a trace, and the copy is cheap.
        """
        with torch.no_grad():
            self.fused[:, :, :-1].copy_(self.weight)
            self.fused[:, :, -1].copy_(self.bias)
            torch.mul(self.weight.transpose(1, 2), self.h, out=self.back)
        return self.stamp()

    def stamp(self) -> tuple[int, ...]:
        """Versions of the parameters."""
        return self.weight._version, self.bias._version

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters, split from the fused one; new tensors."""
        weight = self.fused_gradient[:, :, :-1] * self.h
        bias = self.fused_gradient[:, :, -1] * self.h
        return {"weight": weight, "bias": bias.sum(1, keepdim=True) if self.step.bias == "scalar" else bias}

    def workspace(
        self, shape: Sequence[Any], *, state_slots: int, layer_slots: int, kept_slots: int, adjoint_slots: int
    ) -> DenseWorkspace:
        """States of `shape` (batch, width)."""
        return DenseWorkspace(self, shape[0], state_slots, layer_slots, kept_slots, adjoint_slots)


class DenseWorkspace:
    """States (slots, width + 1, batch) and what is kept of the layers: values F, later slopes, and their adjoints."""

    def __init__(
        self,
        engine: DenseEngine,
        batch: int,
        state_slots: int,
        layer_slots: int,
        kept_slots: int,
        adjoint_slots: int,
    ) -> None:
        like = engine.weight.detach()
        self.engine, self.batch, self.width = engine, batch, engine.step.width
        self.u = torch.zeros(state_slots, self.width + 1, batch, dtype=like.dtype, device=like.device)
        self.u[:, -1] = 1
        self.z = torch.empty(layer_slots, self.width, batch, dtype=like.dtype, device=like.device)
        self._kept_slots, self._adjoint_slots = kept_slots, adjoint_slots
        self._lam: Tensor | None = None
        self._d: Tensor | None = None
        self._scratch: dict[tuple[str, int], Tensor] = {}

    def begin(self, context: Context) -> None:
        """A pass begins; nothing here depends on it."""

    def commit(self) -> None:
        """No buffers."""

    def state(self, slot: Index) -> Tensor:
        """Payload of a state, (width, batch) or (slots, width, batch)."""
        return self.u[slot, :-1]

    @property
    def lam(self) -> Tensor:
        """Adjoint states (slots, width, batch), allocated when first used."""
        if self._lam is None:
            self._lam = self.u.new_zeros(self._adjoint_slots, self.width, self.batch)
        return self._lam

    @property
    def d(self) -> Tensor:
        """sigma' * adjoint per layer, allocated when first used."""
        if self._d is None:
            self._d = self.u.new_empty(self._kept_slots, self.width, self.batch)
        return self._d

    def adjoint(self, slot: Index) -> Tensor:
        """Payload of an adjoint state."""
        return self.lam[slot]

    def rows(self, count: int) -> Tensor:
        """A new array of `count` payloads."""
        return self.u.new_zeros(count, self.width, self.batch)

    def fitted(self, rows: Tensor, point: int) -> Tensor:
        """Rows as payloads of a point; all points are alike here."""
        return rows

    def region(self, point: int) -> int:
        """All points lie in one array."""
        return 0

    def scratch(self, purpose: str, like: Tensor) -> Tensor:
        """A shared dense array of the shape of `like`."""
        key = (purpose, like.numel())
        if key not in self._scratch:
            self._scratch[key] = like.new_empty(like.numel())
        return self._scratch[key].view(like.shape)

    def evaluate(self, layer: Index, u: Index, z: Index) -> list[Op]:
        """z = sigma(W u + b)."""
        out = self.z[z]
        scratch = self.scratch("activation", out) if self.engine.step.activation == "smooth_relu" else out
        return [
            *product(self.engine.fused[layer], self.u[u], out),
            *activate_(self.engine.step.activation, out, scratch),
        ]

    def advance(self, u: Index, z: Index, h: float, out: Tensor, minus: Tensor | None, plus: Tensor | None) -> list[Op]:
        """out = (u + h z) [- minus] [+ plus], in this order."""
        to = out if minus is None or plus is None else self.scratch("advance", out)
        return [*add(self.state(u), self.z[z], h, to), *corrected(to, minus, plus, out)]

    def linearise(self, z: slice) -> list[Op]:
        """z = sigma'(W u + b), some layers at a time, as many as stay in the cache."""
        some = max(1, CACHED // max(1, self.width * self.batch))
        blocks = [self.z[i : min(i + some, z.stop)] for i in range(z.start, z.stop, some)]
        return [op for block in blocks for op in slope_(self.engine.step.activation, block)]

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
        """out = (source + h W^T (slope source)) [- minus] [+ plus], in this order."""
        inner = self.d[d]
        to = out if minus is None or plus is None else self.scratch("advance", out)
        return [
            *times(source, self.z[z], inner),
            *product(self.engine.back[layer], inner, to),
            *add(source, to, h / self.engine.h, to),
            *corrected(to, minus, plus, out),
        ]

    def gradient(self, layers: slice, u: slice, d: slice, h: float) -> list[Op]:
        """Fused gradient of a run of layers, without h: (sigma' lambda) u^T, summed over the batch."""
        return product(self.d[d], self.u[u].transpose(1, 2), self.engine.fused_gradient[layers])

    def pack(self, u: Tensor, out: Tensor, point: int = 0) -> None:
        """Write a state (batch, width) into a payload."""
        out.copy_(u.t())

    def unpack(self, payload: Tensor, point: int = 0) -> Tensor:
        """A payload, or several, as states (..., batch, width); a copy."""
        return payload.transpose(-1, -2).contiguous()


def corrected(result: Tensor, minus: Tensor | None, plus: Tensor | None, out: Tensor) -> list[Op]:
    """out = plus + (result - minus): the parareal form, in which an exact guess is a bitwise fixed point.

    Without `plus`, `result` is `out` already.
    """
    if minus is None:
        return []
    subtract = partial(result.sub_, minus)
    return [subtract] if plus is None else [subtract, partial(torch.add, plus, result, out=out)]
