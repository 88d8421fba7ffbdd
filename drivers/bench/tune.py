"""The planner against a full search: every candidate of three small cases emulated, and the configuration as it was.

    python drivers/bench/tune.py --json tune.json [--ranks 8] [--only WORD]

Prints, per case, the predicted time of the planner's choice over that of the default configuration (at most 1) and over
the fastest candidate whose gradient error is allowed (at most 1.1). Candidates and choice are emulated once more side
by side at the end, since a busy machine changes its speed within minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from dataclasses import replace
from pathlib import Path

from lpnet.config import Config
from lpnet.configfile import from_yaml
from lpnet.errors import LpnetError
from lpnet.parallel.interconnect import NetworkModel, named
from lpnet.scaling.candidates import Measured, Plan, every, grids, multigrid
from lpnet.scaling.emulated import Request, bench
from lpnet.scaling.layer_cost import measure
from lpnet.scaling.tune import error_of, tune, warm

CASES = {  # a large batch; a small one on a deep network; wide layers
    "peaks, 5000 samples": "model: {layers: 64, width: 8}\ndata: {train_samples: 5000, validation_samples: 100}\n",
    "peaks, 50 samples": "model: {layers: 128, width: 8}\ndata: {train_samples: 50, validation_samples: 100}\n",
    "wide, 200 samples": "model: {layers: 64, width: 64}\ndata: {train_samples: 200, validation_samples: 100}\n",
}
DEFAULT = "method: mgrit\nmgrit: {levels: 2, coarsening: 4}\noptim: {name: adam, lr: 0.001}\n"
MOST_ERROR = 0.1
ROUNDS = 3


def seconds(plan: Plan, network: NetworkModel) -> float:
    """Predicted seconds of a step; infinite where the plan is refused or diverges."""
    try:
        return bench(plan.config, Request((plan.ranks,), network), steps=3)[0].seconds
    except LpnetError:
        return float("inf")


def search(config: Config, ranks: int, network: NetworkModel) -> list[Plan]:
    """All candidates of the planner on all ranks, and multigrid with every grid of up to three levels."""
    costs = measure(config)
    found = Measured(costs, (), costs.at_batch.samples, network)
    started = replace(config, mgrit=warm(config.mgrit))
    plans = every(started, ranks, found)
    known = {repr(plan.config) for plan in plans}
    for grid in grids(config.model.layers):
        for replicas in (1, 2, 4):
            if len(grid) < 3 and ranks % replicas == 0 and replicas < ranks:
                mgrit = replace(started.mgrit, levels=len(grid) + 1, coarsening=list(grid))
                plan = multigrid(replace(started, mgrit=mgrit), ranks, replicas, found)
                plans += [plan] if repr(plan.config) not in known else []
    return plans


def main() -> None:
    """Search and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--network", default="infiniband")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()
    logging.getLogger("lpnet").setLevel(logging.ERROR)  # what candidates warn of is in the table
    network, rows = named(options.network), []
    print("| case | choice | candidates | choice / default | choice / fastest | fastest |\n|---|---|---|---|---|---|")
    for name, text in CASES.items():
        if options.only not in name:
            continue
        config = from_yaml(DEFAULT + text, name)
        choice = tune(config, options.ranks, network, most_error=MOST_ERROR)
        plans = search(config, options.ranks, network)
        timed = sorted(((seconds(plan, network), plan) for plan in plans), key=lambda pair: pair[0])
        fastest = next(plan for _, plan in timed if plan.exact or error_of(plan) <= MOST_ERROR)
        default = next(plan for plan in choice.plans if plan.config.mgrit.coarsening == 4 and plan.family == "mgrit")
        sides = {"choice": choice.best, "default": default, "fastest": fastest}
        again = [{key: seconds(plan, network) for key, plan in sides.items()} for _ in range(ROUNDS)]
        ratios = {key: statistics.median(r["choice"] / r[key] for r in again) for key in ("default", "fastest")}
        rows.append({"case": name, "choice": choice.best.label(), "fastest": fastest.label(), **ratios})
        print(
            f"| {name} | {choice.best.label()} | {len(plans)} | {ratios['default']:.3f} | {ratios['fastest']:.3f} | "
            f"{fastest.label()} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
