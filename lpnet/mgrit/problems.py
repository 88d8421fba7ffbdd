"""The two problems of one cycle: StateProblem (u -> Phi(u)) and AdjointProblem (lambda -> Phi'^T lambda).

Both say how one edge is walked and who sends what to whom; the rest is `binding.Problem`. Neighbour messages only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lpnet.mgrit.binding import HALO, Problem, copier
from lpnet.mgrit.coarse import CoarseWorkspace
from lpnet.mgrit.cycle import Action
from lpnet.mgrit.short import Short
from lpnet.mgrit.slots import index_of
from lpnet.nn.steps import Op


class StateProblem(Problem):
    """u_{i+1} = u_i + h F(u_i; theta_i): a step is made by the owner of u_i, its result is sent on."""

    def _step(self, action: Action) -> list[Op]:
        assert action.edges is not None
        layers = action.edges.layers
        targets = [b + action.edges.span for b in layers]
        _, u, z = self._places(layers)
        minus, plus = self._terms(action, layers, targets)
        if plus is None and minus is not None and len(targets) > 1:
            raise AssertionError("a batch of coarse intervals must not leave the rank")
        own = self.layers_of(action.level)
        ops = own.advance(u, z, self.h * action.edges.span, self._sink(action, targets), minus, plus)
        leaves = targets[-1] not in self.place[action.level]
        return [self._free_send((action.sink, action.level)), *ops] if leaves else ops

    def _fas(self, action: Action) -> list[Op]:
        assert action.edges is not None
        layers = action.edges.layers
        _, u, z = self._places(layers)
        out = self._before(action.level, layers, [b + action.edges.span for b in layers])
        return self.layers_of(action.level).advance(u, z, self.h * action.edges.span, out, None, None)

    def _direct(self, action: Action) -> bool:
        return action.level == 0 or action.plain

    def _receive_buffer(self, action: Action) -> Tensor:
        buffer = self.incoming[action.level]
        assert buffer is not None
        return buffer

    def _land(self, action: Action) -> Op:
        level = action.level
        first = self.cycle.levels[level].points[0]
        buffer = self._receive_buffer(action)
        to_c = action.sink == "next"
        place = self._new(level + 1, [first]) if to_c else self.value(first)
        if self._direct(action):
            return copier(place, buffer)
        plus = self._new(level, [first])
        return partial(torch.add, plus, buffer, out=place)

    def _send_buffer(self, action: Action) -> Tensor:
        if action.sink == "next":
            point = self.cycle.levels[action.level].next_point
            assert point is not None
            return self._new(action.level + 1, [point])
        out = self.outgoing[action.level]
        assert out is not None
        return out

    def _pack(self, short: Short, action: Action) -> Op:
        return short.pack(action.sink, action.level, self._send_buffer(action))

    def _unpack(self, short: Short, action: Action) -> Op:
        return short.unpack("in", action.level, self._receive_buffer(action))


class AdjointProblem(Problem):
    """lambda_b = lambda_a + h (dF/du)^T lambda_a: a step is made by the owner of layer b, lambda_a is sent to it.

    Linearised at the states of a StateProblem in the same workspace.
    """

    def _arrival(self, point: int) -> Tensor:
        """The next fine point lies behind the own points, where it can join a batch."""
        return self.value(point) if point == self.high else self._border(point)

    def _evaluate(self, action: Action) -> list[Op]:
        """Values that the forward does not keep, as slopes."""
        assert action.edges is not None
        own, layer = self.layers_of(action.level), self._places(action.edges.layers)[0]
        return super()._evaluate(action) + (own.linearise(layer) if isinstance(own, CoarseWorkspace) else [])

    def _sources(self, layers: Sequence[int], span: int, level: int) -> Tensor:
        points = [b + span for b in layers]
        if points[-1] not in self.place[level] and points[-1] != self.high:
            assert len(points) == 1
            buffer = self.incoming[level]
            assert buffer is not None
            return buffer
        return self.view(points)

    def _pull(self, action: Action, out_of: Callable[[list[int]], Tensor], fas: bool) -> list[Op]:
        edges = action.edges
        assert edges is not None
        layers = edges.layers
        minus, plus = (None, None) if fas else self._terms(action, layers, layers)
        return self.layers_of(action.level).pull(
            index_of([b - self.low for b in layers]),
            index_of([self.slots.layer[b] for b in layers]),
            index_of([self.slots.kept[b] for b in layers]),
            self._sources(layers, edges.span, action.level),
            self.h * edges.span,
            out_of(layers),
            minus,
            plus,
        )

    def _step(self, action: Action) -> list[Op]:
        ops = self._pull(action, lambda layers: self._sink(action, layers), fas=False)
        assert action.edges is not None
        return [*self._releases(action.edges.first), *ops] if action.sink == "point" else ops

    def _releases(self, point: int) -> list[Op]:
        """A state is sent from where it lives: before it is written, what is on its way must have left."""
        return [
            self._free_send((kind, level))
            for level, part in enumerate(self.cycle.levels)
            if part.left is not None and part.points[0] == point
            for kind in ("point", "halo")
        ]

    def _fas(self, action: Action) -> list[Op]:
        level = action.level
        return self._pull(action, lambda layers: self._before(level, layers, layers), fas=True)

    def _c_relax(self, action: Action) -> list[Op]:
        points = self.cycle.levels[action.level].c_points
        return [op for point in points[:1] for op in self._releases(point)] + super()._c_relax(action)

    def _recompute(self, action: Action) -> list[Op]:
        """States and values of one segment again, from its C-point or from the block's first state."""
        assert action.edges is not None
        ops: list[Op] = []
        first, count = action.edges.first, action.edges.number
        for layer in range(first, first + count):
            u, z = self.slots.state[layer], self.slots.layer[layer]
            ops += self.workspace.evaluate(layer - self.low, u, z)
            if layer + 1 < first + count:
                target = self.workspace.state(self.slots.state[layer + 1])
                ops += self.workspace.advance(u, z, self.h, target, None, None)
        head, rest = self.slots.layer[first], [self.slots.layer[layer] for layer in range(first + 1, first + count)]
        ops += self.workspace.linearise(slice(head, head + 1))
        return [*ops, *self.workspace.linearise(slice(rest[0], rest[-1] + 1))] if rest else ops

    def linearise(self) -> list[Op]:
        """What the derivatives of all local layers need, from their latest values."""
        return self.workspace.linearise(slice(0, self.slots.sizes["layer_slots"]))

    def _gradient(self, action: Action) -> list[Op]:
        """Gradients of some layers in a row, by runs that lie in a row in memory too."""
        assert action.edges is not None
        ops: list[Op] = []
        run: list[int] = []
        state, kept = self.slots.state, self.slots.kept
        first, count, stride = action.edges.first, action.edges.number, action.edges.stride
        if stride > 1:  # side by side
            u, d, at = state[first], kept[first], first - self.low
            layers = slice(at, at + (count - 1) * stride + 1, stride)
            return self.workspace.gradient(layers, slice(u, u + count), slice(d, d + count), self.h)
        for layer in range(first, first + count + 1):
            follows = (
                run and layer < first + count and state[layer] - state[layer - 1] == kept[layer] - kept[layer - 1] == 1
            )
            if run and not follows:
                low, u, d, number = run[0] - self.low, state[run[0]], kept[run[0]], len(run)
                ops += self.workspace.gradient(
                    slice(low, low + number), slice(u, u + number), slice(d, d + number), self.h
                )
                run = []
            run.append(layer)
        return ops

    def all_gradients(self) -> list[Op]:
        """Gradients of all local layers in one call, from the latest sweep over level 0."""
        count = self.high - self.low
        return self.workspace.gradient(slice(0, count), slice(0, count), slice(0, count), self.h)

    def _receive_buffer(self, action: Action) -> Tensor:
        buffer = self.incoming[action.level]
        assert buffer is not None
        return buffer

    def _send_buffer(self, action: Action) -> Tensor:
        return self.value(self.cycle.levels[action.level].points[0])

    def _pack(self, short: Short, action: Action) -> Op:
        return short.pack_change(action.sink, action.level, self._send_buffer(action))

    def _unpack(self, short: Short, action: Action) -> Op:
        return short.unpack_change(action.level, self._receive_buffer(action))

    def _halo_post(self, action: Action) -> Op:
        level, buffer = action.level, self._receive_buffer(action)
        buffer = buffer if self.short is None else self.short.buffer("old in", level, buffer)
        return self._poster(buffer, ("halo", level), self._neighbour(level, back=True), self._tag + HALO + level)

    def _halo_wait(self, action: Action) -> list[Op]:
        arrived = self._waiter(("halo", action.level))
        if self.short is None:
            return [arrived]
        return [arrived, self.short.unpack("old in", action.level, self._receive_buffer(action))]

    def _halo_send(self, action: Action) -> list[Op]:
        level, buffer, key, ops = action.level, self._send_buffer(action), ("halo", action.level), list[Op]()
        if self.short is not None:
            ops = [self._free_send(key), *self.short.pack_old(level, buffer)]
            buffer = self.short.buffer("old out", level, buffer)
        return [*ops, self._sender(buffer, key, self._neighbour(level, back=False), self._tag + HALO + level)]
