"""FDG: a network cut into modules that train at the same time, each with gradients that arrive some ticks late.

Zhuang, Wang, Liu, Lin, "Fully decoupled neural network learning using delayed gradients", arXiv 1906.09108.

    fdg = FDG(network, comm=comm, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), shrink=0.7)
    for x, y in loader:
        report = fdg.step(x, y)
    fdg.flush()

Every rank owns one module; on one rank all modules run side by side over queues in memory, tick by tick, with the same
bits. The same calls must be made on all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.fdg.chain import Chain
from lpnet.fdg.compensation import Compensation
from lpnet.fdg.mailbox import Mailbox
from lpnet.fdg.member import drive
from lpnet.fdg.network import CutNetwork, Cuts
from lpnet.fdg.options import Makers, Options, make_stage, make_update
from lpnet.fdg.reports import StepReport
from lpnet.fdg.schedule import Order, Schedule, ScheduleName
from lpnet.fdg.stage import Backward, Loss
from lpnet.fdg.staleness import Followed
from lpnet.fdg.update import OptimizerFactory, SchedulerFactory
from lpnet.fdg.worker import Worker


class FDG(CutNetwork[Worker]):
    """Decoupled training of a network in K modules.

    Collective over comm when made: the ranks compare what they were given.

    Args:
        network: a Sequential whose children are the units; all ranks give the same.
        comm: ranks, one per module; twice, three times, ... as many for data replicas, each of which is given batches
            of its own; None or one rank: all modules in this process.
        loss: of output and labels, one number.
        optimizer: makes an optimiser of torch.optim from a list of parameters.
        modules: K; None: as many as ranks.
        cuts: by_cost: measured on `example`, or on the first batch where that is None; uniform: equally many units per
            module; or the index of the first unit of every module after the first.
        shrink: beta in (0, 1]; in place of compensation.shrink.
        schedule: fdg | ddg | fr | bp.
        order: backward_first | forward_first; None: as published.
        backward: stash | recompute | mixed, see `lpnet.fdg.stage`; None: recompute for fr, stash otherwise.
        compensation: remedies for stale gradients.
        scheduler: makes a learning-rate scheduler from an optimiser; it steps once per batch, so that a gradient in
            flight is applied with the rate of its batch.
        clip_norm: largest norm of the gradients of a module and all behind it; None: no clipping.
        gradient_dtype: float16 or bfloat16, in which gradients travel; None: as they are.
        autocast: bfloat16 or float16, for torch.autocast; None: off.
        seed: of the dropout masks, which depend on (seed, batch, unit) only.
        example: (samples, labels) to measure the cuts on.
        ranks_per_module: ranks that share each module, such as [2, 1]; a shared module is one unit, given as a function
            that makes it from the communicator of its ranks, such as a LayerParallel. None: one rank each.
        staleness_every: batches between two measurements of how stale the gradients are (`lpnet.fdg.staleness`), which
            cost K passes of backpropagation and change nothing; 0: none. Not with data replicas or shared modules.

    Raises:
        UsageError: on every rank; see the messages.
    """

    def __init__(
        self,
        network: torch.nn.Sequential | Sequence[torch.nn.Module],
        *,
        comm: Any = None,
        loss: Loss,
        optimizer: OptimizerFactory,
        modules: int | None = None,
        cuts: Cuts = "by_cost",
        shrink: float | None = None,
        schedule: ScheduleName = "fdg",
        order: Order | None = None,
        backward: Backward | None = None,
        compensation: Compensation | None = None,
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        gradient_dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        seed: int = 0,
        example: tuple[Tensor, Tensor] | None = None,
        ranks_per_module: Sequence[int] | None = None,
        staleness_every: int = 0,
    ) -> None:
        def settings(count: int) -> Options:
            remedies = compensation or Compensation()
            return Options(
                Schedule(count, schedule, order),
                backward or ("recompute" if schedule == "fr" else "stash"),
                remedies if shrink is None else replace(remedies, shrink=shrink),
                clip_norm,
                gradient_dtype,
                autocast,
                seed,
            )

        super().__init__(
            network,
            comm=comm,
            modules=modules,
            cuts=cuts,
            makers=Makers(loss, optimizer, scheduler),
            options=settings,
            example=example,
            ranks_per_module=ranks_per_module,
            more=staleness_every,
        )
        self.comm.together(lambda: self._check_measuring(staleness_every))
        self._every = staleness_every
        self._followed: dict[int, Followed] = {}

    def _check_measuring(self, every: int) -> None:
        if every < 0:
            raise UsageError(f"staleness_every is {every}; give a number of batches, or 0 for no measurements")
        if every and (self.place.peers is not None or max(self.place.shares) > 1):
            raise UsageError(
                "staleness is measured where every module has one rank; leave staleness_every out with data replicas "
                "or modules that several ranks share"
            )

    def _make_member(self, module: int, chain: Chain, box: Mailbox) -> Worker:
        options, makers = self.options, self._makers
        stage = make_stage(options, makers, module, chain, shared=self.place.group is not None)
        update = make_update(options, makers, module, stage)
        return Worker(module, options.schedule, stage, update, box, self.place, shrink=options.compensation.shrink)

    @property
    def schedule(self) -> Schedule:
        """The delay table."""
        return self.options.schedule

    # training

    def step(self, x: Tensor | None, y: Tensor | None) -> StepReport:
        """One tick: take a batch in, and give back the newest batch that has finished. Neighbour messages only.

        The first step of cuts by_cost without an example measures them, which is collective.

        Args:
            x: samples (batch, ...), needed on the rank of module 1; other ranks may give None.
            y: labels (batch, ...), needed on the rank of module K; other ranks may give None.

        Raises:
            NumericsError: on every rank, at the same tick: a number is not finite; names module, batch and unit.
            UsageError: samples or labels are missing, or differ between the ranks.
            LpnetError: another module has failed; its error.
        """
        with self._guarded("step"):
            if not self.members:
                self._build(x, y)
            for member in self.members:
                member.feed(self.batches, x, y)
            if self._every and self.batches and self.batches % self._every == 0:
                self._followed[self.batches] = Followed(self.batches, self.members, x, y)
            self.batches += 1
            return self._run_tick(None)

    def flush(self) -> tuple[StepReport, ...]:
        """Run until every batch has landed on every module, for the end or a change of K. Neighbour messages only.

        Batches that wait for an accumulation to be complete make an update of their own.

        Returns:
            Reports of the ticks that this took.
        """
        with self._guarded("flush"):
            if not self.members:
                return ()
            count = self.batches - self._first.origin
            reports = []
            while count and self._first.since < self.schedule.ticks(count):
                reports.append(self._run_tick(count))
            drive(self.members, [member.close_group(count - 1) for member in self.members])
            drive(self.members, [member.agree() for member in self.members])
            self._raise_failure()
            for member in self.members:
                member.origin, member.since = self.batches, 0
                member.mailbox.settle()
            return tuple(reports)

    def _run_tick(self, batches: int | None) -> StepReport:
        tick, measured = self._first.tick, None
        for followed in self._followed.values():
            followed.before_tick(self.members)
        seconds, receive, send = self.stopwatch.drive(
            self.members, self._boxes, [member.run_tick(batches) for member in self.members]
        )
        for batch, followed in list(self._followed.items()):
            if followed.landed(self._first):
                measured = self._followed.pop(batch).collect(self.comm)
        stop = self._first.news.stop_at <= tick
        if stop:
            self._raise_failure()
        found = self._first.landing
        return StepReport(
            tick=tick,
            batch=found.batch if found else None,
            loss=found.loss if found else None,
            staleness=found.staleness if found else None,
            grad_norm=found.norm if found else None,
            seconds=seconds,
            wait_receive=receive,
            wait_send=send,
            stop=stop,
            measured=measured,
        )
