"""The clock of an emulated rank: what it computes advances it by what such work costs, measured as it is done.

Every stretch of work between two events (messages, spans, groups of layer evaluations) has a key that says what is done
and on how much, never by which rank; the clock advances by the median of the thread's processor time over all stretches
of the key so far. Raw times would bias a prediction upward: the slowest of 256 noisy ranks counts at every meeting.
No communication.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np

from lpnet.parallel.warmth import Cache, operands, touch

Compute = Literal["median", "cpu", "none"]
MOST = 129  # samples per key; the median moves no more after that many


class Costs:
    """Processor time by key, shared by all ranks of an emulation.

    Args:
        compute: median of the key so far | cpu: the raw time | none: work takes no time, only messages do.
        cache: bytes of cache that a rank has to itself; what it used last is warm.
    """

    def __init__(self, compute: Compute = "median", cache: float = 0.0) -> None:
        self.compute, self.cache = compute, cache
        self._samples: dict[Hashable, list[int]] = {}

    def charge(self, key: Hashable, nanoseconds: int) -> float:
        """Note one stretch of work; the seconds that it counts for."""
        if self.compute == "cpu":
            return nanoseconds * 1e-9
        if self.compute == "none":
            return 0.0
        samples = self._samples.get(key)
        if samples is None:
            samples = self._samples[key] = []
        if len(samples) < MOST:
            insort(samples, nanoseconds)
        return samples[(len(samples) - 1) // 2] * 1e-9

    def forget(self) -> None:
        """Start anew: what was measured belongs to a warm-up."""
        self._samples.clear()


class Meter:
    """The virtual clock of one rank. Only the thread of the rank calls it.

    Args:
        costs: shared by the ranks.
        place: first | middle | last, whose work around opening and closing differs, or another name of a kind of work.
    """

    def __init__(self, costs: Costs, place: Hashable) -> None:
        self.costs, self.place = costs, place
        self._cache = Cache(costs.cache)
        self.now = 0.0
        self._last: Hashable = "start"
        self._position = 0
        self._mark = 0

    def start(self) -> None:
        """The rank's thread begins."""
        self._mark = time.thread_time_ns()

    def pause(self, key: Hashable) -> None:
        """An event begins: the work since the event before is counted."""
        spent = time.thread_time_ns() - self._mark
        self.now += self.costs.charge((self.place, self._last, key), spent)
        self._last = key

    def resume(self) -> None:
        """The event is over."""
        self._mark = time.thread_time_ns()

    def exclude(self, nanoseconds: int) -> None:
        """Time since the latest event that is no work of the rank: copying of messages."""
        self._mark += nanoseconds

    def arrived(self, array: np.ndarray) -> None:
        """A message has been put into an array."""
        self._cache.lose(array)

    def position(self) -> int:
        """How many sums have been started one after another: what lies between two of them differs."""
        following = isinstance(self._last, tuple) and self._last[0] == "isum"
        self._position = self._position + 1 if following else 0
        return self._position

    def read(self, key: Hashable = "read") -> float:
        """Virtual seconds."""
        self.pause(key)
        self.resume()
        return self.now

    def read_ns(self, span: str = "") -> int:
        """Virtual nanoseconds, for traces: at the beginning of a span, or at the end of one by its name."""
        return int(self.read(("span", span)) * 1e9)

    def metered(self, key: Hashable, ops: Sequence[Callable[[], object]], warm: bool = True) -> Callable[[], None]:
        """The work of `ops` as one stretch with a key of its own.

        Args:
            key: what is done, and on how much.
            ops: what is done.
            warm: False: on something that has just come from elsewhere.
        """
        used = self._cache.placed(operands(ops)) if self.costs.cache else []

        def run() -> None:
            self.pause(key)
            held = self._cache.use(used)
            if warm:
                touch(held)
            began = time.thread_time_ns()
            for op in ops:
                op()
            self.now += self.costs.charge(key, time.thread_time_ns() - began)
            self._mark = time.thread_time_ns()

        return run
