"""How solves start and what they leave: kept states, class means, the rung of a controller, exact passes.

A gradient of a few iterations is right only from a good start. What there is, from best to worst (measured in
drivers/warm_starts.py): the states of the same samples one visit ago; the mean state of every sample's class for
samples that were never seen; the coarsest grid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.mgrit.cache import MEANS, NOTHING, Pair, StateCache
from lpnet.mgrit.hierarchy import cut, direction, local_level
from lpnet.mgrit.programs import parts, solve_critical_path
from lpnet.mgrit.propagator import Kept, Propagator, Start
from lpnet.mgrit.solver import Solver, SolveReport
from lpnet.nn.stack import LayerStack
from lpnet.parallel.partition import uniform

if TYPE_CHECKING:
    from lpnet.config import MGRIT
    from lpnet.mgrit.control import Rung
    from lpnet.mgrit.flight import Flight
    from lpnet.mgrit.hierarchy import Hierarchy
    from lpnet.nn.network import Network
    from lpnet.parallel.grid import Grid

NEWEST = 0.5  # weight of the newest batch in a class mean: states follow the parameters
KINDS = ("state", "adjoint")


class WarmStarts:
    """The part of LayerParallel that starts solves and keeps states."""

    if TYPE_CHECKING:
        stack: LayerStack | Network
        mgrit: MGRIT
        hierarchy: Hierarchy
        partition: Any
        grid: Grid
        batched: tuple[bool, ...] | None
        _latest: Propagator | None
        _latest_adjoint: bool

    def _begin_cache(self) -> None:
        self._cache = StateCache(self.mgrit.cache_mib, self.mgrit.cache_spill, self.mgrit.cache_dtype)
        self._batches: dict[int, tuple[int, ...]] = {}
        self._solvers: list[Solver] = []  # of the latest pass
        self._points: dict[str, list[int]] = {}
        self._most: dict[str, int] = {}
        self.rung: Rung | None = None
        """Levels and iterations that a controller chose; None: those of the settings."""
        self._warned = False

    def _check_batch(self, batch: int | None, shape: tuple[int, ...]) -> None:
        """The same id means the same samples."""
        if batch is not None and batch < 0:
            raise UsageError(f"batch id is {batch}; it must be 0 or more")
        if batch is not None and self._batches.setdefault(batch, shape) != shape:
            raise UsageError(
                f"batch id {batch} was used for samples of shape {self._batches[batch]} and now for {shape}; "
                f"an id stands for the same samples: give other samples another id"
            )

    # starts

    def _plan(
        self, solver: Solver, kept: Kept | None, flight: Flight, adjoint: bool
    ) -> tuple[Start, Kept | None, int | None, float | None]:
        """Where a solve starts, how long it runs, to which share of its first residual: fixed iterations need kept
        states."""
        mgrit, rung = self.mgrit, self.rung
        iterations = mgrit.adjoint_iterations if adjoint else mgrit.forward_iterations
        if rung is not None:
            iterations = rung.adjoint if adjoint else rung.forward
        reduction = mgrit.reduction if mgrit.control == "residual" else None
        guess = solver.mgrit.initial_guess
        if solver.levels == 1:
            return "zero", None, 0, None
        if mgrit.skip_first_down:
            guess = "coarse"
        if guess == "kept":
            return ("given", kept, iterations, reduction) if kept is not None else ("coarse", None, None, None)
        if guess == "class_mean":
            means = self._from_means(flight, adjoint)
            if means is None:
                return "coarse", None, None, None
            return "given", means, iterations, reduction
        if iterations is not None and mgrit.control == "fixed" and not self._warned:
            self._warned = True
            logging.getLogger("lpnet").warning(
                "%s iterations from a cold start (initial_guess %s) can give gradients that point the wrong way; use "
                "initial_guess kept with net(x, batch=id), or leave the iterations out to iterate to a tolerance",
                iterations,
                guess,
            )
        return cast(Start, guess), None, iterations, reduction

    def solve_states(self, flight: Flight, u0: Tensor | None) -> None:
        """The forward solve of a pass. Neighbour messages only, but for a cold start or `mgrit.control: residual`."""
        propagator = flight.propagator.select(flight.levels)
        if flight.exact:
            propagator.forward(u0, start="zero", iterations=0, context=flight.context)
            return
        solver = propagator.forward_solver
        start, kept, iterations, reduction = self._plan(solver, self._cache.get(flight.batch).state, flight, False)
        propagator.forward(
            u0, start=start, kept=kept, iterations=iterations, reduction=reduction, context=flight.context
        )
        self._solvers = [solver]
        self._latest, self._latest_adjoint = propagator, False

    def solve_adjoints(self, flight: Flight, lam: Tensor | None) -> None:
        """The adjoint solve of a pass; its states and adjoints are kept under its batch id. Messages as forward."""
        propagator = flight.propagator.select(flight.levels)
        if flight.exact:
            propagator.adjoint(lam, start="zero", iterations=0)
            return
        before = self._cache.get(flight.batch)
        solver = propagator.adjoint_solver
        start, kept, iterations, reduction = self._plan(solver, before.adjoint, flight, True)
        propagator.adjoint(lam, start=start, kept=kept, iterations=iterations, reduction=reduction)
        self._solvers = [propagator.forward_solver, solver]
        self._latest_adjoint = True
        if flight.keeps:
            self.keep(flight)

    def keep(self, flight: Flight) -> None:
        """Keep the states that a pass has left in memory, for the next visit of its batch. No communication."""
        if len(self.hierarchy.levels) == 1 and self.mgrit.adjoint.get("levels", 1) == 1:
            return
        propagator = flight.propagator
        if flight.batch is not None:
            before = self._cache.get(flight.batch) if flight.batch in self._cache else NOTHING
            kept = [
                propagator.kept(solver, old, points=self.kept_points(kind), dtype=self._cache.dtype)
                for solver, old, kind in zip(_both(propagator), before, KINDS, strict=True)
            ]
            self._cache.put(flight.batch, Pair(*kept), size=self._largest_share(flight))
        if flight.classes is not None and self.mgrit.initial_guess == "class_mean":
            self._update_means(flight)

    def _largest_share(self, flight: Flight) -> float:
        """Bytes of a batch's kept states on the rank that has most of them, the same on all ranks."""
        if not self._most:
            for kind in KINDS:
                points = self._c_points(kind)
                blocks = [self.partition.owner(min(p, self.stack.num_layers - 1)) for p in points]
                self._most[kind] = max((blocks.count(rank) for rank in range(self.partition.ranks)), default=0)
        itemsize = (self._cache.dtype or self.stack.dtype).itemsize
        return float(sum(self._most.values()) * flight.propagator.payload.numel() * itemsize)

    # class means

    @torch.no_grad()
    def _update_means(self, flight: Flight) -> None:
        """Mean state of every class in this batch, at every C-point, mixed with what is kept."""
        propagator, classes = flight.propagator, flight.classes
        assert classes is not None
        present, inverse = torch.unique(classes, return_inverse=True)
        counts = torch.bincount(inverse).to(self.stack.dtype)
        old = self._cache.get(MEANS)
        found = []
        for solver, kind, kept in zip(_both(propagator), KINDS, old, strict=True):
            rows = []
            for p in self.kept_points(kind):
                u = propagator.workspace.unpack(solver.problem.value(p))
                sums = u.new_zeros(len(present), *u.shape[1:]).index_add_(0, inverse, u)
                rows.append(sums / counts.reshape(-1, *[1] * (u.dim() - 1)))
            number = max(int(classes.max()) + 1, 0 if kept is None else kept.states.shape[1])
            shape = rows[0].shape[1:] if rows else (0,)
            means = torch.full((len(rows), number, *shape), float("nan"), dtype=self.stack.dtype)
            if kept is not None:
                means[:, : kept.states.shape[1]] = kept.states.to(means.dtype)
            for row, new in zip(means, rows, strict=True):
                known = ~torch.isnan(row[present].flatten(1)[:, 0])
                mixed = torch.lerp(row[present], new, NEWEST)
                row[present] = torch.where(known.reshape(-1, *[1] * (new.dim() - 1)), mixed, new)
            found.append(Kept(means.to(self._cache.dtype or means.dtype)))
        self._cache.put(MEANS, Pair(*found), size=0.0)

    @torch.no_grad()
    def _from_means(self, flight: Flight, adjoint: bool) -> Kept | None:
        """A start for every sample from its class; None before the first batch, or where no classes are given."""
        kept = self._cache.get(MEANS)[adjoint]
        if kept is None or flight.classes is None:
            return None
        points, workspace = self.kept_points(KINDS[adjoint]), flight.propagator.workspace
        rows = workspace.rows(len(points))
        number = kept.states.shape[1]
        seen = flight.classes.clamp(max=number - 1)
        for row, point, means in zip(rows, points, kept.states.to(rows.dtype), strict=True):
            known = ~torch.isnan(means.flatten(1)[:, 0])
            means = torch.where(known.reshape(-1, *[1] * (means.dim() - 1)), means, means[known].mean(0))
            u = means[seen]
            u[flight.classes >= number] = means.mean(0)
            workspace.pack(u, row, point)
        return Kept(rows)

    # what the latest pass did

    @property
    def solvers(self) -> tuple[Solver, ...]:
        """Forward and adjoint solver of the latest pass, as far as it went. No communication."""
        return tuple(self._solvers)

    def residual_squares(self) -> np.ndarray:
        """Squared residuals of the latest forward and adjoint solve, zero at other ranks' points. No communication."""
        parts = [solver.pending() for solver in self._solvers]
        return np.concatenate(parts) if parts else np.zeros(0)

    def solve_reports(
        self, summed: np.ndarray, batch_size: int | None = None, solvers: Sequence[Solver] | None = None
    ) -> tuple[SolveReport | None, SolveReport | None]:
        """Reports of a forward and adjoint solve, from summed `residual_squares`. No communication.

        Args:
            summed: over net.comm, or over net.world where there are data replicas.
            batch_size: samples of the joined batch, where there are data replicas.
            solvers: those of an earlier pass; None: of the latest.
        """
        reports: list[SolveReport | None] = []
        at = 0
        for solver in self._solvers if solvers is None else solvers:
            part = summed[at : at + solver.residuals]
            reports.append(solver.report(part, batch_size if self.grid.replicas > 1 else None))
            at += part.size
        return (*reports, None, None)[0], (*reports, None, None)[1]

    def exact_path(self) -> int:
        """Layer evaluations of exact propagation, forward and back. No communication."""
        return 2 * self.stack.num_layers

    def planned_path(self, rung: Rung, *, beside: float = 1.0, alone: bool = False) -> float:
        """Layer evaluations of a warm step on the longest chain over all ranks. No communication.

        Args:
            rung: levels and iterations; a tolerance counts as six iterations.
            beside: cost of a further evaluation in a call that makes several.
            alone: as if every layer had a rank of its own: the shortest there is, the same on any number of ranks.
        """
        total = 0.0
        partition = uniform(self.stack.num_layers, self.stack.num_layers) if alone else self.partition
        for adjoint, iterations in ((False, rung.forward), (True, rung.adjoint)):
            levels, settings = direction(self.hierarchy, self.mgrit, adjoint)
            levels = cut(levels, rung.levels)
            coarse = settings.skip_first_down or settings.initial_guess == "coarse"
            last = "refresh_gradient" if adjoint else "refresh"
            names = parts(iterations or 6, coarse_start=coarse, levels=len(levels.levels), last=last)
            batched = (False,) if alone or not self.batched else self.batched
            total += solve_critical_path(levels, settings, partition, names, batched, beside)
        return total

    def critical_path(self) -> int:
        """Layer evaluations of the latest pass on the longest chain over all ranks. No communication."""
        return sum(solver.path() for solver in self._solvers)

    # kept states

    def forget(self) -> None:
        """Drop all kept states: the next solves start cold. No communication."""
        self._cache.clear()
        self._batches.clear()

    def _c_points(self, kind: str) -> list[int]:
        levels, _ = direction(self.hierarchy, self.mgrit, adjoint=kind == "adjoint")
        return sorted(levels.c_points(0) - {levels.start}) if len(levels.levels) > 1 else []

    def kept_points(self, kind: str) -> list[int]:
        """Points of this rank whose states ("state") or adjoints ("adjoint") are kept. No communication."""
        if kind not in self._points:
            levels, _ = direction(self.hierarchy, self.mgrit, adjoint=kind == "adjoint")
            found: list[int] = []
            if len(levels.levels) > 1:
                part = local_level(levels, 0, self.partition, self.stack.comm.rank)
                found = [p for p in part.c_points if p != levels.start]
            self._points[kind] = found
        return self._points[kind]

    def kept_state(self) -> Iterator[tuple[str, int, Tensor]]:
        """Kept states as (name, point, payload), for checkpoints. No communication."""
        for batch, pair in self._cache.items():
            for kind, kept in zip(KINDS, pair, strict=True):
                if kept is not None:
                    for point, payload in zip(self.kept_points(kind), kept.states, strict=True):
                        yield f"mgrit/{kind}/{batch}", point, payload.to(self.stack.dtype)

    def load_kept_state(self, batch: int, blocks: dict[str, Callable[[int], Tensor]]) -> None:
        """Set the kept states of a batch id from functions point -> payload. No communication."""
        loaded: dict[str, Kept] = {}
        dtype = self._cache.dtype or self.stack.dtype
        size = 0.0
        for kind, read in blocks.items():
            rows = [read(point).to(dtype) for point in self.kept_points(kind)]
            loaded[kind] = Kept(torch.stack(rows) if rows else torch.empty(0, dtype=dtype))
            size += float(sum(row.numel() * row.element_size() for row in rows))
        if "state" in loaded:
            self._cache.put(batch, Pair(loaded["state"], loaded.get("adjoint")), size=size)


def _both(propagator: Propagator) -> tuple[Solver, Solver]:
    return propagator.forward_solver, propagator.adjoint_solver
