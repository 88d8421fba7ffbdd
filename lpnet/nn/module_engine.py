"""The parameters, buffers and evaluations of a block of layers whose residual function is a torch module.

An evaluation records torch's graph of the layer and keeps it: the adjoint iterations are pure vjps of it, however
many there are, and nothing is traced again. Buffers (running statistics) are given to an evaluation as copies; when
the states are found, those of each layer's latest evaluation, which saw the final state, become the layer's own: one
update per pass, as in torch. No communication.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call

from lpnet.errors import UsageError
from lpnet.nn import dropout, parts
from lpnet.nn.context import Block, Context, takes
from lpnet.nn.kernels import Op
from lpnet.nn.layerwise import LayerwiseWorkspace


class ModuleEngine:
    """A template module and every layer's parameters as leaves that share the stacked memory.

    Args:
        template: structure of a layer.
        tensors: (local layers, ...) per name; what is no torch.nn.Parameter is a buffer.
        compute: precision of F.
        block: which layers.
        time: call F(u, t).
        like: dtype, device and number of layers where there are no parameters.
    """

    gradient_block = 0

    def __init__(
        self,
        template: torch.nn.Module,
        tensors: dict[str, Tensor],
        compute: torch.dtype,
        block: Block,
        *,
        time: bool,
        like: Tensor | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in tensors.items() if isinstance(p, torch.nn.Parameter)}
        self.buffers = {name.replace("/", "."): b for name, b in tensors.items() if name not in self.parameters}
        self.compute, self.block = compute, block
        self.like = next(iter(self.parameters.values())).detach() if like is None else like
        self.template = copy.deepcopy(template).to(self.like.dtype)
        self.dropouts = dropout.dropouts(self.template)
        self.takes_side, self.takes_layer = takes(self.template, "side"), takes(self.template, "layer")
        count = self.like.shape[0]
        self.times = [self.like.new_tensor((block.low + i) * block.h) for i in range(count)] if time else None
        self.gradient = {name: torch.zeros_like(p.detach()) for name, p in self.parameters.items()}
        self.refresh()

    def refresh(self) -> tuple[int, ...]:
        """Leaves of the parameters as they are; a stamp of their versions."""
        stacked = [(name.replace("/", "."), p.detach(), p.requires_grad) for name, p in self.parameters.items()]
        self.leaves = [
            {name: p[i].detach().requires_grad_(wanted) for name, p, wanted in stacked}
            for i in range(self.like.shape[0])
        ]
        return self.stamp()

    def autocast(self) -> Any:
        """torch's autocast where F is computed in a narrower precision than the states have."""
        narrower = self.compute != self.like.dtype
        return torch.autocast(self.like.device.type, self.compute) if narrower else contextlib.nullcontext()

    def stamp(self) -> tuple[int, ...]:
        """Versions of the parameters."""
        return tuple(p._version for p in self.parameters.values())

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters; new tensors."""
        return {name: g.clone() for name, g in self.gradient.items()}

    def workspace(
        self, shape: Sequence[Any], *, state_slots: int, layer_slots: int, kept_slots: int, adjoint_slots: int
    ) -> ModuleWorkspace:
        """States of `shape` (batch, ...), or a tuple of such shapes."""
        return ModuleWorkspace(self, shape, state_slots, layer_slots, adjoint_slots)

    def call(
        self, layer: int, state: Any, context: Context, masks: dropout.Masks, batch: int
    ) -> tuple[Any, dict[str, Tensor]]:
        """F of one layer, and its buffers after that."""
        if self.template.training != context.training:
            self.template.train(context.training)
        if self.dropouts:
            place = {"seed": self.block.seed, "layer": self.block.offset + self.block.low + layer, "batch": batch}
            dropout.begin(self.dropouts, context.key, masks, **place)
        own = {name: b[layer].clone() if context.training else b[layer] for name, b in self.buffers.items()}
        tensors = {**self.leaves[layer], **own}
        arguments = (state,) if self.times is None else (state, self.times[layer])
        options = {"side": context.side} if self.takes_side else {}
        if self.takes_layer:
            options["layer"] = self.block.low + layer
        out = functional_call(self.template, tensors, arguments, options)
        return out, {name: tensors[name] for name in own}  # a buffer that F has replaced is in there too

    def check(self, layer: int, out: Any, shape: Sequence[Any], dtype: torch.dtype) -> None:
        """Refuse a value of another shape or dtype.

        Raises:
            UsageError: with the layer and the shapes.
        """
        members = out if isinstance(out, tuple | list) else (out,)
        wanted = tuple(shape) if parts.is_tuple(shape) else (tuple(shape),)
        found = tuple((tuple(m.shape), m.dtype) for m in members if isinstance(m, Tensor))
        if isinstance(out, tuple | list) != parts.is_tuple(shape) or found != tuple((s, dtype) for s in wanted):
            makes = ", ".join(f"{s} {d}" for s, d in found) or f"a {type(out).__name__}"
            state = ", ".join(str(s) for s in wanted)
            raise UsageError(
                f"layer {self.block.offset + self.block.low + layer} makes {makes} of a state {state} {dtype}; "
                f"F must keep shape and dtype"
            )

    @torch.no_grad()
    def rehearse(self, shape: Sequence[Any], context: Context) -> None:
        """Evaluate the first layer on zeros: what does not fit is found before the first message.

        Raises:
            UsageError: F fails, changes the shape or draws from torch's global generator.
        """
        state = parts.split(self.like.new_zeros(parts.payload(shape)), shape)
        before = torch.random.get_rng_state()
        try:
            with self.autocast():
                out, _ = self.call(0, state, context, {}, parts.samples(shape))
        except UsageError:
            raise
        except Exception as error:
            side = "" if context.side is None else " with this side input"
            raise UsageError(
                f"layer {self.block.offset + self.block.low} cannot take a state {tuple(shape)}{side}: {error}"
            ) from error
        if self.compute == self.like.dtype:
            self.check(0, out, shape, self.like.dtype)
        if not torch.equal(before, torch.random.get_rng_state()):
            torch.random.set_rng_state(before)
            raise UsageError(
                "a layer draws from torch's global generator, so that its evaluations would differ; use "
                "lpnet.nn.Dropout and set the dropout of attention and recurrent modules to 0"
            )


class ModuleWorkspace(LayerwiseWorkspace):
    """States (slots, *payload) and torch's graph of every layer's latest evaluation."""

    def __init__(
        self,
        engine: ModuleEngine,
        shape: Sequence[Any],
        state_slots: int,
        layer_slots: int,
        adjoint_slots: int,
        payload: Sequence[int] | None = None,
    ) -> None:
        super().__init__(engine.like, payload or parts.payload(shape), state_slots, layer_slots, adjoint_slots)
        self.engine, self.shape = engine, tuple(shape)
        self.is_tuple, self.batch = parts.is_tuple(shape), parts.samples(shape)
        self.graphs: list[tuple[Tensor, Tensor, dict[str, Tensor]] | None] = [None] * layer_slots
        self.sources: list[Tensor | None] = [None] * layer_slots
        self.context = Context()
        self.pending: dict[int, dict[str, Tensor]] = {}
        self.masks: dropout.Masks = {}

    def begin(self, context: Context) -> None:
        """A pass begins."""
        self.context, self.pending, self.masks = context, {}, {}

    def commit(self) -> None:
        """The states are found: buffers take the values of the latest evaluations."""
        for layer, found in self.pending.items():
            for name, value in found.items():
                self.engine.buffers[name][layer].copy_(value)
        self.pending = {}

    def one_evaluate(self, layer: int, u: int, z: int) -> list[Op]:
        """z = F(u), with the graph of the layer kept."""
        # .data has a version counter of its own: that other slots are written later does not spoil the graph
        state, engine, graphs, values = self.u[u].data, self.engine, self.graphs, self.z

        def run() -> None:
            context = self.context
            with torch.set_grad_enabled(context.graphs), engine.autocast():
                leaf = state.detach().requires_grad_(context.graphs)
                out, buffers = engine.call(layer, self.opened(leaf), context, self.masks, self.batch)
                out = self.closed(layer, out, state.dtype)
            graphs[z] = (leaf, out, engine.leaves[layer]) if context.graphs else None
            values[z] = out.detach()
            if buffers and context.training:
                self.pending[layer] = buffers

        return [run]

    def opened(self, leaf: Tensor) -> Any:
        """A payload as F sees it."""
        return parts.split(leaf, self.shape) if self.is_tuple else leaf

    def closed(self, layer: int, out: Any, dtype: torch.dtype) -> Tensor:
        """What F makes, as a payload."""
        if self.engine.compute != dtype and isinstance(out, tuple if self.is_tuple else Tensor):
            out = tuple(part.to(dtype) for part in out) if isinstance(out, tuple) else out.to(dtype)
        if self.is_tuple or getattr(out, "shape", None) != self.shape or out.dtype != dtype:
            self.engine.check(layer, out, self.shape, dtype)
            out = parts.join(out)
        return cast(Tensor, out)

    def _graph(self, z: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        graph = self.graphs[z]
        assert graph is not None
        return graph

    def one_pull(self, layer: int, z: int, d: int, source: Tensor, h: float, out: Tensor) -> list[Op]:
        """out = source + h F'^T source, a vjp of the kept graph."""
        sources = self.sources

        def run() -> None:
            leaf, value, _ = self._graph(z)
            found = vjp(value, [leaf], source)[0]
            sources[d] = source
            if found is None:
                out.copy_(source)
            else:
                torch.add(source, found, alpha=h, out=out)

        return [run]

    def one_gradient(self, layer: int, u: int, d: int, h: float) -> list[Op]:
        """Gradients of the layer's parameters, a vjp of the kept graph; frozen ones have none."""

        def run() -> None:
            _, value, parameters = self._graph(d)
            source = self.sources[d]
            assert source is not None
            leaves = {name: p for name, p in parameters.items() if p.requires_grad}
            found = vjp(value, list(leaves.values()), source)
            for name, gradient in zip(leaves, found, strict=True):
                target = self.engine.gradient[name.replace(".", "/")][layer]
                target.zero_() if gradient is None else torch.mul(gradient, h, out=target)

        return [run]

    def pack(self, u: Tensor, out: Tensor, point: int = 0) -> None:
        """Write a state into a payload."""
        out.copy_(u)

    def unpack(self, payload: Tensor, point: int = 0) -> Tensor:
        """A payload, or several; a copy."""
        return payload.clone()


def vjp(value: Tensor, inputs: list[Tensor], source: Tensor) -> Sequence[Tensor | None]:
    """Source times the Jacobian, None where the value does not depend on an input."""
    if not inputs or not value.requires_grad:
        return [None] * len(inputs)
    found: Sequence[Tensor | None] = torch.autograd.grad(value, inputs, source, retain_graph=True, allow_unused=True)
    return found
