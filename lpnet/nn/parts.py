"""States of several tensors as one: a tuple travels flat, end to end, and is seen as views of it.

No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lpnet.errors import UsageError

StateShape = tuple[int, ...] | tuple[tuple[int, ...], ...]


def shape_of(state: Any) -> StateShape:
    """Shape of a tensor, or of each tensor of a tuple.

    Raises:
        UsageError: neither, or a tensor that is not floating.
    """
    members = state if isinstance(state, tuple | list) else (state,)
    for member in members:
        if not isinstance(member, Tensor):
            raise UsageError(f"a state is a tensor or a tuple of tensors; it holds a {type(member).__name__}")
        if not member.is_floating_point():
            raise UsageError(
                f"the state holds a tensor {tuple(member.shape)} of {member.dtype}; states are floating tensors: embed "
                f"it in the opening, or give it to every layer by net(x, side=...)"
            )
    if not members:
        raise UsageError("the state is an empty tuple; it needs a floating tensor")
    return tuple(tuple(m.shape) for m in members) if isinstance(state, tuple | list) else tuple(state.shape)


def is_tuple(shape: Sequence[Any]) -> bool:
    """Whether a shape is that of a tuple of tensors."""
    return bool(shape) and isinstance(shape[0], tuple)


def samples(shape: Sequence[Any]) -> int:
    """Length of the first axis of a state, or of a tuple's first tensor."""
    first = shape[0] if is_tuple(shape) else shape
    return int(first[0])


def payload(shape: Sequence[Any]) -> tuple[int, ...]:
    """Shape in memory: a tuple's tensors lie end to end."""
    return (sum(torch.Size(part).numel() for part in shape),) if is_tuple(shape) else tuple(shape)


def join(state: Any) -> Tensor:
    """A state as one tensor, differentiable."""
    if isinstance(state, tuple | list):
        return torch.cat([part.reshape(-1) for part in state])
    return cast(Tensor, state)


def split(flat: Tensor, shape: Sequence[Any]) -> Any:
    """The inverse of `join`: views."""
    if not is_tuple(shape):
        return flat
    parts = flat.split([torch.Size(part).numel() for part in shape])
    return tuple(part.view(to) for part, to in zip(parts, shape, strict=True))
