"""Which rank owns which layers: contiguous blocks, pure data. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpnet.errors import UsageError


@dataclass(frozen=True)
class Partition:
    """Rank p owns layers bounds[p] <= i < bounds[p + 1], and the states at points of the same indices;
    the last rank owns the last point too.

    Args:
        bounds: (ranks + 1) increasing integers from 0 to the number of layers.
    """

    bounds: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.bounds) - 1

    @property
    def layers(self) -> int:
        """Number of layers N."""
        return self.bounds[-1]

    def block(self, rank: int) -> tuple[int, int]:
        """First layer of `rank` and the first one after its block."""
        return self.bounds[rank], self.bounds[rank + 1]

    def owner(self, point: int) -> int:
        """The rank that owns layer `point` (point N: the last rank)."""
        from bisect import bisect_right

        return min(bisect_right(self.bounds, point) - 1, self.ranks - 1)


def _check(layers: int, ranks: int) -> None:
    if ranks > layers:
        raise UsageError(f"{layers} layers cannot be shared by {ranks} ranks; use at most {layers} ranks")


def uniform(layers: int, ranks: int) -> Partition:
    """Blocks that differ by one layer at most; the first ranks take the larger ones.

    Raises:
        UsageError: more ranks than layers.
    """
    _check(layers, ranks)
    small, larger = divmod(layers, ranks)
    return Partition(tuple(rank * small + min(rank, larger) for rank in range(ranks + 1)))


def explicit(sizes: Sequence[int], layers: int, ranks: int) -> Partition:
    """Blocks of the given sizes.

    Raises:
        UsageError: sizes that do not fit the layers or the ranks.
    """
    if len(sizes) != ranks or sum(sizes) != layers or min(sizes) < 1:
        raise UsageError(
            f"parallel.partition lists {len(sizes)} blocks with {sum(sizes)} layers in all; "
            f"{ranks} ranks and {layers} layers need {ranks} positive numbers that add up to {layers}"
        )
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return Partition(tuple(bounds))


def by_cost(costs: Sequence[float], ranks: int) -> Partition:
    """Contiguous blocks whose largest total cost is as small as can be; every rank gets a layer.

    Bisection on the bound with a greedy check (the chains-on-chains problem), then ties are settled by
    the first bounds that keep it.

    Args:
        costs: positive cost per layer, in any unit.
        ranks: number of ranks.

    Raises:
        UsageError: more ranks than layers.
    """
    layers = len(costs)
    _check(layers, ranks)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def cut(bound: float) -> list[int] | None:
        bounds = [0]
        for rank in range(ranks):
            end = bounds[-1] + 1
            last = layers - (ranks - rank - 1)
            if prefix[end] - prefix[bounds[-1]] > bound:
                return None
            while end < last and prefix[end + 1] - prefix[bounds[-1]] <= bound:
                end += 1
            bounds.append(end)
        return bounds if bounds[-1] == layers else None

    low, high = max(costs), prefix[-1]
    best = cut(high)
    for _ in range(60):
        middle = 0.5 * (low + high)
        found = cut(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    if best is None:  # rounding of the total only
        return uniform(layers, ranks)
    return Partition(tuple(best))
