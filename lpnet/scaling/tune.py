"""The planner: which method, how many ranks, replicas and grids for a configuration, explained in a table.

    1  measure what a layer, or a unit, costs here, at the run's batch and at a part of it
    2  predict replicas, exact pipelines, multigrid, decoupled modules and their mixes from these costs
    3  emulate the best of each kind, and measure the gradient error of those that are inexact
    4  take the fastest that is accurate enough; an exact method wherever it is as fast

Nothing here talks to other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lpnet.config import MGRIT, RESNETS, Config
from lpnet.errors import LpnetError, UsageError
from lpnet.mgrit.plan import partition_of
from lpnet.parallel.interconnect import NetworkModel, named
from lpnet.scaling.accuracy import gradient_error, stale_error
from lpnet.scaling.candidates import Measured, Plan, every, multigrid, serial
from lpnet.scaling.emulated import Request, bench
from lpnet.scaling.layer_cost import Costs, batch_size, measure, measure_units

EMULATED = {"data": 1, "pipeline": 2, "mgrit": 4, "fdg": 3, "fdg x mgrit": 2}
"""Candidates of each kind that are emulated; of decoupled ones the best for different numbers of modules, since the
fastest may have so many that its gradients are too old."""
NEAR = 3.0  # of them those whose predicted time is within this factor of the best
CLOSE = 1.05  # an exact method within 5 % of the fastest is taken
STEPS = 3
SHOWN = 4  # candidates in the table that were not emulated


@dataclass(frozen=True)
class Choice:
    """What `tune` found.

    Args:
        best: the plan to run.
        plans: all that were emulated, and the best that were not.
        costs: of a layer; None for a network of units.
        network: of the messages.
        most_error: bound on the gradient error.
    """

    best: Plan
    plans: tuple[Plan, ...]
    costs: Costs | None
    network: NetworkModel
    most_error: float

    def table(self) -> str:
        """The choice explained."""
        costs, lines = self.costs, []
        ranks = max(plan.ranks for plan in self.plans)
        if costs is not None:
            lines += [
                f"a layer's training step takes {costs.at_batch.step * 1e6:.1f} us at {costs.at_batch.samples} "
                f"samples: {costs.floor * 1e6:.1f} us and {costs.each * 1e9:.2f} ns per sample (equal at "
                f"{costs.half_batch:.0f} samples)"
            ]
        lines += [
            f"predicted on {self.network.describe()}",
            "",
            f"{'':2}{'ranks':>6} {'from costs ms':>13} {'emulated ms':>12} {'gradient error':>15} {'MiB':>8}  method",
        ]
        for plan in self.plans:
            emulated = "" if plan.emulated_seconds is None else f"{plan.emulated_seconds * 1e3:.3f}"
            error = "exact" if plan.exact else "" if plan.gradient_error is None else f"{plan.gradient_error:.1e}"
            mark = "->" if plan == self.best else ""
            lines.append(
                f"{mark:2}{plan.ranks:>6} {plan.model_seconds * 1e3:13.3f} {emulated:>12} {error:>15} "
                f"{plan.memory / 2**20:8.1f}  {plan.label()}"
            )
        lines += ["", self._why()]
        if self.best.ranks < ranks:
            lines.append(f"more than {self.best.ranks} rank(s) do not make it faster: start it on {self.best.ranks}")
        return "\n".join(lines)

    def _why(self) -> str:
        best = self.best
        if best.exact:
            return f"chosen: {best.label()} on {best.ranks} rank(s), because nothing inexact is more than 5 % faster"
        alone = next(plan for plan in self.plans if plan.family == "serial")
        assert best.emulated_seconds is not None and alone.emulated_seconds is not None
        gain = alone.emulated_seconds / best.emulated_seconds
        return (
            f"chosen: {best.label()} on {best.ranks} ranks: {gain:.2f} times as fast as serial, inexact (error "
            f"{best.gradient_error:.1e}, allowed {self.most_error:g})"
        )


def tune(config: Config, ranks: int, network: NetworkModel, *, most_error: float = 0.1) -> Choice:
    """Choose method, ranks, replicas and grids. Emulates; no communication with other processes.

    Args:
        config: the run; its own multigrid settings are one of the candidates.
        ranks: that there are.
        network: costs of messages.
        most_error: largest gradient error of an inexact method.

    Raises:
        UsageError: more ranks than layers.
    """
    stack = config.model.name not in RESNETS
    if stack:
        partition_of(config, ranks)
        costs = measure(config)
        found = Measured(costs, (), costs.at_batch.samples, network)
    else:
        costs = None
        found = Measured(None, measure_units(config), batch_size(config), network)
    config = replace(config, mgrit=warm(config.mgrit))
    counts = sorted({max(ranks // share, 1) for share in (1, 2, 4)} - {1}, reverse=True)
    candidates = [plan for count in counts for plan in every(config, count, found)]
    candidates.sort(key=lambda plan: plan.model_seconds)
    finalists = [serial(config, found)]
    if stack and ranks > 1 and config.mgrit.levels > 1:
        finalists.append(multigrid(config, ranks, 1, found))  # the configuration as it is
    finalists += [plan for plan in _finalists(candidates) if plan not in finalists]
    emulated = [_emulated(plan, network) for plan in finalists]
    best = choose(emulated, most_error)
    ranked = sorted(emulated, key=lambda plan: plan.emulated_seconds or math.inf)
    rest = [plan for plan in candidates if plan not in finalists][:SHOWN]
    return Choice(best, (*ranked, *rest), costs, network, most_error)


def choose(plans: Sequence[Plan], most_error: float) -> Plan:
    """The fastest that is accurate enough; an exact one wherever it is as fast. No communication.

    Args:
        plans: emulated; those that diverged have neither time nor error.
        most_error: largest gradient error.
    """
    usable = [plan for plan in plans if plan.gradient_error is not None and plan.gradient_error <= most_error]
    by_time = sorted(usable, key=lambda plan: plan.emulated_seconds or math.inf)
    limit = CLOSE * (by_time[0].emulated_seconds or math.inf)
    return next((plan for plan in by_time if plan.exact and (plan.emulated_seconds or math.inf) <= limit), by_time[0])


def _finalists(candidates: Sequence[Plan]) -> list[Plan]:
    """The best few of each kind, without those that are far behind."""
    taken: list[Plan] = []
    for plan in candidates:
        near = plan.model_seconds <= NEAR * candidates[0].model_seconds
        same = [other for other in taken if other.family == plan.family]
        known = plan.modules is not None and any(other.modules == plan.modules for other in same)
        if len(same) < EMULATED[plan.family] and not known and (near or not same):
            taken.append(plan)
    return taken


def warm(mgrit: MGRIT) -> MGRIT:
    """Two forward iterations and one adjoint iteration from kept states, where the settings iterate to a tolerance."""
    return replace(
        mgrit,
        forward_iterations=mgrit.forward_iterations or 2,
        adjoint_iterations=mgrit.adjoint_iterations or 1,
        initial_guess="kept",
        skip_first_down=False,
    )


def _emulated(plan: Plan, network: NetworkModel) -> Plan:
    """The plan with its emulated time and its gradient error; one that diverges or is refused has neither."""
    try:
        seconds = bench(plan.config, Request((plan.ranks,), network), steps=STEPS)[0].seconds
        error = 0.0 if plan.exact else error_of(plan)
    except LpnetError:
        if plan.family == "serial":
            raise
        return plan
    return replace(plan, emulated_seconds=seconds, gradient_error=error)


def error_of(plan: Plan) -> float:
    """Relative gradient error, which does not depend on the ranks and replicas: found on one rank."""
    config = replace(plan.config, parallel=replace(plan.config.parallel, replicas=1))
    if not plan.family.startswith("fdg"):
        return gradient_error(config)[0]
    modules = config.parallel.modules or 1
    alone = replace(config.parallel, layers=1) if plan.family == "fdg x mgrit" else config.parallel
    stale = stale_error(replace(config, parallel=alone))[0]
    if plan.family == "fdg":
        return stale
    # delayed gradients are compared with those of the same solves: how far these are off comes on top of it
    module = replace(config.model, layers=config.model.layers // modules)
    solved = replace(config, method="mgrit", model=module, parallel=replace(alone, modules=None, layers="auto"))
    return math.hypot(stale, gradient_error(solved)[0])


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
