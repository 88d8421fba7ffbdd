"""What a block of layers is told besides states: which layers it holds, and what holds for one pass through them.

No communication.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import UsageError


@dataclass(frozen=True)
class Block:
    """The place of a rank's layers in the network.

    Args:
        low: index of the first one in its stack.
        h: step in layer time; layer i of a stack has the time i h.
        seed: of the masks of dropout.
        offset: layers before the stack.
    """

    low: int = 0
    h: float = 1.0
    seed: int = 0
    offset: int = 0


@dataclass(frozen=True)
class MaskKey:
    """What the masks of one pass depend on besides seed and layer.

    Args:
        step: training step.
        micro: number of the pass within the step.
        first: global index of the first sample.
    """

    step: int = 0
    micro: int = 0
    first: int = 0


@dataclass(frozen=True)
class Context:
    """What holds for one pass: all evaluations of F in it, on every level, forward and adjoint, see the same.

    Args:
        training: batch statistics and masks (torch's train mode).
        side: a tensor, or a tuple or dict of tensors, that every layer is given.
        key: of the masks; None: no dropout.
        graphs: whether an adjoint may follow.
    """

    training: bool = False
    side: Any = None
    key: MaskKey | None = None
    graphs: bool = True


def takes(module: torch.nn.Module, name: str) -> bool:
    """Whether a module's forward has a parameter of this name."""
    return name in _names(getattr(module.forward, "__func__", module.forward))


@cache
def _names(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def call(module: torch.nn.Module, value: Any, side: Any) -> Any:
    """module(value), with the side input where its forward takes one."""
    return module(value, side=side) if takes(module, "side") else module(value)


def prepared(side: Any, dtype: torch.dtype) -> Any:
    """A side input with its floating tensors in the precision of the states.

    Raises:
        UsageError: something else than tensors, or a tensor that wants a gradient.
    """
    if side is None:
        return None
    if isinstance(side, dict):
        return {name: prepared(value, dtype) for name, value in side.items()}
    if isinstance(side, tuple | list):
        return tuple(prepared(value, dtype) for value in side)
    if not isinstance(side, Tensor):
        raise UsageError(f"the side input holds a {type(side).__name__}; it takes tensors, tuples and dicts of them")
    if side.requires_grad:
        raise UsageError(f"a side input of shape {tuple(side.shape)} asks for a gradient; give side.detach()")
    return side.to(dtype) if side.is_floating_point() else side


def signature(side: Any) -> Any:
    """Shapes and dtypes of a side input, as a key."""
    if isinstance(side, dict):
        return tuple((name, signature(value)) for name, value in side.items())
    if isinstance(side, tuple):
        return tuple(signature(value) for value in side)
    return None if side is None else (tuple(side.shape), side.dtype)
