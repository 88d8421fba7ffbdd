"""One module's ticks in decoupled training: take, compute, post, in the order of the schedule.

    [1] take gradient   [2] backward   [3] post input gradient   [4] update   [5] take input   [6] forward   [7] post

or forward first. Every tick one message goes to each neighbour, with a tensor or without: it carries the news of the
run.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

from torch import Tensor

from lpnet.fdg.gauge import Gauge
from lpnet.fdg.mailbox import Mailbox, Stream
from lpnet.fdg.member import Member, Need, Work
from lpnet.fdg.message import NO_NEWS, Message, dense, digest, expect
from lpnet.fdg.place import Place
from lpnet.fdg.schedule import Schedule
from lpnet.fdg.stage import Stage
from lpnet.fdg.update import Update
from lpnet.io import trace


@dataclass(frozen=True)
class Landing:
    """A batch whose gradient has landed on a module.

    Args:
        batch: its id.
        loss: of this batch, before any module learnt from it.
        staleness: updates made on this module between its forward and its update.
        norm: norm of the gradients of this module and all behind it, where clipping asks for it.
    """

    batch: int
    loss: float
    staleness: int
    norm: float | None


class Worker(Member):
    """One module at work. Neighbour messages only.

    Args:
        module: which one, counted from 1.
        schedule: the delay table.
        stage: its units.
        update: its optimiser.
        mailbox: its ends of the queues.
        place: the ranks it shares its work with.
        shrink: beta.
    """

    def __init__(
        self,
        module: int,
        schedule: Schedule,
        stage: Stage,
        update: Update,
        mailbox: Mailbox,
        place: Place,
        *,
        shrink: float = 1.0,
    ) -> None:
        super().__init__(module, stage, update, mailbox, place)
        self.schedule = schedule
        self.inputs: dict[int, Tensor] = {}
        self.landing: Landing | None = None
        self.gauges: dict[int, Gauge] = {}  # of batches whose staleness is measured
        self._shrink = shrink
        self._taken: set[str] = set()
        self._posted: set[str] = set()
        self._loss = math.nan

    def feed(self, batch: int, x: Tensor | None, y: Tensor | None) -> None:
        """Give the module the batch that module 1 takes at the next tick. No communication.

        Args:
            batch: its id.
            x: samples; needed on the first module only.
            y: labels; needed on the last module only.

        Raises:
            UsageError: what is needed is missing.
        """
        self.check_ends(batch, x, y)
        # stashed for some ticks, in which a loader may use its memory again
        keep = self.modules > 1
        if self.is_first and x is not None:
            self.inputs[batch] = dense(x).clone() if keep else x.detach()
        if self.is_last and y is not None:
            self.labels[batch] = y.detach().clone() if keep else y
        if keep:
            self.digests[batch] = (digest(x), digest(y))

    # ticks

    def run_tick(self, batches: int | None) -> Work:
        """Everything this module does at the next tick of the schedule.

        Args:
            batches: how many there are in all, counted from the origin; None: no end.
        """
        self.landing, self._taken, self._posted = None, set(), set()
        receives: list[Stream] = [stream for stream in ("gradient", "activation") if self._due(stream)]
        self.mailbox.prepare(*receives)
        for action in self.schedule.actions(self.module, self.since, batches):
            if action.kind == "F":
                yield from self._forward(action.batch)
            else:
                yield from self._backward(action.batch)
        for stream in receives:
            if stream not in self._taken:
                yield from self.take(stream)
        yield from self._post_news()
        self.tick += 1
        self.since += 1

    def _due(self, stream: Stream) -> bool:
        """Whether a message of the stream is to be used at this tick: the neighbour made one `lag` ticks ago."""
        up = stream == "activation"
        neighbour = not self.is_first if up else not self.is_last
        lag = self.schedule.forward_lag if up else self.schedule.backward_lag
        return neighbour and self.since >= lag

    def take(self, stream: Stream) -> Generator[Need, None, Message]:
        """The next message of a stream, whose news are heard. Neighbour messages only."""
        message = yield from super().take(stream)
        self._taken.add(stream)
        return message

    def post(self, stream: Stream, message: Message) -> Work:
        """Send a message, the news with it. Neighbour messages only."""
        yield from super().post(stream, message)
        self._posted.add(stream)

    def _post_news(self) -> Work:
        """A message without a tensor to the neighbours that have not heard from this tick."""
        if self.is_last and self.place.peers is None and self.place.group is None:
            self._decide()
        if not self.is_last and "activation" not in self._posted:
            yield from self.post("activation", Message())
        if not self.is_first and "gradient" not in self._posted:
            yield from self.post("gradient", Message())

    def _decide(self) -> None:
        """The last module turns the first wish or failure into the tick at which all modules stop.

        News travel one module per tick, so that all know it K - 1 ticks from now. Where several ranks decide, they do
        so when they have shared their news, at the backward.
        """
        if self.news.stop_at == NO_NEWS and (self.news.wish or self.news.failure is not None):
            self.news = replace(self.news, stop_at=self.tick + self.modules - 1)

    # forward

    def _forward(self, number: int) -> Work:
        batch = self.origin + number
        x: Tensor | None
        mine = self.digests.pop(batch, (0, 0))
        if self.is_first:
            x, sums = self.inputs.pop(batch), mine
        else:
            message = expect((yield from self.take("activation")), batch, "activation", self.module)
            x, sums = message.tensor, message.digest
            self.check_same(batch, sums, mine)
        assert x is not None
        y = self.labels.pop(batch, None)
        predicted = self.update.predict(number) if self.news.failure is None else None
        if batch in self.gauges:
            self.gauges[batch].forward(self.update.parameters if predicted is None else predicted)
        span = trace.begin()
        out = self.stage.forward(batch, x, y, version=self.update.version, predicted=predicted)
        trace.end(span, "forward", module=self.module, batch=batch)
        self.check_output(batch, batch, out)
        if self.is_last:
            self._loss = float(out)
        else:
            yield from self.post("activation", Message(batch, out, digest=sums))

    # backward

    def _backward(self, number: int) -> Work:
        batch, gradient, loss, behind = self.origin + number, None, self._loss, 0.0
        if not self.is_last:
            message = expect((yield from self.take("gradient")), batch, "gradient", self.module)
            gradient, loss, behind = message.tensor, message.loss, message.square
            if self._shrink != 1.0 and gradient is not None:
                gradient.mul_(self._shrink)
        span = trace.begin()
        back, gradients = self.backward(batch, gradient)
        trace.end(span, "backward", module=self.module, batch=batch)
        if batch in self.gauges:
            self.gauges.pop(batch).land(gradients)
        loss = self.check_gradients(batch, gradients, loss)
        if self.is_last:
            self._decide()
        self.update.add(gradients)
        complete = self.update.complete
        square = self._clip(behind) if complete else 0.0
        if not self.is_first:
            yield from self.post("gradient", Message(batch, back, loss=loss, square=square))
        staleness = self.schedule.outstanding(self.module, number, self.update.accumulate)
        if complete:
            self._apply(staleness)
        self.update.next_batch()
        self.landing = Landing(batch, loss, staleness, math.sqrt(square) if complete and square else None)

    def _clip(self, behind: float) -> float:
        """Make the waiting gradients the mean, clipped; the squared norm of this module's and those behind."""
        self.update.average()
        square = self.square() + behind
        self.update.clip(square)
        return square

    def _apply(self, staleness: int) -> None:
        span = trace.begin()
        if self.news.failure is None:
            self.update.apply(staleness)
        else:  # nothing is learnt from numbers that are not finite, nor after them
            self.update.skip()
        trace.end(span, "update", module=self.module)

    def close_group(self, number: int) -> Work:
        """Update from the batches that wait for an accumulation to be complete, with their mean.

        Args:
            number: the latest batch, counted from the start of the schedule.
        """
        if not self.update.grouped:
            return
        behind = 0.0
        if self.update.clips and not self.is_last:
            behind = (yield from self.take("closing")).square
        square = self._clip(behind)
        if self.update.clips and not self.is_first:
            yield from self.post("closing", Message(square=square))
        self._apply(self.schedule.outstanding(self.module, number, self.update.accumulate))

    def agree(self) -> Work:
        """Take what the last tick left in the queues; merge the news of all modules, up to the last and down again."""
        for stream in self.parked():
            yield from self.take(stream)
        if not self.is_first:
            yield from self.take("evaluation")
        if not self.is_last:
            yield from self.post("evaluation", Message())
            yield from self.take("closing")
        if not self.is_first:
            yield from self.post("closing", Message())

    def parked(self) -> list[Stream]:
        """Streams with a message that was made at the last tick, to be used at the next."""
        out: list[Stream] = []
        if self.since and not self.is_first and self.schedule.forward_lag:
            out.append("activation")
        if self.since and not self.is_last and self.schedule.backward_lag:
            out.append("gradient")
        return out
