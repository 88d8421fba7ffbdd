"""Where to cut the network: by measured time, so that the slowest module is as fast as can be.

A tick lasts as long as its slowest module, so counting units is not enough: a stem or a wide block weighs more than
another. The chains-on-chains problem is solved exactly by dynamic programming over (modules, units).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import LpnetError, UsageError
from lpnet.fdg.chain import check_cuts
from lpnet.fdg.schedule import Schedule
from lpnet.fdg.stage import Backward
from lpnet.parallel.comm import Comm
from lpnet.parallel.partition import uniform

_WORKSPACE = 4  # tensors as large as a unit's input or output
REPEATS = 3  # timed passes of every unit, of which the median counts


@dataclass(frozen=True)
class UnitCost:
    """What one unit takes for one batch.

    Args:
        name: of the unit.
        forward: seconds.
        backward: seconds.
        parameters: bytes.
        inner: bytes kept for the backward, without input and output.
        input: bytes of the input.
        output: bytes of the output.
        keeps_input: whether the backward needs the input.
        keeps_output: whether the backward needs the output.
    """

    name: str
    forward: float
    backward: float
    parameters: int = 0
    inner: int = 0
    input: int = 0
    output: int = 0
    keeps_input: bool = False
    keeps_output: bool = False

    def seconds(self, recompute: bool = False) -> float:
        """Forward and backward, and the forward once more where it is recomputed."""
        return self.forward * (2 if recompute else 1) + self.backward


@dataclass(frozen=True)
class ModulePlan:
    """One module of a plan.

    Args:
        units: index of its first unit and after its last.
        seconds: of a tick.
        share: of the time that all units take without recomputation.
        delay: ticks between forward and backward.
        stash: bytes of batches in flight at most: graphs, inputs.
        weights: bytes of parameters.
        copies: bytes of old weights at most.
        workspace: bytes of gradients and reordered copies in use while one unit is computed, roughly.
        shared: bytes that the gradients of the parameters take over from the graph, which a backward frees meanwhile.

    Bytes are those of tensors. The heap of glibc takes up to half as much again, for a plain network just as well;
    MALLOC_MMAP_THRESHOLD_=131072 in the environment keeps the process within some per cent of them.
    """

    units: tuple[int, int]
    seconds: float
    share: float
    delay: int
    stash: int
    weights: int
    copies: int
    workspace: int
    shared: int = 0

    def peak(self, slots: int = 1) -> int:
        """Bytes beyond the parameters: all of these, their gradients, and so many slots of an optimiser."""
        return self.stash + self.copies + self.workspace + (1 + slots) * self.weights - self.shared


@dataclass(frozen=True)
class CutPlan:
    """A cut and what it promises.

    Args:
        names: of the units.
        modules: in order.
        serial: seconds of all units on one rank.
    """

    names: tuple[str, ...]
    modules: tuple[ModulePlan, ...]
    serial: float

    @property
    def cuts(self) -> list[int]:
        """Index of the first unit of every module after the first."""
        return [module.units[0] for module in self.modules[1:]]

    @property
    def speedup(self) -> float:
        """Predicted: time on one rank over time of the slowest module."""
        return self.serial / max(module.seconds for module in self.modules)

    def text(self) -> str:
        """Units, shares, delay and memory per module, and the predicted speed-up."""
        heads = ["module", "units", "share", "ms", "delay", "stash MiB", "weights MiB", "old weights MiB"]
        rows = [heads]
        for number, module in enumerate(self.modules, 1):
            low, high = module.units
            span = self.names[low] if high - low == 1 else f"{self.names[low]} .. {self.names[high - 1]}"
            sizes = [f"{size / 2**20:.1f}" for size in (module.stash, module.weights, module.copies)]
            milliseconds, share = f"{1e3 * module.seconds:.1f}", f"{module.share:.3f}"
            rows.append([str(number), f"{low}-{high - 1} ({span})", share, milliseconds, str(module.delay), *sizes])
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        largest = max(module.seconds for module in self.modules) / self.serial if self.serial else 0.0
        return "\n".join(
            [*lines, f"cuts {self.cuts}: predicted speed-up {self.speedup:.2f} (largest share {largest:.3f})"]
        )


def best_cuts(costs: Sequence[Sequence[float]]) -> list[int]:
    """Cuts whose slowest module is as fast as can be; of equal ones the earliest. No communication.

    Args:
        costs: (modules, units) seconds of every unit, were it in that module.

    Raises:
        UsageError: more modules than units.
    """
    modules, units = len(costs), len(costs[0])
    if modules > units:
        check_cuts([], units, modules)
    sums = [[0.0] for _ in costs]
    for prefix, row in zip(sums, costs, strict=True):
        for cost in row:
            prefix.append(prefix[-1] + cost)
    best = [sums[0][high] for high in range(units + 1)]  # of the first module alone
    choices: list[list[int]] = []
    for module in range(1, modules):
        prefix, before = sums[module], best
        best, choice = [float("inf")] * (units + 1), [0] * (units + 1)
        for high in range(module + 1, units + 1):
            for low in range(module, high):
                slowest = max(before[low], prefix[high] - prefix[low])
                if slowest < best[high]:
                    best[high], choice[high] = slowest, low
        choices.append(choice)
    cuts, high = [], units
    for choice in reversed(choices):
        high = choice[high]
        cuts.append(high)
    return cuts[::-1]


def plan(
    costs: Sequence[UnitCost],
    schedule: Schedule,
    cuts: Sequence[int] | None = None,
    *,
    backward: Backward = "stash",
) -> CutPlan:
    """The best cuts for measured costs, or given ones, and what they promise. No communication.

    Args:
        costs: from `measure`.
        schedule: the delay table, with the number of modules.
        cuts: index of the first unit of every module after the first; None: the best.
        backward: stash | recompute | mixed.

    Raises:
        UsageError: cuts that do not fit.
    """
    again = [backward == "recompute" and schedule.delay(module) > 0 for module in range(1, schedule.modules + 1)]
    if cuts is None:
        cuts = best_cuts([[cost.seconds(recompute) for cost in costs] for recompute in again])
    bounds = check_cuts(cuts, len(costs), schedule.modules)
    serial = sum(cost.seconds() for cost in costs)
    modules = []
    for module, recompute in enumerate(again, 1):
        low, high = bounds[module - 1], bounds[module]
        units = costs[low:high]
        seconds = sum(cost.seconds(recompute) for cost in units)
        weights = sum(cost.parameters for cost in units)
        held, delay = schedule.stash(module), schedule.delay(module)
        graph = _graph(units)
        stash = held * units[0].input + graph if recompute else held * (units[0].input + graph)
        copies = held * weights if backward == "stash" and delay else 0
        workspace = _WORKSPACE * max(max(cost.input, cost.output) for cost in units)
        shared = graph + weights - _most(units)
        modules.append(
            ModulePlan((low, high), seconds, seconds / serial, delay, stash, weights, copies, workspace, shared)
        )
    return CutPlan(tuple(cost.name for cost in costs), tuple(modules), serial)


def _most(units: Sequence[UnitCost]) -> int:
    """Bytes of what is left of a graph and of the gradients that are there, at most, while a backward goes through."""
    most, left, gradients = 0, _graph(units), 0
    for place, unit in reversed(list(enumerate(units))):
        most = max(most, left + gradients)
        gradients += unit.parameters
        left -= unit.inner + (unit.output if unit.keeps_output else 0)
        if place and unit.keeps_input and not units[place - 1].keeps_output:
            left -= units[place - 1].output
    return max(most, left + gradients)


def _graph(units: Sequence[UnitCost]) -> int:
    """Bytes that the graph of one batch keeps, without the input of the first unit."""
    total = sum(cost.inner for cost in units)
    for before, after in zip(units, units[1:], strict=False):
        total += before.output if before.keeps_output or after.keeps_input else 0
    return total + (units[-1].output if units[-1].keeps_output else 0)


def find_cuts(
    units: Mapping[str, torch.nn.Module],
    how: str,
    schedule: Schedule,
    backward: Backward = "stash",
    *,
    comm: Comm,
    example: tuple[Tensor | None, Tensor | None],
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> tuple[list[int], CutPlan | None]:
    """Cuts that all ranks share, and the plan where rank 0 has measured them. Collective over comm.

    Args:
        units: of the network.
        how: by_cost | uniform.
        schedule: the delay table, with the number of modules.
        backward: stash | recompute | mixed.
        comm: ranks.
        example: samples and labels of a typical batch, on rank 0; without labels the loss is not measured.
        loss: of output and labels.
        autocast: dtype of torch.autocast.

    Raises:
        UsageError: on every rank; an unknown word, more modules than units, or no samples.
    """

    def work() -> tuple[list[int], CutPlan | None]:
        if how not in ("by_cost", "uniform"):
            raise UsageError(f"cuts is {how!r}; it must be by_cost, uniform or a list of unit indices")
        if schedule.modules > len(units):
            check_cuts([], len(units), schedule.modules)
        if how == "uniform" or schedule.modules == 1:
            return list(uniform(len(units), schedule.modules).bounds[1:-1]), None
        if comm.rank > 0:
            return [], None
        x, y = example
        if x is None:
            raise UsageError("cuts by_cost are measured on rank 0, which was given no samples")
        made = plan(measure(units, x, y, loss, autocast=autocast), schedule, backward=backward)
        return made.cuts, made

    found: tuple[list[int], CutPlan | None] = comm.broadcast_object(comm.together(work))
    return found


def measure(
    units: Mapping[str, torch.nn.Module],
    x: Tensor,
    y: Tensor | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    autocast: torch.dtype | None = None,
    repeats: int = REPEATS,
) -> list[UnitCost]:
    """Time and memory of every unit on one batch, of copies, so that nothing changes. No communication.

    Args:
        units: of the network, by name.
        x: samples.
        y: labels; None: the loss is not measured.
        loss: of output and labels; counts for the last unit.
        autocast: dtype of torch.autocast.
        repeats: timed passes, of which the median counts.

    Raises:
        LpnetError: a unit returns something that is no tensor.
    """
    costs = []
    value = x.detach()
    with torch.random.fork_rng(devices=[]):
        for index, (name, unit) in enumerate(units.items()):
            last = index == len(units) - 1 and y is not None and loss is not None
            cost, value = _measure(name, unit, value, index > 0, (loss, y) if last else None, autocast, repeats)
            costs.append(cost)
    return costs


def _measure(
    name: str, unit: torch.nn.Module, x: Tensor, grad: bool, end: Any, autocast: torch.dtype | None, repeats: int
) -> tuple[UnitCost, Tensor]:
    twin = copy.deepcopy(unit)
    parameters = {p.untyped_storage().data_ptr() for p in [*twin.parameters(), *twin.buffers()]}
    saved: dict[int, int] = {}
    forwards, backwards = [], []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    for attempt in range(repeats + 1):
        leaf = x.detach().clone().requires_grad_(grad and x.is_floating_point())
        inner = leaf.clone()
        began = time.perf_counter()
        with (
            torch.enable_grad(),
            torch.autocast(x.device.type, dtype=autocast, enabled=autocast is not None),
        ):
            if attempt == 0:  # counts what is kept, and warms up
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    out = twin(inner)
            else:
                out = twin(inner)
            if not isinstance(out, Tensor):
                raise LpnetError(
                    f"unit {name!r} returns a {type(out).__name__}; a unit takes one tensor and returns one"
                )
            end_value = end[0](out, end[1]) if end is not None else out
        middle = time.perf_counter()
        if attempt == 0:
            sizes = (inner.untyped_storage(), out.untyped_storage())
            places = [storage.data_ptr() for storage in sizes]
            keeps = [place in saved for place in places]
            bytes_in, bytes_out = (storage.nbytes() for storage in sizes)
            inner_bytes = sum(size for place, size in saved.items() if place not in places)
        result = out.detach()
        if end_value.requires_grad:
            gradient = torch.ones_like(end_value)
            middle = time.perf_counter()
            torch.autograd.backward(end_value, gradient)
        done = time.perf_counter()
        if attempt > 0:
            forwards.append(middle - began)
            backwards.append(done - middle)
        twin.zero_grad(set_to_none=True)
    cost = UnitCost(
        name,
        statistics.median(forwards),
        statistics.median(backwards),
        sum(p.numel() * p.element_size() for p in twin.parameters()),
        inner_bytes,
        bytes_in,
        bytes_out,
        *keeps,
    )
    return cost, result
