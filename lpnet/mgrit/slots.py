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
        layer: slot of what is kept of every local layer.
        states: number of state slots.
        layers: number of layer slots.
    """

    state: dict[int, int]
    layer: dict[int, int]
    states: int
    layers: int


def all_points(low: int, high: int) -> Slots:
    """Every point and layer has a slot of its own."""
    count = high - low
    return Slots({low + i: i for i in range(count + 1)}, {low + i: i for i in range(count)}, count + 1, count)


def c_points_only(low: int, high: int, c_points: Sequence[int], is_last: bool) -> Slots:
    """Slots for C-points and the block's ends; the F-points of all intervals share scratch slots."""
    kept = sorted({p for p in c_points if low <= p < high} | {low})
    state = {p: i for i, p in enumerate(kept)}
    layer = dict(state)
    state[high] = len(kept)
    first, longest = len(kept) + 1, 0
    since = 0
    for point in range(low, high):
        since = 0 if point in layer and point in kept else since + 1
        longest = max(longest, since)
        if since:
            state[point] = first + since - 1
            layer[point] = len(kept) + since - 1
    return Slots(state, layer, first + longest, len(kept) + longest)


def rolling(low: int, high: int) -> Slots:
    """Two state slots in turn and one layer slot: propagation that keeps nothing."""
    return Slots({low + i: i % 2 for i in range(high - low + 1)}, {low + i: 0 for i in range(high - low)}, 2, 1)


def index_of(places: Sequence[int]) -> Index:
    """One place as an int, several at equal distances as a slice."""
    if len(places) == 1:
        return places[0]
    stride = places[1] - places[0]
    assert stride > 0 and all(b - a == stride for a, b in zip(places, places[1:], strict=False)), places
    return slice(places[0], places[-1] + 1, stride)
