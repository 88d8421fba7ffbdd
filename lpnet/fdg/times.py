"""How the modules spend their time: at work, waiting for a message, waiting for room in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lpnet.fdg.mailbox import Mailbox, waited
from lpnet.fdg.member import Member, Work, drive
from lpnet.parallel.comm import Comm


@dataclass(frozen=True)
class ModuleTime:
    """Seconds of one module in all its ticks so far.

    Args:
        module: which one, counted from 1.
        rank: where it runs.
        ticks: how many.
        seconds: of the ticks, from begin to end; of all modules together where they share a process.
        busy: of them, the module's own work.
        wait_receive: of them, waiting for a message of a neighbour.
        wait_send: of them, waiting for room in a queue.
    """

    module: int
    rank: int = 0
    ticks: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    wait_receive: float = 0.0
    wait_send: float = 0.0


class Stopwatch:
    """Adds up the times of this rank's modules.

    Args:
        comm: ranks, for their clock.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.modules: dict[int, ModuleTime] = {}

    def drive(
        self, members: Sequence[Member], boxes: Sequence[Mailbox], works: Sequence[Work]
    ) -> tuple[float, float, float]:
        """Run the work of a tick to its end. Neighbour messages only.

        Returns:
            Seconds in all, waiting to receive, and waiting to send.

        Raises:
            LpnetError: no module can go on.
        """
        began, before = self._comm.now(), waited(boxes)
        took = drive(members, works, clock=self._comm.now)
        after, seconds = waited(boxes), self._comm.now() - began
        receive, send = after[0] - before[0], after[1] - before[1]
        for member, own in zip(members, took if len(members) > 1 else [seconds], strict=True):
            sums = self.modules.get(member.module, ModuleTime(member.module, self._comm.rank))
            self.modules[member.module] = replace(
                sums,
                ticks=sums.ticks + 1,
                seconds=sums.seconds + seconds,
                busy=sums.busy + own - receive - send,
                wait_receive=sums.wait_receive + receive,
                wait_send=sums.wait_send + send,
            )
        return seconds, receive, send

    def all(self) -> tuple[ModuleTime, ...]:
        """Of all modules, in order of modules and ranks, on every rank. Collective."""
        parts = self._comm.all_gather_objects(list(self.modules.values()))
        return tuple(sorted((row for part in parts for row in part), key=lambda row: (row.module, row.rank)))


def lines(rows: Sequence[ModuleTime]) -> list[str]:
    """One line per module, in per cent of its ticks. No communication."""
    found = []
    for row in rows:
        whole = (row.seconds or 1.0) / 100.0
        found.append(
            f"module {row.module} on rank {row.rank}: {row.ticks} ticks, busy {row.busy / whole:.1f} %, waiting to "
            f"receive {row.wait_receive / whole:.1f} %, to send {row.wait_send / whole:.1f} %"
        )
    return found
