"""Any torch module as the residual function: u + h F(u), with F made once per layer by a factory.

An evaluation records torch's graph of the layer and keeps it: the adjoint iterations are pure vjps of it, however
many there are, and nothing is traced again. No communication.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lpnet.errors import UsageError
from lpnet.nn.kernels import Op
from lpnet.nn.layerwise import LayerwiseWorkspace


class ModuleStep:
    """u + h F(u) for a torch module F that keeps shape and dtype of the state.

    Args:
        factory: makes the module of one layer; called once per layer under that layer's seed. Every call must make
            the same structure.
    """

    def __init__(self, factory: Callable[[], torch.nn.Module]) -> None:
        self.factory = factory

    def __repr__(self) -> str:
        return f"ModuleStep({getattr(self.factory, '__name__', self.factory)})"

    def state_shape(self, batch: int) -> tuple[int, ...] | None:
        """The opening decides."""
        return None

    def check(self, shape: Sequence[int]) -> None:
        """Any state is fine here; the first evaluation checks that F keeps its shape."""

    def make(self, seed: int) -> torch.nn.Module:
        """The module of a layer; torch's global generator is left as found.

        Raises:
            UsageError: the factory makes something else, or a module without parameters.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.factory()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"the factory of a layer made a {type(module).__name__}; it must make a torch.nn.Module")
        if not any(True for _ in module.parameters()):
            raise UsageError("the factory of a layer made a module without parameters; there is nothing to train")
        return module

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters of one layer; a dot in a name becomes a slash, as torch wants it."""
        module = self.make(generator.initial_seed())
        return {name.replace(".", "/"): parameter.detach() for name, parameter in module.named_parameters()}

    def engine(self, parameters: dict[str, Tensor], compute: torch.dtype | None = None) -> ModuleEngine:
        """One module that is called with every layer's parameters, under autocast where `compute` is narrower."""
        return ModuleEngine(self.make(0), parameters, compute or next(iter(parameters.values())).dtype)

    def serial_layer(self, parameters: dict[str, Tensor], h: float) -> torch.nn.Module:
        """One layer as an ordinary torch module with parameters of its own."""
        return SerialModuleLayer(self.make(0), parameters, h)


class SerialModuleLayer(torch.nn.Module):
    """u + h F(u) as plain torch."""

    def __init__(self, module: torch.nn.Module, parameters: dict[str, Tensor], h: float) -> None:
        super().__init__()
        self.module, self.h = module.to(next(iter(parameters.values())).dtype), h
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(parameters[name.replace(".", "/")])

    def forward(self, u: Tensor) -> Tensor:
        """One layer."""
        out: Tensor = u + self.h * self.module(u)
        return out


class ModuleEngine:
    """A template module and every layer's parameters as leaves that share the stacked memory.

    Args:
        template: structure of a layer.
        parameters: (local layers, ...) per name.
        compute: precision of F.
    """

    gradient_block = 0

    def __init__(self, template: torch.nn.Module, parameters: dict[str, Tensor], compute: torch.dtype) -> None:
        self.parameters, self.compute = parameters, compute
        self.like = next(iter(parameters.values())).detach()
        self.template = copy.deepcopy(template).to(self.like.dtype)
        self.gradient = {name: torch.zeros_like(p.detach()) for name, p in parameters.items()}
        self.refresh()

    def refresh(self) -> tuple[int, ...]:
        """Leaves of the parameters as they are; a stamp of their versions."""
        stacked = {name: p.detach() for name, p in self.parameters.items()}
        self.leaves = [
            {name.replace("/", "."): p[i].detach().requires_grad_() for name, p in stacked.items()}
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
        self, shape: Sequence[int], *, state_slots: int, layer_slots: int, kept_slots: int
    ) -> ModuleWorkspace:
        """States of `shape` (batch, ...)."""
        return ModuleWorkspace(self, shape, state_slots, layer_slots)


class ModuleWorkspace(LayerwiseWorkspace):
    """States (slots, batch, ...) and torch's graph of every layer's latest evaluation."""

    def __init__(self, engine: ModuleEngine, shape: Sequence[int], state_slots: int, layer_slots: int) -> None:
        super().__init__(engine.like, shape, state_slots, layer_slots)
        self.engine = engine
        self.graphs: list[tuple[Tensor, Tensor, dict[str, Tensor]] | None] = [None] * layer_slots
        self.sources: list[Tensor | None] = [None] * layer_slots

    def one_evaluate(self, layer: int, u: int, z: int) -> list[Op]:
        """z = F(u), with the graph of the layer kept."""
        # .data has a version counter of its own: that other slots are written later does not spoil the graph
        state, engine, graphs, values = self.u[u].data, self.engine, self.graphs, self.z

        def run() -> None:
            parameters = engine.leaves[layer]
            with torch.enable_grad(), engine.autocast():
                leaf = state.detach().requires_grad_()
                out = functional_call(engine.template, parameters, (leaf,))
                if engine.compute != state.dtype:
                    out = out.to(state.dtype)
            value = out.detach()
            if value.shape != state.shape or value.dtype != state.dtype:
                raise UsageError(
                    f"layer {layer} of this rank makes {tuple(value.shape)} {value.dtype} of a state "
                    f"{tuple(state.shape)} {state.dtype}; F must keep shape and dtype"
                )
            graphs[z], values[z] = (leaf, out, parameters), value

        return [run]

    def _graph(self, z: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        graph = self.graphs[z]
        assert graph is not None
        return graph

    def one_pull(self, layer: int, z: int, d: int, source: Tensor, h: float, out: Tensor) -> list[Op]:
        """out = source + h F'^T source, a vjp of the kept graph."""
        sources = self.sources

        def run() -> None:
            leaf, value, _ = self._graph(z)
            (found,) = torch.autograd.grad(value, [leaf], source, retain_graph=True, allow_unused=True)
            sources[d] = source
            if found is None:
                out.copy_(source)
            else:
                torch.add(source, found, alpha=h, out=out)

        return [run]

    def one_gradient(self, layer: int, u: int, d: int, h: float) -> list[Op]:
        """Gradients of the layer's parameters, a vjp of the kept graph."""

        def run() -> None:
            _, value, parameters = self._graph(d)
            source = self.sources[d]
            assert source is not None
            found: Sequence[Any] = torch.autograd.grad(
                value, list(parameters.values()), source, retain_graph=True, allow_unused=True
            )
            for name, gradient in zip(parameters, found, strict=True):
                target = self.engine.gradient[name.replace(".", "/")][layer]
                target.zero_() if gradient is None else torch.mul(gradient, h, out=target)

        return [run]

    def pack(self, u: Tensor, out: Tensor) -> None:
        """Write a state into a payload."""
        out.copy_(u)

    def unpack(self, payload: Tensor) -> Tensor:
        """A payload, or several; a copy."""
        return payload.clone()
