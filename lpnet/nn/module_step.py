"""Any torch module as the residual function: u + h F(u), with F made once per layer by a factory.

F is called as F(u), F(u, t) where its forward takes `t` (layer time), and with `side=` and `layer=` (the index in the
stack) where it takes those. A state
that is a tuple of tensors comes as a tuple and goes as one. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.nn.context import Block, takes
from lpnet.nn.dropout import replace
from lpnet.nn.module_engine import ModuleEngine


class ModuleStep:
    """u + h F(u) for a torch module F that keeps shape and dtype of the state.

    torch's dropout modules in F are replaced by `lpnet.nn.Dropout`, whose masks are the same for all evaluations.

    Args:
        factory: makes the module of one layer; called once per layer under that layer's seed. Every call must make
            the same structure.
        time: call F(u, t) with the layer time t, a tensor without axes; None: where F's forward has a parameter `t`.
    """

    def __init__(self, factory: Callable[[], torch.nn.Module], *, time: bool | None = None) -> None:
        self.factory, self.time = factory, time

    def __repr__(self) -> str:
        return f"ModuleStep({getattr(self.factory, '__name__', self.factory)})"

    def state_shape(self, batch: int) -> tuple[int, ...] | None:
        """The opening decides."""
        return None

    def check(self, shape: Sequence[Any]) -> None:
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
        return replace(module)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters and buffers of one layer; a dot in a name becomes a slash, as torch wants it.

        Parameters come as torch.nn.Parameter, which tells them from buffers and frozen ones from others.
        """
        module = self.make(generator.initial_seed())
        found: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        return {name.replace(".", "/"): tensor for name, tensor in found}

    def transient(self) -> set[str]:
        """Names of buffers that are not saved (persistent=False)."""
        return {
            f"{prefix}.{name}".lstrip(".").replace(".", "/")
            for prefix, part in self.make(0).named_modules()
            for name in part._non_persistent_buffers_set
        }

    def wants_time(self, module: torch.nn.Module) -> bool:
        """Whether F is called with the layer time."""
        return takes(module, "t") if self.time is None else self.time

    def engine(
        self, parameters: dict[str, Tensor], compute: torch.dtype | None = None, block: Block | None = None
    ) -> ModuleEngine:
        """One module that is called with every layer's parameters, under autocast where `compute` is narrower."""
        first = next(p for p in parameters.values() if isinstance(p, torch.nn.Parameter))
        template = self.make(0)
        return ModuleEngine(
            template, parameters, compute or first.dtype, block or Block(), time=self.wants_time(template)
        )

    def serial_layer(self, parameters: dict[str, Tensor], h: float, layer: int = 0) -> torch.nn.Module:
        """One layer as an ordinary torch module with parameters and buffers of its own."""
        module = self.make(0)
        return SerialModuleLayer(module, parameters, h, layer, with_time=self.wants_time(module))


class SerialModuleLayer(torch.nn.Module):
    """u + h F(u) as plain torch."""

    def __init__(
        self, module: torch.nn.Module, parameters: Mapping[str, Tensor], h: float, layer: int, *, with_time: bool
    ) -> None:
        super().__init__()
        like = parameters[next(module.named_parameters())[0].replace(".", "/")]
        self.module, self.h, self.layer, self.with_time = module.to(like.dtype), h, layer, with_time
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(parameters[name.replace(".", "/")])

    def forward(self, u: Any, side: Any = None) -> Any:
        """One layer."""
        state = u[0] if isinstance(u, tuple) else u
        more = [torch.tensor(self.layer * self.h, dtype=state.dtype, device=state.device)] if self.with_time else []
        options = {name: value for name, value in (("side", side), ("layer", self.layer)) if takes(self.module, name)}
        value = self.module(u, *more, **options)
        if isinstance(u, tuple):
            return tuple(a + self.h * b for a, b in zip(u, value, strict=True))
        return u + self.h * value
