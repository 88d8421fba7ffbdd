"""Checkpoints written beside the training, from a copy in memory: by a thread, or in parts between the steps.

    ThreadWriter   all of it on a background thread with a communicator of its own; needs MPI's THREAD_MULTIPLE
    StepWriter     messages between the steps, on the main thread; files and checksums in between, on a thread
                   that sends nothing; one small reduction per step while a save is under way

Only the copy is waited for. The caller writes one checkpoint at a time.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from lpnet.io.checkpoint import Attribute, prepare
from lpnet.io.checkpoint import save as write_checkpoint
from lpnet.io.checkpoint_write import Outcome, Work, attempt, stages
from lpnet.parallel.comm import Comm
from lpnet.parallel.shard import Shard

Shards = Mapping[str, Sequence[Shard]]

SLEEP_S = 0.002
"""Between two looks at whether the other ranks have come as far."""


class Writer(Protocol):
    """Writes one checkpoint beside the training."""

    def start(self, folder: Path, step: int, shards: Shards, attributes: Mapping[str, Attribute], keep: int) -> None:
        """Begin to write shards that nobody changes until it is done. Collective over comm."""

    def advance(self) -> Path | None:
        """The file, if it has been written; asked between the steps. Collective over comm for a `StepWriter`.

        Raises:
            SaveError: on every rank, though not at the same step where it is a `ThreadWriter`.
        """

    def wait(self) -> Path:
        """The file, once it has been written. Collective over comm; errors as `advance`, on every rank."""

    def close(self) -> None:
        """Give back what it holds; nothing is under way. Collective over comm."""


def threads_may_send() -> bool:
    """Whether MPI lets two threads send at the same time. No communication."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


class Snapshot:
    """Copies of shards, in memory that the next copies use again."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, int], torch.Tensor] = {}

    def take(self, shards: Shards) -> dict[str, list[Shard]]:
        """Shards with the same numbers in memory of their own; those of before are lost. No communication."""
        before, self._copies = self._copies, {}
        out: dict[str, list[Shard]] = {}
        for section, members in shards.items():
            out[section] = []
            for number, shard in enumerate(members):
                copy = before.get((section, number))
                tensor = shard.tensor.detach()
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
                copy.copy_(tensor)
                self._copies[section, number] = copy
                out[section].append(replace(shard, tensor=copy))
        return out


class _Patient(Comm):
    """A communicator whose waits sleep: on a background thread a wait that spins takes the core of the training."""

    def _meet(self) -> None:
        if self._mpi is not None:
            request = self._mpi.Ibarrier()
            while not request.Test():
                time.sleep(SLEEP_S)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self._meet()
        return super().broadcast_object(value, root)

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        self._meet()
        return super().gather_objects(value, root)

    def all_gather_objects(self, value: Any) -> list[Any]:
        self._meet()
        return super().all_gather_objects(value)

    def barrier(self) -> None:
        self._meet()


class ThreadWriter:
    """Writes on a background thread. Collective over comm when made.

    Args:
        comm: ranks; the thread gets a duplicate.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = _Patient(comm.mpi)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lpnet-save")
        self._future: Future[Path] | None = None

    def start(self, folder: Path, step: int, shards: Shards, attributes: Mapping[str, Attribute], keep: int) -> None:
        """Begin to write. No communication on this thread."""
        self._future = self._pool.submit(
            write_checkpoint, folder, self._comm, step=step, shards=shards, attributes=attributes, keep=keep
        )

    def advance(self) -> Path | None:
        """The file, if it has been written here. No communication; errors as `Writer` says."""
        return self.wait() if self._future is not None and self._future.done() else None

    def wait(self) -> Path:
        """The file, once it has been written. Collective over comm on the other thread; errors as `Writer` says."""
        assert self._future is not None
        future, self._future = self._future, None
        return future.result()

    def close(self) -> None:
        """Give back thread and communicator. Collective over comm."""
        self._pool.shutdown()
        self._comm.free()


class StepWriter:
    """Writes in parts between the steps.

    Args:
        comm: ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lpnet-save")
        self._parts: Generator[Work, Outcome, Path] | None = None
        self._future: Future[Outcome] | None = None

    def start(self, folder: Path, step: int, shards: Shards, attributes: Mapping[str, Attribute], keep: int) -> None:
        """Begin to write: the checksums. No communication."""
        self._parts = self._all(folder, step, shards, attributes, keep)
        self._future = self._pool.submit(attempt, next(self._parts))

    def _all(
        self, folder: Path, step: int, shards: Shards, attributes: Mapping[str, Attribute], keep: int
    ) -> Generator[Work, Outcome, Path]:
        entries: list[Any] = []
        _, error = yield lambda: entries.extend(prepare(shards))
        self._comm.agree(error)
        return (yield from stages(folder, self._comm, step=step, entries=entries, attributes=attributes, keep=keep))

    def advance(self) -> Path | None:
        """Go on as far as all ranks can without waiting. Collective over comm; errors as `Writer` says."""
        while self._future is not None:
            here = np.array([float(self._future.done())])
            if self._comm.sum(here)[0] < self._comm.size:
                return None
            if (path := self._go_on()) is not None:
                return path
        return None

    def wait(self) -> Path:
        """Go on to the end. Collective over comm; errors as `Writer` says."""
        while (path := self._go_on()) is None:
            pass
        return path

    def close(self) -> None:
        """Give back the thread. No communication."""
        self._pool.shutdown()

    def _go_on(self) -> Path | None:
        """The messages up to the next work, and that work begun; the path at the end. Collective over comm."""
        assert self._parts is not None and self._future is not None
        future, self._future = self._future, None
        try:
            self._future = self._pool.submit(attempt, self._parts.send(future.result()))
        except StopIteration as finished:
            path: Path = finished.value
            return path
        return None
