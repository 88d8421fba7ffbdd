"""Caches of emulated ranks: what a rank computes on is read once more before its work is timed, where it would be warm.

All ranks' states pass through the caches of one processor, so that every rank finds its own gone when its turn comes;
on a processor of its own a small working set stays in the cache from one turn to the next. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

LINE = 64  # bytes of a cache line


class Resident:
    """The memory that one rank computes on.

    Args:
        cache: bytes of cache that a rank has to itself; 0: nothing is ever warm.
    """

    def __init__(self, cache: float) -> None:
        self._cache = cache
        self._spans: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        """Bytes that the rank computes on."""
        return sum(high - low for low, high in self._spans)

    def add(self, arrays: Iterable[np.ndarray]) -> None:
        """The rank computes on these too."""
        if not self._cache:
            return
        spans = sorted([*self._spans, *map(_span, arrays)])
        merged: list[tuple[int, int]] = []
        for low, high in spans:
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self._spans = merged

    def is_warm(self) -> bool:
        """Whether all of it fits into the cache."""
        return 0 < self.size <= self._cache


def _span(array: np.ndarray) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def operands(ops: Sequence[Callable[..., Any]]) -> list[np.ndarray]:
    """Arrays that some operations read or write, as far as they can be told: those bound to partials and closures."""
    found: dict[tuple[int, int], np.ndarray] = {}
    for op in ops:
        for value in _bound(op):
            array = _array(value)
            if array is not None and array.size:
                found.setdefault(_span(array), array)
    return list(found.values())


def _bound(op: Any) -> Iterator[Any]:
    if isinstance(op, partial):
        yield from op.args
        yield from op.keywords.values()
        op = op.func
    owner = getattr(op, "__self__", None)
    if owner is not None:
        yield owner
    for cell in getattr(op, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _array(value: Any) -> np.ndarray | None:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        plain = value.detach()
        plain = plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain
        return plain.numpy()
    return None


def touch(arrays: Iterable[np.ndarray]) -> None:
    """Bring arrays into the cache."""
    for array in arrays:
        if array.flags.c_contiguous:
            array.reshape(-1)[:: max(LINE // array.itemsize, 1)].max()
        else:
            array.max()
