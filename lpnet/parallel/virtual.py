"""The communicator that an emulated rank sees: messages by memory copy, time by a network model.

Only the rank that holds the baton touches what the ranks share, so nothing here locks. A rank may have several
communicators (`split`); its clock is one.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch

from lpnet.errors import LpnetError
from lpnet.parallel.baton import Stopped, caller
from lpnet.parallel.comm import Comm, _buffer
from lpnet.parallel.meter import Meter
from lpnet.parallel.requests import TOTAL, Receive, Sent, Summing
from lpnet.parallel.world import Circle, Life, Meeting, RankDiedError, World

T = TypeVar("T")
_PLAIN = (type(None), bool, int, float, str)


class VirtualComm(Comm):
    """A communicator of one emulated rank; `mpi` is None.

    Args:
        world: the job.
        circle: its ranks.
        life: the rank, with its clock.
    """

    meter: Meter

    def __init__(self, world: World, circle: Circle, life: Life) -> None:
        super().__init__()
        self.world, self.circle, self.life, self.meter = world, circle, life, life.meter
        self.rank, self.size = circle.ranks.index(life.rank), len(circle.ranks)
        self.predicted = f"predicted for {world.ranks} emulated rank(s) on {world.network.describe()}"
        self._met = 0
        self._took = 0
        life.traffic.append(self.traffic)

    # clock

    def check(self) -> None:
        """End this rank where another one has failed."""
        if self.world.baton.stopping:
            raise Stopped

    def pause(self, key: Hashable) -> None:
        """An event of communication begins."""
        self.check()
        self.meter.pause(key)

    def resume(self) -> None:
        """The event is over."""
        self.meter.resume()

    def now(self, work: Hashable = None) -> float:
        """Virtual seconds. No communication."""
        frame = sys._getframe(1)
        return self.meter.read((frame.f_code.co_name, frame.f_lineno, work))

    def restart_clocks(self) -> None:
        """Forget what was measured and set all clocks to zero. Collective."""
        self.barrier()
        if self.rank == 0:
            self.world.costs.forget()
            self.world.latest.clear()
        self.pause("restart")
        self.meter.now, self.life.waited = 0.0, 0.0
        self.resume()
        self.barrier()
        self.meter.now, self.life.waited = 0.0, 0.0

    def alike(self, work: Hashable) -> None:
        """What this rank computes from here on costs what it costs other ranks with the same word. No communication."""
        self.meter.place = work

    def patiently(self, done: Callable[[], bool]) -> bool:
        """`done()`, in which a test of a receive waits for the message: time passes only while ranks work."""
        self.life.patient = True
        try:
            return done()
        finally:
            self.life.patient = False

    def at_step(self, step: int) -> None:
        """A training step begins: planned deaths happen here. No communication."""
        if self.world.faults.kill == (self.life.rank, step):
            raise RankDiedError(f"rank {self.life.rank} of {self.world.ranks} died at step {step} (a planned fault)")

    def shared(self, work: Callable[[], T]) -> T:
        """A value that nobody changes, made once for all ranks. Collective."""
        turn, self._took = self._took, self._took + 1
        shared = self.circle.shared
        self.barrier()
        if self.rank == 0:
            shared[turn] = self._outcome(work)
        self.barrier()
        value, error = shared[turn]
        self.barrier()
        shared.pop(turn, None)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    @staticmethod
    def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return work(), None
        except Exception as error:
            return None, error

    # other communicators

    def split(self, color: int | None) -> Comm | None:
        """The ranks that give the same colour, in rank order, as a communicator; None for None. Collective."""
        colours = self._meet("split", color, 8, None)
        if "circles" not in colours:  # the first to leave makes them, for all
            groups: dict[int, list[int]] = {}
            for rank in self.circle.ranks:
                if colours[rank] is not None:
                    groups.setdefault(colours[rank], []).append(rank)
            colours["circles"] = {colour: self.world.circle(ranks) for colour, ranks in groups.items()}
        if color is None:
            return None
        return VirtualComm(self.world, colours["circles"][color], self.life)

    def duplicate(self) -> Comm:
        """The same ranks, whose messages meet none of this communicator's. Collective."""
        made = self.split(0)
        assert made is not None
        return made

    # neighbour messages

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        """Start sending a dense tensor. One message."""
        self.pause(("send", tag, tensor.numel()))
        data = _buffer(tensor)
        to = self._other(dest)
        self.traffic.messages += 1
        self.traffic.bytes += data.nbytes
        self.meter.now += self.world.network.send_overhead_s
        arrival = self.world.arrival(self.life.rank, to, data.nbytes, self.meter.now)
        envelope = (self.circle.number, self.life.rank, to, tag)
        queue = self.world.posted.get(envelope)
        if queue:
            queue.popleft().fill(data, arrival)
            self.world.baton.wake(to)
        else:
            self.world.unexpected.setdefault(envelope, deque()).append((data.copy(), arrival, caller()))
        self.resume()
        return Sent()

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Post the receive of a dense tensor. One message."""
        self.check()
        began = time.thread_time_ns()  # no event of its own: where in the work it falls is a matter of chance
        envelope = (self.circle.number, self._other(source), self.life.rank, tag)
        self.meter.now += self.world.network.send_overhead_s
        request = Receive(self, _buffer(tensor), envelope)
        queue = self.world.unexpected.get(envelope)
        if queue:
            data, arrival, _ = queue.popleft()
            request.fill(data, arrival)
        else:
            self.world.posted.setdefault(envelope, deque()).append(request)
        self.meter.exclude(time.thread_time_ns() - began)
        return request

    def _other(self, rank: int) -> int:
        """The rank of the job of a rank of this communicator."""
        if not 0 <= rank < self.size:
            raise LpnetError(f"rank {self.rank} talks to rank {rank}, and the ranks are 0 to {self.size - 1}")
        return self.circle.ranks[rank]

    # collectives

    def enter(self, kind: str, value: Any) -> int:
        """Bring a value to the next collective: its number."""
        circle, turn, me = self.circle, self._met, self.life.rank
        self._met += 1
        meeting = circle.meetings.setdefault(turn, Meeting(kind, caller(), me))
        if meeting.kind != kind:
            raise LpnetError(
                f"the ranks are in different collectives: rank {meeting.by} in {meeting.kind} at {meeting.place}, "
                f"rank {me} in {kind} at {caller()}"
            )
        meeting.come[me] = self.meter.now
        meeting.values[me] = value
        for rank, wanted in list(meeting.waiters.items()):
            if wanted == me or (wanted is None and len(meeting.come) == self.size):
                del meeting.waiters[rank]
                self.world.baton.wake(rank)
        return turn

    def leave(self, turn: int, size: int, need: int | None) -> dict[Any, Any]:
        """Wait in a collective for one rank of the job (`need`), or for all (None): the values."""
        circle, me = self.circle, self.life.rank
        meeting = circle.meetings[turn]
        while need not in meeting.come if need is not None else len(meeting.come) < self.size:
            meeting.waiters[me] = need
            late = "rank " + str(need) if need is not None else f"{self.size} ranks"
            self.world.baton.wait(me, f"{late} in {meeting.kind} (collective {turn})")
        if need != me:
            began = max(meeting.come.values()) if need is None else meeting.come[need]
            self.life.arrive(began + self.world.network.collective(circle.ranks, size))
        meeting.left += 1
        if meeting.left == self.size:
            del circle.meetings[turn]
        return meeting.values

    def is_over(self, turn: int, size: int) -> bool:
        """Whether a collective that all ranks must have come to is over by this rank's clock. No communication."""
        meeting = self.circle.meetings[turn]
        if len(meeting.come) < self.size:
            return False
        cost = self.world.network.collective(self.circle.ranks, size)
        return max(meeting.come.values()) + cost <= self.meter.now

    def _meet(self, kind: str, value: Any, size: int, need: int | None) -> dict[Any, Any]:
        """Bring a value to the next collective and wait for one rank of this communicator or for all: the values."""
        self.pause((kind, size))
        turn = self.enter(kind, value)
        values = self.leave(turn, size, None if need is None else self.circle.ranks[need])
        self.resume()
        return values

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of float64 arrays of equal shape over the ranks, in rank order, on every rank. Collective."""
        if self.size == 1:
            return values
        self.traffic.reductions += 1
        come = self._meet("sum", values.copy(), values.nbytes, None)
        if TOTAL not in come:  # the first to leave adds, for all
            first, *others = self.circle.ranks
            come[TOTAL] = come[first].copy()
            for rank in others:
                come[TOTAL] += come[rank]
        self.resume()
        return come[TOTAL].copy()  # type: ignore[no-any-return]

    def isum(self, tensor: torch.Tensor) -> Any:
        """Start summing a dense float32 or float64 tensor over the ranks, in place. Collective, one reduction."""
        self.traffic.reductions += 1
        _buffer(tensor)
        flat = tensor.detach().reshape(-1).numpy()
        self.pause(("isum", flat.nbytes, self.meter.position()))
        self.meter.now += self.world.network.send_overhead_s
        turn = self.enter(f"isum of {flat.size} numbers", flat.copy())
        self.resume()
        return Summing(self, turn, flat)

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fill a dense tensor on every rank with the root's. Collective."""
        if self.size > 1:
            self.traffic.broadcasts += 1
            data = _buffer(tensor)
            mine = data.copy() if self.rank == root else None
            come = self._meet(f"broadcast from rank {root}", mine, data.nbytes, root)
            if self.rank != root:
                data[:] = come[self.circle.ranks[root]]
        return tensor

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The root's small Python object on every rank. Collective."""
        packed = _pack(value) if self.rank == root else None
        come = self._meet(f"broadcast_object from rank {root}", packed, 64, root)
        return _unpack(come[self.circle.ranks[root]])

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Small Python objects of all ranks, in rank order, on the root; None elsewhere. Collective."""
        need = None if self.rank == root else self.rank
        come = self._meet(f"gather_objects to rank {root}", _pack(value), 64, need)
        return [_unpack(come[rank]) for rank in self.circle.ranks] if self.rank == root else None

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Small Python objects of all ranks, in rank order, on every rank. Collective."""
        come = self._meet("all_gather_objects", _pack(value), 64, None)
        return [_unpack(come[rank]) for rank in self.circle.ranks]

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
