"""A run that makes no progress ends, and says where every rank stands: Python stacks and last messages.

The ranks begin a step within a step of each other, so each notices a stall by itself; none needs a message, which might
never arrive. The report comes from a thread; a rank stuck in C code that keeps Python's lock is reported, and ended, by
a timer of `faulthandler`, which needs no lock.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from typing import Any

from lpnet.errors import LpnetError
from lpnet.parallel import comm as communicators
from lpnet.parallel.launch import keep_error

GRACE_S = 2.0
"""From the reports of all ranks to the end of the job: they began the step up to a step after each other."""


class Watchdog:
    """Ends the job where two beats lie too far apart; use with `with`, or `start` and `stop`.

    Args:
        stall_s: seconds allowed; None: nothing is watched.
        rank: this rank.
        size: ranks of the job.
        mpi: an mpi4py communicator, for its Abort; None: one rank, or emulated ones, which are not watched.
    """

    def __init__(self, stall_s: float | None, *, rank: int = 0, size: int = 1, mpi: Any = None) -> None:
        self._stall = stall_s if size == 1 or mpi is not None else None
        self._rank, self._size, self._mpi = rank, size, mpi
        self._slack = min((stall_s or 0) / 4, 5.0)
        self._what, self._at, self._armed = "start", 0.0, float("-inf")
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to watch. No communication."""
        if self._stall is None or self._thread is not None:
            return
        self.beat("start")
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, args=(self._stall,), name="lpnet-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. No communication."""
        if self._thread is not None:
            self._over.set()
            self._thread = None
            faulthandler.cancel_dump_traceback_later()

    def beat(self, what: str) -> None:
        """There is progress: `what` begins. No communication."""
        if self._stall is None:
            return
        self._what, self._at = what, time.monotonic()
        # setting the timer starts a thread, which is too much for every step
        if self._at - self._armed > self._slack:
            self._armed = self._at
            limit = self._stall + self._slack + 1.0  # when the thread, if it can run, has reported
            if limit < threading.TIMEOUT_MAX:
                faulthandler.dump_traceback_later(limit, exit=True)

    def _watch(self, stall: float) -> None:
        while not self._over.wait(min(stall / 20, 0.5)):
            late = time.monotonic() - self._at
            if late > stall:
                faulthandler.cancel_dump_traceback_later()
                self._report(late)
                if not self._over.wait(self._slack + 1.0 + GRACE_S):
                    self._end()
                return

    def _report(self, late: float) -> None:
        """Print where this rank stands."""
        lines = [f"{self._what} has taken {late:.1f} s, and run.stall_s is {self._stall:g}: the job ends"]
        for comm in list(communicators.living):
            lines.append(f"messages between {comm.size} ranks: {comm.traffic.last()}")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines.append(f"stack of {names.get(ident, 'a thread')}:")
                lines += [line for part in traceback.format_stack(frame) for line in part.rstrip("\n").split("\n")]
        text = "".join(f"[lpnet {self._rank}/{self._size} ERROR] {line}\n" for line in lines)
        os.write(2, text.encode(errors="replace"))
        keep_error(LpnetError("\n".join(lines)))

    def _end(self) -> None:
        if self._mpi is not None and self._size > 1:
            self._mpi.Abort(1)
        os._exit(1)
