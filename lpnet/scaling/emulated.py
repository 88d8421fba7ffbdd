"""bench and train on emulated ranks: the same programs, one process, virtual time. Nothing here talks to MPI."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lpnet.config import Config
from lpnet.errors import UsageError
from lpnet.parallel.comm import Comm
from lpnet.parallel.emulator import emulate
from lpnet.parallel.interconnect import NetworkModel, named
from lpnet.parallel.world import Faults
from lpnet.scaling.faults import read_faults
from lpnet.scaling.profile import Profile, profile
from lpnet.train.trainer import check, train

OPTIONS = ("emulate", "network", "networks", "faults")
"""Flags of an emulated command."""


@dataclass(frozen=True)
class Request:
    """What --emulate, --network, --networks and --faults ask for.

    Args:
        ranks: rank counts, one emulation each.
        network: costs of messages.
        faults: what goes wrong on purpose; None: nothing.
    """

    ranks: tuple[int, ...]
    network: NetworkModel
    faults: Faults | None = None


def requested(options: Mapping[str, str], *, started_ranks: int = 1) -> Request:
    """The emulation that the flags ask for. No communication.

    Raises:
        UsageError: no --emulate, not a list of rank counts, an unknown network, faults of another form, or a job of
            several ranks already.
    """
    if "emulate" not in options:
        extra = next(name for name in OPTIONS if name in options)
        raise UsageError(f"--{extra} needs --emulate P[,P...]")
    if started_ranks > 1:
        raise UsageError(f"--emulate runs in one process, and there are {started_ranks} ranks; start it without mpirun")
    ranks = rank_list(options["emulate"])
    faults = read_faults(options["faults"], ranks) if "faults" in options else None
    return Request(ranks, named(options.get("network", "infiniband"), options.get("networks")), faults)


def rank_list(text: str) -> tuple[int, ...]:
    """P[,P...] as numbers.

    Raises:
        UsageError: anything else.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--emulate is {text!r}; expected rank counts such as 1,16,256")
    return tuple(int(word) for word in words)


def bench(config: Config, request: Request, *, steps: int) -> list[Profile]:
    """Profiles of a configuration, one per rank count; predicted. No communication with other processes.

    Raises:
        UsageError: the configuration cannot run on a rank count.
    """
    profiles = []
    for ranks in request.ranks:
        gc.collect()  # networks hold themselves in cycles, and the states of the run before may be gigabytes

        def program(comm: Comm) -> Profile | None:
            check(config, comm)
            found = profile(config, comm, steps=steps)
            return found if comm.rank == 0 else None

        done = emulate(program, ranks=ranks, network=request.network, faults=request.faults)
        assert done.results[0] is not None
        profiles.append(replace(done.results[0], predicted=done.describe()))
    return profiles


def train_emulated(config: Config, request: Request) -> int:
    """Train on emulated ranks, checkpoints included. With several rank counts each run has a folder RUN/ranks-P.

    Returns:
        The worst exit code.

    Raises:
        UsageError: as `train`; several rank counts without run.out.
    """
    if len(request.ranks) > 1 and config.run.out is None:
        raise UsageError("--emulate with several rank counts needs --run.out FOLDER, for FOLDER/ranks-P each")
    codes: list[int] = []
    for ranks in request.ranks:
        mine = config
        if len(request.ranks) > 1:
            mine = replace(config, run=replace(config.run, out=str(Path(config.run.out or "") / f"ranks-{ranks}")))
        done = emulate(
            lambda comm, mine=mine: train(mine, comm),  # type: ignore[misc]
            ranks=ranks,
            network=request.network,
            faults=request.faults,
        )
        print(f"{max(done.seconds):.3f} s, {done.describe()}")
        codes += done.results
    return max(codes)


def tables(profiles: Sequence[Profile]) -> str:
    """All profiles, one below the other. No communication."""
    return "\n\n".join(found.table() for found in profiles)
