"""Where the points and layers of a rank live in its workspace: three storage schemes. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpnet.nn.steps import Index


@dataclass(frozen=True)
class Slots:
    """Where points and layers of a rank live in its workspace.

    Args:
        state: slot of every local point, the one after the block included.
        layer: slot of every local layer's value F.
        kept: slot of what the gradient of every local layer needs of the adjoint.
        block: layers whose gradient is made at once while what it needs is in the cache; 0: all layers in one call.
    """

    state: dict[int, int]
    layer: dict[int, int]
    kept: dict[int, int]
    block: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of slots, as a workspace wants them."""
        most = {"state_slots": self.state, "layer_slots": self.layer, "kept_slots": self.kept}
        return {name: max(places.values()) + 1 for name, places in most.items()}


def all_points(low: int, high: int, *, block: int = 0) -> Slots:
    """Every point and layer has a slot of its own; gradients layer block by layer block where `block` is given."""
    layers = {low + i: i for i in range(high - low)}
    kept = {layer: i % block for layer, i in layers.items()} if block else layers
    return Slots({**layers, high: high - low}, layers, kept, block)


def c_points_only(low: int, high: int, c_points: Sequence[int]) -> Slots:
    """Slots for C-points and the block's ends; the F-points of all intervals share scratch slots."""
    own = sorted({p for p in c_points if low <= p < high} | {low})
    state = {p: i for i, p in enumerate(own)}
    layer = dict(state)
    state[high] = len(own)
    since = 0
    for point in range(low, high):
        since = 0 if point in layer else since + 1
        if since:
            state[point] = len(own) + since
            layer[point] = len(own) + since - 1
    return Slots(state, layer, layer, high - low)


def rolling(low: int, high: int) -> Slots:
    """Two state slots in turn and one layer slot: propagation that keeps nothing."""
    only = {low + i: 0 for i in range(high - low)}
    return Slots({low + i: i % 2 for i in range(high - low + 1)}, only, only)


def index_of(places: Sequence[int]) -> Index:
    """One place as an int, several at equal distances as a slice."""
    if len(places) == 1:
        return places[0]
    stride = places[1] - places[0]
    assert stride > 0 and all(b - a == stride for a, b in zip(places, places[1:], strict=False)), places
    return slice(places[0], places[-1] + 1, stride)
