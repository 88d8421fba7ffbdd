"""Peak memory of a rank, its imports not counted, for the same network on 1, 2 and 4 ranks. Under a minute.

    python drivers/bench/memory.py --json memory.json

Dense, N = 512, width 32, batch 2,000, two levels, one training step after a cold one. The plan's figure (lpnet plan)
stands beside what the operating system counted.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import Row, arguments, finish, on_ranks, versions

import lpnet
from lpnet.config import Config, DataConfig, ModelConfig, OptimConfig
from lpnet.mgrit.plan import memory_bytes, partition_of

LAYERS, WIDTH, BATCH = 512, 32, 2000


def resident() -> int:
    """Bytes of this process now in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(ranks: int) -> list[Row]:
    """One row: the largest rank's memory, and the plan's."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    x, y = torch.randn(BATCH, 2), torch.randint(0, 5, (BATCH,))
    F.cross_entropy(torch.nn.Linear(2, 5)(x), y).backward()  # what torch itself allocates at first use
    before = resident()
    stack = lpnet.LayerStack(lpnet.nn.DenseStep(width=WIDTH), num_layers=LAYERS, final_time=5.0, comm=comm, seed=0)
    settings = lpnet.MGRIT(levels=2, coarsening=8, forward_iterations=2, adjoint_iterations=1)
    net = lpnet.LayerParallel(
        stack, opening=lpnet.nn.ZeroExpand(2, WIDTH), closing=torch.nn.Linear(WIDTH, 5), mgrit=settings
    )
    for _ in range(2):
        net.zero_grad()
        F.cross_entropy(net(x, batch=0), y).backward()
    used = max(comm.allgather(resident() - before))
    config = Config(
        method="mgrit",
        model=ModelConfig(layers=LAYERS, width=WIDTH),
        data=DataConfig(train_samples=BATCH),
        mgrit=settings,
        optim=OptimConfig(name="sgd"),
    )
    planned = sum(memory_bytes(config, partition_of(config, ranks), BATCH))
    return [
        Row(
            "memory",
            "plan",
            used / planned,
            used / planned,
            used / planned,
            used / 2**20,
            planned / 2**20,
            runs=1,
            ranks=ranks,
            versions=versions(),
            note="seconds_lpnet and seconds_baseline hold MiB: measured and planned",
        )
    ]


def main() -> None:
    """A row per rank count; with --part one of them."""
    args = arguments(__doc__.splitlines()[0])
    if args.part:
        rows = measure(args.part)
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 0:
            finish(rows, args.json, quiet=True)
        return
    rows = [row for ranks in (1, 2, 4) for row in on_ranks(str(Path(__file__).resolve()), ranks, [])]
    finish(rows, args.json, quiet=True)
    print("| ranks | measured MiB | planned MiB | measured / planned | share of one rank's |")
    print("|---|---|---|---|---|")
    for row in rows:
        share = row.seconds_lpnet / rows[0].seconds_lpnet
        numbers = f"{row.seconds_lpnet:.1f} | {row.seconds_baseline:.1f} | {row.ratio_median:.2f} | {share:.2f}"
        print(f"| {row.ranks} | {numbers} |")


if __name__ == "__main__":
    sys.exit(main())
