"""Gradients averaged over data replicas, while the backward still runs.

Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020: parameters fill buckets
in the reverse order of the layers, and a bucket is sent as soon as its last gradient is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lpnet.parallel.comm import Comm

BUCKET_BYTES = 4 << 20

Wait = Callable[[Any, str], None]


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, like: Tensor) -> None:
        self.dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.places: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        self.size = 0
        self.missing: set[str] = set()
        self.flat = torch.empty(0)
        self.request: Any = None

    def append(self, name: str, like: Tensor) -> None:
        """One more parameter."""
        self.places[name] = (self.size, like.shape, like.dtype)
        self.size += like.numel()


class GradientMean:
    """The mean over replicas of the gradients of one module. Collective over comm, as its methods.

    Args:
        comm: the same module in all replicas.
        parameters: by name; the same on all replicas.
        wait: waits for a request.
    """

    def __init__(self, comm: Comm, parameters: Mapping[str, Tensor], wait: Wait) -> None:
        self.comm, self._wait = comm, wait
        self._buckets: list[_Bucket] = []
        self._of: dict[str, _Bucket] = {}
        for name, parameter in reversed(list(parameters.items())):
            full = self._buckets and self._buckets[-1].size * 4 >= BUCKET_BYTES
            kind = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            if not self._buckets or full or self._buckets[-1].dtype != kind:
                self._buckets.append(_Bucket(parameter))
            self._buckets[-1].append(name, parameter)
            self._of[name] = self._buckets[-1]
        self._next = 0

    def begin(self) -> None:
        """A backward begins. No communication."""
        self._next = 0
        for bucket in self._buckets:
            bucket.flat = torch.zeros(bucket.size, dtype=bucket.dtype)
            bucket.missing = set(bucket.places)

    def ready(self, name: str, gradient: Tensor) -> None:
        """The gradient of a parameter is there; full buckets start to travel, in order on all replicas."""
        bucket = self._of[name]
        start, shape, _ = bucket.places[name]
        bucket.flat[start : start + shape.numel()].copy_(gradient.detach().reshape(-1))
        bucket.missing.discard(name)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._next]
        bucket.request = self.comm.isum(bucket.flat)
        self._next += 1

    def finish(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean gradients, in the order of the given ones; one that a replica lacks counts as zero there."""
        while self._next < len(self._buckets):
            self._start()
        means: dict[str, Tensor] = {}
        for bucket in self._buckets:
            self._wait(bucket.request, "wait replicas")
            bucket.flat.div_(self.comm.size)
            for name, (start, shape, dtype) in bucket.places.items():
                value = bucket.flat[start : start + shape.numel()].view(shape)
                if name in gradients:
                    means[name] = gradients[name].copy_(value)
                else:
                    means[name] = value.to(dtype)
        return {name: means[name] for name in [*gradients, *(name for name in means if name not in gradients)]}


def sum_over(comm: Comm, values: list[float], wait: Wait) -> list[float]:
    """Sums of some numbers over the ranks. Collective over comm."""
    tensor = torch.tensor(values, dtype=torch.float64)
    wait(comm.isum(tensor), "wait replicas")
    return [float(value) for value in tensor]
