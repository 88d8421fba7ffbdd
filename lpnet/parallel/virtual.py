"""The communicator that an emulated rank sees: messages by memory copy, time by a network model.

Only the rank that holds the baton touches what the ranks share, so nothing here locks.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from lpnet.errors import LpnetError
from lpnet.parallel.baton import Baton, Stopped, caller
from lpnet.parallel.comm import Comm, _buffer
from lpnet.parallel.interconnect import NetworkModel
from lpnet.parallel.meter import Costs, Meter

T = TypeVar("T")
TOTAL = -1  # where a reduction keeps its result among the ranks' values
_PLAIN = (type(None), bool, int, float, str)


class RankDiedError(LpnetError):
    """A rank died by a planned fault; the job has ended as under MPI."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose.

    Args:
        delay: extra seconds of every message of a pair (source, dest).
        jitter: every message takes up to this many seconds longer, at random.
        reorder: ranks that can run do so in random order, so that messages of different pairs overtake each other.
        kill: (rank, step): the rank dies when that training step begins.
        seed: of all random choices.
    """

    delay: Mapping[tuple[int, int], float] = field(default_factory=dict)
    jitter: float = 0.0
    reorder: bool = False
    kill: tuple[int, int] | None = None
    seed: int = 0


class World:
    """What the ranks of one emulation share; only the rank that holds the baton touches it."""

    def __init__(self, ranks: int, network: NetworkModel, costs: Costs, faults: Faults) -> None:
        self.ranks, self.network, self.costs, self.faults = ranks, network, costs, faults
        self.baton = Baton(ranks, faults.seed if faults.reorder else None)
        self.baton.hints = self.lost
        self.posted: dict[tuple[int, int, int], deque[_Receive]] = {}
        self.unexpected: dict[tuple[int, int, int], deque[tuple[np.ndarray, float, str]]] = {}
        self.latest: dict[tuple[int, int], float] = {}
        self.meetings: dict[int, _Meeting] = {}
        self.shared: dict[int, Any] = {}
        self.random = random.Random(faults.seed)

    def arrival(self, source: int, dest: int, size: int, now: float) -> float:
        """When a message arrives; messages of a pair keep their order."""
        extra = self.faults.delay.get((source, dest), 0.0)
        if self.faults.jitter:
            extra += self.faults.jitter * self.random.random()
        time = now + self.network.flight(source, dest, size) + extra
        time = self.latest[source, dest] = max(time, self.latest.get((source, dest), 0.0))
        return time

    def lost(self) -> list[str]:
        """Messages that nobody receives, for the report of a deadlock."""
        return [
            f"  rank {source} has sent rank {dest} a message with tag {tag} that is not received, at {place}"
            for (source, dest, tag), queue in sorted(self.unexpected.items())
            for _, _, place in queue
        ]


@dataclass
class _Meeting:
    """One collective: who has come, with what."""

    kind: str
    place: str
    by: int
    come: dict[int, float] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    waiters: dict[int, int | None] = field(default_factory=dict)  # rank -> the one rank it needs; None: all
    left: int = 0


class _Sent:
    """The request of a message that has been copied."""

    def Wait(self) -> None:  # noqa: N802
        """Done at once."""

    def Test(self) -> bool:  # noqa: N802
        """Done at once."""
        return True


class _Receive:
    """The request of a receive."""

    def __init__(self, comm: VirtualComm, buffer: np.ndarray, source: int, tag: int) -> None:
        self._comm, self._buffer, self._source, self._tag = comm, buffer, source, tag
        self._arrival: float | None = None

    def fill(self, data: np.ndarray, arrival: float) -> None:
        """The message is here."""
        if data.size > self._buffer.size:
            raise LpnetError(
                f"rank {self._comm.rank} receives from rank {self._source} with tag {self._tag} into "
                f"{self._buffer.size} bytes, and the message has {data.size}"
            )
        self._buffer[: data.size] = data
        self._arrival = arrival

    def Wait(self) -> None:  # noqa: N802
        """Wait for the message."""
        comm = self._comm
        comm.pause(("wait", self._tag, self._buffer.size))
        while self._arrival is None:
            comm.world.baton.wait(comm.rank, f"a message from rank {self._source} with tag {self._tag}")
        comm.arrive(self._arrival)
        comm.resume()

    def Test(self) -> bool:  # noqa: N802
        """Whether the message is here; lets the other ranks run."""
        comm = self._comm
        comm.pause(("test", self._tag, self._buffer.size))
        if self._arrival is None:
            comm.world.baton.give_way(comm.rank)
        if self._arrival is not None:
            comm.arrive(self._arrival)
        comm.resume()
        return self._arrival is not None


class VirtualComm(Comm):
    """The communicator of one emulated rank; `mpi` is None."""

    meter: Meter

    def __init__(self, world: World, rank: int) -> None:
        super().__init__()
        self.world, self.rank, self.size = world, rank, world.ranks
        place = "first" if rank == 0 else "last" if rank == world.ranks - 1 else "middle"
        self.meter = Meter(world.costs, place)
        self.predicted = f"predicted for {world.ranks} emulated rank(s) on {world.network.describe()}"
        self.waited = 0.0
        self._met = 0
        self._took = 0

    # clock

    def pause(self, key: object) -> None:
        """An event of communication begins."""
        if self.world.baton.stopping:
            raise Stopped
        self.meter.pause(key)

    def resume(self) -> None:
        """The event is over."""
        self.meter.resume()

    def arrive(self, time: float) -> None:
        """Something that happened at `time` has been waited for."""
        if time > self.meter.now:
            self.waited += time - self.meter.now
            self.meter.now = time

    def now(self) -> float:
        """Virtual seconds. No communication."""
        return self.meter.read()

    def restart_clocks(self) -> None:
        """Forget what was measured and set all clocks to zero. Collective."""
        self.barrier()
        if self.rank == 0:
            self.world.costs.forget()
            self.world.latest.clear()
        self.pause("restart")
        self.meter.now, self.waited = 0.0, 0.0
        self.resume()
        self.barrier()
        self.meter.now, self.waited = 0.0, 0.0

    def at_step(self, step: int) -> None:
        """A training step begins: planned deaths happen here. No communication."""
        if self.world.faults.kill == (self.rank, step):
            raise RankDiedError(f"rank {self.rank} of {self.size} died at step {step} (a planned fault)")

    def shared(self, work: Callable[[], T]) -> T:
        """A value that nobody changes, made once for all ranks. Collective."""
        turn, self._took = self._took, self._took + 1
        self.barrier()
        if self.rank == 0:
            self.world.shared[turn] = self._outcome(work)
        self.barrier()
        value, error = self.world.shared[turn]
        self.barrier()
        self.world.shared.pop(turn, None)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    @staticmethod
    def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return work(), None
        except Exception as error:
            return None, error

    # neighbour messages

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        """Start sending a dense tensor. One message."""
        self.pause(("send", tag, tensor.numel()))
        data = _buffer(tensor)
        self._check(dest)
        self.traffic.messages += 1
        self.traffic.bytes += data.nbytes
        self.meter.now += self.world.network.send_overhead_s
        arrival = self.world.arrival(self.rank, dest, data.nbytes, self.meter.now)
        key = (self.rank, dest, tag)
        queue = self.world.posted.get(key)
        if queue:
            queue.popleft().fill(data, arrival)
            self.world.baton.wake(dest)
        else:
            self.world.unexpected.setdefault(key, deque()).append((data.copy(), arrival, caller()))
        self.resume()
        return _Sent()

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Post the receive of a dense tensor. One message."""
        self.pause(("receive", tag, tensor.numel()))
        self._check(source)
        self.meter.now += self.world.network.send_overhead_s
        request = _Receive(self, _buffer(tensor), source, tag)
        key = (source, self.rank, tag)
        queue = self.world.unexpected.get(key)
        if queue:
            data, arrival, _ = queue.popleft()
            request.fill(data, arrival)
        else:
            self.world.posted.setdefault(key, deque()).append(request)
        self.resume()
        return request

    def _check(self, other: int) -> None:
        if not 0 <= other < self.size:
            raise LpnetError(f"rank {self.rank} talks to rank {other}, and the ranks are 0 to {self.size - 1}")

    # collectives

    def _meet(self, kind: str, value: Any, size: int, need: int | None) -> dict[int, Any]:
        """Bring a value to the next collective and wait for one rank (`need`) or for all (None): the values."""
        self.pause((kind, size))
        world, turn = self.world, self._met
        self._met += 1
        meeting = world.meetings.setdefault(turn, _Meeting(kind, caller(), self.rank))
        if meeting.kind != kind:
            raise LpnetError(
                f"the ranks are in different collectives: rank {meeting.by} in {meeting.kind} at {meeting.place}, "
                f"rank {self.rank} in {kind} at {caller()}"
            )
        meeting.come[self.rank] = self.meter.now
        meeting.values[self.rank] = value
        for rank, wanted in list(meeting.waiters.items()):
            if wanted == self.rank or (wanted is None and len(meeting.come) == self.size):
                del meeting.waiters[rank]
                world.baton.wake(rank)
        while need not in meeting.come if need is not None else len(meeting.come) < self.size:
            meeting.waiters[self.rank] = need
            late = "rank " + str(need) if need is not None else f"{self.size} ranks"
            world.baton.wait(self.rank, f"{late} in {kind} (collective {turn})")
        if need != self.rank:
            began = max(meeting.come.values()) if need is None else meeting.come[need]
            self.arrive(began + world.network.collective(self.size, size))
        meeting.left += 1
        if meeting.left == self.size:
            del world.meetings[turn]
        self.resume()
        return meeting.values

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of float64 arrays of equal shape over the ranks, in rank order, on every rank. Collective."""
        if self.size == 1:
            return values
        self.traffic.reductions += 1
        come = self._meet("sum", values.copy(), values.nbytes, None)
        if TOTAL not in come:  # the first to leave adds, for all
            come[TOTAL] = come[0].copy()
            for rank in range(1, self.size):
                come[TOTAL] += come[rank]
        self.resume()
        return come[TOTAL].copy()  # type: ignore[no-any-return]

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fill a dense tensor on every rank with the root's. Collective."""
        if self.size > 1:
            self.traffic.broadcasts += 1
            data = _buffer(tensor)
            mine = data.copy() if self.rank == root else None
            come = self._meet(f"broadcast from rank {root}", mine, data.nbytes, root)
            if self.rank != root:
                data[:] = come[root]
        return tensor

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The root's small Python object on every rank. Collective."""
        packed = _pack(value) if self.rank == root else None
        return _unpack(self._meet(f"broadcast_object from rank {root}", packed, 64, root)[root])

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Small Python objects of all ranks, in rank order, on the root; None elsewhere. Collective."""
        need = None if self.rank == root else self.rank
        come = self._meet(f"gather_objects to rank {root}", _pack(value), 64, need)
        return [_unpack(come[rank]) for rank in range(self.size)] if self.rank == root else None

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Small Python objects of all ranks, in rank order, on every rank. Collective."""
        come = self._meet("all_gather_objects", _pack(value), 64, None)
        return [_unpack(come[rank]) for rank in range(self.size)]

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self._meet("barrier", None, 0, None)

    def free(self) -> None:
        """Nothing to give back. No communication."""


def _pack(value: Any) -> Any:
    """What is sent of an object: a copy that the sender cannot change."""
    return value if isinstance(value, _PLAIN) else pickle.dumps(value)


def _unpack(packed: Any) -> Any:
    return pickle.loads(packed) if isinstance(packed, bytes) else packed
