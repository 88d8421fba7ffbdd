"""Nested iteration in depth: a trained network of N layers makes the start of one of k N layers.

Cyr, Günther, Schroder, "Multilevel initialization for layer-parallel deep neural network training", 2019,
arXiv 1912.08974. Layer i has the parameters theta(i h); the fine network reads the same function of layer time at its
own layers, constant between two coarse layers or linear; beyond the last one it is constant. Parameters, buffers and
the slots of a torch optimiser are refined alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lpnet.config import MGRIT
from lpnet.errors import UsageError
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.nn.stack import LayerStack
from lpnet.parallel.comm import Comm
from lpnet.parallel.partition import Partition

Interpolation = Literal["constant", "linear"]
_TAG = 900


def refine_rows(
    rows: Tensor, factor: int, interpolation: Interpolation = "linear", after: Tensor | None = None
) -> Tensor:
    """Rows (layers, ...) at `factor` times as many layers. No communication.

    Args:
        rows: one per coarse layer; integers are repeated.
        factor: k.
        interpolation: constant or linear in layer time.
        after: the coarse row after the last one, where another rank has it.

    Raises:
        UsageError: a factor below 1, or another interpolation.
    """
    if factor < 1:
        raise UsageError(f"the factor of a refinement is {factor}; it must be 1 or more")
    if interpolation not in ("constant", "linear"):
        raise UsageError(f"interpolation is {interpolation!r}; it must be constant or linear")
    fine = rows.repeat_interleave(factor, 0)
    if interpolation == "constant" or not rows.is_floating_point():
        return fine
    following = torch.cat([rows[1:], (rows[-1] if after is None else after)[None]])
    share = torch.arange(factor, dtype=rows.dtype, device=rows.device).repeat(len(rows)) / factor
    share = share.reshape(-1, *([1] * (rows.dim() - 1)))
    return fine + share * (following.repeat_interleave(factor, 0) - fine)


@torch.no_grad()
def refine(
    net: LayerParallel,
    factor: int,
    *,
    interpolation: Interpolation = "linear",
    mgrit: MGRIT | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[LayerParallel, torch.optim.Optimizer | None]:
    """The network with `factor` times as many layers, and its optimiser. Collective; messages to the left neighbour.

    Every rank keeps its part of depth. Opening and closing are the same modules, so that the coarse network is given
    up where there are data replicas. The optimiser is of the same class and
    settings as the coarse one, with its slots refined.

    Args:
        net: a network of one stack.
        factor: k.
        interpolation: constant or linear in layer time.
        mgrit: settings of the fine network; those of the coarse one by default.
        optimizer: a torch optimiser over net.parameters() with one group.

    Raises:
        UsageError: a network of several stacks, an optimiser of several groups.
    """
    stack = net.stack
    if not isinstance(stack, LayerStack):
        raise UsageError("refine takes a network of one stack; refine the stacks of a Network one by one")
    if optimizer is not None and len(optimizer.param_groups) != 1:
        raise UsageError(f"refine takes an optimiser of one group; this one has {len(optimizer.param_groups)}")
    refine_rows(torch.zeros(1), factor, interpolation)
    slots = [] if optimizer is None else [optimizer.state.get(p, {}) for p in stack.parameters()]
    own = [p.detach() for p in stack.parameters()]
    tensors = [*own, *stack.buffers()]
    tensors += [value for slot, p in zip(slots, own, strict=False) for value in slot.values() if _stacked(value, p)]
    after = _first_rows_of_the_right(stack.comm, tensors)
    fine = {id(t): refine_rows(t, factor, interpolation, a) for t, a in zip(tensors, after, strict=True)}
    bounds = Partition(tuple(factor * bound for bound in stack.partition.bounds))
    new = LayerStack(
        stack.step,
        num_layers=factor * stack.num_layers,
        final_time=stack.h * stack.num_layers,
        comm=stack.comm,
        seed=stack.seed,
        dtype=stack.compute,
        partition=bounds,
    )
    targets: list[Tensor] = [*new.parameters(), *new.buffers()]
    for target, source in zip(targets, [*own, *stack.buffers()], strict=True):
        target.copy_(fine[id(source)])
    for parameter, coarse in zip(new.parameters(), stack.parameters(), strict=True):
        parameter.requires_grad_(coarse.requires_grad)
    opening, closing = (torch.nn.Identity() if end is None else end for end in (net.opening, net.closing))
    net.leave_replicas()  # the ends are the fine network's from here on
    made = LayerParallel(new, opening=opening, closing=closing, mgrit=mgrit or net.mgrit, grid=net.grid)
    made.train(net.training)
    if optimizer is None:
        return made, None
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    other = type(optimizer)(made.parameters(), **_accepted(optimizer, settings))
    for parameter, slot, before in zip(new.parameters(), slots, own, strict=True):
        if slot:
            other.state[parameter] = {n: fine[id(v)] if _stacked(v, before) else _copy(v) for n, v in slot.items()}
    for end in (made.opening, made.closing):
        for p in [] if end is None else end.parameters():
            if p in optimizer.state:
                other.state[p] = optimizer.state[p]
    return made, other


def _stacked(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _accepted(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    import inspect

    known = inspect.signature(type(optimizer).__init__).parameters
    return {name: value for name, value in settings.items() if name in known}


def _first_rows_of_the_right(comm: Comm, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The right neighbour's first row of every tensor. Neighbour messages only."""
    rows: list[Tensor | None] = [torch.empty_like(t[0]) for t in tensors] if comm.rank + 1 < comm.size else []
    waiting = [comm.irecv(row.view(-1), comm.rank + 1, _TAG + i) for i, row in enumerate(rows) if row is not None]
    if comm.rank > 0:
        mine = [t[0].contiguous() for t in tensors]
        waiting += [comm.isend(row.view(-1), comm.rank - 1, _TAG + i) for i, row in enumerate(mine)]
    for request in waiting:
        request.Wait()
    return rows or [None] * len(tensors)
