"""A solve as a list of recorded programs, and what it costs: evaluations, messages, critical path. No communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lpnet.config import MGRIT
from lpnet.mgrit.cycle import Action, Cycle
from lpnet.mgrit.hierarchy import Hierarchy
from lpnet.parallel.partition import Partition


def record(cycle: Cycle, name: str) -> list[Action]:
    """The actions of one part of a solve by its name."""
    if name == "refresh":
        return cycle.refresh()
    if name == "refresh_gradient":
        return cycle.refresh(gradient=True)
    if name == "start_coarse":
        return cycle.start_coarse()
    if name == "tail":
        return cycle.tail()
    return cycle.correct()


def parts(iterations: int, *, coarse_start: bool, levels: int, last: str = "refresh") -> list[str]:
    """Names of the programs of a solve with a fixed number of iterations, in order."""
    if levels == 1:
        return [last]
    names = ["start_coarse"] if coarse_start else []
    for _ in range(iterations - coarse_start):
        names += ["refresh", "correct"]
    return [*names, last]


def solve_critical_path(
    hierarchy: Hierarchy,
    mgrit: MGRIT,
    partition: Partition,
    names: Sequence[str],
    batched: Sequence[bool] = (),
    beside: float = 1.0,
) -> int:
    """Layer evaluations on the longest chain over all ranks for a list of programs. No communication.

    `beside` is what a further evaluation costs in a call that makes several side by side.
    """
    key = (hierarchy, repr(mgrit), partition, tuple(names), tuple(batched), beside)
    if key not in _PATHS:
        cycles = [Cycle(hierarchy, partition, rank, mgrit, batched) for rank in range(partition.ranks)]
        programs = [[action for name in names for action in record(cycle, name)] for cycle in cycles]
        _PATHS[key] = critical_path(programs, cycles, beside)
    return _PATHS[key]


_PATHS: dict[tuple[object, ...], int] = {}


def evaluations(actions: Sequence[Action], levels: int, *, adjoint: bool) -> tuple[int, ...]:
    """Layer evaluations of a list of actions, per level."""
    counts = [0] * levels
    for action in actions:
        counts[action.level] += _cost(action, adjoint)
    return tuple(counts)


def _cost(action: Action, adjoint: bool) -> int:
    # the adjoint evaluates on coarse levels where they have smaller states or weights of their own
    counted = ("evaluate", "step", "fas", "recompute") if adjoint else ("evaluate",)
    return action.edges.number * action.work if action.edges is not None and action.kind in counted else 0


def messages(actions: Sequence[Action]) -> int:
    """Messages that a list of actions sends."""
    return sum(action.kind in ("send", "halo_send") for action in actions)


def critical_path(programs: Sequence[Sequence[Action]], cycles: Sequence[Cycle], beside: float = 1.0) -> int:
    """Evaluations on the longest chain over all ranks, with free messages.

    Args:
        programs: actions per rank.
        cycles: the recorders per rank, for levels and neighbours.
        beside: cost of a further evaluation in a call that makes several.
    """
    adjoint = cycles[0].hierarchy.adjoint

    def cost(action: Action) -> float:
        number = _cost(action, adjoint)
        return number if beside == 1 or number < 2 else 1 + (number - 1) * beside

    return int(max(simulate(programs, cycles, cost, lambda source, dest, level: 0.0)))


def simulate(
    programs: Sequence[Sequence[Action]],
    cycles: Sequence[Cycle],
    cost: Callable[[Action], float],
    flight: Callable[[int, int, int], float],
) -> list[float]:
    """When every rank is done with its actions: an event simulation.

    Args:
        programs: actions per rank.
        cycles: the recorders per rank, for levels and neighbours.
        cost: seconds of an action; of sending and posting too.
        flight: seconds of a message from rank to rank on a level.
    """
    adjoint = cycles[0].hierarchy.adjoint
    clocks = [0.0] * len(programs)
    sent: dict[tuple[int, int, int, str], list[float]] = {}
    taken: dict[tuple[int, int, int, str], int] = {}
    position = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(programs):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                part = cycles[rank].levels[action.level]
                if action.kind in ("send", "halo_send"):
                    to = part.left if adjoint else part.right
                    assert to is not None
                    clocks[rank] += cost(action)
                    arrival = clocks[rank] + flight(rank, to, action.level)
                    sent.setdefault((rank, to, action.level, action.kind), []).append(arrival)
                elif action.kind in ("wait", "halo_wait"):
                    source = part.right if adjoint else part.left
                    assert source is not None
                    kind = "send" if action.kind == "wait" else "halo_send"
                    key = (source, rank, action.level, kind)
                    index = taken.get(key, 0)
                    if index >= len(sent.get(key, ())):
                        break
                    taken[key] = index + 1
                    clocks[rank] = max(clocks[rank], sent[key][index])
                else:
                    clocks[rank] += cost(action)
                position[rank] += 1
                moved = True
    assert all(p == len(a) for p, a in zip(position, programs, strict=True)), "a receive has no matching send"
    return clocks


def span_of(action: Action, levels: int) -> str:
    """The span that an action's time belongs to in profiles and traces."""
    if action.kind in ("wait", "halo_wait"):
        return "wait"
    if action.kind in ("post", "send", "land", "halo_post", "halo_send"):
        return "message"
    if action.kind in ("residual", "fas"):
        return "residual"
    if action.kind in ("c_relax", "gradient"):
        return action.kind
    return "coarse" if action.level == levels - 1 and levels > 1 else "f_relax"
