"""Levels, C- and F-points, owners and neighbours of the multigrid over layers: pure data.

Level 0 has the points 0..N; every level keeps each c-th point of the one above it. The edge between two
neighbouring points b < a of a level is the layer b with step h (a - b) and belongs to the owner of layer
b. Forward, the edge leads from b to a; the adjoint walks the same edges from a down to b and keeps the
point N on every level, so that its first interval may be short. N need not be a multiple of anything.
Source: Günther et al. 2020, doi 10.1137/19M1247620, sections 3.1 and 3.3. No communication.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lpnet.config import MGRIT
from lpnet.errors import UsageError
from lpnet.parallel.partition import Partition

T = TypeVar("T")


@dataclass(frozen=True)
class Hierarchy:
    """The points of every level.

    Args:
        levels: fine indices of the points of every level, increasing.
        adjoint: walked from N down to 0.
        barriers: points that every level keeps.
    """

    levels: tuple[tuple[int, ...], ...]
    adjoint: bool = False
    barriers: frozenset[int] = frozenset()

    @property
    def layers(self) -> int:
        """Number of layers N."""
        return len(self.levels[0]) - 1

    @property
    def start(self) -> int:
        """The point whose value is given."""
        return self.layers if self.adjoint else 0

    def c_points(self, level: int) -> frozenset[int]:
        """The points of `level` that the next level keeps; on the coarsest only the start."""
        return frozenset(self.levels[level + 1]) if level + 1 < len(self.levels) else frozenset((self.start,))

    def reversed(self) -> Hierarchy:
        """The hierarchy of the adjoint: the same points and N on every level."""
        last = self.layers
        return Hierarchy(tuple(p if p[-1] == last else (*p, last) for p in self.levels), True, self.barriers)

    def exact_iterations(self, relaxation: str) -> int | None:
        """Iterations after which two levels equal serial propagation bit for bit; None for more levels."""
        if len(self.levels) == 1:
            return 0
        if len(self.levels) > 2:
            return None
        intervals = len(self.levels[1]) - (self.levels[1][-1] == self.layers)
        per_iteration = 1 + relaxation.count("C")
        return -(-intervals // per_iteration)


def per_level(option: T | list[T], level: int) -> T:
    """The entry of an option that is one value or a list per level; the last entry holds for deeper levels."""
    return option[min(level, len(option) - 1)] if isinstance(option, list) else option


def build(layers: int, mgrit: MGRIT, *, barriers: Iterable[int] = ()) -> Hierarchy:
    """The forward hierarchy of `layers` layers.

    Args:
        layers: N.
        mgrit: levels, coarsening, min_coarse and buffer_layers are used. Levels that would leave fewer than min_coarse
            points are left out with a warning.
        barriers: points that every level keeps (where the state changes its shape).

    Raises:
        UsageError: no layers.
    """
    if layers < 1:
        raise UsageError(f"a network needs at least 1 layer, got {layers}")
    k = min(mgrit.buffer_layers, layers)
    ends = [*range(k + 1), *range(layers - k, layers + 1)] if k else []
    kept = frozenset([*barriers, *ends])
    levels = [tuple(range(layers + 1))]
    while len(levels) < mgrit.levels:
        c = per_level(mgrit.coarsening, len(levels) - 1)
        coarse: list[int] = []
        since = c
        for point in levels[-1]:
            if since >= c or point in kept:
                coarse.append(point)
                since = 0
            since += 1
        if len(coarse) < mgrit.min_coarse or len(coarse) == len(levels[-1]):
            logging.getLogger("lpnet").warning(
                "%d levels leave nothing to coarsen: level %d of %d layers would have %d points; using %d levels",
                mgrit.levels,
                len(levels),
                layers,
                len(coarse),
                len(levels),
            )
            break
        levels.append(tuple(coarse))
    return Hierarchy(tuple(levels), barriers=kept)


def cut(hierarchy: Hierarchy, levels: int) -> Hierarchy:
    """The finest `levels` levels; all of them where there are no more."""
    return replace(hierarchy, levels=hierarchy.levels[:levels])


@dataclass(frozen=True)
class Segment:
    """The edges between two neighbouring C-points that one rank owns, in increasing order.

    Args:
        layers: lower points b of the edges.
        spans: a - b of the edges.
        below_is_c: the lowest edge starts at a C-point (else the segment goes on at the left rank).
        above_is_c: the highest edge ends at a C-point.
        above: the upper end of the highest edge.
    """

    layers: tuple[int, ...]
    spans: tuple[int, ...]
    below_is_c: bool
    above_is_c: bool
    above: int


@dataclass(frozen=True)
class LocalLevel:
    """One rank's part of a level.

    Args:
        points: owned points, increasing; the last rank owns N where the level has it.
        c_points: those of them that are C-points.
        segments: owned edges, cut at C-points, increasing.
        left: rank that owns the point before the first; None at the left end or without points.
        right: rank that owns the point after the last.
        next_point: that point.
    """

    points: tuple[int, ...]
    c_points: tuple[int, ...]
    segments: tuple[Segment, ...]
    left: int | None
    right: int | None
    next_point: int | None

    @property
    def edges(self) -> tuple[int, ...]:
        """Lower points of the owned edges."""
        return tuple(b for s in self.segments for b in s.layers)


def local_level(hierarchy: Hierarchy, level: int, partition: Partition, rank: int) -> LocalLevel:
    """What `rank` owns of a level."""
    points = hierarchy.levels[level]
    is_c = hierarchy.c_points(level)
    low, high = partition.block(rank)
    first = bisect_left(points, low)
    stop = bisect_left(points, high) if rank < partition.ranks - 1 else len(points)
    if first == stop:
        return LocalLevel((), (), (), None, None, None)
    mine = points[first:stop]
    segments: list[Segment] = []
    run: list[tuple[int, int]] = []

    def close() -> None:
        if run:
            above = run[-1][0] + run[-1][1]
            layers, spans = zip(*run, strict=True)
            segments.append(Segment(layers, spans, run[0][0] in is_c, above in is_c, above))
            run.clear()

    for index in range(first, min(stop, len(points) - 1)):
        if points[index] in is_c:
            close()
        run.append((points[index], points[index + 1] - points[index]))
    close()
    return LocalLevel(
        mine,
        tuple(p for p in mine if p in is_c),
        tuple(segments),
        partition.owner(points[first - 1]) if first else None,
        partition.owner(points[stop]) if stop < len(points) else None,
        points[stop] if stop < len(points) else None,
    )


def direction(hierarchy: Hierarchy, mgrit: MGRIT, adjoint: bool) -> tuple[Hierarchy, MGRIT]:
    """Hierarchy and settings of one direction; the adjoint may have levels and coarsening of its own."""
    if not adjoint:
        return hierarchy, mgrit
    if mgrit.adjoint:
        mgrit = mgrit.for_adjoint()
        hierarchy = build(hierarchy.layers, mgrit, barriers=hierarchy.barriers)
    return hierarchy.reversed(), replace(mgrit, forward_iterations=mgrit.adjoint_iterations)


def table(hierarchy: Hierarchy, partition: Partition, *, most: int = 16) -> str:
    """The levels as a small text table: C- and F-points and their owners.

    Args:
        most: ranks and points shown; longer ones are cut with an ellipsis.
    """

    def short(items: Sequence[object]) -> str:
        shown = [str(item) for item in items[:most]]
        return " ".join(shown) + (f" ... {items[-1]}" if len(items) > most else "")

    lines = []
    for level, points in enumerate(hierarchy.levels):
        is_c = hierarchy.c_points(level)
        marks = "".join("C" if p in is_c else "F" for p in points[:64]) + ("..." if len(points) > 64 else "")
        owners = [partition.owner(p) for p in points]
        lines += [
            f"level {level}: {len(points)} points, {len(is_c)} C-points",
            f"  kind   {marks}",
            f"  point  {short(points)}",
            f"  owner  {short(owners)}",
        ]
    return "\n".join(lines)
