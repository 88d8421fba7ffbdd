"""Many ranks in one process, each with a clock of its own: hundreds of ranks on a laptop, with real numerics.

    virtual        the Comm that programs see
    baton          which rank's thread runs, deadlocks
    meter          what computing costs
    interconnect   what messages cost

A receive sets the rank's clock to max(own, sender's + latency + bytes / bandwidth); a reduction or broadcast costs
log2(P) messages after the last rank that it needs. The numbers are those of a run under MPI; the times are predictions.
All ranks' layers go through the caches of one processor, which are therefore colder than a real rank's: predictions err
on the slow side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from lpnet.errors import UsageError
from lpnet.io import trace
from lpnet.parallel.comm import Comm, Traffic
from lpnet.parallel.interconnect import NetworkModel, named
from lpnet.parallel.meter import Compute, Costs, Meter
from lpnet.parallel.virtual import VirtualComm
from lpnet.parallel.world import Faults, Life, RankDiedError, World

__all__ = ["Emulation", "Faults", "RankDiedError", "emulate"]

T = TypeVar("T")
EVENTS = 3_000_000  # spans kept of all ranks together


@dataclass(frozen=True)
class Emulation(Generic[T]):
    """What an emulated job gave.

    Args:
        results: what the program returned, by rank.
        seconds: virtual time of every rank at its end; predicted.
        waiting: part of it that the rank waited for messages.
        traffic: what every rank sent.
        network: the network model.
        switches: how often the baton went to another rank.
    """

    results: list[T]
    seconds: list[float]
    waiting: list[float]
    traffic: list[Traffic]
    network: NetworkModel
    switches: int

    def describe(self) -> str:
        """The label of the predicted times."""
        return f"predicted for {len(self.results)} emulated rank(s) on {self.network.describe()}"


def emulate(
    program: Callable[[Comm], T],
    *,
    ranks: int,
    network: NetworkModel | str = "infiniband",
    compute: Compute = "median",
    faults: Faults | None = None,
) -> Emulation[T]:
    """Run `program(comm)` on `ranks` virtual ranks inside this process. Computes on one thread.

    Args:
        program: what every rank runs; takes its communicator.
        ranks: how many.
        network: costs of messages, or the name of a preset.
        compute: what computing costs: median (of the same work so far) | cpu (raw thread time) | none.
        faults: what goes wrong on purpose.

    Returns:
        Results and virtual times by rank.

    Raises:
        DeadlockError: no rank can go on.
        Exception: what the first failing rank raised; the others end there, as under MPI.
    """
    if ranks < 1:
        raise UsageError(f"ranks is {ranks}; an emulation needs 1 or more")
    model = named(network) if isinstance(network, str) else network
    world = World(ranks, model, Costs(compute, model.cache_bytes), faults or Faults())
    places = ["first", *["middle"] * (ranks - 2), "last"][:ranks]
    lives = [Life(rank, Meter(world.costs, place)) for rank, place in enumerate(places)]
    comms = [VirtualComm(world, world.circles[0], life) for life in lives]
    results: dict[int, T] = {}

    def work(comm: VirtualComm) -> None:
        torch.set_num_threads(1)
        trace.use(trace.Tracer(comm.meter.read_ns, most=EVENTS // ranks))
        comm.meter.start()
        results[comm.rank] = program(comm)
        comm.pause("end")

    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    try:
        with threadpool_limits(1):
            world.baton.run([lambda comm=comm: work(comm) for comm in comms])  # type: ignore[misc]
    finally:
        torch.set_num_threads(threads)
    return Emulation(
        [results[rank] for rank in range(ranks)],
        [life.meter.now for life in lives],
        [life.waited for life in lives],
        [life.total() for life in lives],
        model,
        world.baton.switches,
    )
