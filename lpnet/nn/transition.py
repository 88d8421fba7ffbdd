"""A torch module between two stacks: u_{i+1} = T(u_i), which may change the shape of the state.

It is one layer without a step size. Coarse intervals never cross it, so that it is the same on every level.
No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.nn import dropout, parts
from lpnet.nn.context import Block
from lpnet.nn.kernels import Op
from lpnet.nn.layout import Layout
from lpnet.nn.module_engine import ModuleEngine, ModuleWorkspace, vjp


class TransitionEngine(ModuleEngine):
    """Parameters and buffers of one module that are not stacked.

    Args:
        module: T; its own parameters are trained.
        dtype: of states and parameters.
        place: global index of this layer.
        seed: of the masks of dropout.
    """

    def __init__(
        self, module: torch.nn.Module, dtype: torch.dtype, compute: torch.dtype, place: int, seed: int
    ) -> None:
        self.module = module
        whole = dict(module.named_parameters())
        tensors: dict[str, Tensor] = {
            name.replace(".", "/"): torch.nn.Parameter(p.detach()[None], p.requires_grad) for name, p in whole.items()
        }
        tensors |= {name.replace(".", "/"): b[None] for name, b in module.named_buffers()}
        device = next(iter(whole.values())).device if whole else torch.get_default_device()
        block = Block(offset=place, seed=seed)
        super().__init__(module, tensors, compute, block, time=False, like=torch.zeros(1, dtype=dtype, device=device))

    def refresh(self) -> tuple[int, ...]:
        """Leaves of the parameters as they are; a stamp of their versions."""
        named = dict(self.module.named_parameters())
        self.leaves = [{name: p.detach().requires_grad_(p.requires_grad) for name, p in named.items()}]
        return self.stamp()

    def stamp(self) -> tuple[int, ...]:
        """Versions of the parameters."""
        return tuple(p._version for p in self.module.parameters())

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters; new tensors."""
        return {name.replace("/", "."): g[0].clone() for name, g in self.gradient.items()}

    def between(self, before: Layout, after: Layout) -> TransitionWorkspace:
        """Memory for the state before, and the way to the layout of the one after."""
        return TransitionWorkspace(self, before, after)


class TransitionWorkspace(ModuleWorkspace):
    """One state in the layout of the layers before, one value in that of the layers after."""

    def __init__(self, engine: TransitionEngine, before: Layout, after: Layout) -> None:
        super().__init__(engine, before.shape, 1, 1, 1, payload=before.payload)
        self.before, self.after = before, after

    def opened(self, leaf: Tensor) -> Any:
        """The state as T sees it."""
        return self.before.to_state(leaf)

    def closed(self, layer: int, out: Any, dtype: torch.dtype) -> Tensor:
        """The value as the layers after want it."""
        members = out if isinstance(out, tuple) else (out,)
        out = tuple(part.to(dtype) for part in members) if isinstance(out, tuple) else out.to(dtype)
        if parts.shape_of(out) != self.after.shape:
            raise UsageError(
                f"transition at layer {self.engine.block.offset} makes {parts.shape_of(out)}; {self.after.shape} was "
                f"agreed for this batch"
            )
        return self.after.to_payload(out).contiguous()

    def _advance(self, state: Tensor, z: int, h: float, out: Tensor) -> None:
        value = self.z[z]
        assert value is not None
        out.copy_(value)

    def one_pull(self, layer: int, z: int, d: int, source: Tensor, h: float, out: Tensor) -> list[Op]:
        """out = T'^T source."""

        def run() -> None:
            leaf, value, _ = self._graph(z)
            found = vjp(value, [leaf], source)[0]
            self.sources[d] = source
            out.zero_() if found is None else out.copy_(found)

        return [run]


def prepare(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A transition in the precision of the states, with lpnet's dropout. No communication."""
    return dropout.replace(module.to(dtype))


def shape_after(module: torch.nn.Module, shape: Sequence[Any], dtype: torch.dtype) -> parts.StateShape:
    """Shape that a module (on the meta device) makes of a state. No communication.

    Raises:
        UsageError: the module does not take it.
    """
    state = parts.split(torch.empty(parts.payload(shape), dtype=dtype, device="meta"), shape)
    try:
        with torch.no_grad():
            return parts.shape_of(module(state))
    except Exception as error:
        raise UsageError(
            f"a transition ({type(module).__name__}) cannot take a state {tuple(shape)}: {error}"
        ) from error
