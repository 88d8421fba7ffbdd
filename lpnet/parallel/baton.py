"""Who runs: one thread per emulated rank, a baton that exactly one of them holds, and what all of them wait for.

A rank runs until it has to wait; then the baton goes to the rank that has been able to run the longest. Receives name
their source and tag, so results and virtual times do not depend on that order. When no rank can run, that is a
deadlock, found at once and reported as who waits for whom. torch's gradient and inference modes belong to threads,
which is why ranks are threads and not coroutines.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from lpnet.errors import LpnetError

HERE = str(Path(__file__).parent)
STACK_BYTES = 16 << 20


class DeadlockError(LpnetError):
    """No rank can go on; the message says who waits for whom."""


class Stopped(BaseException):
    """Unwinds a rank because another one has failed. No error of its own."""


def caller() -> str:
    """FILE:LINE of the innermost frame outside lpnet.parallel."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Baton:
    """Threads of which one runs at a time.

    Args:
        ranks: how many.
        shuffle: seed of a random choice among the ranks that can run; None: first come, first served.
    """

    def __init__(self, ranks: int, shuffle: int | None = None) -> None:
        self.ranks = ranks
        self.error: BaseException | None = None
        self.stopping = False
        self.switches = 0
        self.waiting: dict[int, tuple[str, str]] = {}  # rank -> what it waits for, where
        self.hints: Callable[[], list[str]] = list  # further lines of a deadlock's report
        self._alive = set(range(ranks))
        self._ready: deque[int] = deque()
        self._random = random.Random(shuffle) if shuffle is not None else None
        self._locks = [threading.Lock() for _ in range(ranks)]
        self._done = threading.Event()
        for lock in self._locks:
            lock.acquire()

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Run one work per rank to its end; raises what the first failing rank raised."""
        before = threading.stack_size(STACK_BYTES)
        try:
            threads = [
                threading.Thread(target=self._main, args=(rank, work), name=f"rank {rank}", daemon=True)
                for rank, work in enumerate(works)
            ]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        self._ready.extend(range(self.ranks))
        self._hand_over()
        while True:
            try:
                self._done.wait()
                break
            except KeyboardInterrupt as interrupt:  # the ranks unwind one after another, then it is raised here
                self._fail(interrupt)
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def wait(self, rank: int, what: str) -> None:
        """Give the baton away until `wake(rank)`. Only the running rank calls it."""
        if self.stopping:
            raise Stopped
        self.waiting[rank] = (what, caller())
        self._switch(rank)

    def give_way(self, rank: int) -> None:
        """Let the others run first."""
        if self.stopping:
            raise Stopped
        self._ready.append(rank)
        self._switch(rank)

    def wake(self, rank: int) -> None:
        """What a waiting rank waits for has happened."""
        if self.waiting.pop(rank, None) is not None:
            self._ready.append(rank)

    def _switch(self, rank: int) -> None:
        chosen = self._next()
        if chosen != rank:
            self.switches += 1
            self._locks[chosen].release()
            self._locks[rank].acquire()
        if self.stopping:
            raise Stopped

    def _next(self) -> int:
        """The rank to run; a deadlock ends all."""
        if not self.stopping and not self._ready:
            self._fail(DeadlockError(self._report()))
        if self.stopping:
            return min(self._alive)
        if self._random is not None:
            self._ready.rotate(self._random.randrange(len(self._ready)))
        return self._ready.popleft()

    def _main(self, rank: int, work: Callable[[], None]) -> None:
        self._locks[rank].acquire()
        try:
            if not self.stopping:
                work()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._alive.discard(rank)
            self._hand_over()

    def _hand_over(self) -> None:
        if self._alive:
            self._locks[self._next()].release()
        else:
            self._done.set()

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self.stopping = True

    def _report(self) -> str:
        lines = [
            f"deadlock: {len(self.waiting)} of {self.ranks} ranks wait for ever"
            + (f", {self.ranks - len(self._alive)} have finished" if len(self._alive) < self.ranks else "")
        ]
        lines += [f"  rank {rank} waits for {what}, at {place}" for rank, (what, place) in sorted(self.waiting.items())]
        return "\n".join([*lines, *self.hints()])
