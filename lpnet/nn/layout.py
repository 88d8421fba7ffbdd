"""How the state at a point lies in memory: as the layers that read it want it. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lpnet.nn import parts
from lpnet.nn.conv import ConvStep, folded, unfolded
from lpnet.nn.steps import DenseStep


@dataclass(frozen=True)
class Layout:
    """The memory of one state.

    Args:
        shape: of the state, as modules see it.
        kind: plain; features first (dense layers); channels last (convolutional layers).
        fold: parts of the batch that lie side by side as channels.
    """

    shape: parts.StateShape
    kind: Literal["plain", "features", "channels"] = "plain"
    fold: int = 1

    @property
    def payload(self) -> tuple[int, ...]:
        """Shape in memory."""
        shape: Any = self.shape
        if self.kind == "features":
            return shape[1], shape[0]
        if self.kind == "channels":
            return shape[0] // self.fold, shape[2], shape[3], shape[1] * self.fold
        return parts.payload(shape)

    @property
    def numbers(self) -> int:
        """Numbers in the state."""
        return torch.Size(self.payload).numel()

    def to_state(self, payload: Tensor) -> Any:
        """The state as modules see it; a view, differentiable."""
        if self.kind == "features":
            return payload.t()
        return unfolded(payload, self.fold) if self.kind == "channels" else parts.split(payload, self.shape)

    def to_payload(self, state: Any) -> Tensor:
        """The inverse, differentiable."""
        if self.kind == "features":
            return state.t()  # type: ignore[no-any-return]
        return folded(state, self.fold) if self.kind == "channels" else parts.join(state)


def layout_for(step: Any, shape: Sequence[Any]) -> Layout:
    """The layout that a step's workspace has for states of a shape."""
    kinds: dict[type, Literal["features", "channels"]] = {DenseStep: "features", ConvStep: "channels"}
    fold = step.fold(shape[0]) if isinstance(step, ConvStep) else 1
    return Layout(tuple(shape), kinds.get(type(step), "plain"), fold)
