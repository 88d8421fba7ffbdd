"""Signals that ask a run to stop: noted by a handler that does nothing else, asked for between the steps.

SLURM announces the end of a job by a signal (`--signal`), mpirun hands SIGUSR1 on to the ranks. A handler of Python
runs when the main thread comes back from MPI, so it may neither save nor send: the ranks agree on a step to stop at.
Importing this module installs nothing.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

STOPPING = (signal.SIGUSR1, signal.SIGTERM)
"""SIGUSR1 comes minutes before the end; after SIGTERM mpirun leaves about a second."""

_received: list[int] = []
_before: dict[int, Any] = {}


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(number)


def install() -> None:
    """Note stop signals from now on, in place of being ended by them; main thread only. No communication."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOPPING:
        if number not in _before:
            _before[number] = signal.signal(number, _note)


def restore(*, at_exit: bool = False) -> None:
    """Undo `install`, and forget what was noted. No communication.

    Args:
        at_exit: the process does nothing more but end. SIGUSR1 is then ignored: it would end the process by itself, and
            with that the job of a run that is done.
    """
    _received.clear()
    while _before:
        number, handler = _before.popitem()
        if at_exit and number == signal.SIGUSR1:
            handler = signal.SIG_IGN
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def received() -> str | None:
    """The name of the first stop signal that this rank has noted; None where there was none. No communication."""
    return signal.Signals(_received[0]).name if _received else None
