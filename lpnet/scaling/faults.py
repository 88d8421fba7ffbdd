"""Faults of an emulated command as words: --faults delay=0-1:1e-3,jitter=1e-5,reorder,kill=3@10,seed=1. Pure data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lpnet.errors import UsageError
from lpnet.parallel.world import Faults

FORM = "delay=SOURCE-DEST:SECONDS (repeatable), jitter=SECONDS, reorder, kill=RANK@STEP, seed=N, separated by commas"


def read_faults(text: str, ranks: Sequence[int]) -> Faults:
    """The faults that words ask for. No communication.

    Args:
        text: as --faults has it.
        ranks: rank counts of the emulations; every rank named must be in each of them.

    Raises:
        UsageError: another form, a number out of range, a rank that there is not.
    """
    delay: dict[tuple[int, int], float] = {}
    jitter, reorder, kill, seed = 0.0, False, None, 0
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        try:
            if name == "delay":
                pair, seconds = value.split(":")
                source, dest = pair.split("-")
                delay[_rank(source, ranks), _rank(dest, ranks)] = _seconds(seconds)
            elif name == "jitter":
                jitter = _seconds(value)
            elif name == "reorder" and not value:
                reorder = True
            elif name == "kill":
                rank, step = value.split("@")
                kill = _rank(rank, ranks), _whole(step)
            elif name == "seed":
                seed = _whole(value)
            else:
                raise ValueError("not one of them")
        except ValueError as error:
            raise UsageError(f"--faults has {word.strip()!r} ({error}); expected {FORM}") from error
    return Faults(delay, jitter, reorder, kill, seed)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _rank(text: str, ranks: Sequence[int]) -> int:
    if _whole(text) >= min(ranks):
        raise ValueError(f"there is no rank {text} of {min(ranks)}")
    return int(text)


def _seconds(text: str) -> float:
    if not (math.isfinite(value := float(text)) and value >= 0):
        raise ValueError(f"{text} seconds; they must not be negative")
    return value
