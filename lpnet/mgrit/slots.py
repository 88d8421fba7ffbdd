"""Where the points and layers of a rank live in its workspace: four storage schemes. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpnet.mgrit.hierarchy import Hierarchy
from lpnet.nn.steps import Index


@dataclass(frozen=True)
class Slots:
    """Where points and layers of a rank live in its workspace.

    Args:
        state: slot of every local point, the one after the block included.
        layer: slot of every local layer's value F.
        kept: slot of what the gradient of every local layer needs of the adjoint.
        adjoint: slot of every local point's adjoint.
        block: layers whose gradient is made at once while what it needs is in the cache; 0: all layers in one call.
    """

    state: dict[int, int]
    layer: dict[int, int]
    kept: dict[int, int]
    adjoint: dict[int, int]
    block: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of slots, as a workspace wants them."""
        most = {
            "state_slots": self.state,
            "layer_slots": self.layer,
            "kept_slots": self.kept,
            "adjoint_slots": self.adjoint,
        }
        return {name: max(places.values()) + 1 for name, places in most.items()}


def all_points(low: int, high: int, *, block: int = 0, one_sweep: bool = False) -> Slots:
    """Every point and layer has a slot of its own; gradients layer block by layer block where `block` is given.

    With `one_sweep` and blocks the adjoints are walked through once, from the end to the start: they take as many slots
    as a block has points.
    """
    layers = {low + i: i for i in range(high - low)}
    points = {**layers, high: high - low}
    kept = {layer: i % block for layer, i in layers.items()} if block else layers
    adjoint = {point: i % (block + 1) for point, i in points.items()} if block and one_sweep else points
    return Slots(points, layers, kept, adjoint, block)


def side_by_side(low: int, high: int, c_points: Sequence[int]) -> Slots:
    """Points and layers at the same place of their intervals lie in a row: one call works on one dense array.

    Whole intervals one after the other would put such points at equal distances, often a power of two bytes, where they
    push each other out of the caches. Gradients are made row by row, so what they need of the adjoint takes one row.
    Adjoints of F-points live while the interval is walked through: they take two rows in turn. The ends of the block
    are sent from where they lie, or arrive there: they have slots of their own.
    """
    ends = set(c_points)
    start = max((p for p in ends if p <= low), default=low)
    offset, interval, at, number = {}, {}, start, 0
    for point in range(start, high + 1):
        if point in ends and point > start:
            at, number = point, number + 1
        offset[point], interval[point] = point - at, number
    points = sorted(range(low, high + 1), key=lambda p: (offset[p], p))
    layers = [p for p in points if p < high]
    kept = {layer: interval[layer] for layer in layers}
    own = [p for p in points if p in ends] + [p for p in dict.fromkeys((low, high)) if p not in ends]
    adjoint = {p: i for i, p in enumerate(own)}
    for p in points:
        if p not in adjoint:
            adjoint[p] = len(own) + offset[p] % 2 * (number + 1) + interval[p]
    return Slots({p: i for i, p in enumerate(points)}, {b: i for i, b in enumerate(layers)}, kept, adjoint, block=1)


def side_by_side_if_alike(low: int, high: int, forward: Hierarchy, backward: Hierarchy) -> Slots:
    """Slots for side-by-side relaxation; in their order where the intervals of both directions differ."""
    one_level = len(forward.levels) == 1 or len(backward.levels) == 1
    if one_level or {*forward.levels[1], forward.layers} != set(backward.levels[1]):
        return all_points(low, high)
    return side_by_side(low, high, forward.levels[1])


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
    return Slots(state, layer, layer, state, high - low)


def rolling(low: int, high: int) -> Slots:
    """Two state slots in turn and one layer slot: propagation that keeps nothing."""
    only = {low + i: 0 for i in range(high - low)}
    state = {low + i: i % 2 for i in range(high - low + 1)}
    return Slots(state, only, only, state)


def index_of(places: Sequence[int]) -> Index:
    """One place as an int, several at equal distances as a slice."""
    if len(places) == 1:
        return places[0]
    stride = places[1] - places[0]
    assert stride > 0 and all(b - a == stride for a, b in zip(places, places[1:], strict=False)), places
    return slice(places[0], places[-1] + 1, stride)
