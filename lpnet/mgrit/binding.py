"""Binds the recorded actions of a rank to memory and messages: what both directions share.

Each action becomes a closure over views that exist already, so that a sweep is a loop over closures. A problem
owns the arrays of the coarse levels: E (the value a sweep brings to a C-point) and K (the coarse step of the old
value); the states live in one workspace, where every level works on its own points in place. Neighbour messages
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpnet.mgrit.coarse import CoarseWorkspace
from lpnet.mgrit.cycle import Action, Cycle
from lpnet.mgrit.hierarchy import per_level
from lpnet.mgrit.short import DTYPES, Short
from lpnet.mgrit.slots import Slots, index_of
from lpnet.nn.kernels import Op, uses_numpy
from lpnet.nn.spatial import SpatialWorkspace
from lpnet.nn.steps import Index, Workspace
from lpnet.parallel.comm import Comm

FORWARD_TAG, ADJOINT_TAG = 0, 500
HALO = 250


class Problem:
    """What both directions share: coarse arrays, C-relaxation, residuals, messages."""

    def __init__(
        self,
        workspace: Workspace,
        cycle: Cycle,
        slots: Slots,
        comm: Comm,
        h: float,
        spaces: Sequence[SpatialWorkspace | CoarseWorkspace | None] = (),
    ) -> None:
        self._spaces = spaces
        self.workspace, self.cycle, self.slots, self.comm, self.h = workspace, cycle, slots, comm, h
        self.low, self.high = cycle.partition.block(comm.rank)
        self.adjoint = cycle.hierarchy.adjoint
        self.slot = slots.adjoint if self.adjoint else slots.state
        self.last_point = cycle.hierarchy.layers
        levels = cycle.levels
        self.place = [{p: i for i, p in enumerate(part.points)} for part in levels]
        # states leave the rank where they are brought: for a C-point of the right rank in a further row of E, for an
        # F-point in a buffer; adjoints are sent from where they live
        leaving = [None if self.adjoint else part.next_point for part in levels]
        into_c = [point in cycle.hierarchy.c_points(level) for level, point in enumerate(leaving)]
        numbers = [0, *(len(part.points) + further for part, further in zip(levels[1:], into_c, strict=False))]
        self.arrived = [workspace.rows(number) for number in numbers]
        self.old = [workspace.rows(len(part.edges) if level else 0) for level, part in enumerate(levels)]
        comes = [part.next_point if self.adjoint else (part.points or (None,))[0] for part in levels]
        self.incoming = [None if point is None else self._arrival(point) for point in comes]
        ends = zip(leaving, into_c, strict=True)
        self.outgoing = [None if point is None or is_c else self._border(point) for point, is_c in ends]
        dtype = DTYPES[cycle.mgrit.coarse_messages]
        self.short = Short(dtype) if dtype is not None and dtype.itemsize < self.arrived[0].element_size() else None
        self.squares: list[np.ndarray] = []  # squared residuals at this rank's C-points, per refresh
        self._differences: Tensor | None = None
        self._receiving: dict[tuple[str, int], Any] = {}
        self._sending: dict[tuple[str, int], Any] = {}
        self._tag = ADJOINT_TAG if self.adjoint else FORWARD_TAG

    # places

    def layers_of(self, level: int) -> Workspace | SpatialWorkspace | CoarseWorkspace:
        """What evaluates the layers on a level: on full or on restricted states, or with other weights."""
        space = self._spaces[level] if level < len(self._spaces) else None
        return self.workspace if space is None else space

    def _border(self, point: int) -> Tensor:
        """A buffer for the state of a point."""
        return self.workspace.fitted(self.workspace.rows(1)[0], point)

    def _arrival(self, point: int) -> Tensor:
        """Where the state of a point arrives from another rank."""
        return self._border(point)

    def _new(self, level: int, points: Sequence[int]) -> Tensor:
        """What the sweep before has brought to points of a coarse level."""
        return self.workspace.fitted(self.arrived[level][self._row(level, points)], points[0])

    def _before(self, level: int, layers: Sequence[int], targets: Sequence[int]) -> Tensor:
        """K: the coarse step of the old values along the edges at `layers`, which lead to `targets`."""
        return self.workspace.fitted(self.old[level][self._row(level, layers)], targets[0])

    def local_c_points(self) -> list[int]:
        """C-points of level 0 on this rank, without the start."""
        return [p for p in self.cycle.levels[0].c_points if p != self.cycle.hierarchy.start]

    @cached_property
    def local_runs(self) -> list[list[int]]:
        """`local_c_points` by the runs that lie in a row."""
        return self.runs(self.local_c_points())

    def view(self, points: Sequence[int]) -> Tensor:
        """States of some points, one or several at equal distances."""
        place = index_of([self.slot[p] for p in points])
        return self.workspace.adjoint(place) if self.adjoint else self.workspace.state(place)

    def value(self, point: int) -> Tensor:
        """The state at a point."""
        return self.view([point])

    def runs(self, points: Sequence[int]) -> list[list[int]]:
        """Points split into runs at equal distances, in memory too."""
        out: list[list[int]] = []
        for p in points:
            run = out[-1] if out else []
            slot = self.slot
            if run and self.workspace.region(p) != self.workspace.region(run[0]):
                out.append([p])
            elif (
                len(run) == 1
                and slot[p] > slot[run[0]]
                or len(run) > 1
                and (p - run[-1] == run[1] - run[0] and slot[p] - slot[run[-1]] == slot[run[1]] - slot[run[0]])
            ):
                run.append(p)
            else:
                out.append([p])
        return out

    def _row(self, level: int, points: Sequence[int]) -> Index:
        """Rows of E for some target points; the row after the last for one at the right rank."""
        last = len(self.cycle.levels[level].points)
        return index_of([self.place[level].get(p, last) for p in points])

    def _sink(self, action: Action, targets: Sequence[int]) -> Tensor:
        if action.sink == "next":
            return self._new(action.level + 1, targets)
        if action.sink == "out":
            out = self.outgoing[action.level]
            assert out is not None
            return out
        return self.view(targets)

    def _terms(
        self, action: Action, layers: Sequence[int], targets: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """K and E of the edges; E is added by the owner of the target."""
        level = action.level
        if level == 0 or action.plain:
            return None, None
        minus = self._before(level, layers, targets)
        local = all(t in self.place[level] for t in targets)
        return minus, self._new(level, targets) if local else None

    # actions

    def _places(self, layers: Sequence[int]) -> tuple[Index, Index, Index]:
        """Layers, and the slots of their states and values."""
        return (
            index_of([b - self.low for b in layers]),
            index_of([self.slots.state[b] for b in layers]),
            index_of([self.slots.layer[b] for b in layers]),
        )

    def _evaluate(self, action: Action) -> list[Op]:
        assert action.edges is not None
        layer, u, z = self._places(action.edges.layers)
        return self.layers_of(action.level).evaluate(layer, u, z)

    def bind(self, actions: Sequence[Action]) -> list[Op]:
        """Closures for a list of actions; no communication, the closures talk."""
        ops: list[Op] = []
        for action in actions:
            bound = getattr(self, "_" + action.kind)(action)
            ops.extend(bound if isinstance(bound, list) else [bound])
        return ops

    def _c_relax(self, action: Action) -> list[Op]:
        level = action.level
        weight = per_level(self.cycle.mgrit.c_weight, level)
        ops: list[Op] = []
        points = [p for p in self.cycle.levels[level].c_points if p != self.cycle.hierarchy.start]
        for run in self.runs(points):
            state, new = self.view(run), self._new(level + 1, run)
            ops.append(copier(state, new) if weight == 1.0 else lerper(state, new, weight))
        return ops

    def _residual(self, action: Action) -> list[Op]:
        """||E - u||^2 at the C-points of level 0, noted in `squares`."""
        ops: list[Op] = []
        if self._differences is None:  # one for all programs
            self._differences = self.workspace.rows(len(self.local_c_points()))
        scratch = self._differences
        at = 0
        for run in self.local_runs:
            new, state = self._new(1, run), self.view(run)
            out = self.workspace.fitted(scratch[at : at + len(run)] if len(run) > 1 else scratch[at], run[0])
            ops.append(partial(torch.sub, new, state, out=out))
            at += len(run)
        return [*ops, lambda: self.squares.append(squared_norms(scratch))]

    # messages

    def _shortened(self, action: Action) -> Short | None:
        """The short buffers of a message; None where it travels as it is."""
        return self.short if action.level > 0 and not action.plain else None

    def _post(self, action: Action) -> Op:
        buffer, key, short = self._receive_buffer(action), ("", action.level), self._shortened(action)
        buffer = buffer if short is None else short.buffer("in", action.level, buffer)
        source = self._neighbour(action.level, back=True)
        return self._poster(buffer, key, source, self._tag + action.level)

    def _poster(self, buffer: Tensor, key: tuple[str, int], source: int, tag: int) -> Op:
        receiving, comm = self._receiving, self.comm

        def run() -> None:
            receiving[key] = comm.irecv(buffer, source, tag)

        return run

    def _wait(self, action: Action) -> list[Op]:
        short, arrived = self._shortened(action), self._waiter(("", action.level))
        return [arrived] if short is None else [arrived, self._unpack(short, action)]

    def _waiter(self, key: tuple[str, int]) -> Op:
        receiving = self._receiving
        return lambda: receiving.pop(key).Wait()

    def _send(self, action: Action) -> list[Op]:
        buffer, key, short = self._send_buffer(action), (action.sink, action.level), self._shortened(action)
        ops: list[Op] = []
        if short is not None:
            ops = [self._free_send(key), self._pack(short, action)]
            buffer = short.buffer(action.sink, action.level, buffer)
        dest = self._neighbour(action.level, back=False)
        return [*ops, self._sender(buffer, key, dest, self._tag + action.level)]

    def _sender(self, buffer: Tensor, key: tuple[str, int], dest: int, tag: int) -> Op:
        sending, comm = self._sending, self.comm

        def run() -> None:
            sending[key] = comm.isend(buffer, dest, tag)

        return run

    def _free_send(self, key: tuple[str, int]) -> Op:
        """Wait until a buffer that is about to be written has been sent."""
        sending = self._sending

        def run() -> None:
            request = sending.pop(key, None)
            if request is not None:
                request.Wait()

        return run

    def settle(self) -> None:
        """Wait until every message has left. No new messages."""
        for request in self._sending.values():
            request.Wait()
        self._sending.clear()

    def _neighbour(self, level: int, *, back: bool) -> int:
        part = self.cycle.levels[level]
        rank = part.left if back != self.adjoint else part.right
        assert rank is not None
        return rank

    def _receive_buffer(self, action: Action) -> Tensor:
        raise NotImplementedError

    def _send_buffer(self, action: Action) -> Tensor:
        raise NotImplementedError

    def _pack(self, short: Short, action: Action) -> Op:
        """Shorten what is about to be sent."""
        raise NotImplementedError

    def _unpack(self, short: Short, action: Action) -> Op:
        """Widen what has arrived."""
        raise NotImplementedError


def copier(to: Tensor, source: Tensor) -> Op:
    """to = source."""
    return partial(to.copy_, source)


def lerper(state: Tensor, new: Tensor, weight: float) -> Op:
    """state = weight new + (1 - weight) state."""

    def run() -> None:
        state.mul_(1 - weight).add_(new, alpha=weight)

    return run


def squared_norms(payloads: Tensor) -> np.ndarray:
    """Sum of squares of each payload (points,), float64; a payload's own sum is made in its precision, by BLAS."""
    flat = payloads.flatten(1)
    if uses_numpy(flat):
        rows = flat.numpy()
        return np.matmul(rows[:, None, :], rows[:, :, None])[:, 0, 0].astype(np.float64)
    return (flat.double() ** 2).sum(1).cpu().numpy()


def spread(rows: Sequence[np.ndarray], where: np.ndarray, total: int) -> np.ndarray:
    """Local rows in an array (rows, all C-points), zero where another rank owns the point."""
    out = np.zeros((len(rows), total))
    if rows:
        out[:, where] = rows
    return out
