"""A workspace that works on one layer at a time, for steps whose layers are not one batched product.

A step says how one layer is evaluated, pulled back and differentiated; side-by-side calls run in turn.
No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpnet.nn.context import Context
from lpnet.nn.kernels import Op
from lpnet.nn.steps import Index, corrected


class LayerwiseWorkspace:
    """States and adjoints (slots, *payload) and what is kept of every layer.

    Subclasses give `one_evaluate`, `one_pull`, `one_gradient`, `pack` and `unpack`.

    Args:
        like: dtype and device.
        payload: shape of a state in memory.
        state_slots: number of states.
        layer_slots: number of layers that something is kept of.
        adjoint_slots: number of adjoint states.
    """

    def __init__(
        self, like: Tensor, payload: Sequence[int], state_slots: int, layer_slots: int, adjoint_slots: int
    ) -> None:
        self.like, self.payload = like.detach(), tuple(payload)
        self.u = self.like.new_zeros(state_slots, *self.payload)
        self.z: list[Tensor | None] = [None] * layer_slots  # F in the shape of a payload
        self._lam: Tensor | None = None
        self._scratch: dict[int, Tensor] = {}
        self._adjoint_slots = adjoint_slots

    def one_evaluate(self, layer: int, u: int, z: int) -> list[Op]:
        """z[z] = F(u[u]; layer)."""
        raise NotImplementedError

    def one_pull(self, layer: int, z: int, d: int, source: Tensor, h: float, out: Tensor) -> list[Op]:
        """out = source + h F'^T source."""
        raise NotImplementedError

    def one_gradient(self, layer: int, u: int, d: int, h: float) -> list[Op]:
        """Gradients of one layer from what its latest pull has kept."""
        raise NotImplementedError

    def scratch(self, like: Tensor) -> Tensor:
        """A shared dense array of the shape of `like`, for what is used at once."""
        if like.numel() not in self._scratch:
            self._scratch[like.numel()] = like.new_empty(like.numel())
        return self._scratch[like.numel()].view(like.shape)

    def begin(self, context: Context) -> None:
        """A pass begins."""

    def commit(self) -> None:
        """The states are found."""

    def state(self, slot: Index) -> Tensor:
        """Payload of a state."""
        return self.u[slot]

    @property
    def lam(self) -> Tensor:
        """Adjoint states, allocated when first used."""
        if self._lam is None:
            self._lam = self.like.new_zeros(self._adjoint_slots, *self.payload)
        return self._lam

    def adjoint(self, slot: Index) -> Tensor:
        """Payload of an adjoint state."""
        return self.lam[slot]

    def rows(self, count: int) -> Tensor:
        """A new array of `count` payloads."""
        return self.like.new_zeros(count, *self.payload)

    def fitted(self, rows: Tensor, point: int) -> Tensor:
        """Rows as payloads of a point; all points are alike here."""
        return rows

    def region(self, point: int) -> int:
        """All points lie in one array."""
        return 0

    def evaluate(self, layer: Index, u: Index, z: Index) -> list[Op]:
        """z = F(u)."""
        slots = zip(places(layer), places(u), places(z), strict=True)
        return [op for each in slots for op in self.one_evaluate(*each)]

    def advance(self, u: Index, z: Index, h: float, out: Tensor, minus: Tensor | None, plus: Tensor | None) -> list[Op]:
        """out = (u + h z) [- minus] [+ plus], in this order."""
        ops: list[Op] = []
        rows = side_by_side(u, out, minus, plus)
        for slot, kept, (o, m, p) in zip(places(u), places(z), rows, strict=True):
            to = o if m is None or p is None else self.scratch(o)
            ops += [partial(self._advance, self.u[slot], kept, h, to), *corrected(to, m, p, o)]
        return ops

    def _advance(self, state: Tensor, z: int, h: float, out: Tensor) -> None:
        value = self.z[z]
        assert value is not None
        torch.add(state, value, alpha=h, out=out)

    def linearise(self, z: slice) -> list[Op]:
        """Values serve as they are."""
        return []

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
        ops: list[Op] = []
        rows = side_by_side(layer, source, out, minus, plus)
        for a, b, c, (s, o, m, p) in zip(places(layer), places(z), places(d), rows, strict=True):
            to = o if m is None or p is None else self.scratch(o)
            ops += [*self.one_pull(a, b, c, s, h, to), *corrected(to, m, p, o)]
        return ops

    def gradient(self, layers: slice, u: slice, d: slice, h: float) -> list[Op]:
        """Gradients of a run of layers."""
        slots = zip(places(layers), places(u), places(d), strict=True)
        return [op for layer, state, kept in slots for op in self.one_gradient(layer, state, kept, h)]


def places(index: Index) -> list[int]:
    """The places of an index one by one."""
    return [index] if isinstance(index, int) else list(range(index.start, index.stop, index.step or 1))


def side_by_side(index: Index, *arrays: Tensor | None) -> list[Any]:
    """Rows of arrays for every place of an index; with a single place the arrays are the row."""
    if isinstance(index, int):
        return [arrays]
    number = len(places(index))
    return list(zip(*([None] * number if a is None else a.unbind(0) for a in arrays), strict=True))
