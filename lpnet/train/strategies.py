"""One training step, and what it reports: loss, residuals and flags of all ranks ride on one reduction.

The methods serial and mgrit share this code: serial is one level on one rank. `gradient` training iterates both solves
to a tolerance, `one-shot` training (Günther et al. 2020, section 3.3) fixes the iterations and keeps the states; both
are settings of `MGRIT`, not code paths here.

    torch.optim     forward, backward, one reduction, update
    lbfgs           per trial: forward, one reduction; accepted: backward, one reduction
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lpnet.config import OptimConfig
from lpnet.io import trace
from lpnet.optim.clip import norm_terms, scale_gradients
from lpnet.optim.lbfgs import LBFGS, Evaluation, NotFinite
from lpnet.optim.regularization import Regularization
from lpnet.optim.select import load_optimizer, optimizer_shards, torch_optimizer
from lpnet.parallel.shard import Shard
from lpnet.train.objective import Objective
from lpnet.train.watch import Watch, seen_of

if TYPE_CHECKING:
    from lpnet.data.samples import Samples
    from lpnet.fdg.reports import Staleness
    from lpnet.mgrit.layer_parallel import LayerParallel
    from lpnet.mgrit.solver import SolveReport
    from lpnet.train.watch import Watched


@dataclass(frozen=True)
class StepReport:
    """What one optimisation step did, the same on every rank but for times and counts.

    Args:
        objective: loss and regularisation, before the update.
        loss: mean cross-entropy, before the update.
        grad_norm: norm of the gradient of the objective before clipping, all ranks together.
        step_size: step size accepted before the objective was evaluated.
        forward: report of the forward solve that gave the objective; None on one level.
        adjoint: report of the adjoint solve.
        seconds: wall time of the step on this rank.
        stop: some rank asked to stop (see `Strategy.stop_requested`).
        finished: reason why the optimiser cannot go on.
        abandoned: the step was given up to stop early, and all is as it was before.
        batch: decoupled modules: the newest batch that has finished, whose loss this is; loss and objective are None
            where none has.
        staleness: decoupled modules: updates between that batch's forward and its update on this rank.
        wait_seconds: decoupled modules: time of the step that was waited.
        measured: decoupled modules: how stale the gradients of a batch were, where it was measured and has landed.
        watched: what is known of the gradient that was applied; None on one level.
        evaluations: layer evaluations of the step on the longest chain over all ranks, comparisons included.
        compared: those of comparisons among them.
    """

    objective: float | None
    loss: float | None
    grad_norm: float | None
    step_size: float
    forward: SolveReport | None = None
    adjoint: SolveReport | None = None
    seconds: float = 0.0
    stop: bool = False
    finished: str | None = None
    abandoned: bool = False
    batch: int | None = None
    staleness: int | None = None
    wait_seconds: float | None = None
    measured: Staleness | None = None
    watched: Watched | None = None
    evaluations: int | None = None
    compared: int = 0


class Strategy(Protocol):
    """How a step is made. `stop_requested` may be set on any rank; the next step's reduction tells all of them.
    `steps` counts the steps done, `kind` names the optimiser."""

    stop_requested: bool
    steps: int
    kind: str

    @property
    def current(self) -> StepReport | None:
        """Objective and gradient norm after the latest step, where they are known. No communication."""

    def step(self, samples: Samples, batch: int | None) -> StepReport:
        """One optimisation step on a batch. Collective."""

    def finish(self) -> None:
        """The last step has been made: nothing may be left in flight. Neighbour messages only."""

    def before_save(self) -> None:
        """What a checkpoint needs first. Neighbour messages only."""

    def shards(self) -> list[Shard]:
        """State of the optimiser. No communication."""

    def load(self, names: Sequence[str], read: Callable[[Shard], torch.Tensor]) -> None:
        """Take the state over from a checkpoint of any number of ranks; communicates as `read` does."""


class _WholeSteps:
    """Steps that leave nothing in flight."""

    def finish(self) -> None:
        """Nothing is in flight between steps."""

    def before_save(self) -> None:
        """A checkpoint can be made after any step."""


def _path(*reports: SolveReport | None) -> int:
    return sum(report.critical_path for report in reports if report is not None)


def rate_factor(config: OptimConfig, step: int, batches: int) -> float:
    """What the learning rate is multiplied by at a step: `decay` per passed epoch of decay_epochs. No communication."""
    passed = sum(step >= epoch * batches for epoch in config.decay_epochs)
    return float(config.decay**passed)


class GradientSteps(_WholeSteps):
    """Steps of an optimiser of torch.optim: one reduction each.

    Args:
        net: the network.
        config: optimiser and regularisation.
        batches: per epoch, for the learning rate's decay.
    """

    def __init__(self, net: LayerParallel, config: OptimConfig, batches: int = 1) -> None:
        self._net, self._config, self._batches = net, config, batches
        regularization = Regularization(
            net, tikhonov=config.tikhonov, classifier_tikhonov=config.classifier_tikhonov, ddt=config.ddt
        )
        self._objective = Objective(net, regularization)
        self.watch = Watch(net, self._objective)
        self._optimizer = torch_optimizer(config, self._objective.shards)
        self.kind = type(self._optimizer).__name__
        self.stop_requested = False
        self.steps = 0

    def step(self, samples: Samples, batch: int | None) -> StepReport:
        """Forward, backward, one reduction, update. Collective.

        Raises:
            NumericsError: loss or gradient is not finite, on every rank; the parameters are as they were.
        """
        net, objective, watch = self._net, self._objective, self.watch
        began = net.comm.now()
        objective.stop_requested, objective.step = self.stop_requested, self.steps
        watch.begin(self.steps, batch)
        head, terms = objective.forward(samples, batch)
        objective.backward()
        solvers, squares = net.solvers, net.residual_squares()
        if watch.compares:
            watch.second(samples, batch)
        rows, shards, extra = objective.rows, objective.shards, watch.local()
        packed = rows.pack([np.concatenate(pair) for pair in zip(terms, norm_terms(shards), strict=True)])
        with trace.span("reduction"):
            summed = net.world.sum(np.concatenate([head, objective.counted(packed), squares, extra]))
        loss, stop = summed[:2].tolist()
        at = 2 + packed.size
        penalty, square = rows.total(summed[2:at].reshape(packed.shape)).tolist()
        forward, adjoint = net.solve_reports(summed[at : at + squares.size], len(samples), solvers)
        extra = summed[at + squares.size :]
        finite = math.isfinite(loss) and math.isfinite(penalty) and math.isfinite(square)
        seen = seen_of(forward, adjoint, finite=finite)
        if math.isfinite(penalty) and (finite or watch.controller.adaptive) and watch.alarm(seen, samples, batch):
            extra = net.world.sum(watch.local())
        decision = watch.judge(seen, loss, square, extra)
        if decision.reject:
            watch.take_second()
            loss, square, finite = watch.loss, watch.rejected_square, True
        if not finite:
            what = "loss" if not math.isfinite(loss) else "gradient" if math.isfinite(penalty) else "regularisation"
            raise objective.first_problem(what, self.steps, samples)
        norm = math.sqrt(square)
        if self._config.clip_norm is not None:
            scale_gradients(shards, norm, self._config.clip_norm)
        rate = self._config.lr * rate_factor(self._config, self.steps, self._batches)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with trace.span("optimiser"):
            self._optimizer.step()
        self.steps += 1
        return StepReport(
            loss + penalty,
            loss,
            norm,
            rate,
            forward,
            adjoint,
            net.comm.now() - began,
            bool(stop),
            watched=watch.watched(decision),
            evaluations=_path(forward, adjoint) + watch.evaluations,
            compared=watch.evaluations,
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser on the local parameters."""
        return self._optimizer

    @property
    def current(self) -> StepReport | None:
        """Not known before the next step. No communication."""
        return None

    def shards(self) -> list[Shard]:
        """State of the optimiser. No communication."""
        slots = optimizer_shards(self._optimizer, self._objective.shards, rank=self._net.comm.rank)
        return slots + self.watch.shards()

    def load(self, names: Sequence[str], read: Callable[[Shard], torch.Tensor]) -> None:
        """Take the state over from a checkpoint of any number of ranks; communicates as `read` does."""
        load_optimizer(self._optimizer, self._objective.shards, names, read)
        self.watch.load(names, read)


class LBFGSSteps(_WholeSteps):
    """Iterations of distributed L-BFGS on one batch, the same in every step (see `Problem` of lpnet.optim.lbfgs).

    Line-search trials are solves like any other: with fixed iterations they start from the kept states of the current
    parameters, which only the backward of an accepted trial replaces.

    Args:
        net: the network.
        config: optimiser and regularisation.
    """

    def __init__(self, net: LayerParallel, config: OptimConfig) -> None:
        self._net, self._config = net, config
        regularization = Regularization(
            net, tikhonov=config.tikhonov, classifier_tikhonov=config.classifier_tikhonov, ddt=config.ddt
        )
        self._objective = Objective(net, regularization)
        self._lbfgs = LBFGS(
            self._objective.shards,
            self,
            net.world,
            net.partition,
            lr=config.lr,
            memory=config.memory,
            trials=config.line_search_trials,
            interrupted=lambda: self._stop,
            starts=net.stack.starts,
            leads=net.grid.leads,
            revise=self._revise,
            rescue=lambda: self.watch.rescue(),
            noise=lambda: self.watch.noise(),
        )
        self.watch = Watch(net, self._objective, steers=True)
        self.kind = "LBFGS"
        self._reports: tuple[SolveReport | None, SolveReport | None] = (None, None)
        self._watched: Watched | None = None
        self._stop = False
        self.stop_requested = False
        self.steps = 0

    def step(self, samples: Samples, batch: int | None) -> StepReport:
        """One iteration; the first one evaluates the starting point too. Collective.

        Raises:
            NumericsError: objective or gradient is not finite, on every rank.
        """
        began = self._net.comm.now()
        self._samples, self._batch, self._stop, self._work = samples, batch, False, 0
        self.watch.begin(self.steps, batch)
        try:
            at = self._lbfgs.evaluation or self._lbfgs.start()
            norm, step_size, (forward, adjoint) = self._lbfgs.grad_norm, self._lbfgs.step_size, self._reports
            watched = self._watched
            report = self._lbfgs.step()
        except NotFinite as error:
            raise self._objective.first_problem("objective or gradient", self.steps, samples) from error
        self.steps += not report.interrupted
        return StepReport(
            at.objective,
            at.loss,
            norm,
            step_size,
            forward,
            adjoint,
            self._net.comm.now() - began,
            self._stop,
            report.stop,
            report.interrupted,
            watched=watched,
            evaluations=self._work + self.watch.evaluations,
            compared=self.watch.evaluations,
        )

    @property
    def current(self) -> StepReport | None:
        """Objective and gradient norm after the latest step; None before the first. No communication."""
        at = self._lbfgs.evaluation
        if at is None:
            return None
        norm, step_size = self._lbfgs.grad_norm, self._lbfgs.step_size
        return StepReport(at.objective, at.loss, norm, step_size, *self._reports, watched=self._watched)

    # the problem that L-BFGS sees

    def evaluate(self) -> np.ndarray:
        """Forward at the current parameters. Neighbour messages only."""
        self._objective.stop_requested, self._objective.step = self.stop_requested, self.steps
        head, terms = self._objective.forward(self._samples, self._batch)
        self._work += self._net.critical_path()
        return np.concatenate([head, self._objective.counted(self._objective.rows.pack(terms))])

    def read(self, summed: np.ndarray) -> Evaluation:
        """Objective and loss, and whether any rank asked to stop. No communication."""
        self._stop = self._stop or bool(summed[1])
        loss = float(summed[0])
        objective = loss + float(self._objective.rows.total(summed[None, 2:])[0])
        return Evaluation(objective, loss, bool(np.isfinite(objective)))

    def gradient(self) -> np.ndarray:
        """Backward; the residuals of both solves and a comparison ride along. Neighbour messages only."""
        self._objective.backward()
        self._solvers, squares = self._net.solvers, self._net.residual_squares()
        if self.watch.compares:
            self.watch.second(self._samples, self._batch)
        self._residuals = squares.size
        return np.concatenate([squares, self.watch.local()])

    def read_gradient(self, summed: np.ndarray) -> None:
        """Reports of the solves at the accepted point. No communication."""
        squares, self._compared = summed[: self._residuals], summed[self._residuals :]
        self._reports = self._net.solve_reports(squares, len(self._samples), self._solvers)
        adjoint = self._reports[1]
        self._work += adjoint.critical_path if adjoint is not None else 0

    def _revise(self, at: Evaluation, square: float) -> tuple[Evaluation, bool] | None:
        """Objective and gradient of the same point by exact propagation, where the inexact ones are not to be trusted,
        and whether those before are in doubt too. An alarm costs a reduction.
        """
        watch, compared = self.watch, self._compared
        seen = seen_of(*self._reports, finite=bool(np.isfinite(square)))
        if (seen.finite or watch.controller.adaptive) and watch.alarm(seen, self._samples, self._batch):
            compared = self._net.world.sum(watch.local())
        decision = watch.judge(seen, at.loss, square, compared)
        self._watched = watch.watched(decision)
        if not decision.reject or watch.loss is None:
            return None
        watch.take_second()
        return Evaluation(at.objective - at.loss + watch.loss, watch.loss), decision.severe

    # state

    def shards(self) -> list[Shard]:
        """State of the optimiser. No communication."""
        return self._lbfgs.shards() + self.watch.shards()

    def load(self, names: Sequence[str], read: Callable[[Shard], torch.Tensor]) -> None:
        """Take the state over from a checkpoint of any number of ranks; communicates as `read` does."""
        self._lbfgs.load(read)
        self.watch.load(names, read)


def make_strategy(net: LayerParallel, config: OptimConfig, batches: int = 1) -> Strategy:
    """The strategy of a configuration, with so many batches per epoch. No communication."""
    return LBFGSSteps(net, config) if config.name == "lbfgs" else GradientSteps(net, config, batches)
