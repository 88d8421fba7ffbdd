"""Solves of given states and adjoints without autograd: the numbers behind a training step, for tests and studies."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lpnet.config import MGRIT
from lpnet.errors import UsageError
from lpnet.mgrit.hierarchy import build
from lpnet.mgrit.propagator import Kept, Propagator, Start
from lpnet.mgrit.solver import Solver, SolveReport

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from lpnet.nn.network import Network
    from lpnet.nn.stack import LayerStack


class DirectSolves:
    """`solve`, `solve_adjoint` and `layer_gradients` of LayerParallel."""

    if TYPE_CHECKING:
        stack: LayerStack | Network
        mgrit: MGRIT
        is_last: bool
        _latest: Propagator | None
        _latest_adjoint: bool
        _solvers: list[Solver]
        _take: Callable[..., Propagator]
        residual_squares: Callable[[], np.ndarray]
        solve_reports: Callable[[np.ndarray], tuple[SolveReport | None, SolveReport | None]]

    @torch.no_grad()
    def solve(self, u0: Tensor, guess: Tensor | str | None = None) -> tuple[range, Tensor, SolveReport]:
        """Solve for the states of a given u_0 (batch, width). Neighbour messages and reductions; no autograd.

        Args:
            u0: the same on every rank.
            guess: states (layers + 1, batch, width), "exact", or None: as mgrit.initial_guess says (kept: zero).

        Returns:
            The points of this rank, their states (points, batch, width), and the report.
        """
        run = self._latest = self._take(tuple(u0.shape), "show")
        self._latest_adjoint = False
        self._solvers = [run.forward_solver]
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
            self.solve_reports(self.stack.comm.sum(self.residual_squares()))[0],
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
        self._solvers = [run.forward_solver, run.adjoint_solver]
        points = range(self.stack.low, self.stack.high + self.is_last)
        report = self.solve_reports(self.stack.comm.sum(self.residual_squares()))[1]
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
            return ("zero" if name in ("kept", "class_mean") else cast(Start, name)), None
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
        return torch.stack([state for part in self.stack.comm.all_gather_objects(mine) for _, state in part])
