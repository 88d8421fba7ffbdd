"""Caches of emulated ranks: what a rank computes on is read once more before its work is timed, where it would be warm.

All ranks' states pass through the caches of one processor, so that every rank finds its own gone when its turn comes;
on a processor of its own it would find what it used last. What that is, a model tells: a cache of a given size from
which the blocks leave that have not been used for longest. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

LINE = 64  # bytes of a cache line
BLOCKS = 256  # in the cache of the model

Operand = tuple[np.ndarray, range]
"""An array and the blocks of memory that it lies in."""


class Cache:
    """The cache of one rank; least recently used blocks leave it.

    Args:
        size: bytes that the rank has to itself; 0: nothing is ever warm.
    """

    def __init__(self, size: float) -> None:
        self._block = max(int(size) // BLOCKS, LINE)
        self._most = int(size) // self._block
        self._blocks: dict[int, None] = {}  # the one used last comes last

    def placed(self, arrays: Iterable[np.ndarray]) -> list[Operand]:
        """Arrays with their blocks, worked out once."""
        spans = [(array, _span(array)) for array in arrays]
        return [(array, range(low // self._block, -(-high // self._block))) for array, (low, high) in spans]

    def use(self, operands: Sequence[Operand]) -> list[np.ndarray]:
        """The rank computes on these now: those that the cache holds as a whole."""
        held, warm = self._blocks, []
        for array, blocks in operands:
            if len(blocks) <= self._most and all(block in held for block in blocks):
                warm.append(array)
            for block in blocks:
                held.pop(block, None)
                held[block] = None
            while len(held) > self._most:
                del held[next(iter(held))]
        return warm

    def lose(self, array: np.ndarray) -> None:
        """Something has arrived in an array from elsewhere: it is not warm."""
        if self._most:
            for _, blocks in self.placed([array]):
                for block in blocks:
                    self._blocks.pop(block, None)


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
