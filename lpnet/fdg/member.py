"""One module of a cut network: what all ways of training share: messages, news of the run, evaluation.

Work is written as generators that say before every message what they need, so that the same code runs on a rank of its
own (where `take` and `post` wait) and side by side with the other modules of one process (where it is resumed when the
message is there).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from lpnet.errors import LpnetError, UsageError
from lpnet.fdg.chain import is_finite
from lpnet.fdg.mailbox import Mailbox, Stream
from lpnet.fdg.message import KINDS, Failure, Message, News, expect
from lpnet.fdg.place import Place
from lpnet.fdg.stage import Stage
from lpnet.fdg.update import Update
from lpnet.parallel.replicas import GradientMean, sum_over
from lpnet.parallel.shard import Shard


@dataclass(frozen=True)
class Need:
    """What a generator waits for: a message of a stream, or room for one more in it."""

    kind: Literal["message", "room"]
    stream: Stream


Work = Generator[Need, None, None]
Gradients = dict[str, Tensor]
Score = Callable[[Tensor, Tensor | None], Sequence[float]]
"""Of an output and its labels: at most 8 numbers that are summed over all batches."""


class Member:
    """One module. Neighbour messages only.

    Args:
        module: which one, counted from 1.
        modules: K.
        stage: its units.
        update: its optimiser.
        mailbox: its ends of the queues.
        place: the ranks it shares its work with.
    """

    def __init__(self, module: int, stage: Stage, update: Update, mailbox: Mailbox, place: Place) -> None:
        self.module, self.modules, self.stage, self.update, self.mailbox = module, place.modules, stage, update, mailbox
        self.place = place
        self._mean = GradientMean(place.peers, update.parameters, mailbox.wait) if place.peers is not None else None
        self.news = News()
        self.tick = 0  # steps since the very beginning
        self.origin = 0  # the first batch whose schedule is still running
        self.since = 0  # ticks since that schedule began
        self.labels: dict[int, Tensor] = {}  # of batches on their way here
        self.digests: dict[int, tuple[int, int]] = {}
        self.sums: tuple[float, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this module reads the samples."""
        return self.module == 1

    @property
    def is_last(self) -> bool:
        """Whether this module makes the loss."""
        return self.module == self.modules

    def wish(self) -> None:
        """Ask all modules to stop. No communication: it rides on the next messages."""
        self.news = replace(self.news, wish=True)

    def parked(self) -> list[Stream]:
        """Streams with a message that was made at the last tick, to be used at the next."""
        return []

    # messages

    def take(self, stream: Stream) -> Generator[Need, None, Message]:
        """The next message of a stream, whose news are heard. Neighbour messages only."""
        yield Need("message", stream)
        message = self.mailbox.take(stream)
        self.news = self.news.merged(message.news)
        return message

    def post(self, stream: Stream, message: Message) -> Work:
        """Send a message, the news with it. Neighbour messages only."""
        yield Need("room", stream)
        self.mailbox.post(stream, replace(message, news=self.news))

    def check_ends(self, batch: int, x: Tensor | None, y: Tensor | None) -> None:
        """Refuse a batch that lacks what this module needs of it. No communication.

        Raises:
            UsageError: samples are missing on the first module, or labels on the last.
        """
        if (self.is_first and x is None) or (self.is_last and y is None):
            raise UsageError(
                f"batch {batch} comes without {'samples' if self.is_first and x is None else 'labels'} on module "
                f"{self.module}/{self.modules}; only modules between the first and the last may do without"
            )

    def check_same(self, batch: int, theirs: tuple[int, int], mine: tuple[int, int]) -> None:
        """Refuse a batch that is another one than module 1 was given, by their digests. No communication.

        Raises:
            UsageError: samples or labels differ.
        """
        for what, their, my in zip(("samples", "labels"), theirs, mine, strict=True):
            if their and my and their != my:
                raise UsageError(
                    f"the {what} of batch {batch} on module {self.module}/{self.modules} are not those that module 1 "
                    "was given; every rank must be given the same batches in the same order"
                )

    # gradients

    def backward(self, number: int, gradient: Tensor | None, weight: float = 1.0) -> tuple[Tensor | None, Gradients]:
        """Gradients of a batch in flight, their mean where there are data replicas. Collective over those.

        Args:
            number: under which the stage keeps the batch.
            gradient: with respect to the output; None on the last module.
            weight: of the loss, on the last module.
        """
        if self._mean is None:
            return self.stage.backward(number, gradient, weight=weight)
        self._mean.begin()
        back, gradients = self.stage.backward(number, gradient, weight=weight, ready=self._mean.ready)
        return back, self._mean.finish(gradients)

    def square(self) -> float:
        """Squared norm of this module's gradients; 0 without clipping. Collective over the ranks that share it."""
        own = self.update.square()
        if self.place.group is None or not self.update.clips:
            return own
        return sum_over(self.place.group, [own], self.mailbox.wait)[0]

    # numbers that are not finite

    def check_output(self, batch: int, flight: int, out: Tensor) -> None:
        """Note a failure where an output is not finite. No communication.

        Args:
            batch: to be named.
            flight: under which the stage keeps it.
            out: output of the module, or the loss.
        """
        if self.news.failure is None and not is_finite(out):
            unit, kind = self.stage.diagnose(flight)
            self._fail(batch, unit, kind)

    def check_gradients(self, batch: int, gradients: Mapping[str, Tensor], loss: float) -> float:
        """Note a failure where a gradient is not finite, and share the news. Collective, see below.

        Over the ranks that share the module, and on the last module over the data replicas; no communication elsewhere.

        Args:
            batch: to be named.
            gradients: of this rank.
            loss: of the batch.

        Returns:
            Mean loss of the data replicas on the last module, the loss given elsewhere.
        """
        name = self.update.not_finite(gradients) if self.news.failure is None else None
        unit = self.stage.chain.unit_of(name) if name is not None else -1
        group, peers, wait = self.place.group, self.place.peers if self.is_last else None, self.mailbox.wait
        if group is not None:
            bad, wishes = sum_over(group, [float(unit >= 0), float(self.news.wish)], wait)
            unit = max(group.all_gather_objects(unit)) if bad else -1
            self.news = self.news.merged(News(wish=wishes > 0))
        if unit >= 0:
            self._fail(batch, unit, "gradient")
        if peers is not None:
            news = self.news
            values = [loss, float(news.wish), float(news.failure is not None)]
            total, wishes, failures = sum_over(peers, values, wait)
            for failure in peers.all_gather_objects(news.failure) if failures else []:
                self.news = self.news.merged(News(failure=failure))
            self.news = self.news.merged(News(wish=wishes > 0))
            loss = total / peers.size
        return loss

    def _fail(self, batch: int, unit: int, kind: str) -> None:
        failure = Failure(self.tick, self.module, batch, unit, KINDS.index(kind))
        self.news = self.news.merged(News(failure=failure))

    # parameters

    def shards(self) -> list[Shard]:
        """Parameters and buffers by global name, in the order of a state_dict. No communication."""
        out: list[Shard] = []
        seen: set[int] = set()
        for unit_name, unit in self.stage.chain.named_children():
            own: Callable[[], list[Shard]] | None = getattr(unit, "shards", None)
            if own is not None:  # shared by several ranks
                whole = getattr(unit, "global_names", False)
                out += own() if whole else [replace(shard, name=f"{unit_name}.{shard.name}") for shard in own()]
                continue
            kept = unit.state_dict()
            named = {**dict(unit.named_parameters()), **dict(unit.named_buffers())}
            for local in kept:
                if local in named and id(named[local]) not in seen:  # others are second names of tied parameters
                    seen.add(id(named[local]))
                    name = f"{unit_name}.{local}"
                    out.append(Shard(name, self.update.parameters.get(name, named[local])))
        return out

    # evaluation

    def evaluate(self, batches: Iterable[tuple[Tensor | None, Tensor | None]], score: Score) -> Work:
        """Forward only, batch after batch; `sums` holds the summed scores on every module in the end.

        Args:
            batches: samples (needed on the first module) and labels (on the last one).
            score: of output and labels, on the last module.

        Raises:
            UsageError: no samples on the first module.
            LpnetError: the modules were not given the same number of batches.
        """
        self.sums = ()
        number = 0
        for x, y in batches:
            if not self.is_first:
                x = expect((yield from self.take("evaluation")), number, "evaluation", self.module).tensor
            if x is None:
                raise UsageError(f"evaluation batch {number} comes without samples on module 1")
            out = self.stage.evaluate(x)
            if self.is_last:
                sums = [float(value) for value in score(out, y)]
                self.sums = tuple(a + b for a, b in zip(self.sums or [0.0] * len(sums), sums, strict=True))
            else:
                yield from self.post("evaluation", Message(number, out))
            number += 1
        yield from self._share(number)

    def _share(self, number: int) -> Work:
        """Check that all modules saw as many batches, and hand the last one's sums down."""
        if not self.is_first:
            message = yield from self.take("evaluation")
            if message.batch != number or message.tensor is not None:
                raise LpnetError(
                    f"module {self.module}/{self.modules} was given {number} batches for evaluation, and "
                    "the module before it has more; give all ranks the same"
                )
        if not self.is_last:
            yield from self.post("evaluation", Message(number))
            self.sums = (yield from self.take("closing")).sums
        elif self.place.peers is not None and self.sums:
            self.sums = tuple(sum_over(self.place.peers, list(self.sums), self.mailbox.wait))
        if not self.is_first:
            yield from self.post("closing", Message(sums=self.sums))


def _real_seconds(_: Hashable) -> float:
    return time.perf_counter()


def drive(
    members: Sequence[Member], works: Sequence[Work], *, clock: Callable[[Hashable], float] = _real_seconds
) -> list[float]:
    """Run the work of all modules of this process to its end, each as far as its messages allow.

    Args:
        members: the modules.
        works: of each.
        clock: seconds, from a word for the work up to then.

    Returns:
        Seconds that each module's work took, waiting for other ranks included.

    Raises:
        LpnetError: none of them can go on.
    """
    seconds = [0.0] * len(works)
    if len(works) == 1:  # a rank of its own: `take` and `post` wait
        began = clock("before")
        for _ in works[0]:
            pass
        return [clock("work") - began]
    parts = [0] * len(works)

    def resume(place: int, work: Work) -> Need | None:
        began = clock("before")
        need = next(work, None)
        parts[place] += 1
        seconds[place] += clock((members[place].module, parts[place])) - began
        return need

    left = [(place, members[place], work, resume(place, work)) for place, work in enumerate(works)]
    while left := [item for item in left if item[3] is not None]:
        moved = False
        for row, (place, member, work, need) in enumerate(left):
            while need is not None and _met(member, need):
                moved, need = True, resume(place, work)
            left[row] = (place, member, work, need)
        if not moved:
            waits = ", ".join(f"module {member.module} for {need}" for _, member, _, need in left)
            raise LpnetError(f"no module can go on: {waits}")
    return seconds


def _met(member: Member, need: Need) -> bool:
    if need.kind == "message":
        return member.mailbox.ready(need.stream)
    return member.mailbox.vacant(need.stream)
