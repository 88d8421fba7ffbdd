"""What watching gradients costs: warm one-shot steps with mgrit.check_every auto against the same steps without.

python drivers/bench/monitors.py [--runs R] [--json FILE]. A timed run is as many steps as lie between two comparisons,
so that each holds exactly one; the share by counting layer evaluations stands in the note.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import Row, alternate, arguments, finish, on_ranks, row

from lpnet.config import MGRIT, Config, DataConfig, ModelConfig, OptimConfig
from lpnet.data.samples import load
from lpnet.mgrit.network import build_network
from lpnet.train.strategies import make_strategy

CASES = {
    "monitors": MGRIT(coarsening=16, forward_iterations=2, adjoint_iterations=1),
    "monitors-batched": MGRIT(coarsening=16, forward_iterations=2, adjoint_iterations=1, batching="on"),
}
TARGET = 1.03


def rows(comm: Any, runs: int) -> list[Row]:
    """Both cases on the ranks of comm."""
    return [measured(name, mgrit, comm, runs) for name, mgrit in CASES.items()]


def measured(name: str, mgrit: MGRIT, comm: Any, runs: int) -> Row:
    """One case: alternating runs of steps."""
    config = Config(
        method="mgrit",
        model=ModelConfig(layers=256, width=8),
        data=DataConfig(train_samples=200, validation_samples=10),
        optim=OptimConfig(lr=1e-4),
    )
    data = load(config.data, 0, torch.float32)
    sides, strategies, work = {}, {}, {"all": 0, "compared": 0}
    for side, every in (("off", 0), ("auto", "auto")):
        net = build_network(replace(config, mgrit=replace(mgrit, check_every=every)), data, comm)
        strategies[side] = make_strategy(net, config.optim)
    every = strategies["auto"].watch.every

    def steps(side: str) -> None:
        for _ in range(every):
            report = strategies[side].step(data.train, 0)
            if side == "auto":
                work["all"] += report.evaluations or 0
                work["compared"] += report.compared

    for side in strategies:
        sides[side] = lambda side=side: steps(side)
    seconds = alternate(sides, runs=runs, comm=comm, warm=1)
    share = work["compared"] / work["all"]
    return row(
        f"{name}-{1 if comm is None else comm.size}",
        "no comparisons",
        seconds["auto"],
        seconds["off"],
        ranks=1 if comm is None else comm.size,
        target=TARGET,
        note=f"a comparison every {every} steps of {statistics.median(seconds['off']) / every * 1e3:.2f} ms; "
        f"{100 * share:.1f} % of the layer evaluations",
    )


def main() -> None:
    """All rows, or with --part the rows of one mpirun."""
    args = arguments(__doc__.splitlines()[0])
    if args.part:
        from mpi4py import MPI

        found = rows(MPI.COMM_WORLD, args.runs)
        if MPI.COMM_WORLD.rank == 0:
            finish(found, args.json, quiet=True)
        return
    torch.set_num_threads(1)
    found = rows(None, args.runs) + on_ranks(str(Path(__file__).resolve()), 2, ["--runs", str(args.runs)])
    finish(found, args.json)
    for one in found:
        print(f"{one.id}: {one.note}")


if __name__ == "__main__":
    sys.exit(main())
