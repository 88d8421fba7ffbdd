"""Which rank works where: data replicas x modules x ranks that share a module.

2 replicas of modules 1 (ranks a, b) and 2 (rank c)
rank      0    1    2    3    4    5
replica   1    1    1    2    2    2
module    1a   1b   2c   1a   1b   2c

chain     the first ranks of the modules of one replica: they talk to each other        {0, 2}, {3, 5}
group     the ranks of one module of one replica                                         {0, 1}, {3, 4}
peers     ranks with the same work in all replicas: they average gradients               {0, 3}, {1, 4}, {2, 5}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpnet.errors import UsageError
from lpnet.parallel.comm import Comm


@dataclass(frozen=True)
class Place:
    """This rank's work.

    Args:
        modules: K.
        local: modules of this rank, counted from 1: one, or all of them in one process.
        shares: ranks of every module.
        replica: which data replica, counted from 0.
        replicas: how many.
        chain: first ranks of the modules; None on other ranks of a shared module, and where all modules are here.
        group: ranks that share this module; None: this one alone.
        peers: the same place in all replicas; None: one replica.
    """

    modules: int
    local: tuple[int, ...]
    shares: tuple[int, ...]
    replica: int = 0
    replicas: int = 1
    chain: Comm | None = None
    group: Comm | None = None
    peers: Comm | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its module, which talks to other modules."""
        return self.group is None or self.group.rank == 0

    @property
    def saves(self) -> bool:
        """Whether this rank's parameters count for checkpoints: those of other replicas are the same."""
        return self.replica == 0


def check_ranks(size: int, modules: int, ranks_per_module: Sequence[int] | None) -> list[int]:
    """Ranks of every module of a replica. No communication.

    Args:
        size: ranks in all.
        modules: K.
        ranks_per_module: as the user gave them; None: one each.

    Raises:
        UsageError: they do not fit.
    """
    shares = [1] * modules if ranks_per_module is None else list(ranks_per_module)
    if len(shares) != modules or min(shares) < 1:
        raise UsageError(f"ranks_per_module is {shares}; {modules} modules need {modules} positive numbers")
    alone = size == 1 and sum(shares) == modules
    if not alone and size % sum(shares):
        raise UsageError(
            f"{modules} modules on {size} ranks; use one rank per module ({sum(shares)}), a multiple of them for data "
            "replicas, or one rank for all modules"
        )
    return shares


def arrange(world: Comm, modules: int, ranks_per_module: Sequence[int] | None = None) -> Place:
    """Where this rank works. Collective over world.

    Raises:
        UsageError: see `check_ranks`.
    """
    shares = check_ranks(world.size, modules, ranks_per_module)
    if world.size == 1:
        return Place(modules, tuple(range(1, modules + 1)), tuple(shares))
    each = sum(shares)
    replica, within = divmod(world.rank, each)
    owners = [module for module, share in enumerate(shares, 1) for _ in range(share)]
    module = owners[within]
    first = owners.index(module) == within
    group = world.split(replica * modules + module) if each > modules else None
    chain = world.split(replica if first else None)
    peers = world.split(within) if world.size > each else None
    return Place(
        modules,
        (module,),
        tuple(shares),
        replica,
        world.size // each,
        chain,
        group if group is not None and group.size > 1 else None,
        peers,
    )
