"""Whether a level relaxes its intervals side by side: measured once at the start, the same for all ranks.

Side by side, one call does the j-th layers of all of a rank's intervals: fewer calls, larger arrays. Which is faster
depends on the layer, the batch and the cache, so it is timed on this rank's own part of each level without messages;
the ranks add their times and decide together. The choice is kept for the whole run and written to its resolved
configuration: it changes the order of nothing, but the kernels, and so the last bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from lpnet.config import MGRIT
from lpnet.mgrit.binding import Problem
from lpnet.mgrit.cycle import Cycle
from lpnet.mgrit.hierarchy import Hierarchy, direction
from lpnet.mgrit.problems import AdjointProblem, StateProblem
from lpnet.mgrit.slots import all_points, side_by_side_if_alike
from lpnet.nn.module_step import ModuleStep
from lpnet.nn.network import Network
from lpnet.nn.stack import LayerStack
from lpnet.parallel.comm import Comm

LOCAL = ("evaluate", "step")


def fixed_choice(mgrit: MGRIT) -> tuple[bool, ...] | None:
    """The choice that the settings make themselves; None where it is to be measured. No communication."""
    if isinstance(mgrit.batching, list):
        return tuple(word == "on" for word in mgrit.batching)
    return None if mgrit.batching == "auto" and mgrit.levels > 1 else (mgrit.batching == "on",)


def as_setting(choice: Sequence[bool], mgrit: MGRIT) -> MGRIT:
    """The settings with a measured choice written down. No communication."""
    return replace(mgrit, batching=["on" if batched else "off" for batched in choice])


def lies_side_by_side(stack: LayerStack | Network) -> TypeGuard[LayerStack]:
    """Whether its intervals can be relaxed in one call: modules, and stacks of several shapes, run one by one in any
    case. No communication."""
    return isinstance(stack, LayerStack) and not isinstance(stack.step, ModuleStep)


def measure(
    stack: LayerStack, hierarchy: Hierarchy, mgrit: MGRIT, shape: Sequence[Any], world: Comm, *, runs: int = 3
) -> tuple[bool, ...]:
    """Time both ways on every level but the coarsest. Collective over world, one reduction.

    Args:
        stack: the layers.
        world: all ranks that decide together: those of every data replica.
        hierarchy: forward levels.
        mgrit: settings.
        shape: of a state, (batch, ...).
        runs: sweeps timed; the fastest counts.
    """
    total = world.sum(sweep_seconds(stack, hierarchy, mgrit, shape, runs=runs))
    return tuple(bool(beside < alone) for alone, beside in total.T) or (False,)


def sweep_seconds(
    stack: LayerStack, hierarchy: Hierarchy, mgrit: MGRIT, shape: Sequence[Any], *, runs: int = 3
) -> np.ndarray:
    """Seconds of this rank's sweeps: (2, levels without the coarsest), one by one and side by side. No communication.

    Args:
        stack, hierarchy, mgrit, shape, runs: as for `measure`.
    """
    stack.engine.refresh()
    levels = len(hierarchy.levels) - 1
    seconds = np.zeros((2, levels))
    backward = direction(hierarchy, mgrit, adjoint=True)[0]
    for batched in (False, True):
        alike = side_by_side_if_alike(stack.low, stack.high, hierarchy, backward)
        slots = alike if batched else all_points(stack.low, stack.high)
        workspace = stack.engine.workspace(shape, **slots.sizes)
        for adjoint, kind in ((False, StateProblem), (True, AdjointProblem)):
            points, settings = direction(hierarchy, mgrit, adjoint)
            cycle = Cycle(points, stack.partition, stack.comm.rank, settings, (batched,))
            problem: Problem = kind(workspace, cycle, slots, stack.comm, stack.h)
            for level in range(min(levels, cycle.coarsest)):
                cycle.fresh = set()
                cycle.f_relax(level)
                actions, cycle.actions = [a for a in cycle.actions if a.kind in LOCAL], []
                ops = problem.bind([a._replace(plain=True) for a in actions])
                seconds[int(batched), level] += min(_time(ops) for _ in range(runs))
    return seconds


def _time(ops: Sequence[object]) -> float:
    began = time.perf_counter()
    for op in ops:
        op()  # type: ignore[operator]
    return time.perf_counter() - began
