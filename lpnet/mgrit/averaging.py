"""Gradients of a layer-parallel network averaged over its data replicas, while the rest of the backward runs.

A part of the network (closing, stack, opening: the order of the backward) has buckets of its own, which start to travel
as soon as its last gradient is there: those of the closing during the adjoint solve, those of the layers while the
opening is differentiated. Parameters that replicas hold alike stay alike, bit for bit: they all take the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.parallel.replicas import GradientMean

if TYPE_CHECKING:
    from lpnet.nn.network import Network
    from lpnet.nn.stack import LayerStack
    from lpnet.parallel.comm import Comm
    from lpnet.parallel.grid import Grid
    from lpnet.parallel.shard import Shard


class ReplicaMean:
    """Averages .grad at the end of every backward, over grid.peers.

    As in torch's DistributedDataParallel every backward of `loss.backward()` is averaged, so that accumulated
    gradients are means too; gradients asked for by torch.autograd.grad are this replica's own.

    Args:
        grid: the ranks.
        parts: trainable parameters by name, of closing, stack and opening.
    """

    def __init__(self, grid: Grid, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        assert grid.peers is not None
        self._means: dict[str, GradientMean] = {}
        self._parameters = {part: dict(named) for part, named in parts.items() if named}
        self._begun: list[str] = []
        self.count = sum(map(len, parts.values()))
        """Parameters that are averaged."""
        self._handles: list[Any] = []
        for part, named in self._parameters.items():
            self._means[part] = GradientMean(grid.peers, named, _wait)
            for name, parameter in named.items():
                hook = self._hook(part, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _hook(self, part: str, name: str) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if not self._begun:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            if part not in self._begun:
                self._begun.append(part)
                self._means[part].begin()
            assert parameter.grad is not None
            self._means[part].ready(name, parameter.grad)

        return ready

    def _finish(self) -> None:
        """The backward is over: wait for the means. Collective over the peers."""
        for part in self._begun:
            named = self._parameters[part]
            self._means[part].finish({name: p.grad for name, p in named.items() if p.grad is not None})
        self._begun = []

    def close(self) -> None:
        """Leave the parameters alone. No communication."""
        for handle in self._handles:
            handle.remove()


def _wait(request: Any, _: str) -> None:
    request.Wait()


@torch.no_grad()
def share(grid: Grid, tensors: Mapping[str, Tensor]) -> None:
    """All replicas take the values of the first one. Collective over grid.peers."""
    if grid.peers is None:
        return
    for tensor in tensors.values():
        dense = tensor.detach().contiguous()
        tensor.copy_(grid.peers.broadcast(dense, 0))


class Replicated:
    """What LayerParallel does about data replicas."""

    if TYPE_CHECKING:
        grid: Grid
        stack: LayerStack | Network
        opening: torch.nn.Module | None
        closing: torch.nn.Module | None
        named_buffers: Callable[..., Any]
        named_parameters: Callable[..., Any]
        parameters: Callable[..., Any]

    _mean: ReplicaMean | None = None

    @staticmethod
    def _checked(grid: Grid, ranks: int) -> Grid:
        if grid.layers.size != ranks:
            raise UsageError(
                f"the stack is shared by {ranks} ranks, and a replica of the grid has {grid.layers.size}; make it with "
                f"comm=grid.layers"
            )
        return grid

    @property
    def world(self) -> Comm:
        """All ranks, of all data replicas."""
        return self.stack.comm if self.grid.peers is None else self.grid.world

    @property
    def saves(self) -> bool:
        """Whether this rank's parameters count for checkpoints: those of other replicas are the same."""
        return self.grid.leads

    def all_shards(self) -> list[Shard]:
        """What is filled from a checkpoint, on all replicas. No communication."""
        own: list[Shard] = self.shards()  # type: ignore[attr-defined]
        return own

    def _join_replicas(self, *, begin: bool = True) -> None:
        """Average gradients from here on; `begin` with the tensors of the first replica: collective over peers."""
        if self.grid.peers is None:
            return
        if begin:
            share(self.grid, {**dict(self.named_parameters()), **dict(self.named_buffers())})
        if self._mean is not None:
            self._mean.close()
        self._mean = ReplicaMean(self.grid, self._trainable())

    def leave_replicas(self) -> None:
        """Average no more: another network has taken over. No communication."""
        if self._mean is not None:
            self._mean.close()
            self._mean = None

    def _trainable(self) -> dict[str, dict[str, Tensor]]:
        parts = (("closing", self.closing), ("stack", self.stack), ("opening", self.opening))
        return {
            name: {} if module is None else {n: p for n, p in module.named_parameters() if p.requires_grad}
            for name, module in parts
        }

    def _follow_parameters(self) -> None:
        """Parameters may have been frozen or thawed since. No communication."""
        if self._mean is not None and self._mean.count != sum(p.requires_grad for p in self.parameters()):
            self._join_replicas(begin=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy averages too. No communication."""
        super().__setstate__(state)  # type: ignore[misc]
        self._join_replicas(begin=False)

    def share_buffers(self) -> None:
        """Running statistics of the first replica for all, before they are used or saved. Collective over peers."""
        share(self.grid, dict(self.named_buffers()))
