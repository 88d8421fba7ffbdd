"""When a run must stop early: a signal, a file named STOP in the run folder, or the end of the job's time.

Asked for between the steps, on every rank and without a message; the wish of one rank rides on a reduction that the
step makes anyway, so that all ranks stop at the same step.

    touch RUN/STOP             stops with a checkpoint and exit code 75; the file is then renamed to STOPPED
    echo hold > RUN/STOP       the same, and the job scripts put the job back into the queue on hold
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lpnet.parallel import signals

log = logging.getLogger("lpnet.train")

STOP, STOPPED = "STOP", "STOPPED"
FILE_EVERY_S = 0.5
"""Seconds between two looks for the file: a network file system takes a millisecond to answer."""


class Stopping:
    """Watches for reasons to stop.

    Args:
        folder: run folder.
        rank: this rank; rank 0 watches file and clock, every rank its signals.
        margin_s: seconds to keep free before the end of the job's time.
        environ: in place of os.environ, for SLURM_JOB_END_TIME (seconds since 1970).
        clock: in place of time.time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        margin_s: float = 0.0,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file, self._rank, self._margin, self._clock = folder / STOP, rank, margin_s, clock
        text = (os.environ if environ is None else environ).get("SLURM_JOB_END_TIME", "")
        self._end = float(text) if text.isdecimal() and rank == 0 else None
        self._longest = self._save = 0.0
        self._steps = 0
        self._began: float | None = None
        self._next_look = 0.0
        self.reason: str | None = None
        if rank == 0:
            with suppress(OSError):  # of a start before
                (folder / STOPPED).unlink()

    def requested(self) -> bool:
        """Whether this rank wants to stop, for which `reason` is then set. No communication."""
        if self.reason is None:
            self.reason = self._signal() or self._time() or self._stop_file()
            if self.reason is not None:
                log.info("will stop with a checkpoint: %s", self.reason)
        return self.reason is not None

    def begin_step(self) -> bool:
        """`requested`, at the start of a step: measures how long a step takes, with all that is between two of them."""
        now = self._clock()
        if self._began is not None:
            self._steps += 1
            # the first one starts cold and tells nothing about the others
            self._longest = now - self._began if self._steps <= 2 else max(self._longest, now - self._began)
        self._began = now
        return self.requested()

    def saved(self, seconds: float) -> None:
        """Take note of how long a save took. No communication."""
        self._save = max(self._save, seconds)

    def done(self) -> None:
        """The run has stopped, with a checkpoint: rename the file that asked for it. No communication."""
        if self._rank == 0:
            with suppress(OSError):
                os.replace(self._file, self._file.with_name(STOPPED))

    def _signal(self) -> str | None:
        return signals.received()

    def _time(self) -> str | None:
        if self._end is None:
            return None
        # a wish is heard at the end of the step that is about to begin, which is one more
        left, needed = self._end - self._clock(), 2 * self._longest + self._save + self._margin
        if left > needed:
            return None
        return (
            f"{max(left, 0):.0f} s are left of the job's time, and {needed:.0f} s are kept free (run.stop_margin_s "
            f"{self._margin:g}, steps of {self._longest:.2g} s, saves of {self._save:.2g} s)"
        )

    def _stop_file(self) -> str | None:
        now = time.monotonic()
        if self._rank != 0 or now < self._next_look:
            return None
        self._next_look = now + FILE_EVERY_S
        return f"found {self._file}" if self._file.exists() else None
