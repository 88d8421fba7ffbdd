"""ResNet-1202 in four modules, batch 8, eight ticks: peak memory of every module against its plan. About a minute.

    python drivers/bench/fdg_memory.py --json memory.json [--depth 1202] [--modules 4] [--batch 8] [--ticks 8]

Memory is what the process has in RAM beyond what it had when its module was ready, at most during the ticks: graphs in
flight, old weights, gradients, momentum; without code and what MPI shares between the ranks. The C library's heap would
keep freed blocks; with the threshold that is set here every tensor goes back at once, so that the process shows what is
in use. Measured for old weights kept (stash) and for the forward run again (recompute).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import lpnet
from lpnet.fdg.decoupled import FDG

THRESHOLD = "131072"  # bytes from which on a block is the kernel's, not the heap's
TOLERANCE = 0.10


def resident(name: str) -> int:
    """A number of /proc/self/status in bytes: VmRSS now, VmHWM at most since `forget`, RssFile, RssShmem."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def forget() -> None:
    """Let VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The paper's optimiser: one slot."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)


def warm_up(x: torch.Tensor, y: torch.Tensor) -> None:
    """Code and tables that the first step of any network loads are no module's memory."""
    network = lpnet.models.resnet_cifar(8, seed=0).to(memory_format=torch.channels_last)
    optimizer = sgd(network.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()


def part(args: argparse.Namespace) -> None:
    """All modules, on their ranks; rank 0 prints."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.batch, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (args.batch,), generator=generator)
    warm_up(x, y)
    rows: list[dict[str, Any]] = []
    for backward in ("stash", "recompute"):
        network = lpnet.models.resnet_cifar(args.depth, seed=0).to(memory_format=torch.channels_last)
        net = FDG(
            network, comm=comm, cuts="by_cost", loss=F.cross_entropy, optimizer=sgd, backward=backward, example=(x, y)
        )
        assert net.plan is not None
        planned = net.plan.modules[comm.rank]
        del network
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        start, alien = resident("VmRSS"), resident("RssFile") + resident("RssShmem")
        forget()
        began, losses = time.perf_counter(), []
        for _ in range(args.ticks):
            losses.append(net.step(x, y).loss)
            if comm.rank == 0:
                print(
                    f"{backward}, tick {len(losses)} of {args.ticks}: {time.perf_counter() - began:.0f} s", flush=True
                )
        alien = resident("RssFile") + resident("RssShmem") - alien  # code, and what MPI shares between the ranks
        used = resident("VmHWM") - start - alien
        found = comm.gather((used, planned.peak(), list(planned.units)))
        if found is not None:
            for module, (most, peak, units) in enumerate(found, 1):
                rows.append({"backward": backward, "module": module, "units": units, "measured_bytes": most,
                             "planned_bytes": peak, "ratio": most / peak,
                             "seconds_per_tick": (time.perf_counter() - began) / args.ticks})  # fmt: skip
        net.close()
        del net
    if comm.rank == 0:
        args.json.write_text(json.dumps(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, and the largest and the sum of the modules."""
    lines = [
        "| backward | module | units | measured MiB | planned MiB | measured / planned |",
        "|---|---|---|---|---|---|",
    ]
    for backward in dict.fromkeys(row["backward"] for row in rows):
        own = [row for row in rows if row["backward"] == backward]
        sums = [sum(row[key] for row in own) for key in ("measured_bytes", "planned_bytes")]
        for row in own:
            low, high = row["units"]
            sizes = f"{row['measured_bytes'] / 2**20:.1f} | {row['planned_bytes'] / 2**20:.1f}"
            lines.append(f"| {backward} | {row['module']} | {low}-{high - 1} | {sizes} | {row['ratio']:.3f} |")
        whole = f"{sums[0] / 2**20:.1f} | {sums[1] / 2**20:.1f} | {sums[0] / sums[1]:.3f}"
        lines.append(f"| {backward} | all | | {whole} |")
    return "\n".join(lines)


def main() -> int:
    """Start the ranks and print their table; 1 where a module's peak is off by more than a tenth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("fdg_memory.json"))
    for name, value in (("depth", 1202), ("modules", 4), ("batch", 8), ("ticks", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part(args)
        return 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": THRESHOLD}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if (os.cpu_count() or 1) < args.modules:
        environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    script = [sys.executable, "-m", "mpi4py", str(Path(__file__).resolve()), "--part", *sys.argv[1:]]
    subprocess.run(["mpirun", "-n", str(args.modules), *script], check=True, env=environment)
    rows = json.loads(args.json.read_text())
    print(table(rows))
    bad = [row for row in rows if abs(row["ratio"] - 1) > TOLERANCE]
    print(f"{len(rows) - len(bad)} of {len(rows)} peaks are within {100 * TOLERANCE:.0f} % of the plan")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
