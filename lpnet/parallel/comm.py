"""Tensors between ranks: the one class through which lpnet talks.

Buffers are dense and checked: a strided or transposed tensor would be sent in memory order without an
error. Receives are posted before the work they overlap; requests and buffers are kept until they are
done. mpi4py is imported only where a communicator is made, so that importing lpnet starts nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from lpnet.errors import LpnetError

if TYPE_CHECKING:
    from lpnet.parallel.meter import Meter

T = TypeVar("T")
living: weakref.WeakSet[Comm] = weakref.WeakSet()
"""Every communicator of this process, for a report about a stall."""


@dataclass
class Traffic:
    """What this rank has sent and how often it has taken part in a collective."""

    messages: int = 0
    bytes: int = 0
    reductions: int = 0
    broadcasts: int = 0
    sent: tuple[int, int, int] | None = field(default=None, compare=False)
    """The last message: to which rank, tag, bytes."""
    posted: tuple[int, int, int] | None = field(default=None, compare=False)
    """The last receive: from which rank, tag, bytes."""
    collective: str = field(default="", compare=False)
    """The last collective, which may still wait."""

    def last(self) -> str:
        """The last messages in words. No communication."""
        words = ["last sent {2} bytes to rank {0}, tag {1}".format(*self.sent)] if self.sent else []
        words += ["last receive {2} bytes from rank {0}, tag {1}".format(*self.posted)] if self.posted else []
        words += [f"last collective {self.collective}"] if self.collective else []
        return "; ".join(words) or "no message so far"


def _buffer(tensor: torch.Tensor) -> Any:
    """The bytes of a dense tensor as a numpy array that shares its memory."""
    if not tensor.is_contiguous():
        raise LpnetError(
            f"a message needs a dense tensor; got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


class Comm:
    """A private duplicate of an MPI communicator, or one rank without MPI.

    Collective over `mpi` when made and when freed; nothing else in a constructor talks.

    Args:
        mpi: an mpi4py communicator, or None for a single rank that needs no MPI.
    """

    meter: Meter | None = None
    """The virtual clock of an emulated rank; None where time is real."""

    predicted: str | None = None
    """What the times of emulated ranks are predicted for; None where time is real."""

    def __init__(self, mpi: Any = None) -> None:
        self._mpi: Any = mpi.Dup() if mpi is not None and mpi.size > 1 else None
        self.rank: int = self._mpi.rank if self._mpi is not None else 0
        self.size: int = self._mpi.size if self._mpi is not None else 1
        self.traffic = Traffic()
        if self._mpi is not None:
            living.add(self)

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: object) -> Comm:
        """The same ranks: copying a network duplicates no communicator."""
        return self

    @property
    def mpi(self) -> Any:
        """The mpi4py communicator; None on one rank without MPI."""
        return self._mpi

    # time: real here, virtual where ranks are emulated

    def now(self, work: Hashable = None) -> float:
        """Seconds of this rank's clock. No communication.

        Args:
            work: a word for what this rank has done since it last asked or talked, where one place in the code ends
                work of several kinds; only emulated ranks ask.
        """
        return time.perf_counter()

    def restart_clocks(self) -> None:
        """Forget what a warm-up has measured, where ranks are emulated. Collective there."""

    def alike(self, work: Hashable) -> None:
        """This rank's work costs what that of other ranks with the same word does; only emulated ranks ask.

        No communication.
        """

    def patiently(self, done: Callable[[], bool]) -> bool:
        """`done()`, which tests requests; emulated ranks wait in those tests. Messages as `done`."""
        return done()

    def duplicate(self) -> Comm:
        """The same ranks, whose messages meet none of this communicator's. Collective."""
        return Comm(self._mpi)

    def at_step(self, step: int) -> None:
        """A training step begins; an emulated rank may be planned to die here. No communication."""

    # neighbour messages

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        """Start sending a dense tensor; wait on the returned request before its memory is changed. One message."""
        buffer = _buffer(tensor)
        self.traffic.messages += 1
        self.traffic.bytes += buffer.nbytes
        self.traffic.sent = (dest, tag, buffer.nbytes)
        return self._mpi.Isend(buffer, dest, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Post the receive of a dense tensor; wait on the returned request before it is read. One message."""
        buffer = _buffer(tensor)
        self.traffic.posted = (source, tag, buffer.nbytes)
        return self._mpi.Irecv(buffer, source, tag)

    # collectives

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of float64 arrays of equal shape over the ranks, on every rank. Collective, one reduction.

        Where every entry is non-zero on one rank only, the result does not depend on the number of ranks.
        """
        if self._mpi is None:
            return values
        from mpi4py import MPI

        out = np.empty_like(values)
        self.traffic.reductions += 1
        self.traffic.collective = f"sum of {values.size} numbers"
        self._mpi.Allreduce(values, out, op=MPI.SUM)
        return out

    def isum(self, tensor: torch.Tensor) -> Any:
        """Start summing a dense float32 or float64 tensor over the ranks, in place. Collective, one reduction.

        Wait on the returned request before it is read or changed. Every rank starts its sums in the same order.
        """
        from mpi4py import MPI

        self.traffic.reductions += 1
        self.traffic.collective = f"started a sum of {tensor.numel()} numbers"
        _buffer(tensor)
        return self._mpi.Iallreduce(MPI.IN_PLACE, tensor.detach().reshape(-1).numpy(), op=MPI.SUM)

    def split(self, color: int | None) -> Comm | None:
        """The ranks that give the same colour, in rank order, as a communicator; None for None. Collective."""
        if self._mpi is None:
            return None if color is None else Comm()
        from mpi4py import MPI

        part = self._mpi.Split(MPI.UNDEFINED if color is None else color, self.rank)
        if part == MPI.COMM_NULL:
            return None
        out = Comm(part)
        part.Free()
        return out

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fill a dense tensor on every rank with the root's. Collective."""
        if self._mpi is not None:
            self.traffic.broadcasts += 1
            self.traffic.collective = f"broadcast from rank {root}"
            self._mpi.Bcast(_buffer(tensor), root=root)
        return tensor

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The root's small Python object on every rank (set-up only, never in a step). Collective."""
        if self._mpi is None:
            return value
        self.traffic.collective = f"broadcast of an object from rank {root}"
        return self._mpi.bcast(value, root=root)

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Small Python objects of all ranks, in rank order, on the root; None elsewhere. Collective."""
        if self._mpi is None:
            return [value]
        self.traffic.collective = f"gather on rank {root}"
        return self._mpi.gather(value, root=root)  # type: ignore[no-any-return]

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Small Python objects of all ranks, in rank order, on every rank. Collective."""
        if self._mpi is None:
            return [value]
        self.traffic.collective = "gather on all ranks"
        return self._mpi.allgather(value)  # type: ignore[no-any-return]

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self._mpi is not None:
            self.traffic.collective = "barrier"
            self._mpi.Barrier()

    def agree(self, error: Exception | None = None) -> None:
        """Raise on every rank when any rank brings an error: the lowest such rank's. Collective.

        Raises:
            LpnetError: the same type and message on every rank, with the rank that met it.
        """
        verdicts = self.all_gather_objects(None if error is None else (type(error), str(error)))
        for rank, verdict in enumerate(verdicts):
            if verdict is not None:
                kind, message = verdict
                if rank == self.rank and error is not None:
                    raise error
                kind = kind if issubclass(kind, LpnetError) else LpnetError
                raise kind(message)

    def together(self, work: Callable[[], Any]) -> Any:
        """Run `work` here and `agree` on its outcome: its value, or the same error on every rank. Collective."""
        value, error = None, None
        try:
            value = work()
        except Exception as caught:
            error = caught
        self.agree(error)
        return value

    def shared(self, work: Callable[[], T]) -> T:
        """A value that nobody changes, from `together`; emulated ranks make it once and share it. Collective."""
        return self.together(work)  # type: ignore[no-any-return]

    def free(self) -> None:
        """Give the duplicate back. Collective."""
        if self._mpi is not None:
            self._mpi.Free()
            self._mpi = None


def wait_all(requests: Sequence[Any]) -> None:
    """Wait until every request is done. No communication of its own."""
    for request in requests:
        request.Wait()


def as_comm(comm: Any) -> Comm:
    """A `Comm` as it is; an mpi4py communicator duplicated (collective over it); None: one rank."""
    return comm if isinstance(comm, Comm) else Comm(comm)
