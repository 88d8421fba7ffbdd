"""The multigrid cycle, recorded as the list of actions that one rank takes: pure data.

FAS V- and F-cycles over the layers (Günther et al. 2020, algorithm 1; Falgout et al. 2014) in parareal form:

    f_relax       u_j = Phi(u_{j-1}) over the F-points of every interval, and E = Phi(u_last) into its C-point
    c_relax       u_C = w E + (1 - w) u_C
    fas_residual  K = Phi_c(u_C), so that the coarse level solves  v_j = E_j + (Phi_c(v_{j-1}) - K_{j-1})
    coarse_solve  the coarsest level: forward substitution along the ranks

The coarse levels work in place on the C-points of level 0: restriction is injection, the correction needs
no copy, and an exact guess is a bitwise fixed point because Phi_c(new) - Phi_c(old) is exactly zero. An
action names layers, never tensors; `problems` binds actions to memory once and replays them every step.
A forward evaluation F(u_b) is recorded only where u_b has changed since the last one: fine and coarse step
from the same C-point share it, with injected weights. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lpnet.config import MGRIT
from lpnet.mgrit.hierarchy import Hierarchy, LocalLevel, Segment, local_level, per_level
from lpnet.parallel.partition import Partition

Sink = Literal["point", "next", "out"]


class Edges(NamedTuple):
    """A number of equal edges at layers first, first + stride, ..., each of `span` layers."""

    first: int
    span: int
    number: int = 1
    stride: int = 1

    @property
    def layers(self) -> list[int]:
        """The layers, which are the lower ends of the edges."""
        return [self.first + i * self.stride for i in range(self.number)]


class Action(NamedTuple):
    """One thing a rank does.

    Args:
        kind: evaluate F of the edges' layers (forward) | step along the edges to `sink` | fas: coarse step of the
            old values, kept as K | c_relax | residual | recompute the states of a segment | gradient of a segment |
            post a receive | wait for it | land: put the received value in its place | send | halo_post, halo_wait,
            halo_send: the same for the old value that the adjoint's K needs.
        level: level of the edges.
        sink: where a step's result goes: the target's state, the next level's E, or the outgoing buffer.
        plain: without the FAS terms E and K (start from the coarsest grid).
        work: layer evaluations per edge.
    """

    kind: str
    level: int
    edges: Edges | None = None
    sink: Sink = "point"
    plain: bool = False
    work: int = 1


@dataclass
class Cycle:
    """Records what `rank` does; the methods read like the algorithm.

    Args:
        hierarchy: levels of this direction.
        mgrit: relaxation, weights, cycle and storage of this direction.
        batched: per level: relax the j-th edges of all intervals in one action.
        block: adjoint: layers whose gradients are made at once during the last sweep, besides those side by side; 0:
            none are made in it.
        fresh: layers whose evaluation is up to date when recording starts.
    """

    hierarchy: Hierarchy
    partition: Partition
    rank: int
    mgrit: MGRIT
    batched: Sequence[bool] = ()
    block: int = 0
    fresh: set[int] = field(default_factory=set)
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.levels: list[LocalLevel] = [
            local_level(self.hierarchy, level, self.partition, self.rank) for level in range(len(self.hierarchy.levels))
        ]
        self.coarsest = len(self.levels) - 1
        self.low = self.partition.block(self.rank)[0]
        # levels with states of the same size share evaluations; 0: full states and the layers' own weights
        sizes = self.mgrit.spatial_factors
        kinds = sorted(set(sizes))
        self.spaces = [kinds.index(sizes[min(level, len(sizes) - 1)]) for level in range(len(self.levels))]
        if self.mgrit.coarse != "injected":  # every coarse level has weights of its own
            self.spaces = list(range(len(self.levels)))

    # programs

    def start_coarse(self) -> list[Action]:
        """Propagate the coarsest grid with its plain step, then fill the finer ones down to level 1."""
        for level in range(self.coarsest, 0, -1):
            self.f_relax(level, into_c=False, plain=True)
        return self._take()

    def refresh(self, *, residual: bool = True, gradient: bool = False) -> list[Action]:
        """F-relaxation of level 0, with the residual at the C-points: opens an iteration and ends a solve."""
        self.f_relax(0, into_c=True, gradient=gradient)
        if residual and self.coarsest > 0:
            self._add("residual", 0)
        return self._take()

    def correct(self) -> list[Action]:
        """The rest of an iteration after `refresh`: further relaxations, coarse levels, correction of the C-points."""
        self._descend(0, self.mgrit.cycle)
        return self._take()

    def tail(self) -> list[Action]:
        """Only what the last point needs: the interval that ends in N (forward)."""
        if self.coarsest == 0:
            self.f_relax(0)
        elif self.hierarchy.layers not in self.hierarchy.c_points(0):
            self.f_relax(0, into_c=False, from_point=self.hierarchy.levels[1][-1])
        return self._take()

    # the algorithm

    def iterate(self, level: int, kind: str) -> None:
        """One cycle on `level` >= 1, which ends with refreshed F-points of the level."""
        if level == self.coarsest:
            self.coarse_solve()
            return
        self.f_relax(level)
        self._descend(level, kind)
        self.f_relax(level, into_c=False)

    def _descend(self, level: int, kind: str) -> None:
        for _ in range(per_level(self.mgrit.relaxation, level).count("C")):
            self.c_relax(level)
            self.f_relax(level)
        self.fas_residual(level)
        self.iterate(level + 1, kind)
        if kind == "F" and level > 0:
            self.f_relax(level)
            self._descend(level, "V")

    def coarse_solve(self) -> None:
        """Forward substitution on the coarsest level, along the ranks."""
        self.f_relax(self.coarsest)

    def c_relax(self, level: int) -> None:
        """C-points take the value that the sweep before brought to them."""
        self._add("c_relax", level)
        self._stale(p for p in self.levels[level].c_points if p != self.hierarchy.start)

    def fas_residual(self, level: int) -> None:
        """K of the next level: its step from the present values."""
        coarse = self.levels[level + 1]
        if self.hierarchy.adjoint:
            self._halo(level + 1, coarse)
        # equal edges in a row make one action where chunks are batched
        for edges in self._rows(coarse, self._is_batched(level)):
            self._evaluate(level + 1, edges)
            self._add("fas", level + 1, edges)
        if self.hierarchy.adjoint and coarse.right is not None and coarse.segments:
            self._add("halo_wait", level + 1)
            last = coarse.segments[-1]
            edges = Edges(last.layers[-1], last.spans[-1])
            self._evaluate(level + 1, edges)
            self._add("fas", level + 1, edges)

    def f_relax(
        self,
        level: int,
        *,
        into_c: bool = True,
        plain: bool = False,
        gradient: bool = False,
        from_point: int | None = None,
    ) -> None:
        """Propagate every interval from its C-point; with `into_c` also the last step, into the next C-point.

        Intervals whose result another rank waits for come first; the one that waits itself comes last.
        """
        part = self.levels[level]
        if not part.points:
            return
        if self.hierarchy.adjoint:
            self._relax_adjoint(level, part, into_c, plain, gradient)
        else:
            self._relax_forward(level, part, into_c, plain, from_point)

    # one rank's sweep

    def _relax_forward(self, level: int, part: LocalLevel, into_c: bool, plain: bool, from_point: int | None) -> None:
        def wanted(upper_is_c: bool) -> bool:
            return not upper_is_c or (into_c and from_point is None)

        first_is_c = part.points[0] in self.hierarchy.c_points(level)
        receives = part.left is not None and wanted(first_is_c) and (from_point is None or part.points[0] > from_point)
        if receives:
            self._add("post", level, plain=plain)
        chunks = self._chunks(level, part.segments)
        for chunk in reversed(chunks):
            head = chunk[0]
            if from_point is not None and head.above <= from_point:
                continue
            if not head.below_is_c and part.left is not None:
                continue
            self._run(level, chunk, into_c, plain)
            self._send_forward(level, part, chunk[-1], wanted, plain)
        if receives:
            self._add("wait", level, plain=plain)
            self._add("land", level, sink="next" if first_is_c else "point", plain=plain)
            if not first_is_c:
                self._stale(part.points[:1])
        if (
            part.segments
            and not part.segments[0].below_is_c
            and part.left is not None
            and (from_point is None or part.segments[0].above > from_point)
        ):
            self._run(level, chunks[0], into_c, plain)
            self._send_forward(level, part, part.segments[0], wanted, plain)

    def _send_forward(
        self, level: int, part: LocalLevel, segment: Segment, wanted: Callable[[bool], bool], plain: bool
    ) -> None:
        if part.right is not None and segment is part.segments[-1] and wanted(segment.above_is_c):
            self._add("send", level, sink="next" if segment.above_is_c else "out", plain=plain)

    def _relax_adjoint(self, level: int, part: LocalLevel, into_c: bool, plain: bool, gradient: bool) -> None:
        first_is_c = part.points[0] in self.hierarchy.c_points(level)
        recompute = level == 0 and self.mgrit.storage == "c_points" and self.coarsest > 0
        receives = part.right is not None
        if receives:
            self._add("post", level, plain=plain)
        if part.left is not None and first_is_c:
            self._add("send", level, plain=plain)
        chunks = self._chunks(level, part.segments)
        waited = False
        for chunk in chunks:
            if receives and chunk[-1] is part.segments[-1]:
                self._add("wait", level, plain=plain)
                waited = True
            if recompute:
                self._add("recompute", 0, Edges(chunk[0].layers[0], 1, len(chunk[0].layers)))
            self._run(level, chunk, into_c, plain, gradient=gradient)
            if part.left is not None and not first_is_c and chunk[0] is part.segments[0]:
                self._add("send", level, plain=plain)
        if receives and not waited:
            self._add("wait", level, plain=plain)

    def _run(self, level: int, chunk: list[Segment], into_c: bool, plain: bool, *, gradient: bool = False) -> None:
        """Walk the edges of one segment, or of equal segments side by side; make gradients block by block."""
        head, count = chunk[0], len(chunk)
        stride = chunk[1].layers[0] - head.layers[0] if count > 1 else 1
        steps = list(zip(head.layers, head.spans, strict=True))
        for k, (layer, span) in enumerate(reversed(steps) if self.hierarchy.adjoint else steps):
            last = k == len(steps) - 1
            ends_in_c = last and (head.below_is_c if self.hierarchy.adjoint else chunk[-1].above_is_c)
            if ends_in_c and not into_c:
                break
            edges = Edges(layer, span, count, stride)
            leaves = not self.hierarchy.adjoint and last and self._is_remote(level, chunk[-1])
            self._evaluate(level, edges)
            self._add("step", level, edges, "next" if ends_in_c else "out" if leaves else "point", plain)
            if gradient and self.block and count > 1:
                self._add("gradient", 0, edges)
            elif gradient and self.block and (last or (layer - self.low) % self.block == 0):
                upper = min(head.above, layer + self.block - (layer - self.low) % self.block)
                self._add("gradient", 0, Edges(layer, 1, upper - layer))
            if not ends_in_c and not leaves and not self.hierarchy.adjoint:
                self._stale(layer + span + i * stride for i in range(count))

    def _is_remote(self, level: int, segment: Segment) -> bool:
        return self.levels[level].next_point == segment.above

    def _evaluate(self, level: int, edges: Edges) -> None:
        """F of the edges' lower points where it is not up to date; in the adjoint where the forward keeps none."""
        space = self.spaces[level]
        if self.hierarchy.adjoint and space == 0:
            return
        keys = [self._key(layer, space) for layer in edges.layers]
        if not self.fresh.issuperset(keys):
            self._add("evaluate", level, edges)
            self.fresh.update(keys)

    def _key(self, layer: int, space: int) -> int:
        return layer + space * (self.hierarchy.layers + 1)

    def _stale(self, points: Iterable[int]) -> None:
        """States have changed: no evaluation of them is up to date. The adjoint changes none."""
        if not self.hierarchy.adjoint:
            spaces = range(max(self.spaces) + 1)
            self.fresh.difference_update(self._key(point, space) for point in points for space in spaces)

    def _halo(self, level: int, part: LocalLevel) -> None:
        """Adjoint: the first point's value goes to the left rank, whose last coarse edge starts from it."""
        if part.right is not None and part.segments:
            self._add("halo_post", level)
        if part.left is not None:
            self._add("halo_send", level)

    def _rows(self, part: LocalLevel, batched: bool) -> list[Edges]:
        """The edges of a level one by one or as rows of equal ones; in the adjoint those from local sources only."""
        edges = [(b, s) for segment in part.segments for b, s in zip(segment.layers, segment.spans, strict=True)]
        if self.hierarchy.adjoint and part.right is not None:
            edges = edges[:-1]
        if not batched:
            return [Edges(b, s) for b, s in edges]
        rows: list[Edges] = []
        for layer, span in edges:
            if rows and rows[-1].span == span and layer == rows[-1].first + rows[-1].number * span:
                rows[-1] = rows[-1]._replace(number=rows[-1].number + 1, stride=span)
            else:
                rows.append(Edges(layer, span))
        return rows

    def _chunks(self, level: int, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Segments in increasing order; neighbours of equal shape together where chunks are batched."""
        if not self._is_batched(level):
            return [[segment] for segment in segments]
        chunks: list[list[Segment]] = []
        for segment in segments:
            if chunks and _side_by_side(chunks[-1], segment) and self._batchable(level, segment):
                chunks[-1].append(segment)
            else:
                chunks.append([segment])
        return chunks

    def _batchable(self, level: int, segment: Segment) -> bool:
        """An interval that ends at another rank joins a batch only where its place follows the rank's own points."""
        if not self._is_remote(level, segment):
            return True
        return segment.above == self.partition.block(self.rank)[1] if self.hierarchy.adjoint else level == 0

    def _is_batched(self, level: int) -> bool:
        if not self.batched or (self.mgrit.storage == "c_points" and self.coarsest > 0):
            return False
        return self.batched[min(level, len(self.batched) - 1)]

    def _add(
        self, kind: str, level: int, edges: Edges | None = None, sink: Sink = "point", plain: bool = False
    ) -> None:
        halves = self.mgrit.coarse == "half_steps" and level > 0 and edges is not None and edges.span > 1
        self.actions.append(Action(kind, level, edges, sink, plain, 2 if halves else 1))

    def _take(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions


def _side_by_side(chunk: list[Segment], segment: Segment) -> bool:
    """Equal whole intervals at equal distances."""
    head, before = chunk[0], chunk[-1]
    if not (head.below_is_c and segment.below_is_c and before.above_is_c and segment.above_is_c):
        return False
    distance = segment.layers[0] - before.layers[0]
    return (
        segment.spans == head.spans
        and sum(head.spans) == distance
        and (len(chunk) == 1 or distance == chunk[1].layers[0] - head.layers[0])
    )
