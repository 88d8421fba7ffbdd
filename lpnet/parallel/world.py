"""What the emulated ranks of one job share: messages under way, collectives, planned faults.

Only the rank that holds the baton touches any of it, so nothing here locks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lpnet.errors import LpnetError
from lpnet.parallel.baton import Baton
from lpnet.parallel.comm import Traffic
from lpnet.parallel.interconnect import NetworkModel
from lpnet.parallel.meter import Costs, Meter

if TYPE_CHECKING:
    from lpnet.parallel.requests import Receive

Envelope = tuple[int, int, int, int]
"""Number of the circle, rank that sends, rank that receives (both of the job), tag."""


class RankDiedError(LpnetError):
    """A rank died by a planned fault; the job has ended as under MPI."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose.

    Args:
        delay: extra seconds of every message of a pair (source, dest).
        jitter: every message takes up to this many seconds longer, at random.
        reorder: ranks that can run do so in random order, so that messages of different pairs overtake each other.
        kill: (rank, step): the rank dies when that training step begins.
        seed: of all random choices.
    """

    delay: Mapping[tuple[int, int], float] = field(default_factory=dict)
    jitter: float = 0.0
    reorder: bool = False
    kill: tuple[int, int] | None = None
    seed: int = 0


@dataclass
class Meeting:
    """One collective: who has come, with what. Ranks are those of the job.

    Args:
        kind: what it is.
        place: FILE:LINE of the first rank to come.
        by: that rank.
        come: virtual time at which every rank came.
        values: what it brought.
        waiters: rank to the one rank it needs; None: all.
        left: how many ranks have gone again.
    """

    kind: str
    place: str
    by: int
    come: dict[int, float] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    waiters: dict[int, int | None] = field(default_factory=dict)
    left: int = 0


class Circle:
    """The ranks of one communicator.

    Args:
        number: tells its messages from those of other circles.
        ranks: of the job, in the order of the circle.
    """

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number, self.ranks = number, tuple(ranks)
        self.meetings: dict[int, Meeting] = {}
        self.shared: dict[int, Any] = {}


@dataclass
class Life:
    """One rank of the job, whatever communicators it has.

    Args:
        rank: of the job.
        meter: its clock.
        waited: virtual seconds it waited for messages.
        patient: a test of a receive waits for the message.
        traffic: of every communicator.
    """

    rank: int
    meter: Meter
    waited: float = 0.0
    patient: bool = False
    traffic: list[Traffic] = field(default_factory=list)

    def arrive(self, time: float) -> None:
        """Something that happened at `time` has been waited for."""
        if time > self.meter.now:
            self.waited += time - self.meter.now
            self.meter.now = time

    def total(self) -> Traffic:
        """Counts over all communicators."""
        keys = ("messages", "bytes", "reductions", "broadcasts")
        return Traffic(*(sum(getattr(traffic, key) for traffic in self.traffic) for key in keys))


class World:
    """What the ranks of one emulation share; only the rank that holds the baton touches it."""

    def __init__(self, ranks: int, network: NetworkModel, costs: Costs, faults: Faults) -> None:
        self.ranks, self.network, self.costs, self.faults = ranks, network, costs, faults
        self.baton = Baton(ranks, faults.seed if faults.reorder else None)
        self.baton.hints = self.lost
        self.posted: dict[Envelope, deque[Receive]] = {}
        self.unexpected: dict[Envelope, deque[tuple[np.ndarray, float, str]]] = {}
        self.latest: dict[tuple[int, int], float] = {}
        self.circles = [Circle(0, range(ranks))]
        self.random = random.Random(faults.seed)

    def circle(self, ranks: Sequence[int]) -> Circle:
        """A new communicator's ranks."""
        made = Circle(len(self.circles), ranks)
        self.circles.append(made)
        return made

    def arrival(self, source: int, dest: int, size: int, now: float) -> float:
        """When a message arrives; messages of a pair keep their order."""
        extra = self.faults.delay.get((source, dest), 0.0)
        if self.faults.jitter:
            extra += self.faults.jitter * self.random.random()
        time = now + self.network.flight(source, dest, size) + extra
        time = self.latest[source, dest] = max(time, self.latest.get((source, dest), 0.0))
        return time

    def lost(self) -> list[str]:
        """Messages that nobody receives, for the report of a deadlock."""
        return [
            f"  rank {source} has sent rank {dest} a message with tag {tag} that is not received, at {place}"
            for (_, source, dest, tag), queue in sorted(self.unexpected.items())
            for _, _, place in queue
        ]
