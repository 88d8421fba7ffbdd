"""One training step, and what it reports: loss, residuals and flags of all ranks ride on one reduction.

The methods serial and mgrit share this code: serial is one level on one rank. `gradient` training iterates both solves
to a tolerance, `one-shot` training (Günther et al. 2020, section 3.3) fixes the iterations and keeps the states; both
are settings of `MGRIT`, not code paths here.

    torch.optim     forward, backward, one reduction, update
    lbfgs           per trial: forward, one reduction; accepted: backward, one reduction
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lpnet.config import OptimConfig
from lpnet.errors import NumericsError
from lpnet.io import trace
from lpnet.optim.clip import norm_terms, scale_gradients
from lpnet.optim.lbfgs import LBFGS, Evaluation
from lpnet.optim.regularization import Regularization
from lpnet.optim.rows import RowSum, trainable
from lpnet.optim.select import load_optimizer, optimizer_shards, torch_optimizer
from lpnet.parallel.shard import Shard

if TYPE_CHECKING:
    from lpnet.data.samples import Samples
    from lpnet.fdg.reports import Staleness
    from lpnet.mgrit.layer_parallel import LayerParallel
    from lpnet.mgrit.solver import SolveReport


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


class _Objective:
    """Loss and regularisation of one batch, forward and backward, on local parameters."""

    def __init__(self, net: LayerParallel, regularization: Regularization) -> None:
        self.net, self.regularization = net, regularization
        self.shards = trainable(net.shards())
        self.rows = RowSum(self.shards, net.partition, starts=net.stack.starts)
        self.stop_requested = False
        self.step = 0  # trials of one step draw the same masks
        self._objectives: list[torch.Tensor] = []  # of the parts of the batch

    def forward(self, samples: Samples, batch: int | None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Local loss and stop flag, and the regularisation's terms. Neighbour messages only."""
        self._objectives = []  # the graphs of a rejected trial die before the next forward
        net, replicas = self.net, self.net.grid.replicas
        own, weight = net.grid.part(len(samples))  # of this data replica
        parts = min(net.mgrit.microbatches, own.stop - own.start)
        bounds = [own.start + (own.stop - own.start) * k // parts for k in range(parts + 1)]
        for low, high in zip(bounds, bounds[1:], strict=False):
            net.begin_step(self.step, first=low)
            objective = net.local_logits(samples.x[low:high], batch if parts == 1 else None)
            if net.is_last:
                objective = torch.nn.functional.cross_entropy(objective, samples.y[low:high])
                if replicas * parts > 1:
                    objective = objective * (weight * (high - low) / (own.stop - own.start))
            self._objectives.append(objective)
        # read when all parts are on their way
        loss = sum(float(objective.detach()) for objective in self._objectives) / replicas if net.is_last else 0.0
        return np.array([loss, float(self.stop_requested)]), self.regularization.terms()

    def counted(self, packed: np.ndarray) -> np.ndarray:
        """Terms of parameters, which all data replicas have alike, for a sum over all ranks. No communication."""
        return packed.ravel() * float(self.net.grid.leads)

    def backward(self) -> None:
        """Gradients of the latest forward in .grad, regularisation included. Neighbour messages only."""
        for shard in self.shards:
            shard.tensor.grad = None
        # one pass: the parts in the reverse order on every rank, each parameter's gradient finished once
        torch.autograd.backward(self._objectives)
        self._objectives = []
        self.regularization.add_gradient()

    def first_problem(self, what: str, step: int, samples: Samples) -> NumericsError:
        """The error for a value that is not finite, naming rank and layer where they can be told. Collective."""
        comm = self.net.world
        places = [place for place in comm.all_gather_objects(self._first_parameter()) if place is not None]
        seen = [] if places else [text for text in comm.all_gather_objects(self._first_state(samples)) if text]
        seen.sort(key=lambda text: not text.startswith("first seen"))  # the samples of one data replica may do it alone
        found = places[0] if places else seen[0]
        return NumericsError(f"step {step}: the {what} is not finite; {found}. Lower optim.lr, or set optim.clip_norm")

    def _first_parameter(self) -> str | None:
        """The first parameter of this rank that is not finite. No communication."""
        rank = f"on rank {self.net.comm.rank}/{self.net.comm.size}"
        for shard in self.shards:
            rows = torch.isfinite(shard.tensor).reshape(shard.tensor.shape[0], -1).all(1)
            if not rows.all():
                first = int((~rows).nonzero()[0])
                layer = "" if shard.rows is None else f", layer {shard.rows[0] + first}"
                return f"so is the parameter {shard.name}{layer}, {rank}"
        return None

    @torch.no_grad()
    def _first_state(self, samples: Samples) -> str | None:
        """Where exact propagation leaves the finite numbers, found on rank 0. Collective."""
        serial = self.net.to_serial()
        if serial is None:
            return None
        ranks = self.net.partition.ranks
        part, _ = self.net.grid.part(len(samples))
        u = serial.opening(samples.x[part].to(self.net.stack.dtype))  # type: ignore[operator]
        if not torch.isfinite(u).all():
            return f"first seen in the state after the opening, on rank 0/{ranks}"
        for layer, module in enumerate(serial.layers):  # type: ignore[arg-type]
            u = module(u)
            if not torch.isfinite(u).all():
                return f"first seen in the state after layer {layer}, on rank {self.net.partition.owner(layer)}/{ranks}"
        if len(self.net.hierarchy.levels) > 1:
            return "exact propagation is finite, so multigrid diverges: raise its iterations or lower mgrit.levels"
        return "all states and parameters are finite"


class _WholeSteps:
    """Steps that leave nothing in flight."""

    def finish(self) -> None:
        """Nothing is in flight between steps."""

    def before_save(self) -> None:
        """A checkpoint can be made after any step."""


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
        self._objective = _Objective(net, regularization)
        self._optimizer = torch_optimizer(config, self._objective.shards)
        self.kind = type(self._optimizer).__name__
        self.stop_requested = False
        self.steps = 0

    def step(self, samples: Samples, batch: int | None) -> StepReport:
        """Forward, backward, one reduction, update. Collective.

        Raises:
            NumericsError: loss or gradient is not finite, on every rank; the parameters are as they were.
        """
        began = self._net.comm.now()
        self._objective.stop_requested, self._objective.step = self.stop_requested, self.steps
        head, terms = self._objective.forward(samples, batch)
        self._objective.backward()
        rows, shards = self._objective.rows, self._objective.shards
        both = [np.concatenate(pair) for pair in zip(terms, norm_terms(shards), strict=True)]
        packed = rows.pack(both)
        squares = self._net.residual_squares()
        with trace.span("reduction"):
            summed = self._net.world.sum(np.concatenate([head, self._objective.counted(packed), squares]))
        loss, stop = summed[:2]
        penalty, square = rows.total(summed[2 : 2 + packed.size].reshape(packed.shape))
        if not np.isfinite([loss, penalty, square]).all():
            what = "loss" if not np.isfinite(loss) else "gradient" if np.isfinite(penalty) else "regularisation"
            raise self._objective.first_problem(what, self.steps, samples)
        norm = float(np.sqrt(square))
        if self._config.clip_norm is not None:
            scale_gradients(shards, norm, self._config.clip_norm)
        rate = self._config.lr * rate_factor(self._config, self.steps, self._batches)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with trace.span("optimiser"):
            self._optimizer.step()
        self.steps += 1
        forward, adjoint = self._net.solve_reports(summed[2 + packed.size :], len(samples))
        return StepReport(
            float(loss + penalty),
            float(loss),
            norm,
            rate,
            forward,
            adjoint,
            self._net.comm.now() - began,
            bool(stop),
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
        return optimizer_shards(self._optimizer, self._objective.shards, rank=self._net.comm.rank)

    def load(self, names: Sequence[str], read: Callable[[Shard], torch.Tensor]) -> None:
        """Take the state over from a checkpoint of any number of ranks; communicates as `read` does."""
        load_optimizer(self._optimizer, self._objective.shards, names, read)


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
        self._objective = _Objective(net, regularization)
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
        )
        self.kind = "LBFGS"
        self._reports: tuple[SolveReport | None, SolveReport | None] = (None, None)
        self._stop = False
        self.stop_requested = False
        self.steps = 0

    def step(self, samples: Samples, batch: int | None) -> StepReport:
        """One iteration; the first one evaluates the starting point too. Collective.

        Raises:
            NumericsError: objective or gradient is not finite, on every rank.
        """
        began = self._net.comm.now()
        self._samples, self._batch, self._stop = samples, batch, False
        try:
            at = self._lbfgs.evaluation or self._lbfgs.start()
            norm, step_size, (forward, adjoint) = self._lbfgs.grad_norm, self._lbfgs.step_size, self._reports
            report = self._lbfgs.step()
        except NumericsError as error:
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
        )

    @property
    def current(self) -> StepReport | None:
        """Objective and gradient norm after the latest step; None before the first. No communication."""
        at = self._lbfgs.evaluation
        if at is None:
            return None
        return StepReport(at.objective, at.loss, self._lbfgs.grad_norm, self._lbfgs.step_size, *self._reports)

    # the problem that L-BFGS sees

    def evaluate(self) -> np.ndarray:
        """Forward at the current parameters. Neighbour messages only."""
        self._objective.stop_requested, self._objective.step = self.stop_requested, self.steps
        head, terms = self._objective.forward(self._samples, self._batch)
        return np.concatenate([head, self._objective.counted(self._objective.rows.pack(terms))])

    def read(self, summed: np.ndarray) -> Evaluation:
        """Objective and loss, and whether any rank asked to stop. No communication."""
        self._stop = self._stop or bool(summed[1])
        loss = float(summed[0])
        objective = loss + float(self._objective.rows.total(summed[None, 2:])[0])
        return Evaluation(objective, loss, bool(np.isfinite(objective)))

    def gradient(self) -> np.ndarray:
        """Backward; the residuals of both solves ride along. Neighbour messages only."""
        self._objective.backward()
        return self._net.residual_squares()

    def read_gradient(self, summed: np.ndarray) -> None:
        """Reports of the solves at the accepted point. No communication."""
        self._reports = self._net.solve_reports(summed, len(self._samples))

    # state

    def shards(self) -> list[Shard]:
        """State of the optimiser. No communication."""
        return self._lbfgs.shards()

    def load(self, names: Sequence[str], read: Callable[[Shard], torch.Tensor]) -> None:
        """Take the state over from a checkpoint of any number of ranks; communicates as `read` does."""
        self._lbfgs.load(read)


def make_strategy(net: LayerParallel, config: OptimConfig, batches: int = 1) -> Strategy:
    """The strategy of a configuration, with so many batches per epoch. No communication."""
    return LBFGSSteps(net, config) if config.name == "lbfgs" else GradientSteps(net, config, batches)
