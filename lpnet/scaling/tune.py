"""The planner: which method, how many ranks and which grids for a configuration, explained in a table.

    1  measure what a layer costs here, at the run's batch
    2  rank all grids by a formula, the best by an event simulation of the recorded cycle with these costs
    3  emulate the best few, and measure the gradient error of those that are inexact
    4  take the fastest that is accurate enough; an exact method wherever it is as fast

This version has serial training and multigrid over the layers. Nothing here talks to other processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lpnet.config import MGRIT, Config
from lpnet.errors import NumericsError, UsageError
from lpnet.mgrit.hierarchy import build, direction
from lpnet.mgrit.plan import memory_bytes, partition_of
from lpnet.mgrit.programs import parts, record, simulate
from lpnet.parallel.interconnect import NetworkModel, named
from lpnet.scaling.accuracy import gradient_error
from lpnet.scaling.emulated import Request, bench
from lpnet.scaling.layer_cost import Costs, measure, program_cycles

FACTORS = (2, 4, 8, 16, 32)
SIMULATED, EMULATED = 10, 3
CLOSE = 1.05  # an exact method within 5 % of the fastest is taken
STEPS = 3


@dataclass(frozen=True)
class Plan:
    """One way to run, and what is known of it.

    Args:
        config: the run.
        ranks: of which how many are used.
        model_seconds: of a step, by event simulation.
        emulated_seconds: of a step, by emulation; None where it was not among the best.
        gradient_error: relative; 0 for an exact method, None where it was not measured.
        memory: bytes of the fullest rank.
    """

    config: Config
    ranks: int
    model_seconds: float
    emulated_seconds: float | None = None
    gradient_error: float | None = None
    memory: int = 0

    @property
    def exact(self) -> bool:
        """Whether it computes the gradient of serial training."""
        return self.config.method == "serial" or self.config.mgrit.levels == 1

    def label(self) -> str:
        """Method and grids."""
        if self.config.method == "serial":
            return "serial"
        m = self.config.mgrit
        grids = m.coarsening if isinstance(m.coarsening, list) else [m.coarsening] * (m.levels - 1)
        return f"mgrit {m.levels} levels, coarsening {'-'.join(map(str, grids))}, relaxation {m.relaxation}"


@dataclass(frozen=True)
class Choice:
    """What `tune` found.

    Args:
        best: the plan to run.
        plans: all that were emulated, and the best that were not.
        costs: of a layer.
        network: of the messages.
        most_error: bound on the gradient error.
    """

    best: Plan
    plans: tuple[Plan, ...]
    costs: Costs
    network: NetworkModel
    most_error: float

    def table(self) -> str:
        """The choice explained."""
        costs = self.costs
        ranks = max(plan.ranks for plan in self.plans)
        lines = [
            f"a layer's training step takes {costs.at_batch.step * 1e6:.1f} us at {costs.at_batch.samples} samples: "
            f"{costs.floor * 1e6:.1f} us and {costs.each * 1e9:.2f} ns per sample (equal at {costs.half_batch:.0f} "
            "samples)",
            f"predicted on {self.network.describe()}",
            "",
            f"{'':2}{'ranks':>6} {'simulated ms':>13} {'emulated ms':>12} {'gradient error':>15} {'MiB':>8}  method",
        ]
        for plan in self.plans:
            emulated = "" if plan.emulated_seconds is None else f"{plan.emulated_seconds * 1e3:.3f}"
            error = "exact" if plan.exact else "" if plan.gradient_error is None else f"{plan.gradient_error:.1e}"
            mark = "->" if plan == self.best else ""
            lines.append(
                f"{mark:2}{plan.ranks:>6} {plan.model_seconds * 1e3:13.3f} {emulated:>12} {error:>15} "
                f"{plan.memory / 2**20:8.1f}  {plan.label()}"
            )
        lines += ["", self._why(), "data replicas, pipelines and decoupled modules are not in this version"]
        if self.best.ranks < ranks:
            lines.append(f"more than {self.best.ranks} rank(s) do not make it faster: start it on {self.best.ranks}")
        return "\n".join(lines)

    def _why(self) -> str:
        best = self.best
        if best.exact:
            return f"chosen: {best.label()} on {best.ranks} rank(s), because nothing inexact is more than 5 % faster"
        serial = next(plan for plan in self.plans if plan.config.method == "serial")
        assert best.emulated_seconds is not None and serial.emulated_seconds is not None
        gain = serial.emulated_seconds / best.emulated_seconds
        return (
            f"chosen: {best.label()} on {best.ranks} ranks: {gain:.2f} times as fast as serial, inexact (error "
            f"{best.gradient_error:.1e}, allowed {self.most_error:g})"
        )


def tune(config: Config, ranks: int, network: NetworkModel, *, most_error: float = 0.1) -> Choice:
    """Choose method, ranks and grids. Emulates; no communication with other processes.

    Args:
        config: the run; its own multigrid settings are one of the candidates.
        ranks: that there are.
        network: costs of messages.
        most_error: largest gradient error of an inexact method.

    Raises:
        UsageError: more ranks than layers.
    """
    partition_of(config, ranks)
    costs = measure(config)
    serial = replace(config, method="serial")
    plans = [_judged(serial, 1, costs, network)]
    own = replace(config, method="mgrit", mgrit=_warm(config.mgrit))
    counts = sorted({max(ranks // share, 1) for share in (1, 2, 4)} - {1}, reverse=True)
    inexact = [_judged(own, ranks, costs, network)] if ranks > 1 and own.mgrit.levels > 1 else []
    for count in counts:
        grids = sorted(_grids(config.model.layers), key=lambda c: _formula(config.model.layers, count, c))
        for grid in grids[:SIMULATED]:
            mgrit = replace(own.mgrit, levels=len(grid) + 1, coarsening=list(grid), adjoint={})
            inexact.append(_judged(replace(own, mgrit=mgrit), count, costs, network))
    inexact[1:] = sorted(inexact[1:], key=lambda plan: plan.model_seconds)
    finalists = [*plans, *inexact[: EMULATED + 1]]
    emulated = [_emulated(plan, network) for plan in finalists]
    usable = [plan for plan in emulated if plan.gradient_error is not None and plan.gradient_error <= most_error]
    fastest = min(usable, key=lambda plan: plan.emulated_seconds or math.inf)
    exact = [plan for plan in usable if plan.exact]
    close = [p for p in exact if (p.emulated_seconds or math.inf) <= CLOSE * (fastest.emulated_seconds or math.inf)]
    best = close[0] if close else fastest
    rest = tuple(inexact[EMULATED + 1 : EMULATED + 4])
    ranked = sorted(emulated, key=lambda plan: plan.emulated_seconds or math.inf)
    return Choice(best, (*ranked, *rest), costs, network, most_error)


def _warm(mgrit: MGRIT) -> MGRIT:
    """Two forward iterations and one adjoint iteration from kept states, where the settings iterate to a tolerance."""
    return replace(
        mgrit,
        forward_iterations=mgrit.forward_iterations or 2,
        adjoint_iterations=mgrit.adjoint_iterations or 1,
        initial_guess="kept",
        skip_first_down=False,
    )


def _grids(layers: int) -> list[tuple[int, ...]]:
    """Coarsening factors of two to five levels that leave at least two points."""
    found = [c for depth in range(1, 5) for c in itertools.product(FACTORS, repeat=depth)]
    return [c for c in found if math.prod(c) * 2 <= layers]


def _formula(layers: int, ranks: int, grid: Sequence[int]) -> float:
    """Layer evaluations one after another of an iteration, roughly: three sweeps of the finest level, two of the
    others, the coarsest one in a row; an interval is never shared."""
    total, local, points = 0.0, layers / ranks, float(layers)
    for level, c in enumerate(grid):
        sweeps = 3 if level == 0 else 2
        total += sweeps * max(local, c)
        local, points = local / c, points / c
    return total + 2 * points


def _judged(config: Config, ranks: int, costs: Costs, network: NetworkModel) -> Plan:
    """A plan with its simulated time and its memory."""
    layers, cost = config.model.layers, costs.at_batch
    partition = partition_of(config, ranks)
    seconds = cost.gradient * math.ceil(layers / ranks)
    if config.method == "serial":
        seconds = cost.step * layers
    else:
        hierarchy = build(layers, config.mgrit)
        for adjoint, iterations in (
            (False, config.mgrit.forward_iterations or 2),
            (True, config.mgrit.adjoint_iterations or 1),
        ):
            levels, _ = direction(hierarchy, config.mgrit, adjoint)
            cycles = program_cycles(levels, config, ranks)
            names = parts(iterations, coarse_start=False, levels=len(levels.levels))
            programs = [[action for name in names for action in record(cycle, name)] for cycle in cycles]
            seconds += max(
                simulate(
                    programs,
                    cycles,
                    lambda action, adjoint=adjoint: cost.of(  # type: ignore[misc]
                        action, adjoint=adjoint, overhead=network.send_overhead_s
                    ),
                    lambda source, dest: network.flight(source, dest, cost.payload),
                )
            )
        seconds += network.collective(range(ranks), 1024)
    return Plan(config, ranks, seconds, memory=sum(memory_bytes(config, partition, cost.samples)))


def _emulated(plan: Plan, network: NetworkModel) -> Plan:
    """The plan with its emulated time and its gradient error; one that diverges has neither."""
    try:
        seconds = bench(plan.config, Request((plan.ranks,), network), steps=STEPS)[0].seconds
        error = 0.0 if plan.exact else gradient_error(plan.config)[0]
    except NumericsError:
        return plan
    return replace(plan, emulated_seconds=seconds, gradient_error=error)


def tune_as_asked(config: Config, options: Mapping[str, str], to_yaml: Callable[[Config], str]) -> str:
    """`lpnet tune`: the table of a choice, after its configuration has been written. No communication.

    Args:
        config: the run.
        options: ranks, out, max-error, network, networks, as words of the command line.
        to_yaml: writes a configuration.

    Raises:
        UsageError: an option that is no number, or an unknown network.
    """
    text, error = options.get("ranks", ""), options.get("max-error", "0.1")
    if not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--ranks is {text!r}; expected a whole number greater than 0")
    if not (error.replace(".", "", 1).isdecimal() and float(error) > 0):
        raise UsageError(f"--max-error is {error!r}; expected a number greater than 0, such as 0.1")
    network = named(options.get("network", "infiniband"), options.get("networks"))
    choice = tune(config, int(text), network, most_error=float(error))
    out = Path(options.get("out", "tuned.yaml"))
    out.write_text(to_yaml(choice.best.config), encoding="utf-8")
    start = f"mpirun -n {choice.best.ranks} lpnet train {out}" if choice.best.ranks > 1 else f"lpnet train {out}"
    return f"{choice.table()}\nwrote {out}: {start}"
