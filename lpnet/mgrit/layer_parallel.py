"""LayerParallel: a network whose layers are shared by the ranks, as an ordinary torch module.

    opening (first rank) -> Propagate: u_0 to u_N over all ranks -> closing (last rank) -> Everywhere: logits on all

Propagate is one node of the autograd graph on every rank: its forward is the multigrid solve for the
states, its backward the one for the adjoints, so that `loss.backward()` works in an ordinary loop. Ranks
that hold neither opening nor closing pass a scalar through the graph in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lpnet.config import MGRIT
from lpnet.errors import UsageError
from lpnet.mgrit.batching import as_setting, fixed_choice, measure
from lpnet.mgrit.flight import Everywhere, Flight, Propagate
from lpnet.mgrit.hierarchy import build, direction, local_level
from lpnet.mgrit.propagator import Kept, Propagator, Start
from lpnet.mgrit.solver import Solver, SolveReport
from lpnet.nn.stack import LayerStack
from lpnet.parallel.comm import Comm
from lpnet.parallel.shard import Shard


class LayerParallel(torch.nn.Module):
    """opening -> stack -> closing, trained in parallel across its layers.

    Every rank gives the same batch x and gets the logits; parameters() are this rank's own, for any torch optimiser.
    With gradients enabled the states are found by multigrid as `mgrit` says; without (evaluation) by exact propagation.

    Args:
        stack: the layers.
        opening: (batch, ...) to the state (batch, width); kept on the first rank only.
        closing: state to logits; kept on the last rank only.
        mgrit: settings; fixed iterations need a warm start: `net(x, batch=id)`, the same samples under the same id.
            A start without kept states iterates to the tolerance instead.
    """

    def __init__(
        self, stack: LayerStack, *, opening: torch.nn.Module, closing: torch.nn.Module, mgrit: MGRIT | None = None
    ) -> None:
        super().__init__()
        self.stack = stack
        self.mgrit = mgrit or MGRIT()
        self.is_first, self.is_last = stack.low == 0, stack.high == stack.num_layers
        self.opening: torch.nn.Module | None = opening.to(stack.dtype) if self.is_first else None
        self.closing: torch.nn.Module | None = closing.to(stack.dtype) if self.is_last else None
        self.hierarchy = build(stack.num_layers, self.mgrit)
        self.batched = fixed_choice(self.mgrit)  # None until it is measured
        self._anchor = torch.zeros((), dtype=stack.dtype, requires_grad=True)
        self._pools: dict[tuple[tuple[int, ...], bool], list[Propagator]] = {}
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._kept: dict[int, tuple[Kept, Kept | None]] = {}
        self._batches: dict[int, tuple[int, ...]] = {}
        self._logits: dict[tuple[Any, ...], tuple[tuple[int, ...], torch.dtype]] = {}
        self._latest: Propagator | None = None
        self._latest_adjoint = False
        self._warned = False

    @property
    def comm(self) -> Comm:
        """The ranks of the stack."""
        return self.stack.comm

    @property
    def partition(self) -> Any:
        """Who owns which layers."""
        return self.stack.partition

    # forward

    def forward(self, x: Tensor, batch: int | None = None) -> Tensor:
        """Logits on every rank. Collective over comm; so is the backward of what is made from them.

        Args:
            x: (batch, ...), the same on every rank.
            batch: id of these very samples; their states start the next solve under this id.
        """
        logits = self.local_logits(x, batch) if torch.is_grad_enabled() else self.exact_logits(x)
        if self.comm.size == 1:
            return cast(Tensor, logits)
        key = (tuple(x.shape), x.dtype)
        if key not in self._logits:
            mine = (tuple(logits.shape), logits.dtype) if self.is_last and logits is not None else None
            self._logits[key] = self.comm.broadcast_object(mine, self.comm.size - 1)
        shape, dtype = self._logits[key]
        return cast(Tensor, Everywhere.apply(self.comm, shape, dtype, self._anchor if logits is None else logits))

    def local_logits(self, x: Tensor, batch: int | None = None) -> Tensor:
        """Logits on the last rank, elsewhere a scalar connected to the graph.

        Neighbour messages only, in the backward too, which every rank must run. A cold start to a tolerance reduces.
        """
        self._check_batch(batch, tuple(x.shape))
        u0, shape = self._enter(x)
        propagator = self._take(shape)
        parameters = list(self.stack.parameters())
        out = Propagate.apply(
            Flight(self, propagator, batch), u0 if u0 is not None else self._anchor, self._anchor, *parameters
        )
        return self.closing(out) if self.closing is not None else out

    @torch.no_grad()
    def exact_logits(self, x: Tensor) -> Tensor | None:
        """Logits by exact propagation on the last rank, None elsewhere. Neighbour messages only."""
        u0, shape = self._enter(x)
        propagator = self._take(shape, exact=True)
        propagator.forward(u0, start="zero", iterations=0)
        return self.closing(propagator.last_state()) if self.closing is not None else None

    def _enter(self, x: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
        """u_0 on the first rank, and the shape of the states on every rank, agreed once per shape of x."""
        key = tuple(x.shape)
        if key in self._shapes:
            return self._open(x), self._shapes[key]
        u0: Tensor | None = self.comm.together(lambda: self._open(x))
        self._shapes[key] = self.comm.broadcast_object(None if u0 is None else tuple(u0.shape))
        return u0, self._shapes[key]

    def _open(self, x: Tensor) -> Tensor | None:
        if x.dim() < 1 or x.shape[0] < 1:
            raise UsageError(f"a batch needs at least 1 sample; x has the shape {tuple(x.shape)}")
        if self.opening is None:
            return None
        u0: Tensor = self.opening(x.to(self.stack.dtype) if x.is_floating_point() else x)
        self.stack.step.check(u0.shape)
        return u0

    def _check_batch(self, batch: int | None, shape: tuple[int, ...]) -> None:
        """The same id means the same samples."""
        if batch is not None and self._batches.setdefault(batch, shape) != shape:
            raise UsageError(
                f"batch id {batch} was used for samples of shape {self._batches[batch]} and now for {shape}; "
                f"an id stands for the same samples: give other samples another id"
            )

    def _take(self, shape: tuple[int, ...], exact: bool = False) -> Propagator:
        """States that no live graph holds."""
        pool = self._pools.setdefault((shape, exact), [])
        for propagator in pool:
            if propagator.stack is self.stack and not propagator.in_use():
                return propagator
        if exact:
            one = MGRIT(levels=1)
            made = Propagator(self.stack, build(self.stack.num_layers, one), one, shape, keep=False)
        else:
            made = Propagator(self.stack, self.hierarchy, self.mgrit, shape, batched=self.choose_batching(shape))
        pool.append(made)
        return made

    def prepare(self, x: Tensor) -> None:
        """Agree on the shape of the states for a batch like x, and measure what is to be measured. Collective."""
        with torch.no_grad():
            _, shape = self._enter(x)
        self.choose_batching(shape)

    def choose_batching(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Per level, whether intervals are relaxed side by side. With `mgrit.batching: auto` the first call measures
        (collective over comm, one reduction); the choice is written to `self.mgrit` and never changes again.

        Args:
            shape: of a state, (batch, ...).
        """
        if self.batched is None:
            self.batched = measure(self.stack, self.hierarchy, self.mgrit, shape)
            self.mgrit = as_setting(self.batched, self.mgrit)
        return self.batched

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the parameters and settings, not the states in memory."""
        return {**super().__getstate__(), "_pools": {}, "_kept": {}, "_latest": None}  # type: ignore[dict-item]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moving or converting the parameters makes all states anew."""
        result = super()._apply(fn, recurse)
        self._anchor = torch.zeros(
            (), dtype=self.stack.dtype, device=next(self.stack.parameters()).device, requires_grad=True
        )
        self._pools.clear()
        self._kept.clear()
        self._latest = None
        return result

    # how a solve starts and what it leaves

    def _plan(self, solver: Solver, kept: Kept | None, iterations: int | None) -> tuple[Start, int | None]:
        """Where a solve starts and how long it runs: fixed iterations need kept states."""
        guess = solver.mgrit.initial_guess
        if solver.levels == 1:
            return "zero", 0
        if guess == "kept" and not self.mgrit.skip_first_down:
            return ("given", iterations) if kept is not None else ("coarse", None)
        if iterations is not None and not self._warned:
            self._warned = True
            logging.getLogger("lpnet").warning(
                "%s iterations from a cold start (initial_guess %s) can give gradients that point the wrong way; use "
                "initial_guess kept with net(x, batch=id), or leave the iterations out to iterate to a tolerance",
                iterations,
                guess,
            )
        return ("coarse" if self.mgrit.skip_first_down or guess == "coarse" else cast(Start, guess)), iterations

    def solve_states(self, flight: Flight, u0: Tensor | None) -> None:
        """The forward solve of a pass. Neighbour messages only, but for a cold start."""
        kept = self._kept.get(flight.batch, (None, None))[0] if flight.batch is not None else None
        start, iterations = self._plan(flight.propagator.forward_solver, kept, self.mgrit.forward_iterations)
        flight.propagator.forward(u0, start=start, kept=kept, iterations=iterations)
        self._latest, self._latest_adjoint = flight.propagator, False

    def solve_adjoints(self, flight: Flight, lam: Tensor | None) -> None:
        """The adjoint solve of a pass; its states and adjoints are kept under its batch id. Messages as forward."""
        propagator = flight.propagator
        before = self._kept.get(flight.batch, (None, None)) if flight.batch is not None else (None, None)
        start, iterations = self._plan(propagator.adjoint_solver, before[1], self.mgrit.adjoint_iterations)
        propagator.adjoint(lam, start=start, kept=before[1], iterations=iterations)
        self._latest, self._latest_adjoint = propagator, True
        if flight.batch is not None and max(propagator.forward_solver.levels, propagator.adjoint_solver.levels) > 1:
            self._kept[flight.batch] = (
                propagator.kept(propagator.forward_solver, before[0]),
                propagator.kept(propagator.adjoint_solver, before[1]),
            )

    def _latest_solvers(self) -> list[Solver]:
        if self._latest is None:
            return []
        return [self._latest.forward_solver] + ([self._latest.adjoint_solver] if self._latest_adjoint else [])

    def residual_squares(self) -> np.ndarray:
        """Squared residuals of the latest forward and adjoint solve, zero at other ranks' C-points. No communication."""
        parts = [solver.pending() for solver in self._latest_solvers()]
        return np.concatenate(parts) if parts else np.zeros(0)

    def solve_reports(
        self, summed: np.ndarray, batch_size: int | None = None
    ) -> tuple[SolveReport | None, SolveReport | None]:
        """Reports of the latest forward and adjoint solve, from summed `residual_squares`. No communication."""
        reports: list[SolveReport | None] = []
        at = 0
        for solver in self._latest_solvers():
            size = solver.pending().size
            reports.append(solver.report(summed[at : at + size]))
            at += size
        return (*reports, None, None)[0], (*reports, None, None)[1]

    def forget(self) -> None:
        """Drop all kept states: the next solves start cold. No communication."""
        self._kept.clear()
        self._batches.clear()

    def kept_points(self, kind: str) -> list[int]:
        """Points of this rank whose states ("state") or adjoints ("adjoint") are kept. No communication."""
        levels, _ = direction(self.hierarchy, self.mgrit, adjoint=kind == "adjoint")
        if len(levels.levels) == 1:
            return []
        part = local_level(levels, 0, self.partition, self.comm.rank)
        return [p for p in part.c_points if p != levels.start]

    def kept_state(self) -> Iterator[tuple[str, int, Tensor]]:
        """Kept states as (name, point, payload), for checkpoints. No communication."""
        for batch, (states, adjoints) in sorted(self._kept.items()):
            for kind, kept in (("state", states), ("adjoint", adjoints)):
                if kept is not None:
                    for point, payload in zip(self.kept_points(kind), kept.states, strict=True):
                        yield f"mgrit/{kind}/{batch}", point, payload

    def load_kept_state(self, batch: int, blocks: dict[str, Callable[[int], Tensor]]) -> None:
        """Set the kept states of a batch id from functions point -> payload. No communication."""
        loaded: dict[str, Kept] = {}
        for kind, read in blocks.items():
            rows = [read(point).to(self.stack.dtype) for point in self.kept_points(kind)]
            loaded[kind] = Kept(torch.stack(rows) if rows else torch.empty(0, dtype=self.stack.dtype))
        if "state" in loaded:
            self._kept[batch] = (loaded["state"], loaded.get("adjoint"))

    # parameters by global name

    def shards(self) -> list[Shard]:
        """Local parameters and buffers with global names. No communication."""
        out = self.stack.shards()
        for prefix, module in (("opening", self.opening), ("closing", self.closing)):
            if module is not None:
                out += [
                    Shard(f"{prefix}.{name}", tensor)
                    for name, tensor in [*module.named_parameters(), *module.named_buffers()]
                ]
        return out

    def to_serial(self) -> torch.nn.Module | None:
        """The equivalent ordinary torch module on rank 0, None elsewhere. Collective over comm."""
        from lpnet.mgrit.serial import gather_serial

        return gather_serial(self)

    # solves without autograd

    @torch.no_grad()
    def solve(self, u0: Tensor, guess: Tensor | str | None = None) -> tuple[range, Tensor, SolveReport]:
        """Solve for the states of a given u_0 (batch, width). Neighbour messages and reductions; no autograd.

        Args:
            u0: the same on every rank.
            guess: states (layers + 1, batch, width), "exact", or None: as mgrit.initial_guess says (kept: zero).

        Returns:
            The points of this rank, their states (points, batch, width), and the report.
        """
        self._latest = self._take(tuple(u0.shape))
        self._latest_adjoint = False
        run = self._latest
        start, kept = self._given(run.forward_solver, guess, u0, adjoint=False)
        run.forward(
            u0 if run.is_first else None,
            start=start,
            kept=kept,
            iterations=self.mgrit.forward_iterations if run.forward_solver.levels > 1 else 0,
        )
        points = range(self.stack.low, self.stack.high + self.is_last)
        return (
            points,
            self._states(run, run.forward_solver, points),
            self.solve_reports(self.comm.sum(self.residual_squares()))[0],
        )  # type: ignore[return-value]

    @torch.no_grad()
    def solve_adjoint(self, lam: Tensor, guess: Tensor | str | None = None) -> tuple[range, Tensor, SolveReport]:
        """Solve for the adjoints of a given lambda_N (batch, width), linearised at the latest `solve`; as `solve`."""
        run = self._latest
        if run is None:
            raise UsageError("solve_adjoint needs the states of a solve; call solve(u0) first")
        start, kept = self._given(run.adjoint_solver, guess, lam, adjoint=True)
        run.adjoint(
            lam if run.is_last else None,
            start=start,
            kept=kept,
            iterations=self.mgrit.adjoint_iterations if run.adjoint_solver.levels > 1 else 0,
        )
        self._latest_adjoint = True
        points = range(self.stack.low, self.stack.high + self.is_last)
        report = self.solve_reports(self.comm.sum(self.residual_squares()))[1]
        return points, self._states(run, run.adjoint_solver, points), report  # type: ignore[return-value]

    def layer_gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's stack parameters from the latest solve and solve_adjoint. No communication."""
        if self._latest is None or not self._latest_adjoint:
            raise UsageError("layer_gradients needs solve(u0) and solve_adjoint(lam) first")
        return self._latest.gradients()

    def _states(self, run: Propagator, solver: Solver, points: range) -> Tensor:
        """States that are in memory; NaN for F-points that are not kept."""
        problem = solver.problem
        shown = []
        for p in points:
            held = (
                not run.c_storage
                or p in solver.cycle.hierarchy.c_points(0)
                or p in (self.stack.low, self.stack.num_layers)
            )
            state = run.workspace.unpack(problem.value(p))
            shown.append(state if held else torch.full_like(state, float("nan")))
        return torch.stack(shown)

    def _given(
        self, solver: Solver, guess: Tensor | str | None, start: Tensor, *, adjoint: bool
    ) -> tuple[Start, Kept | None]:
        if guess is None:
            name = solver.mgrit.initial_guess
            if solver.mgrit.skip_first_down:
                name = "coarse"
            return ("zero" if name == "kept" else cast(Start, name)), None
        if isinstance(guess, str):
            if guess != "exact":
                raise UsageError(f"guess is {guess!r}; it must be None, 'exact' or the states of all points")
            guess = self._exact_states(start, adjoint)
        assert self._latest is not None
        points = solver.problem.local_c_points()
        rows = self._latest.workspace.rows(len(points))
        for row, point in zip(rows, points, strict=True):
            self._latest.workspace.pack(guess[point], row)
        return "given", Kept(rows)

    def _exact_states(self, start: Tensor, adjoint: bool) -> Tensor:
        """States of all points by exact propagation, on every rank. Collective; for tests."""
        one = MGRIT(levels=1)
        run = Propagator(self.stack, build(self.stack.num_layers, one), one, tuple(start.shape))
        if adjoint:
            assert self._latest is not None
            raise UsageError("an exact guess of the adjoint is given as a tensor")
        run.forward(start if run.is_first else None, start="zero", iterations=0)
        mine = [
            (p, run.workspace.unpack(run.forward_solver.problem.value(p)))
            for p in range(self.stack.low, self.stack.high + self.is_last)
        ]
        return torch.stack([state for part in self.comm.all_gather_objects(mine) for _, state in part])
