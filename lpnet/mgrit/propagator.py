"""One network's states for one batch size: both solves, the gradients, and what is kept for the next time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lpnet.config import MGRIT
from lpnet.io import trace
from lpnet.mgrit.binding import Problem
from lpnet.mgrit.coarse import CoarseOperators
from lpnet.mgrit.cycle import Cycle
from lpnet.mgrit.hierarchy import Hierarchy, cut, direction
from lpnet.mgrit.problems import AdjointProblem, StateProblem
from lpnet.mgrit.slots import all_points, c_points_only, rolling, side_by_side_if_alike
from lpnet.mgrit.solver import Need, Solver
from lpnet.nn.context import Context
from lpnet.nn.kernels import Op
from lpnet.nn.network import Network
from lpnet.nn.parts import samples
from lpnet.nn.spatial import SpatialWorkspace, Transfer
from lpnet.nn.stack import LayerStack
from lpnet.parallel.grid import Grid

Start = Literal["zero", "constant", "coarse", "given"]


@dataclass(frozen=True)
class Kept:
    """C-point states of a solve, to start the next one from.

    Args:
        states: (C-points of this rank without the start, *payload).
    """

    states: Tensor


class Propagator:
    """Memory and solvers for states of one shape on this rank.

    `select` switches between solvers of more or fewer levels, which all work in the same memory.

    Args:
        stack: the layers.
        hierarchy: forward levels.
        mgrit: settings of both directions.
        shape: of a state, (batch, ...).
        batched: per level: side-by-side relaxation.
        keep: False propagates exactly and keeps nothing (evaluation).
        show: every adjoint stays in memory after a solve (direct solves, which show them).
        grid: data replicas; None: there are none.
        transfers: per level: maps to smaller states, where it has any.
    """

    def __init__(
        self,
        stack: LayerStack | Network,
        hierarchy: Hierarchy,
        mgrit: MGRIT,
        shape: Sequence[Any],
        *,
        batched: tuple[bool, ...] = (),
        keep: bool = True,
        show: bool = False,
        grid: Grid | None = None,
        transfers: Sequence[Transfer | None] = (),
    ) -> None:
        self.stack, self.comm = stack, stack.comm
        low, high = stack.low, stack.high
        self.is_first, self.is_last = low == 0, high == stack.num_layers
        forward, options = direction(hierarchy, mgrit, adjoint=False)
        backward, adjoint_options = direction(hierarchy, mgrit, adjoint=True)
        self.c_storage = mgrit.storage == "c_points" and len(forward.levels) > 1
        if isinstance(stack, Network):
            slots = all_points(low, high)
        elif not keep:
            slots = rolling(low, high)
        elif self.c_storage:
            slots = c_points_only(low, high, forward.levels[1])
        elif any(batched):
            slots = side_by_side_if_alike(low, high, forward, backward)
        else:
            slots = all_points(low, high, block=stack.engine.gradient_block, one_sweep=len(backward.levels) == 1)
        if show:
            slots = replace(slots, adjoint=slots.state)
        self.slots = slots
        self.workspace = stack.engine.workspace(shape, **slots.sizes)
        made = {
            transfer: SpatialWorkspace(
                self.workspace, stack.engine, shape, transfer.check(shape, stack.dtype), transfer, slots.sizes
            )
            for transfer in dict.fromkeys(transfers)
            if transfer is not None and len(forward.levels) > 1
        }
        self.spaces = [None if transfer is None else made.get(transfer) for transfer in transfers]
        self.coarse = None
        if mgrit.coarse != "injected" and isinstance(stack, LayerStack):
            self.coarse = CoarseOperators(stack, mgrit.coarse, (forward, backward), self.workspace, shape, slots)
        tolerance = 1e-12 if stack.dtype == torch.float64 else 1e-5

        def solver(problem: type[Problem], levels: Hierarchy, settings: MGRIT) -> Solver:
            cycle = Cycle(levels, stack.partition, self.comm.rank, settings, batched, slots.block)
            spaces = self.spaces if self.coarse is None else self.coarse.spaces[levels.adjoint]
            bound = problem(self.workspace, cycle, slots, self.comm, stack.h, spaces)
            return Solver(bound, self.comm, batch=samples(shape), stop_relative=tolerance, grid=grid)

        def state_solver(levels: int) -> Solver:
            return solver(StateProblem, cut(forward, levels), options)

        def adjoint_solver(levels: int) -> Solver:
            return solver(AdjointProblem, cut(backward, levels), adjoint_options)

        self._make = (state_solver, adjoint_solver)
        self._made: tuple[dict[int, Solver], dict[int, Solver]] = ({}, {})
        self.most_levels = self._levels = max(len(forward.levels), len(backward.levels))
        self._gradients: list[Op] | None = None  # the same memory whatever the levels
        self._linearise: list[Op] | None = None
        self._is_linear = False  # the values of the latest solve have become slopes
        # per direction: what was kept of the states that are still in memory, and which version of it
        self._held: list[tuple[weakref.ref[Kept], int] | None] = [None, None]
        self.flight: weakref.ref[Any] | None = None
        self.stamp: tuple[int, ...] = ()

    def select(self, levels: int | None = None) -> Propagator:
        """Solve on so many levels from now on, at most as many as there are; None: on all. No communication.

        1 is exact propagation. Points are kept alike, so that solves on other levels go on from them.
        """
        self._levels = self.most_levels if levels is None else min(levels, self.most_levels)
        assert not self.c_storage or self._levels > 1, "storage c_points has no memory for all states"
        return self

    @property
    def forward_solver(self) -> Solver:
        """The solver for the states, with its memory, made when first used."""
        return self._solver(0)

    @property
    def adjoint_solver(self) -> Solver:
        """The adjoint's solver, with its memory, made when first used."""
        return self._solver(1)

    def _solver(self, which: int) -> Solver:
        made = self._made[which]
        if self._levels not in made:
            made[self._levels] = self._make[which](self._levels)
        return made[self._levels]

    def forward(
        self,
        u0: Tensor | None,
        *,
        start: Start,
        kept: Kept | None = None,
        iterations: int | None,
        need: Need = "all",
        reduction: float | None = None,
        context: Context | None = None,
    ) -> None:
        """Solve for the states; u0 is (batch, ...) on the first rank. Neighbour messages only.

        A constant start broadcasts u0 (collective); a tolerance or a `reduction` reduces once per iteration.
        """
        self.stamp = self.stack.engine.refresh()
        if self.coarse is not None and self._levels > 1:
            self.coarse.refresh()
        self.workspace.begin(context or Context())
        self._is_linear = False
        for space in {id(space): space for space in self.spaces if space is not None}.values():
            space.begin(context or Context())
        problem = self.forward_solver.problem
        if self.is_first:
            assert u0 is not None
            self.workspace.pack(u0, problem.value(0))
        self._start(self.forward_solver, start, kept, root=0)
        solver, coarse = self.forward_solver, start == "coarse"
        solver.solve(iterations=iterations, coarse_start=coarse, need=need, reduction=reduction)
        self.workspace.commit()

    def adjoint(
        self,
        lam: Tensor | None,
        *,
        start: Start,
        kept: Kept | None = None,
        iterations: int | None,
        reduction: float | None = None,
    ) -> None:
        """Solve for the adjoints, linearised at the latest states; lam is (batch, ...) on the last rank."""
        if self.stamp != self.stack.engine.stamp():
            raise RuntimeError(
                "a parameter of the stack was changed in place between the forward and the backward pass; "
                "run the backward before the optimiser's step"
            )
        solver = self.adjoint_solver
        if self.is_last:
            assert lam is not None
            self.workspace.pack(lam, solver.problem.value(self.stack.num_layers), self.stack.num_layers)
        self._start(solver, start, kept, root=self.comm.size - 1)
        self._linearise_once()
        solver.solve(iterations=iterations, coarse_start=start == "coarse", need="gradient", reduction=reduction)

    def _linearise_once(self) -> None:
        """Values become slopes, once for all sweeps and all backward passes of a forward. No communication."""
        if self._linearise is None:
            problem = self.adjoint_solver.problem
            assert isinstance(problem, AdjointProblem)
            self._linearise = problem.linearise()
            if self.comm.meter is not None and self._linearise:
                key = ("linearise", self.stack.local_layers, self.adjoint_solver.batch)
                self._linearise = [self.comm.meter.metered(key, self._linearise)]
        if not self._is_linear:
            for op in self._linearise:
                op()
        self._is_linear = True

    def _start(self, solver: Solver, start: Start, kept: Kept | None, root: int) -> None:
        """Put the initial guess into the C-points."""
        problem = solver.problem
        held, self._held[problem.adjoint] = self._held[problem.adjoint], None  # the solve overwrites them
        if solver.levels == 1 or start == "coarse":
            return
        runs = problem.local_runs
        if start == "given":
            assert kept is not None
            if held is not None and held[0]() is kept and held[1] == kept.states._version:
                return
            for rows, run in _rows(runs):
                given = kept.states[rows] if len(run) > 1 else kept.states[rows.start]
                problem.view(run).copy_(self.workspace.fitted(given, run[0]))
            return
        value: Tensor | float = 0.0
        if start == "constant":
            source = self.workspace.rows(1)[0]
            if self.comm.rank == root:
                source.copy_(problem.value(solver.cycle.hierarchy.start))
            value = self.comm.broadcast(source, root)
        for run in runs:
            problem.view(run).copy_(value) if isinstance(value, Tensor) else problem.view(run).fill_(value)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's parameters from the latest solves. No communication."""
        with trace.span("gradient"):
            self._run_gradients()
            return self.stack.engine.gradients()

    def _run_gradients(self) -> None:
        if not self.slots.block:
            if self._gradients is None:
                problem = self.adjoint_solver.problem
                assert isinstance(problem, AdjointProblem)
                self._gradients = problem.all_gradients()
                if self.comm.meter is not None:
                    key = ("gradient", self.stack.local_layers, self.adjoint_solver.batch)
                    self._gradients = [self.comm.meter.metered(key, self._gradients)]
            for op in self._gradients:
                op()

    def last_state(self) -> Tensor:
        """u_N (batch, ...) on the last rank; a copy."""
        last = self.stack.num_layers
        return self.workspace.unpack(self.forward_solver.problem.value(last), last)

    def first_adjoint(self) -> Tensor:
        """lambda_0 (batch, ...) on the first rank; a copy."""
        return self.workspace.unpack(self.adjoint_solver.problem.value(0))

    def kept(
        self, solver: Solver, into: Kept | None = None, *, points: list[int], dtype: torch.dtype | None = None
    ) -> Kept:
        """States of a solver's latest solve at some points, copied into `into` where it fits. No communication.

        Args:
            solver: forward or adjoint.
            into: memory to use again.
            points: of this rank: its C-points.
            dtype: what they are stored in; None: their own precision.
        """
        problem = solver.problem
        if into is None or into.states.shape[1:] != self.payload:
            into = Kept(self.workspace.rows(len(points)).to(dtype or self.stack.dtype))
        # exact propagation has no C-points of its own
        for rows, run in _rows(problem.local_runs if solver.levels > 1 else problem.runs(points)):
            self.workspace.fitted(into.states[rows], run[0]).copy_(problem.view(run))
        if into.states.dtype == self.stack.dtype:  # what was rounded has to be read back
            self._held[problem.adjoint] = weakref.ref(into), into.states._version
        return into

    @cached_property
    def payload(self) -> torch.Size:
        """Shape of a state as it is sent and kept. No communication."""
        return self.workspace.rows(0).shape[1:]

    def in_use(self) -> bool:
        """Whether a graph that can still run its backward holds these states."""
        flight = self.flight() if self.flight is not None else None
        return flight is not None and not flight.is_over()


def _rows(runs: list[list[int]]) -> list[tuple[slice, list[int]]]:
    """Runs of points with their rows in an array of all of them."""
    out, at = [], 0
    for run in runs:
        out.append((slice(at, at + len(run)), run))
        at += len(run)
    return out
