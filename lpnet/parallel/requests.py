"""What an emulated rank waits on: messages and sums that are under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lpnet.errors import LpnetError

if TYPE_CHECKING:
    from lpnet.parallel.virtual import VirtualComm
    from lpnet.parallel.world import Envelope


class Sent:
    """A message that has been copied."""

    def Wait(self) -> None:  # noqa: N802
        """Done at once."""

    def Test(self) -> bool:  # noqa: N802
        """Done at once."""
        return True


class Receive:
    """A message that is to come.

    Args:
        comm: of the rank that receives.
        buffer: where it goes.
        envelope: who sends what.
    """

    def __init__(self, comm: VirtualComm, buffer: np.ndarray, envelope: Envelope) -> None:
        self._comm, self._buffer, self._envelope = comm, buffer, envelope
        self._arrival: float | None = None
        self._cancelled = False

    def fill(self, data: np.ndarray, arrival: float) -> None:
        """The message is here."""
        if data.size > self._buffer.size:
            _, source, dest, tag = self._envelope
            raise LpnetError(
                f"rank {dest} receives from rank {source} with tag {tag} into {self._buffer.size} bytes, and the "
                f"message has {data.size}"
            )
        self._buffer[: data.size] = data
        self._comm.meter.arrived(self._buffer)
        self._arrival = arrival

    def Wait(self) -> None:  # noqa: N802
        """Wait for the message."""
        if self._cancelled:
            return
        comm, (_, source, dest, tag) = self._comm, self._envelope
        comm.pause(("wait", tag, self._buffer.size))
        while self._arrival is None:
            comm.world.baton.wait(dest, f"a message from rank {source} with tag {tag}")
        comm.life.arrive(self._arrival)
        comm.resume()

    def Test(self) -> bool:  # noqa: N802
        """Whether the message is here by the rank's clock; within `patiently` it is waited for."""
        if self._cancelled:
            return True
        if self._comm.life.patient:
            self.Wait()
            return True
        self._comm.check()
        return self._arrival is not None and self._arrival <= self._comm.meter.now

    def Cancel(self) -> None:  # noqa: N802
        """Nobody waits for the message any more."""
        queue = self._comm.world.posted.get(self._envelope)
        if queue and self in queue:
            queue.remove(self)
        self._cancelled = True


class Summing:
    """A sum over the ranks that has been started.

    Args:
        comm: of one rank.
        turn: which collective it is.
        flat: the rank's own values, which become the sum.
    """

    def __init__(self, comm: VirtualComm, turn: int, flat: np.ndarray) -> None:
        self._comm, self._turn, self._flat = comm, turn, flat
        self._done = False

    def Wait(self) -> None:  # noqa: N802
        """Wait for the slowest rank."""
        if not self._done:
            self._comm.pause(("wait sum", self._flat.nbytes))
            values = self._comm.leave(self._turn, self._flat.nbytes, None)
            self._flat[:] = total_in_pairs(values, self._comm.circle.ranks)
            self._done = True
            self._comm.resume()

    def Test(self) -> bool:  # noqa: N802
        """Whether it is done by the rank's clock; within `patiently` it is waited for."""
        if not self._done and (self._comm.life.patient or self._comm.is_over(self._turn, self._flat.nbytes)):
            self.Wait()
        return self._done


TOTAL = -1  # where a reduction keeps its result among the ranks' values


def total_in_pairs(values: dict[int, np.ndarray], ranks: tuple[int, ...]) -> np.ndarray:
    """Sum over the ranks, neighbours first, as the binomial trees of MPI add; made once for all."""
    if TOTAL not in values:
        rows = [values[rank] for rank in ranks]
        while len(rows) > 1:
            pairs = [low + high for low, high in zip(rows[::2], rows[1::2], strict=False)]
            rows = pairs + rows[len(rows) & ~1 :]
        values[TOTAL] = rows[0]
    return values[TOTAL]
