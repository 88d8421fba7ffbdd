"""The order of batches as a pure function of (seed, step): resume needs nothing but the step.

Every rank computes the same indices, so none are sent. Two modes: reshuffled members (ordinary stochastic
training) and fixed members, whose batch ids let a layer-parallel solver keep its states between two visits of
the same samples (one-shot training, Günther et al. 2020, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from lpnet.errors import ConfigError
from lpnet.seeding import numpy_generator_for


@dataclass(frozen=True)
class Batch:
    """One step's samples.

    Args:
        epoch: passes over the data completed before this step.
        id: names the members, equal whenever they are; None where members change from epoch to epoch.
        indices: of the training samples, (batch,), int64; the last batch of an epoch may be short.
    """

    epoch: int
    id: int | None
    indices: torch.Tensor


@dataclass(frozen=True)
class BatchOrder:
    """Which samples each step sees.

        reshuffled   epoch 0 | 7 2 5 | 0 6 3 | 1 4 |   epoch 1 | 4 0 6 | 1 7 2 | 5 3 |   ids: none
        fixed        epoch 0 | 7 2 5 | 1 4 | 0 6 3 |   epoch 1 | 0 6 3 | 7 2 5 | 1 4 |   ids: 0 2 1, 1 0 2

    Args:
        samples: training samples in all.
        batch_size: samples per step; None, or `samples` and more, is the full batch: id 0, natural order.
        seed: seed of the run.
        members: reshuffled: a new permutation every epoch; fixed: members drawn once by the seed, and the order
            of the batches shuffled every epoch.

    Raises:
        ConfigError: no samples, or a batch size below 1.
    """

    samples: int
    batch_size: int | None
    seed: int
    members: Literal["reshuffled", "fixed"] = "reshuffled"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"there are {self.samples} training samples; at least 1 is needed to make a batch")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"data.batch_size is {self.batch_size}; it must be 1 or more, or null for the full batch")

    @property
    def full(self) -> bool:
        """Whether every step sees all samples."""
        return self.batch_size is None or self.batch_size >= self.samples

    @property
    def size(self) -> int:
        """Samples in every batch but the last of an epoch."""
        return self.samples if self.batch_size is None else min(self.batch_size, self.samples)

    @property
    def batches(self) -> int:
        """Steps per epoch."""
        return -(-self.samples // self.size)

    def at(self, step: int) -> Batch:
        """The batch of global step `step`, counted from 0; depends on nothing but the order and `step`.

        No communication.
        """
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        epoch, position = divmod(step, self.batches)
        if self.full:
            return Batch(epoch, 0, torch.arange(self.samples))
        if self.members == "fixed":
            number = int(_permutation(self.batches, self.seed, "batch_order", epoch)[position])
            return Batch(epoch, number, self.members_of(number))
        order = _permutation(self.samples, self.seed, "batch_members", epoch)
        return Batch(epoch, None, self._slice(order, position))

    def members_of(self, number: int) -> torch.Tensor:
        """Indices of the fixed batch `number`, whenever it comes; the last number may be a short batch.

        No communication.

        Raises:
            IndexError: there is no such batch, or members are not fixed.
        """
        if not 0 <= number < self.batches or not (self.full or self.members == "fixed"):
            raise IndexError(f"batch {number} has no fixed members ({self.batches} batches, members {self.members})")
        if self.full:
            return torch.arange(self.samples)
        return self._slice(_permutation(self.samples, self.seed, "batch_members", 0), number)

    def _slice(self, order: np.ndarray, number: int) -> torch.Tensor:
        return torch.from_numpy(order[number * self.size : (number + 1) * self.size].copy())


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, stream: str, epoch: int) -> np.ndarray:
    """Permutation of 0..count-1; cached, because every step of an epoch asks for the same one."""
    order = numpy_generator_for(seed, stream, step=epoch).permutation(count)
    order.flags.writeable = False
    return order
