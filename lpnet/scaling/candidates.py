"""What the planner compares: replicas, exact pipelines, multigrid over the layers, decoupled modules, and their mixes.

Every candidate uses all ranks that it is made for. Its time is predicted from measured costs: a formula for the exact
methods and for decoupled modules, an event simulation of the recorded cycle for multigrid. No communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lpnet.config import MGRIT, RESNETS, Config, ParallelConfig
from lpnet.errors import UsageError
from lpnet.fdg.cuts import UnitCost
from lpnet.fdg.cuts import plan as cut_plan
from lpnet.fdg.schedule import Schedule
from lpnet.mgrit.cycle import Action
from lpnet.mgrit.hierarchy import build, direction
from lpnet.mgrit.plan import BYTES, memory_bytes, message_bytes, partition_of
from lpnet.mgrit.programs import parts, record, simulate
from lpnet.parallel.interconnect import NetworkModel
from lpnet.parallel.partition import uniform
from lpnet.scaling.layer_cost import Costs, LayerCost, program_cycles

FACTORS = (2, 4, 8, 16, 32)
SIMULATED = 6  # grids per number of replicas
SIMULATED_IN_MODULES = 2  # and per number of modules too
MODULES = (2, 3, 4, 6, 8)  # of decoupled training: more of them make gradients ever older
PARTS = (0.5, 1, 2, 4, 8)  # of a batch in a pipeline, per rank

TALK = ("send", "post", "land", "halo_send", "halo_post")
"""What messages cost a rank besides their flight."""

Batching = Literal["on", "off"]


@dataclass(frozen=True)
class Plan:
    """One way to run, and what is known of it.

    Args:
        config: the run.
        ranks: of which how many are used.
        family: serial | data | pipeline | mgrit | fdg | fdg x mgrit.
        model_seconds: of a step, predicted from costs.
        emulated_seconds: of a step, by emulation; None where it was not among the best.
        gradient_error: relative; 0 for an exact method, None where it was not measured.
        memory: bytes of the fullest rank.
    """

    config: Config
    ranks: int
    family: str
    model_seconds: float
    emulated_seconds: float | None = None
    gradient_error: float | None = None
    memory: int = 0

    @property
    def exact(self) -> bool:
        """Whether it computes the gradient of serial training."""
        return self.family in ("serial", "data", "pipeline") or (
            self.family == "mgrit" and self.config.mgrit.levels == 1
        )

    @property
    def modules(self) -> int | None:
        """Decoupled modules; None where the method has none."""
        return (self.config.parallel.modules or self.config.fdg.modules) if self.family.startswith("fdg") else None

    def label(self) -> str:
        """Method, replicas and grids."""
        m, replicas = self.config.mgrit, self.config.parallel.replicas
        words = [self.family]
        grids = m.coarsening if isinstance(m.coarsening, list) else [m.coarsening] * (m.levels - 1)
        levels = f"{m.levels} levels, coarsening {'-'.join(map(str, grids))}, relaxation {m.relaxation}"
        levels += ", side by side" if m.batching != "off" else ""
        if self.family == "mgrit":
            words[0] += f" {levels}"
        elif self.family == "fdg x mgrit":
            words = [f"mgrit {levels}", f"fdg of {self.modules} modules"]
        elif self.family == "pipeline":
            count = self.config.fdg.microbatches if self.config.method == "pipeline" else m.microbatches
            words[0] += f" of {count} parts"
        elif self.family == "fdg":
            words[0] += f" of {self.modules} modules"
        if replicas > 1:
            words.append(f"{replicas} replicas")
        return " x ".join(reversed(words))


@dataclass(frozen=True)
class Measured:
    """What candidates are judged by.

    Args:
        costs: of a layer of a stack; None for a network of units.
        units: of the network's units at the whole batch; empty for a stack.
        samples: per step.
        network: of the messages.
    """

    costs: Costs | None
    units: tuple[UnitCost, ...]
    samples: int
    network: NetworkModel


def every(config: Config, ranks: int, found: Measured) -> list[Plan]:
    """All candidates for some ranks, by increasing predicted time. No communication.

    Args:
        config: the run.
        ranks: how many.
        found: measured costs.
    """
    stack = config.model.name not in RESNETS
    made = [*_exact(config, ranks, found), *(_stack_modules if stack else _unit_modules)(config, ranks, found)]
    if stack:
        made += [*_multigrid(config, ranks, found), *_multigrid_modules(config, ranks, found)]
    return sorted(made, key=lambda plan: plan.model_seconds)


def serial(config: Config, found: Measured) -> Plan:
    """Training on one rank."""
    alone = replace(config, method="serial", parallel=_parallel(config, 1))
    if found.costs is None:
        seconds = sum(cost.seconds() for cost in found.units)
        return Plan(alone, 1, "serial", seconds, memory=_unit_memory(found, 1))
    layers = config.model.layers
    memory = sum(memory_bytes(alone, uniform(layers, 1), found.samples))
    return Plan(alone, 1, "serial", found.costs.at(found.samples).step * layers, memory=memory)


def multigrid(config: Config, ranks: int, replicas: int, found: Measured) -> Plan:
    """Multigrid with the settings of a configuration, by event simulation of its recorded cycle.

    Raises:
        UsageError: more ranks of a replica than layers, or replicas that do not divide the ranks.
    """
    if ranks % replicas:
        raise UsageError(f"{replicas} replicas do not fit {ranks} ranks")
    assert found.costs is not None
    layers, local = config.model.layers, ranks // replicas
    config = replace(config, method="mgrit", parallel=_parallel(config, replicas))
    partition = partition_of(config, local)
    samples = math.ceil(found.samples / replicas)
    cost, network = found.costs.at(samples), found.network
    seconds = cost.gradient * math.ceil(layers / local)
    seconds += sum(solve_seconds(config, local, adjoint, cost, network) for adjoint in (False, True))
    seconds += network.collective(range(ranks), 1024) + _average(config, replicas, local, network)
    return Plan(config, ranks, "mgrit", seconds, memory=sum(memory_bytes(config, partition, samples)))


def solve_seconds(
    config: Config, ranks: int, adjoint: bool, cost: LayerCost, network: NetworkModel, *, free: float = math.inf
) -> float:
    """Seconds of a solve of one direction by some ranks: an event simulation of its recorded cycle. No communication.

    Args:
        config: the run.
        ranks: that share the layers.
        adjoint: which direction.
        cost: per layer.
        network: costs of messages.
        free: from this level on messages cost nothing: a bound on what fewer of them could gain.
    """
    iterations = (config.mgrit.adjoint_iterations or 1) if adjoint else (config.mgrit.forward_iterations or 2)
    payloads = (cost.payload, cost.payload * message_bytes(config) // BYTES[config.model.dtype])
    levels, _ = direction(build(config.model.layers, config.mgrit), config.mgrit, adjoint)
    cycles = program_cycles(levels, config, ranks)
    # a start from the coarsest grid takes the place of an iteration
    started = config.mgrit.initial_guess == "coarse"
    names = parts(iterations, coarse_start=started, levels=len(levels.levels))
    programs = [[action for name in names for action in record(cycle, name)] for cycle in cycles]

    def work(action: Action) -> float:
        if action.level >= free and action.kind in TALK:
            return 0.0
        return cost.of(action, adjoint=adjoint, overhead=network.send_overhead_s)

    def flight(source: int, dest: int, level: int) -> float:
        return 0.0 if level >= free else network.flight(source, dest, payloads[min(level, 1)])

    return max(simulate(programs, cycles, work, flight))


def grids(layers: int) -> list[tuple[int, ...]]:
    """Coarsening factors of two to seven levels that leave at least two points; more than five only with small ones."""
    found = [c for depth in range(1, 5) for c in itertools.product(FACTORS, repeat=depth)]
    found += [c for depth in (5, 6) for c in itertools.product(FACTORS[:2], repeat=depth)]
    return [c for c in found if math.prod(c) * 2 <= layers]


def _multigrid(config: Config, ranks: int, found: Measured) -> Iterator[Plan]:
    assert found.costs is not None
    for replicas in _replicas(ranks, found.samples):
        local = ranks // replicas
        if not 1 < local <= config.model.layers:
            continue
        beside = found.costs.at(math.ceil(found.samples / replicas)).beside
        for grid, batching in _likely(config.model.layers, local, beside)[:SIMULATED]:
            yield multigrid(replace(config, mgrit=_on(config.mgrit, grid, batching)), ranks, replicas, found)


def _likely(layers: int, ranks: int, beside: float) -> list[tuple[tuple[int, ...], Batching]]:
    """Grids, their intervals one by one or side by side where a rank has several, the shortest chains first."""
    possible = grids(layers)
    found = [(_evaluations(layers, ranks, grid), grid, False) for grid in possible]
    if beside < 1:
        several = [grid for grid in possible if layers // ranks >= 2 * grid[0]]
        found += [(_evaluations(layers, ranks, grid, beside), grid, True) for grid in several]
    return [(grid, "on" if together else "off") for _, grid, together in sorted(found)]


def _on(mgrit: MGRIT, grid: Sequence[int], batching: Batching) -> MGRIT:
    """Settings on other grids."""
    return replace(mgrit, levels=len(grid) + 1, coarsening=list(grid), batching=batching, microbatches=1, adjoint={})


def _exact(config: Config, ranks: int, found: Measured) -> Iterator[Plan]:
    """Replicas alone, and pipelines with one or more replicas."""
    for replicas in _replicas(ranks, found.samples):
        local = ranks // replicas
        share = found.samples // replicas
        if local == 1:
            yield _pipeline(config, ranks, replicas, 1, found)
        elif local <= (len(found.units) or config.model.layers):
            for count in sorted({round(local * factor) for factor in PARTS}):
                if 1 < count <= share:
                    yield _pipeline(config, ranks, replicas, count, found)


def _pipeline(config: Config, ranks: int, replicas: int, count: int, found: Measured) -> Plan:
    """A stack or a network of units in stages, its batch in parts; one stage and one part: replicas alone."""
    local, family = ranks // replicas, "pipeline" if ranks > replicas else "data"
    samples = math.ceil(found.samples / (replicas * count))
    network, parallel = found.network, _parallel(config, replicas)
    if found.costs is None:
        fdg = replace(config.fdg, modules=local, cuts="by_cost", microbatches=count)
        run = replace(config, method="pipeline", fdg=fdg, parallel=parallel)
        stages = cut_plan(found.units, Schedule(local, "bp")).modules
        slowest = max(stage.seconds for stage in stages) * samples / found.samples
        flight = 2 * max(unit.output for unit in found.units) * samples / found.samples / network.inter_bandwidth
        memory = _unit_memory(found, local)
    else:
        run = replace(config, method="mgrit", mgrit=MGRIT(levels=1, microbatches=count), parallel=parallel)
        cost, layers = found.costs.at(samples), math.ceil(config.model.layers / local)
        slowest = cost.step * layers
        flight = 2 * (network.flight(0, network.ranks_per_node, cost.payload) + 2 * network.send_overhead_s)
        memory = sum(memory_bytes(run, partition_of(run, local), math.ceil(found.samples / replicas)))
    ticks = count + local - 1
    seconds = ticks * (slowest + (flight if local > 1 else 0.0)) + _average(config, replicas, local, network, found)
    return Plan(run, ranks, family, seconds + network.collective(range(ranks), 1024), memory=memory)


def _stack_modules(config: Config, ranks: int, found: Measured) -> Iterator[Plan]:
    """Decoupled modules of a stack, one rank each, with replicas: forward again before every backward."""
    assert found.costs is not None
    for modules in MODULES:
        if ranks % modules or modules > config.model.layers or ranks // modules > found.samples:
            continue
        replicas = ranks // modules
        parallel = replace(_parallel(config, replicas), modules=modules, layers=1)
        fdg = replace(config.fdg, modules=None, cuts="uniform", backward="recompute")
        run = replace(config, method="fdg", fdg=fdg, mgrit=MGRIT(levels=1), parallel=parallel)
        samples = math.ceil(found.samples / replicas)
        cost, layers = found.costs.at(samples), math.ceil(config.model.layers / modules)
        seconds = (cost.step + cost.evaluate + cost.advance) * layers
        seconds += _average(config, replicas, modules, found.network)
        memory = sum(memory_bytes(run, uniform(config.model.layers, modules), samples))
        yield Plan(run, ranks, "fdg", seconds, memory=memory + 2 * modules * cost.payload)


def _multigrid_modules(config: Config, ranks: int, found: Measured) -> Iterator[Plan]:
    """Decoupled modules of a stack, each solved by multigrid on several ranks, with replicas; all solves start cold,
    and a module goes forward again before every backward."""
    assert found.costs is not None
    for modules, replicas in itertools.product(MODULES, _replicas(ranks, found.samples)):
        local, layers = ranks // (modules * replicas), config.model.layers // modules
        if ranks % (modules * replicas) or not 1 < local <= layers:
            continue
        samples = math.ceil(found.samples / replicas)
        cost, network = found.costs.at(samples), found.network
        parallel = replace(_parallel(config, replicas), modules=modules, layers=local)
        fdg = replace(config.fdg, modules=None, cuts="uniform", backward="recompute")
        for grid, batching in _likely(layers, local, cost.beside)[:SIMULATED_IN_MODULES]:
            mgrit = replace(_on(config.mgrit, grid, batching), initial_guess="coarse")
            part = replace(config, mgrit=mgrit, model=replace(config.model, layers=layers))
            seconds = cost.gradient * math.ceil(layers / local)
            seconds += sum(solve_seconds(part, local, adjoint, cost, network) for adjoint in (False, False, True))
            seconds += _average(config, replicas, modules * local, network)
            run = replace(config, method="fdg", fdg=fdg, mgrit=mgrit, parallel=parallel)
            memory = sum(memory_bytes(part, uniform(layers, local), samples)) + 2 * modules * cost.payload
            yield Plan(run, ranks, "fdg x mgrit", seconds, memory=memory)


def _unit_modules(config: Config, ranks: int, found: Measured) -> Iterator[Plan]:
    """Decoupled modules of a network of units, one rank each, with replicas."""
    for modules in range(2, min(ranks, len(found.units)) + 1):
        if ranks % modules or ranks // modules > found.samples:
            continue
        replicas = ranks // modules
        fdg = replace(config.fdg, modules=modules, cuts="by_cost")
        run = replace(config, method="fdg", fdg=fdg, parallel=_parallel(config, replicas))
        backward = fdg.backward or ("recompute" if fdg.schedule == "fr" else "stash")
        plan = cut_plan(found.units, Schedule(modules, fdg.schedule, fdg.order), backward=backward)
        slowest = max(module.seconds for module in plan.modules) / replicas
        seconds = slowest + _average(config, replicas, modules, found.network, found)
        memory = max(module.peak() + module.weights for module in plan.modules)
        yield Plan(run, ranks, "fdg", seconds, memory=memory)


# shared


def _parallel(config: Config, replicas: int) -> ParallelConfig:
    return replace(config.parallel, replicas=replicas, modules=None, layers="auto", partition="uniform")


def _replicas(ranks: int, samples: int) -> list[int]:
    """Numbers of replicas that divide the ranks and get a sample each."""
    return [count for count in range(1, ranks + 1) if ranks % count == 0 and count <= samples]


def _average(config: Config, replicas: int, local: int, network: NetworkModel, found: Measured | None = None) -> float:
    """Seconds of averaging one rank's gradients over the replicas, not hidden behind the backward."""
    if replicas == 1:
        return 0.0
    if found is not None and found.units:
        size = sum(unit.parameters for unit in found.units) // local
    else:
        model = config.model
        fan_in = model.width * (model.kernel**2 if model.name == "conv" else 1)
        size = math.ceil(model.layers / local) * model.width * (fan_in + 1) * 4
    return network.collective(range(0, replicas * local, local), size)


def _unit_memory(found: Measured, modules: int) -> int:
    """Bytes of the fullest of some modules trained without delay."""
    plan = cut_plan(found.units, Schedule(modules, "bp"))
    return max(module.peak() + module.weights for module in plan.modules)


def _evaluations(layers: int, ranks: int, grid: Sequence[int], beside: float = 1.0) -> float:
    """Layer evaluations one after another of an iteration, roughly: three sweeps of the finest level, two of the
    others, the coarsest one in a row; an interval is never shared. `beside`: what a further one of the same call costs.
    """
    total, local, points = 0.0, layers / ranks, float(layers)
    for level, c in enumerate(grid):
        sweeps = 3 if level == 0 else 2
        total += sweeps * c * (1 + (max(local / c, 1.0) - 1) * beside)
        local, points = local / c, points / c
    return total + 2 * points
