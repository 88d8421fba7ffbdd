"""Kept states per batch id, within a memory budget that all ranks share: some stay, others go to disk or are dropped.

Which batches stay follows from the order of visits and from the largest rank's share alone, so that every rank decides
the same without a message: a solve that one rank starts warm and another cold would wait for ever.

    drop   the batches that came first stay. A pass over all batches would push out each just before its turn
           if the newest stayed instead.
    disk   the rest lies in files of this rank, one per batch and direction, and is read when its batch comes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from lpnet.errors import SaveError
from lpnet.mgrit.propagator import Kept

MEANS = -1  # the id under which class means are kept; never dropped
DTYPES = {"same": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Pair(NamedTuple):
    """States and adjoints of one batch; None where a solve has not been made."""

    state: Kept | None
    adjoint: Kept | None


NOTHING = Pair(None, None)


class StateCache:
    """States by batch id.

    Args:
        budget_mib: memory of the largest rank for them; None: no limit.
        spill: what becomes of batches beyond it.
        dtype: what states are stored in: same | float32 | bfloat16.
    """

    def __init__(
        self, budget_mib: float | None = None, spill: Literal["drop", "disk"] = "drop", dtype: str = "same"
    ) -> None:
        self.dtype = DTYPES[dtype]
        self._budget = None if budget_mib is None else budget_mib * 2**20
        self._spill = spill
        self._pairs: dict[int, Pair] = {}
        self._on_disk: dict[int, list[tuple[int, ...] | None]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._sizes: dict[int, float] = {}
        self.hits = self.misses = self.dropped = 0

    def __len__(self) -> int:
        return len(self._pairs) + len(self._on_disk)

    def __contains__(self, batch: int) -> bool:
        return batch in self._pairs or batch in self._on_disk

    def get(self, batch: int | None) -> Pair:
        """What is kept of a batch. No communication; a batch on disk is read.

        Raises:
            SaveError: its file cannot be read.
        """
        if batch is None:
            return NOTHING
        if batch in self._on_disk:
            self._pairs[batch] = Pair(*(self._read(batch, k, s) for k, s in enumerate(self._on_disk.pop(batch))))
        found = self._pairs.get(batch, NOTHING)
        if batch != MEANS:
            self.hits += found.state is not None
            self.misses += found.state is None
        return found

    def put(self, batch: int, pair: Pair, *, size: float) -> None:
        """Keep states of a batch, and let go of what is beyond the budget. No communication.

        Args:
            batch: id.
            pair: states and adjoints.
            size: bytes on the rank that has most of them.

        Raises:
            SaveError: they cannot be written to disk.
        """
        known = batch in self
        self._sizes[batch] = size
        if self._budget is None or batch == MEANS:
            self._pairs[batch] = pair
        elif self._spill == "drop":
            others = sum(self._sizes[b] for b in self._pairs if b not in (batch, MEANS))
            if known or others + size <= self._budget:
                self._pairs[batch] = pair
            else:
                self.dropped += 1
        else:
            self._pairs.pop(batch, None)
            self._pairs[batch] = pair  # the newest last
            for old in [b for b in self._pairs if b not in (batch, MEANS)]:
                if sum(self._sizes[b] for b in self._pairs if b != MEANS) <= self._budget:
                    break
                self._on_disk[old] = [self._write(old, k, kept) for k, kept in enumerate(self._pairs.pop(old))]

    @contextmanager
    def replaced(self, pairs: Mapping[int, Pair]) -> Iterator[None]:
        """Other states under some ids for a while; what is kept stays as it is."""
        present = {batch: self._pairs.get(batch) for batch in pairs}
        self._pairs.update(pairs)
        try:
            yield
        finally:
            for batch, pair in present.items():
                if pair is None:
                    self._pairs.pop(batch, None)
                else:
                    self._pairs[batch] = pair

    def copies(self, batches: Sequence[int | None]) -> dict[int, Pair]:
        """Copies of what is kept of some batches."""
        return {
            batch: Pair(*(None if kept is None else Kept(kept.states.clone()) for kept in self.get(batch)))
            for batch in batches
            if batch is not None and batch in self
        }

    def items(self) -> Iterator[tuple[int, Pair]]:
        """All batches in the order of their ids; those on disk are read one by one and stay there."""
        for batch in sorted([*self._pairs, *self._on_disk]):
            if batch in self._pairs:
                yield batch, self._pairs[batch]
            else:
                yield batch, Pair(*(self._read(batch, k, s) for k, s in enumerate(self._on_disk[batch])))

    def clear(self) -> None:
        """Drop everything."""
        self._pairs.clear()
        self._on_disk.clear()

    # disk

    def _path(self, batch: int, which: int) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lpnet-states-")
        return Path(self._folder.name) / f"{batch}-{('state', 'adjoint')[which]}"

    def _write(self, batch: int, which: int, kept: Kept | None) -> tuple[int, ...] | None:
        if kept is None:
            return None
        path = self._path(batch, which)
        try:
            kept.states.contiguous().view(torch.uint8).numpy().tofile(path)
        except OSError as error:
            raise SaveError(
                f"{path}: states of batch {batch} cannot be written: {error.strerror or error}; make room, point "
                f"TMPDIR to another disk, or set mgrit.cache_spill drop"
            ) from error
        self._dtype_of = kept.states.dtype
        return tuple(kept.states.shape)

    def _read(self, batch: int, which: int, shape: tuple[int, ...] | None) -> Kept | None:
        if shape is None:
            return None
        path = self._path(batch, which)
        wanted = int(np.prod(shape)) * torch.empty(0, dtype=self._dtype_of).element_size()
        try:
            raw = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            raise SaveError(f"{path}: states of batch {batch} cannot be read: {error.strerror or error}") from error
        if raw.size != wanted:
            raise SaveError(f"{path}: {raw.size} bytes of batch {batch}, expected {wanted}; was the file changed?")
        return Kept(torch.from_numpy(raw).view(self._dtype_of).reshape(shape))
