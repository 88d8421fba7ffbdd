"""Inexact gradients beside exact ones, during training: what `lpnet.mgrit.control` decides by, and what it changes.

A comparison makes the gradient of the batch a second time, by exact propagation in the memory of the first; the scalar
products of the two ride on the step's own reduction. Only an alarm, raised by numbers that this reduction brought,
costs one more. Where nothing is compared a step does what it would do without this module.

All numbers here are the same, bit for bit, on any number of ranks (data replicas aside, whose batches are added up in
another order): residuals are sums over C-points in their order, products of gradients those of `lpnet.optim.rows`. Only
when gradients are compared may depend on the ranks: `check_every: auto` bounds what comparisons cost beside a step, and
a step is the shorter the more ranks there are. So where what is seen changes the run (control adaptive, and L-BFGS,
whose line search and pairs allow for the errors) the step is taken to be as short as on the most ranks there can be;
where it is only told, the step of these ranks counts, and the state in a checkpoint is of other steps than on others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lpnet.errors import NumericsError
from lpnet.io import trace
from lpnet.mgrit.cache import MEANS
from lpnet.mgrit.control import NOTHING, Check, Controller, Decision, Rung, Seen, spacing
from lpnet.optim.rows import dots
from lpnet.parallel.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lpnet.data.samples import Samples
    from lpnet.mgrit.layer_parallel import LayerParallel
    from lpnet.mgrit.solver import SolveReport
    from lpnet.train.objective import Objective

log = logging.getLogger("lpnet.train")
STATE = "control/state"
SIDE_BY_SIDE = (
    0.125  # cost of a further layer in a call that evaluates several (drivers/bench: 1,024 layers of width 8)
)


@dataclass(frozen=True)
class Watched:
    """What is known of the gradient that a step applied.

    Args:
        rung: levels and iterations of the step.
        cosine: with the exact gradient; 1 where the exact one was applied; None where it was not looked at.
        error: relative; 0 where the exact one was applied.
        rejected: cosine of an inexact gradient that was thrown away, in serial of a probe's.
    """

    rung: Rung
    cosine: float | None
    error: float | None
    rejected: float | None


class Watch:
    """Compares, decides and switches for one strategy.

    Args:
        net: the network.
        objective: its forward and backward.
        steers: whether the optimiser's decisions depend on `noise`.
    """

    def __init__(self, net: LayerParallel, objective: Objective, *, steers: bool = False) -> None:
        self._net, self._objective = net, objective
        mgrit = net.mgrit
        levels = len(net.hierarchy.levels)
        self.on = levels > 1
        base = Rung(levels, mgrit.forward_iterations, mgrit.adjoint_iterations)
        alone = steers or mgrit.control == "adaptive"
        step = net.planned_path(base, beside=SIDE_BY_SIDE, alone=alone) if self.on else 1.0
        every = spacing(mgrit.check_every, check=net.exact_path(), step=step) if self.on else 0
        self.controller = Controller(mgrit, levels, every)
        self._buffers = list(net.buffers())
        self._start(0)

    @property
    def every(self) -> int:
        """Steps between comparisons; 0: none."""
        return self.controller.every

    def _start(self, step: int) -> None:
        self._step = step
        self._second: list[torch.Tensor | None] | None = None  # the other gradient
        self._extra = np.zeros(0)  # what goes on the reduction for it
        self.evaluations = 0  # layer evaluations of the comparison on the longest chain
        self._check: Check | None = None
        self._flight: Any = None
        self.loss: float | None = None  # of the exact pass, on all ranks after the reduction

    def begin(self, step: int, batch: int | None) -> None:
        """A step begins: its rung is set. No communication."""
        self._start(step)
        if not self.on:
            return
        self._plan = self.controller.plan(step)
        if self.controller.adaptive:
            self._net.rung = self._plan.rung
        self._before = [b.clone() for b in self._buffers] if self.controller.adaptive else []
        probes = self._plan.compare and self.controller.is_serial
        self._kept = self._net._cache.copies([batch, MEANS]) if probes else {}

    @property
    def compares(self) -> bool:
        """Whether this step is to be compared."""
        return self.on and self._plan.compare

    def second(self, samples: Samples, batch: int | None) -> None:
        """Make the other gradient of this step; the first one stays in .grad. Neighbour messages only."""
        net, objective = self._net, self._objective
        shards = objective.shards
        first = [shard.tensor.grad for shard in shards]
        now = [b.clone() for b in self._buffers]
        if self._before:
            _fill(self._buffers, self._before)
        solvers: tuple[Any, ...] = ()
        with torch.enable_grad(), trace.span("compare", step=self._step):
            if self.controller.is_serial:
                net.rung = self._plan.other
                with net._cache.replaced(self._kept):
                    head, _ = objective.forward(samples, batch, keeps=False)
                    objective.backward()
                solvers, net.rung = net.solvers, self._plan.rung
                self.evaluations += net.critical_path()
            else:
                head, _ = objective.forward(samples, batch, exact=True)
                objective.backward()
                self.evaluations += net.exact_path()
        self._flight, self._solvers = net._flight, solvers
        self._second = [shard.tensor.grad for shard in shards]
        self._after = [b.clone() for b in self._buffers]
        _fill(self._buffers, now)
        terms = []
        for shard, one, two in zip(shards, first, self._second, strict=True):
            shard.tensor.grad = one
            stacked, zero = shard.rows is not None, torch.zeros_like(shard.tensor)
            one, two = (zero if g is None else g for g in (one, two))
            terms.append(np.concatenate([dots(one[None], two, stacked=stacked), dots(two[None], two, stacked=stacked)]))
        self._packed = objective.rows.pack(terms).shape
        squares = net.residual_squares() if solvers else np.zeros(0)
        self._extra = np.concatenate([head[:1], objective.counted(objective.rows.pack(terms)), squares])
        self._samples = len(samples)

    def local(self) -> np.ndarray:
        """This rank's part of a comparison, for a reduction; empty without one. No communication."""
        return self._extra

    def judge(self, seen: Seen, loss: float, square: float, summed: np.ndarray) -> Decision:
        """Decide about this step. No communication.

        Args:
            seen: the step's solves.
            loss: of the step.
            square: of the norm of the gradient in .grad, all ranks together.
            summed: `local` over all ranks.

        Raises:
            NumericsError: on every rank; with inexact gradients that nobody corrects, the solves diverge.
        """
        if not self.on or self._second is None:
            return NOTHING
        size = int(np.prod(self._packed))
        self.loss = float(summed[0])
        both, other = self._objective.rows.total(summed[1 : 1 + size].reshape(self._packed))
        if self.controller.is_serial:
            check = Check.of(float(other), float(both), square)
            squares = summed[1 + size :]
            reports = self._net.solve_reports(squares, self._samples, self._solvers) if self._solvers else (None, None)
            seen = seen_of(*reports, finite=bool(np.isfinite(other)))
        else:
            if not np.isfinite(other):
                return NOTHING  # the exact gradient is not finite either: no remedy here
            check = Check.of(square, float(both), float(other))
        self._check = check
        difference = self.loss - loss
        if not self.controller.is_serial and np.isfinite(difference):
            self.controller.state.noise = abs(difference)
        decision = self.controller.compared(self._step, seen, check)
        self._say(decision)
        self.rejected_square = float(other)
        return decision

    def alarm(self, seen: Seen, samples: Samples, batch: int | None) -> bool:
        """Whether the numbers of a step ask for a comparison that was not planned; it is made. As `second`."""
        if not self.on or self._second is not None:
            return False
        reason = self.controller.alarm(self._step, seen)
        if reason:
            if self._net.world.rank == 0:
                log.debug("step %d: %s: comparing with the exact gradient", self._step, reason)
            self.second(samples, batch)
        return bool(reason)

    def take_second(self) -> None:
        """Put the exact gradient in the place of the rejected one, and keep its states. No communication."""
        assert self._second is not None
        for shard, gradient in zip(self._objective.shards, self._second, strict=True):
            shard.tensor.grad = gradient
        _fill(self._buffers, self._after)
        self._net.keep(self._flight)

    def watched(self, decision: Decision) -> Watched | None:
        """What becomes of a decision in metrics and pictures; None on one level. No communication."""
        if not self.on:
            return None
        check, cosine, error, rejected = self._check, None, None, None
        state = self.controller.state
        state.applied = state.error
        if self._plan.rung.levels == 1 or decision.reject:
            cosine, error, rejected = 1.0, 0.0, None if check is None else check.cosine
            state.applied = 0.0
        elif check is not None:
            cosine, error = check.cosine, check.error
        return Watched(self._plan.rung, cosine, error, rejected)

    def noise(self) -> tuple[float, float]:
        """Errors of inexact solves: of the loss, absolute; of the latest gradient that was applied, relative."""
        s = self.controller.state
        if not self.on:
            return 0.0, 0.0
        loss = 0.0 if self._plan.rung.levels == 1 or not np.isfinite(s.noise) else s.noise
        return loss, s.applied if np.isfinite(s.applied) else 0.0

    def rescue(self) -> bool:
        """Serial from the next step on, because the optimiser found no decrease; whether that changes anything."""
        message = self.controller.rescue(self._step) if self.on else ""
        self._say(Decision(message=message, warn=True))
        if message:
            self._plan = self.controller.plan(self._step)._replace(compare=False)
            self._net.rung = self._plan.rung
        return bool(message)

    def _say(self, decision: Decision) -> None:
        if decision.stop:
            raise NumericsError(f"step {self._step}: {decision.stop}; {REMEDY}")
        if decision.message and self._net.world.rank == 0:
            (log.warning if decision.warn else log.info)("%s", decision.message)

    # checkpoints

    def shards(self) -> list[Shard]:
        """The controller's state, on rank 0. No communication."""
        if not self.on or self._net.comm.rank != 0:
            return []
        return [Shard(STATE, torch.tensor(self.controller.numbers(), dtype=torch.float64))]

    def load(self, names: Sequence[str], read: Callable[[Shard], torch.Tensor]) -> None:
        """Take it over where the checkpoint has it; communicates as `read` does."""
        if self.on and STATE in names:
            values = read(Shard(STATE, torch.zeros(len(self.controller.numbers()), dtype=torch.float64)))
            self.controller.restore(values.tolist())


REMEDY = (
    "training on would be training on garbage: set mgrit.control adaptive, more iterations, or fewer mgrit.levels; the "
    "checkpoint before is intact"
)


def seen_of(forward: SolveReport | None, adjoint: SolveReport | None, *, finite: bool = True) -> Seen:
    """What a controller looks at. No communication."""
    rho = [None if report is None else report.rho for report in (forward, adjoint)]
    last = [report.residuals[-1] if report is not None and report.residuals else None for report in (forward, adjoint)]
    finite = finite and all(r is None or np.isfinite(r) for r in last)
    return Seen(rho[0], rho[1], last[0], last[1], finite)


def _fill(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
