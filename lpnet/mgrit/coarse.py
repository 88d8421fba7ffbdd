"""Coarse operators: the step of a coarse level with other weights than those of its first layer.

An edge of a coarse level leads from point b over s layers to point a = b + s:

    injected     u + s h F(u; theta_b)                                       the layer itself, made by `binding`
    averaged     u + s h F(u; mean of theta_b .. theta_{a-1})
    half_steps   m = u + s h/2 F(u; theta_b), then m + s h/2 F(m; theta_{b + s/2})

The adjoint's coarse step is the transposed Jacobian of the same map, at the states that were found. Edges of one layer
are that layer with every operator, so that only the speed of convergence depends on the choice (Günther et al. 2020,
section 3.2, use injection). An edge belongs to the owner of layer b and may end on another rank: weights that a rank
lacks come along the ranks from the right, added from the last layer of an edge to the first, so that no bit depends on
the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lpnet.config import MGRIT
from lpnet.errors import UsageError
from lpnet.mgrit.hierarchy import Hierarchy
from lpnet.mgrit.slots import Slots, index_of
from lpnet.nn.context import Block
from lpnet.nn.kernels import Op
from lpnet.nn.layerwise import places
from lpnet.nn.module_step import ModuleStep
from lpnet.nn.stack import LayerStack
from lpnet.nn.steps import Index

TAG = 990
Kind = Literal["averaged", "half_steps"]
Points = tuple[int, ...]


def check(mgrit: MGRIT, stack: Any) -> None:
    """Refuse layers that have no weights to put together. No communication.

    Raises:
        UsageError: another coarse operator than injected for modules or for several stacks.
    """
    if mgrit.coarse == "injected" or mgrit.levels == 1:
        return
    if not isinstance(stack, LayerStack) or isinstance(stack.step, ModuleStep):
        what = "modules, whose buffers, masks and times belong to one layer" if isinstance(stack, LayerStack) else (
            "a network of several stacks, whose layers differ"
        )
        raise UsageError(
            f"mgrit.coarse is {mgrit.coarse}, which is not for {what}; use it for dense or convolutional layers, or "
            "set it to injected"
        )


class Weights:
    """The weights of one level's edges on this rank, as tensors (edges, ...) that follow the parameters.

    Args:
        stack: the layers.
        points: of the level, N included.
        kind: the operator.
    """

    def __init__(self, stack: LayerStack, points: Points, kind: Kind) -> None:
        self.kind, self.stack, low, high = kind, stack, stack.low, stack.high
        edges = list(zip(points, points[1:], strict=False))
        before = [edge for edge in edges if edge[0] < low < edge[1]]  # at most one: it began on another rank
        self.layers = [b for b, _ in edges if low <= b < high]
        self.spans = [a - b for b, a in edges if low <= b < high]
        own = [*before, *(edge for edge in edges if low <= edge[0] < high)]
        rows = [self._wanted(b, a) for b, a in own] if before else [[], *(self._wanted(b, a) for b, a in own)]
        local = [[layer for layer in row if low <= layer < high] for row in rows]
        self.sends = bool(before) and rows[0][0] >= low
        self.receives = rows[-1] != [] and rows[-1][0] >= high
        self._passes = []
        for j in range(max(map(len, local))):
            which = [(i, row[j] - low) for i, row in enumerate(local) if len(row) > j]
            self._passes.append([torch.tensor(column) for column in zip(*which, strict=True)])
        parameters = {name: p.detach() for name, p in stack.named_parameters()}
        self._sums = {name: p.new_zeros(len(self.layers) + 1, *p.shape[1:]) for name, p in parameters.items()}
        self.values = {name: p.new_zeros(len(self.layers), *p.shape[1:]) for name, p in parameters.items()}
        self._divisors = torch.tensor(self.spans, dtype=stack.dtype)
        self.engine = (
            stack.step.engine(self.values, stack.compute, Block(low, stack.h, stack.seed, stack.offset))
            if self.layers
            else None
        )

    def _wanted(self, b: int, a: int) -> list[int]:
        """Layers that the weights of an edge are made of, the last one first."""
        return list(range(a - 1, b - 1, -1)) if self.kind == "averaged" else [b + (a - b) // 2]

    def arriving(self) -> list[Tensor]:
        """Where the right rank's share of the last edge is put."""
        return [value[-1] for value in self._sums.values()] if self.receives else []

    def leaving(self) -> list[Tensor]:
        """This rank's share of the edge that began on the left."""
        return [value[0] for value in self._sums.values()] if self.sends else []

    def clear(self) -> None:
        """Begin anew."""
        for total in self._sums.values():
            total.zero_()

    @torch.no_grad()
    def gather(self) -> None:
        """Add the local layers to what has arrived; the engine follows. No communication."""
        for name, parameter in self.stack.named_parameters():
            total = self._sums[name]
            for rows, layers in self._passes:
                total.index_add_(0, rows.to(total.device), parameter.index_select(0, layers.to(parameter.device)))
            if self.kind == "averaged":
                ones = [1] * (total.dim() - 1)
                torch.div(total[1:], self._divisors.to(total.device).view(-1, *ones), out=self.values[name])
            else:
                self.values[name].copy_(total[1:])
        if self.engine is not None:
            self.engine.refresh()


class CoarseWorkspace:
    """The edges of one level, beside the workspace of the layers, in whose states they work.

    Args:
        fine: workspace of the layers.
        weights: of the level.
        shape: of a state (batch, ...).
        slots: where the layers' values lie.
    """

    def __init__(self, fine: Any, weights: Weights, shape: Sequence[Any], slots: Slots) -> None:
        stack, number = weights.stack, len(weights.layers)
        self.h, self.spans = stack.h, weights.spans
        self._by_layer = {b - stack.low: row for row, b in enumerate(weights.layers)}
        self._by_slot = {slots.layer[b]: row for row, b in enumerate(weights.layers)}
        sizes = {"layer_slots": number, "kept_slots": number, "adjoint_slots": 1}
        halves = weights.kind == "half_steps"
        engine: Any = stack.engine if halves else weights.engine
        self.first: Any = engine.workspace(shape, state_slots=1, **sizes)
        self.first.u = fine.u
        self.second: Any = weights.engine.workspace(shape, state_slots=number, **sizes) if halves else None  # type: ignore[union-attr]
        self._between: dict[int, Tensor] = {}

    def _rows(self, index: Index, table: dict[int, int]) -> tuple[Index, bool]:
        """Rows of some edges, and whether they have a second half."""
        rows = [table[place] for place in places(index)]
        return index_of(rows), self.second is not None and self.spans[rows[0]] > 1

    def evaluate(self, layer: Index, u: Index, z: Index) -> list[Op]:
        """F at the states u, and at the middles of half steps."""
        row, halves = self._rows(layer, self._by_layer)
        if self.second is None:
            return self.first.evaluate(row, u, row)
        ops: list[Op] = self.first.evaluate(layer, u, row)
        if halves:
            half = self.h * self.spans[places(row)[0]] / 2
            ops = [*ops, *self.first.advance(u, row, half, self.second.state(row), None, None)]
            ops += self.second.evaluate(row, row, row)
        return ops

    def linearise(self, layer: Index) -> list[Op]:
        """Values become what `pull` needs of them."""
        row, halves = self._rows(layer, self._by_layer)
        spaces = [self.first, self.second] if halves else [self.first]
        return [op for space in spaces for r in places(row) for op in space.linearise(slice(r, r + 1))]

    def advance(self, u: Index, z: Index, h: float, out: Tensor, minus: Tensor | None, plus: Tensor | None) -> list[Op]:
        """out = Phi_c(u) [- minus] [+ plus], in this order."""
        row, halves = self._rows(z, self._by_slot)
        if halves:
            return self.second.advance(row, row, h / 2, out, minus, plus)
        return self.first.advance(u, row, h, out, minus, plus)

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
        """out = Phi_c'^T source [- minus] [+ plus], in this order."""
        row, halves = self._rows(layer, self._by_layer)
        weights = layer if self.second is not None else row
        if not halves:
            return self.first.pull(weights, row, row, source, h, out, minus, plus)
        number = len(places(row))
        if number not in self._between:
            self._between[number] = self.second.rows(number)
        between = self._between[number] if isinstance(row, slice) else self._between[number][0]
        return [
            *self.second.pull(row, row, row, source, h / 2, between, None, None),
            *self.first.pull(weights, row, row, between, h / 2, out, minus, plus),
        ]


class CoarseOperators:
    """The coarse operators of both directions of one batch size; edges that both have are there once.

    Args:
        stack: the layers.
        kind: the operator.
        hierarchies: levels of both directions.
        fine: workspace of the layers.
        shape: of a state (batch, ...).
        slots: where the layers' values lie.
    """

    def __init__(
        self,
        stack: LayerStack,
        kind: Kind,
        hierarchies: Sequence[Hierarchy],
        fine: Any,
        shape: Sequence[Any],
        slots: Slots,
    ) -> None:
        self.comm = stack.comm
        self._weights: dict[Points, Weights] = {}
        made: dict[Points, CoarseWorkspace | None] = {}
        self.spaces: list[list[CoarseWorkspace | None]] = []
        for hierarchy in hierarchies:
            keys = [tuple(sorted({*points, hierarchy.layers})) for points in hierarchy.levels]
            for key in keys[1:]:
                if key not in made:
                    weights = self._weights[key] = Weights(stack, key, kind)
                    made[key] = CoarseWorkspace(fine, weights, shape, slots) if weights.layers else None
            self.spaces.append([None, *(made[key] for key in keys[1:])])
        all_weights = list(self._weights.values())
        like = next(stack.parameters()).detach()
        self._incoming = like.new_zeros(sum(v.numel() for w in all_weights for v in w.arriving()))
        self._outgoing = like.new_zeros(sum(v.numel() for w in all_weights for v in w.leaving()))

    def refresh(self) -> None:
        """Follow the parameters. Neighbour messages only: one from the right where an edge crosses the border."""
        incoming, outgoing = self._incoming, self._outgoing
        request = self.comm.irecv(incoming, self.comm.rank + 1, TAG) if incoming.numel() else None
        every = list(self._weights.values())
        for weights in every:
            weights.clear()
        if request is not None:
            request.Wait()
            arriving = [value for weights in every for value in weights.arriving()]
            for value, part in zip(arriving, incoming.split([v.numel() for v in arriving]), strict=True):
                value.copy_(part.view(value.shape))
        for weights in every:
            weights.gather()
        if outgoing.numel():
            torch.cat([value.reshape(-1) for weights in every for value in weights.leaving()], out=outgoing)
            self.comm.isend(outgoing, self.comm.rank - 1, TAG).Wait()
