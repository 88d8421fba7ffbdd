"""One logger for all of lpnet, `[lpnet 1/4 INFO] message`: standard logging, and no rank ever waits for another.

Rank 0 speaks on the terminal; of the others only warnings and errors are heard. The run folder keeps log.txt.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

NAME = "lpnet"


class _Prefix(logging.Formatter):
    """Puts the rank before every line, those of a traceback included."""

    def __init__(self, rank: int, size: int, *, clock: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._who = f"lpnet {rank}/{size}"
        self._clock = clock

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        prefix = f"[{self._who} {record.levelname}] "
        if self._clock:
            prefix = f"{self.formatTime(record, self.datefmt)} {prefix}"
        return "\n".join(prefix + line for line in super().format(record).splitlines() or [""])


class _File(logging.FileHandler):
    """A log file that a full disk or a lost folder silences and nothing else."""

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record."""
        with suppress(OSError):  # from opening the file; what writing raises goes to handleError
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop the record."""


def setup(rank: int = 0, size: int = 1, *, folder: str | Path | None = None, level: str = "INFO") -> logging.Logger:
    """Send the records of lpnet to the terminal and to FOLDER/log.txt. No communication.

    A second call replaces the first: once at the start, once more when the run folder is known.

    Args:
        rank: this rank; 0 shows everything from `level` on, the others only warnings.
        size: ranks of the job.
        folder: run folder, where it exists.
        level: DEBUG | INFO | WARNING.
    """
    logger = logging.getLogger(NAME)
    close()
    mine = level if rank == 0 else max(logging.WARNING, logging.getLevelNamesMapping()[level])
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if folder is not None:
        # opened by the first record: ranks without a warning never touch the file
        handlers.append(_File(Path(folder) / "log.txt", encoding="utf-8", delay=True))
    for handler in handlers:
        handler.setLevel(mine)
        handler.setFormatter(_Prefix(rank, size, clock=isinstance(handler, _File)))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return logger


def close() -> None:
    """Undo `setup`. No communication."""
    logger = logging.getLogger(NAME)
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, _Prefix):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
