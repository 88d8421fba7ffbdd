"""What gathering coarse levels on fewer ranks could gain: a bound, from measured layer costs, without building it.

    python drivers/bench/gather.py [--json gather.json]

Solves of a warm step (2 + 1 iterations) are simulated as they are, then with messages of the coarse levels that cost
nothing: no way of gathering is faster than that. From its gain goes what any gathering pays, once per iteration: a
state, its relaxed value and its coarse step of every point to the rank that takes over, and the new state back.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from lpnet.config import MGRIT, Config, DataConfig, ModelConfig
from lpnet.parallel.interconnect import NetworkModel, named
from lpnet.scaling.candidates import solve_seconds
from lpnet.scaling.layer_cost import LayerCost, measure

CASES = {  # samples, width, layers, ranks, coarsening
    "Peaks, 5000 samples": (5000, 8, 1024, 256, (4, 2, 4, 4)),
    "Peaks, 625 samples": (625, 8, 1024, 32, (32, 4, 2)),
    "Peaks, 50 samples": (50, 8, 1024, 256, (4, 2, 4, 4)),
    "wide, 4000 samples": (4000, 220, 512, 128, (4, 4, 2, 2)),
}
NETWORKS = ("infiniband", "slingshot", "ethernet")


def seconds(config: Config, ranks: int, cost: LayerCost, network: NetworkModel, free: float = math.inf) -> float:
    """Of both solves, with free messages from a level on."""
    return sum(solve_seconds(config, ranks, adjoint, cost, network, free=free) for adjoint in (False, True))


def price(points: int, group: int, ranks: int, cost: LayerCost, network: NetworkModel) -> float:
    """Seconds of one gathering of a level's points on the first of every `group` ranks, and of the way back."""
    taken = max(points * group // ranks, 1)
    senders = min(group - 1, taken)
    near = group <= network.ranks_per_node
    width = network.intra_bandwidth if near else network.inter_bandwidth
    latency = network.flight(0, 1 if near else network.ranks_per_node, 0)
    return 2 * latency + 2 * (1 + senders) * network.send_overhead_s + 4 * taken * cost.payload / width


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    print("| case | network | solves ms | free messages, at most % | less the gathering % | level, ranks to one |")
    print("|---|---|---|---|---|---|")
    for name, (samples, width, layers, ranks, grid) in CASES.items():
        config = Config(
            method="mgrit",
            model=ModelConfig(layers=layers, width=width, opening="dense"),
            data=DataConfig(train_samples=samples, validation_samples=10),
            mgrit=MGRIT(levels=len(grid) + 1, coarsening=list(grid)),
        )
        cost = measure(replace(config, mgrit=MGRIT())).at_batch
        for preset in NETWORKS:
            network = named(preset)
            whole, best = seconds(config, ranks, cost, network), (-math.inf, 0, 0)
            bound = 1 - seconds(config, ranks, cost, network, 1) / whole
            for level in range(1, len(grid) + 1):
                points = layers // math.prod(grid[:level])
                gain = whole - seconds(config, ranks, cost, network, level)
                for group in (2**k for k in range(1, ranks.bit_length())):
                    if points * group > ranks:  # a leader takes several points: so many messages go away
                        saved = gain * (1 - ranks / group / points) - 3 * price(points, group, ranks, cost, network)
                        best = max(best, (saved / whole, level, group))
            row = {"case": name, "network": preset, "ms": whole * 1e3, "bound": bound, "gain": best[0]}
            rows.append({**row, "level": best[1], "group": best[2]})
            print(
                f"| {name} | {preset} | {whole * 1e3:.2f} | {100 * bound:.1f} | {100 * best[0]:+.1f} | "
                f"{best[1]}, {best[2]} |",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
