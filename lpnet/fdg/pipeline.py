"""Pipeline: exact synchronous training of a network in modules, on parts of every batch: the honest competitor.

The batch is split into micro-batches that follow each other through the modules (`lpnet.fdg.orders`); gradients add up,
and every step ends with one update of all modules, exact to rounding. Batch norm sees micro-batches, as it does in any
pipeline. Stages, queues and checkpoints are those of decoupled training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.fdg.chain import Chain
from lpnet.fdg.mailbox import Mailbox
from lpnet.fdg.member import Member, Work
from lpnet.fdg.message import Message, dense, digest, expect
from lpnet.fdg.network import CutNetwork, Cuts
from lpnet.fdg.options import Makers, Options, make_stage, make_update
from lpnet.fdg.orders import PipelineOrder, actions, held
from lpnet.fdg.place import Place
from lpnet.fdg.reports import StepReport
from lpnet.fdg.schedule import Schedule
from lpnet.fdg.stage import Loss, Stage
from lpnet.fdg.update import OptimizerFactory, SchedulerFactory, Update
from lpnet.io import trace


class PipelineMember(Member):
    """One module of a pipeline. Neighbour messages only.

    Args:
        module: which one, counted from 1.
        stage: its units.
        update: its optimiser.
        mailbox: its ends of the queues.
        place: the ranks it shares its work with.
        order: gpipe | 1f1b.
        micro_batches: M.
    """

    def __init__(
        self,
        module: int,
        stage: Stage,
        update: Update,
        mailbox: Mailbox,
        place: Place,
        *,
        order: PipelineOrder,
        micro_batches: int,
    ) -> None:
        super().__init__(module, stage, update, mailbox, place)
        self.loss, self.norm = math.nan, 0.0
        self._losses: dict[int, float] = {}
        self._order, self._micro_batches = order, micro_batches

    def run_step(self, batch: int, x: Tensor | None, y: Tensor | None) -> Work:
        """All micro-batches both ways, and one update unless a number is not finite.

        Args:
            batch: id.
            x: samples; needed on the first module.
            y: labels; needed on the last module. Others need one of the two, for the number of samples.

        Raises:
            UsageError: what is needed is missing, or differs from what module 1 was given.
        """
        self.check_ends(batch, x, y)
        some = x if x is not None else y
        if some is None or len(some) == 0:
            raise UsageError(f"batch {batch} on module {self.module}/{self.modules} has no samples; give x, y or both")
        count = min(self._micro_batches, len(some))
        sizes = [len(part) for part in some.tensor_split(count)]
        xs = x.tensor_split(count) if x is not None else [None] * count
        ys = y.tensor_split(count) if y is not None else [None] * count
        sums = (digest(x), digest(y)) if self.modules > 1 else (0, 0)
        self.loss = 0.0
        for kind, part in actions(self._order, self.module, self.modules, count):
            number = batch * self._micro_batches + part
            if kind == "F":
                yield from self._forward(batch, number, xs[part], ys[part], sums)
            else:
                yield from self._backward(batch, number, sizes[part] / len(some))
        yield from self._finish()
        self.tick += 1

    def _forward(self, batch: int, number: int, x: Tensor | None, y: Tensor | None, mine: tuple[int, int]) -> Work:
        if not self.is_first:
            message = expect((yield from self.take("activation")), number, "activation", self.module)
            x = message.tensor
            self.check_same(batch, message.digest, mine)
        assert x is not None
        span = trace.begin()
        out = self.stage.forward(number, dense(x), y)
        trace.end(span, "forward", module=self.module, batch=batch)
        self.check_output(batch, number, out)
        if self.is_last:
            self._losses[number] = float(out)
        else:
            yield from self.post("activation", Message(number, out, digest=mine))

    def _backward(self, batch: int, number: int, weight: float) -> Work:
        gradient = None
        if not self.is_last:
            gradient = expect((yield from self.take("gradient")), number, "gradient", self.module).tensor
        span = trace.begin()
        back, gradients = self.backward(number, gradient, weight if self.is_last else 1.0)
        trace.end(span, "backward", module=self.module, batch=batch)
        self.loss += self.check_gradients(batch, gradients, self._losses.pop(number, 0.0) * weight)
        self.update.add(gradients)
        if not self.is_first:
            yield from self.post("gradient", Message(number, back))

    def _finish(self) -> Work:
        """Loss and squared norms down, their sum up again, then the update."""
        square = self.square()
        if not self.is_last:
            message = yield from self.take("closing")
            self.loss, square = message.loss, square + message.square
        if not self.is_first:
            yield from self.post("closing", Message(loss=self.loss, square=square))
            square = (yield from self.take("evaluation")).square
        if not self.is_last:
            yield from self.post("evaluation", Message(square=square))
        self.norm = math.sqrt(square)
        if self.news.failure is not None:
            self.update.skip()
            return
        span = trace.begin()
        self.update.clip(square)
        self.update.apply(0)
        self.update.next_batch()
        trace.end(span, "update", module=self.module)


class Pipeline(CutNetwork[PipelineMember]):
    """Exact synchronous pipeline over K modules.

    Collective over comm when made: the ranks compare what they were given.

    Args:
        network: a Sequential whose children are the units; all ranks give the same.
        comm: ranks, one per module; twice, three times, ... as many for data replicas, each of which is given batches
            of its own; None or one rank: all modules in this process.
        loss: of output and labels, the mean over the samples.
        optimizer: makes an optimiser of torch.optim from a list of parameters.
        modules: K; None: as many as ranks.
        cuts: as for `lpnet.fdg.decoupled.FDG`.
        micro_batches: M, parts of a batch; a batch of fewer samples has as many parts as samples.
        order: gpipe | 1f1b.
        scheduler: makes a learning-rate scheduler from an optimiser; it steps once per batch.
        clip_norm: largest norm of all gradients; None: no clipping.
        autocast: bfloat16 or float16, for torch.autocast; None: off.
        seed: of the dropout masks.
        example: (samples, labels) to measure the cuts on.

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
        micro_batches: int = 4,
        order: PipelineOrder = "1f1b",
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        seed: int = 0,
        example: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.micro_batches, self.order = micro_batches, order

        def settings(count: int) -> Options:
            actions(order, 1, 1, micro_batches)
            return Options(Schedule(count, "bp"), clip_norm=clip_norm, autocast=autocast, seed=seed)

        super().__init__(
            network,
            comm=comm,
            modules=modules,
            cuts=cuts,
            makers=Makers(loss, optimizer, scheduler),
            options=settings,
            example=example,
            more=(micro_batches, order),
        )

    def _make_member(self, module: int, chain: Chain, box: Mailbox) -> PipelineMember:
        most = held(self.order, module, self.modules, self.micro_batches)
        stage = make_stage(self.options, self._makers, module, chain, capacity=most)
        update = make_update(self.options, self._makers, module, stage)
        return PipelineMember(
            module, stage, update, box, self.place, order=self.order, micro_batches=self.micro_batches
        )

    def step(self, x: Tensor | None, y: Tensor | None) -> StepReport:
        """One update from one batch. Neighbour messages only.

        The first step of cuts by_cost without an example measures them, which is collective.

        Args:
            x: samples (batch, ...), needed on the rank of module 1.
            y: labels (batch, ...), needed on the rank of module K; ranks between need one of the two.

        Raises:
            NumericsError: on every rank: a number is not finite; names module, batch and unit. No module has learnt.
            UsageError: samples or labels are missing, or differ between the ranks.
            LpnetError: another module has failed; its error.
        """
        with self._guarded("step"):
            if not self.members:
                self._build(x, y)
            batch = self.batches
            seconds, receive, send = self.stopwatch.drive(
                self.members, self._boxes, [member.run_step(batch, x, y) for member in self.members]
            )
            self._raise_failure()
            self.batches += 1
            for member in self.members:
                member.origin = self.batches
            first = self.members[0]
            return StepReport(
                tick=batch,
                batch=batch,
                loss=first.loss,
                staleness=0,
                grad_norm=first.norm if self.options.clip_norm is not None else None,
                seconds=seconds,
                wait_receive=receive,
                wait_send=send,
                stop=first.news.wish,
            )

    def flush(self) -> tuple[StepReport, ...]:
        """Nothing is in flight between two steps. No communication."""
        return ()
