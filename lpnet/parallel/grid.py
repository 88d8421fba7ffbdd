"""The communicators of data replicas x ranks that share the layers.

    2 replicas x 3 ranks
    rank      0    1    2    3    4    5
    replica   0    0    0    1    1    1
    layers    0    1    2    0    1    2

layers    the ranks that share the layers of one replica          {0, 1, 2}, {3, 4, 5}
peers     ranks with the same layers in all replicas: they average gradients      {0, 3}, {1, 4}, {2, 5}
"""

from __future__ import annotations

from typing import Any, Literal

from lpnet.parallel.comm import Comm, as_comm
from lpnet.parallel.grid_shape import grid_shape


class Shares:
    """Which part of a joined batch a data replica is given.

    Args:
        replicas: how many there are.
        replica: which one, counted from 0.
    """

    def __init__(self, replicas: int = 1, replica: int = 0) -> None:
        self.replicas, self.replica = replicas, replica

    @property
    def leads(self) -> bool:
        """Whether this rank's parameters count where all replicas have the same."""
        return self.replica == 0

    def part(self, samples: int) -> tuple[slice, float]:
        """This replica's samples of a joined batch, and the weight of its mean loss. No communication.

        The mean over replicas of weight x mean loss is the mean loss of the joined batch. Where there are fewer samples
        than replicas, one without any takes the first sample with weight 0.
        """
        small, larger = divmod(samples, self.replicas)
        low = self.replica * small + min(self.replica, larger)
        count = small + (self.replica < larger)
        if count == 0:
            return slice(0, 1), 0.0
        return slice(low, low + count), count * self.replicas / samples


class Grid(Shares):
    """The communicators of one rank: of its replica's layers, and of its peers in the other replicas.

    Collective over comm when made.

    Args:
        comm: an mpi4py communicator or lpnet Comm of all ranks; None: one rank.
        replicas: data replicas.
        layers: ranks that share the layers of a replica; auto: all there are.

    Raises:
        UsageError: on every rank, before any message: the numbers do not fit; with the nearest grid.
    """

    def __init__(self, comm: Any = None, *, replicas: int = 1, layers: int | Literal["auto"] = "auto") -> None:
        self.shape = grid_shape(1 if comm is None else comm.size, replicas=replicas, layers=layers)
        self.world: Comm = as_comm(comm)
        super().__init__(replicas, self.shape.place(self.world.rank)[0])
        self.layers: Comm = self.world
        self.peers: Comm | None = None
        if self.replicas > 1:
            part, peers = self.world.split(self.replica), self.world.split(self.world.rank % self.shape.layers)
            assert part is not None
            self.layers, self.peers = part, peers

    def free(self) -> None:
        """Give the communicators back. Collective over all ranks."""
        for comm in (self.peers, self.layers if self.layers is not self.world else None, self.world):
            if comm is not None:
                comm.free()
