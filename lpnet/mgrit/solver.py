"""The multigrid solver of one direction: replays the recorded cycle until it is done and reports what happened."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lpnet.io import trace
from lpnet.mgrit.binding import Problem, spread, squared_norms
from lpnet.mgrit.cycle import Action
from lpnet.mgrit.hierarchy import per_level
from lpnet.mgrit.programs import evaluations, parts, record, solve_critical_path, span_of
from lpnet.nn.steps import Op
from lpnet.parallel.comm import Comm
from lpnet.parallel.grid import Grid

Need = Literal["all", "last", "gradient"]
MESSAGES = ("post", "wait", "send", "halo_post", "halo_wait", "halo_send")


@dataclass(frozen=True)
class SolveReport:
    """What a solve did.

    Args:
        iterations: multigrid iterations; a start from the coarsest grid counts as one.
        residuals: sqrt(sum over C-points ||E - u||^2 / batch) before the first iteration (after a coarse start) and
            after every one, the last included.
        rho: last residual over the one before; None where it is undefined.
        evaluations: layer evaluations of this rank per level.
        critical_path: layer evaluations on the longest chain over all ranks.
        seconds: time of this rank by span.
        converged: the tolerance was reached; None where none was asked for.
    """

    iterations: int
    residuals: tuple[float, ...]
    rho: float | None
    evaluations: tuple[int, ...]
    critical_path: int
    seconds: dict[str, float]
    converged: bool | None


@dataclass(frozen=True)
class Program:
    """Bound actions, and which layers are evaluated up to date after them."""

    name: str
    ops: list[Op]
    evaluations: tuple[int, ...]
    fresh: frozenset[int]


class Solver:
    """Runs one direction on one workspace. Neighbour messages; one reduction per iteration with a tolerance.

    Args:
        problem: bound memory and messages of the direction.
        comm: ranks of the stack.
        batch: samples, for the residual norm.
        stop_relative: relative tolerance where none is given and no iterations are fixed.
        grid: data replicas, which iterate together until the joined batch meets a tolerance; None: there are none.
    """

    def __init__(
        self, problem: Problem, comm: Comm, *, batch: int, stop_relative: float, grid: Grid | None = None
    ) -> None:
        self._world, self._replicas = (comm, 1) if grid is None or grid.peers is None else (grid.world, grid.replicas)
        self.problem, self.cycle, self.comm, self.batch = problem, problem.cycle, comm, batch
        self.mgrit = self.cycle.mgrit
        self.levels = len(self.cycle.levels)
        self.stop_relative = stop_relative
        start = self.cycle.hierarchy.start
        self._c_points = sorted(self.cycle.hierarchy.c_points(0) - {start}) if self.levels > 1 else []
        index = {p: i for i, p in enumerate(self._c_points)}
        self._where = np.array([index[p] for p in problem.local_c_points()] if self.levels > 1 else [], dtype=int)
        self._programs: dict[tuple[str, frozenset[int], bool], Program] = {}
        self._fresh: frozenset[int] = frozenset()
        self._known: dict[frozenset[int], frozenset[int]] = {self._fresh: self._fresh}
        self._ran: list[Program] = []
        self._paths: dict[tuple[str, ...], int] = {}
        self._seconds: dict[str, float] = {}
        self._converged: bool | None = None
        self._first: float | None = None  # residual before the first iteration

    def program(self, name: str, fresh: frozenset[int]) -> Program:
        """The bound actions of one part of a solve, recorded when first needed. No communication."""
        timed = trace.is_on()
        key = (name, fresh, timed)
        if key not in self._programs:
            self.cycle.fresh = set(fresh)
            actions = record(self.cycle, name)
            after = frozenset(self.cycle.fresh)
            after = self._known.setdefault(after, after)  # one object per set: looking it up compares no elements
            counts = evaluations(actions, self.levels, adjoint=self.cycle.hierarchy.adjoint)
            ops = self._bind_timed(actions) if timed else self._bind(actions)
            self._programs[key] = Program(name, ops, counts, after)
        return self._programs[key]

    def _bind(self, actions: Sequence[Action]) -> list[Op]:
        """Closures; on an emulated rank those between two messages are one stretch of work of known kind and size."""
        meter = self.comm.meter
        if meter is None:
            return self.problem.bind(actions)
        ops: list[Op] = []
        for talks, group in itertools.groupby(actions, key=lambda action: action.kind in MESSAGES):
            part = list(group)
            bound = self.problem.bind(part)
            key = (self.batch, self.cycle.hierarchy.adjoint, *map(_work, part))
            arrived = all(action.kind == "land" for action in part)
            ops += bound if talks else [meter.metered(key, bound, warm=not arrived)]
        return ops

    def _bind_timed(self, actions: list[Action]) -> list[Op]:
        """Closures with one trace span around each run of equal work."""
        levels = [f"{span_of(a, self.levels)} level {a.level}" for a in actions]
        ops: list[Op] = []
        for span, group in itertools.groupby(zip(levels, actions, strict=True), key=lambda pair: pair[0]):
            ops.append(_timed(span, self._bind([action for _, action in group]), self.cycle.hierarchy.adjoint))
        return ops

    def _run(self, name: str) -> None:
        program = self.program(name, self._fresh)
        began = self.comm.now()
        for op in program.ops:
            op()
        span = "coarse" if name in ("correct", "start_coarse") else "f_relax"
        self._seconds[span] = self._seconds.get(span, 0.0) + self.comm.now() - began
        self._fresh = program.fresh
        self._ran.append(program)

    def solve(
        self, *, iterations: int | None, coarse_start: bool, need: Need = "all", reduction: float | None = None
    ) -> None:
        """Solve from the states in the workspace.

        Args:
            iterations: how many; None: until a tolerance is met.
            coarse_start: propagate the coarsest grid first.
            need: all states, only the last one (no residual after the last correction), or the gradients too.
            reduction: stop where the residual is this share of the first one; `iterations` is then the most.
        """
        self._ran, self._seconds, self._fresh = [], {}, frozenset()
        self.problem.squares.clear()
        self._converged = None
        last = {"all": "refresh", "last": "tail", "gradient": "refresh_gradient"}[need]
        watched = iterations is None or reduction is not None
        watched |= self.mgrit.tolerance is not None or self.mgrit.relative_tolerance is not None
        # a diverging run is found by its loss and named; numpy need not warn of every overflow
        with np.errstate(all="ignore"):
            if self.levels == 1 or (iterations is not None and not watched):
                for name in parts(iterations or 0, coarse_start=coarse_start, levels=self.levels, last=last):
                    self._run(name)
            else:
                most = self.mgrit.max_iterations if iterations is None else iterations
                self._iterate(most, coarse_start, need, reduction)
        self.problem.settle()

    def _iterate(self, most: int, coarse_start: bool, need: Need, reduction: float | None) -> None:
        done = 0
        if coarse_start:
            self._run("start_coarse")
            done = 1
        exact = self.cycle.hierarchy.exact_iterations(per_level(self.mgrit.relaxation, 0))
        if exact is None or per_level(self.mgrit.c_weight, 0) != 1.0:
            exact = most + 1
        self._first = None
        sweep = "refresh_gradient" if need == "gradient" else "refresh"  # which one is the last shows only after it
        while True:
            self._run(sweep)
            # after `exact` further corrections the states are those of serial propagation, whatever the rounding
            self._converged = self._small_enough(reduction) or done - coarse_start >= exact
            if self._converged or done >= most:
                break
            self._run("correct")
            done += 1
        if not self._converged and reduction is None:
            logging.getLogger("lpnet").warning(
                "the %s solve missed its tolerance after %d iterations; raise mgrit.max_iterations or the tolerance",
                "adjoint" if self.cycle.hierarchy.adjoint else "forward",
                done,
            )

    def _small_enough(self, reduction: float | None) -> bool:
        """Compare the latest residual with the tolerances. Collective, one reduction."""
        residual = spread(self.problem.squares[-1:], self._where, len(self._c_points))[0]
        local = self.problem.local_c_points()
        norms = [squared_norms(self.problem.view(run).reshape(len(run), -1)) for run in self.problem.runs(local)]
        states = spread([np.concatenate([np.zeros(0), *norms])], self._where, len(self._c_points))[0]
        total = self._world.sum(np.concatenate([residual, states]))
        r = float(np.sqrt(total[: len(residual)].sum() / (self.batch * self._replicas)))
        u = float(np.sqrt(total[len(residual) :].sum() / (self.batch * self._replicas)))
        relative = self.mgrit.relative_tolerance
        if relative is None and self.mgrit.tolerance is None and reduction is None:
            relative = self.stop_relative
        if not np.isfinite(r):
            return True
        self._first = r if self._first is None else self._first
        if reduction is not None and r <= reduction * self._first:
            return True
        return (self.mgrit.tolerance is not None and r <= self.mgrit.tolerance) or (
            relative is not None and r <= relative * u
        )

    # what happened

    def pending(self) -> np.ndarray:
        """Squared residuals of this rank, (residuals, C-points) flat; sum them over the ranks. No communication."""
        return spread(self.problem.squares, self._where, len(self._c_points)).ravel()

    @property
    def residuals(self) -> int:
        """Numbers in `pending`. No communication."""
        return len(self.problem.squares) * len(self._c_points)

    def path(self) -> int:
        """Layer evaluations of the latest solve on the longest chain over all ranks. No communication."""
        names = tuple(program.name for program in self._ran)
        if names not in self._paths:
            cycle = self.cycle
            path = solve_critical_path(cycle.hierarchy, self.mgrit, cycle.partition, names, cycle.batched)
            self._paths[names] = path
        return self._paths[names]

    def report(self, summed: np.ndarray, batch: int | None = None) -> SolveReport:
        """The report, from `pending` summed over the ranks, for a batch of so many samples. No communication."""
        rows = summed.reshape(len(self.problem.squares), -1) if self.problem.squares else np.zeros((0, 0))
        residuals = tuple(np.sqrt(rows.sum(1) / (batch or self.batch)).tolist())
        rho = residuals[-1] / residuals[-2] if len(residuals) > 1 and residuals[-2] > 0 else None
        names = tuple(program.name for program in self._ran)
        counts = tuple(sum(column) for column in zip(*(program.evaluations for program in self._ran), strict=True))
        iterations = sum(name in ("start_coarse", "correct") for name in names)
        return SolveReport(iterations, residuals, rho, counts, self.path(), dict(self._seconds), self._converged)


def _work(action: Action) -> tuple[object, ...]:
    """What an action costs depends on this, not on where in the network it is."""
    edges = action.edges
    return action.kind, action.level, action.sink, action.plain, edges and (edges.span, edges.number, edges.stride)


def _timed(span: str, ops: list[Op], adjoint: bool) -> Op:
    direction = "adjoint" if adjoint else "forward"

    def run() -> None:
        began = trace.begin()
        for op in ops:
            op()
        trace.end(began, span, direction=direction)

    return run
