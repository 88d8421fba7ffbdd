"""Decoupled modules against backpropagation and exact pipelines: ResNet-20, CIFAR shapes, batch 128. Four minutes.

    python drivers/bench/fdg.py --json fdg.json

Two modules on 2 ranks with 1 thread each, against backpropagation on 1 and 2 threads and against 1F1B and GPipe of
torch.distributed.pipelining (best cut, 4 and 8 micro-batches), in float32 and bfloat16, all channels last. fdg-train
is everything lpnet switches on against plain torch as a user writes it, with 2 threads. Ratios are the baseline's time
over lpnet's. The cut may lie within a block (`split`) where that makes the shares more equal; the pipelines have the
same one. The bound of the measured shares, the whole network's time over the slower module's, stands in the note.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import HERE, Row, arguments, finish, meet, versions

import lpnet
from lpnet.fdg.cuts import CutPlan, measure, plan
from lpnet.fdg.decoupled import FDG
from lpnet.fdg.schedule import Schedule

BATCH, STEPS = 128, 3
OTHER_NAMES = {1: "BP 1 thread", 2: "BP 2 threads"}


def samples(last: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (BATCH,), generator=generator)
    return (x.to(memory_format=torch.channels_last) if last else x), y


def network(last: bool = True, split: Sequence[str] = ()) -> torch.nn.Sequential:
    """ResNet-20, blocks in two units where `split` says so."""
    net = lpnet.models.resnet_cifar(20, seed=0, split=split)
    return net.to(memory_format=torch.channels_last) if last else net


def best_cut(dtype: torch.dtype) -> tuple[list[str], int, float]:
    """Where two modules are most equal by measured time: split, index of the second module's first unit, bound."""
    x, y = samples()
    autocast = None if dtype == torch.float32 else dtype

    def found(split: list[str]) -> tuple[float, list[str], CutPlan]:
        costs = measure(dict(network(split=split).named_children()), x, y, F.cross_entropy, autocast=autocast)
        made = plan(costs, Schedule(2))
        return max(module.seconds for module in made.modules), split, made

    blocks = found([])
    cut = blocks[2].cuts[0]
    near = [name for name in blocks[2].names[cut - 1 : cut + 1] if name.startswith("block")]
    tried = [blocks, *(found([f"{name}.{layer}"]) for name in near for layer in ("conv1", "conv2"))]
    _, split, made = min(tried, key=lambda entry: entry[0])
    return split, made.cuts[0], made.speedup


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The paper's optimiser."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)


def casting(dtype: torch.dtype) -> Any:
    """torch.autocast, or nothing."""
    return torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext()


def plain(dtype: torch.dtype, threads: int, last: bool = True) -> Callable[[], None]:
    """Training steps of backpropagation in this process."""
    net, (x, y) = network(last), samples(last)
    optimizer = sgd(net.parameters())

    def steps() -> None:
        torch.set_num_threads(threads)
        for _ in range(STEPS):
            optimizer.zero_grad()
            with casting(dtype):
                loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        torch.set_num_threads(1)

    return steps


class Half(torch.nn.Module):
    """A part of the network, channels last inside; torch sends dense tensors only."""

    def __init__(self, units: list[torch.nn.Module]) -> None:
        super().__init__()
        self.units = torch.nn.Sequential(*units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The units, from and to the memory order that messages have."""
        return self.units(x.to(memory_format=torch.channels_last)).contiguous()


def pipelined(kind: str, parts: int, split: list[str], cut: int, dtype: torch.dtype, rank: int) -> Callable[[], None]:
    """Training steps of torch.distributed.pipelining on two ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    units = list(network(split=split))
    halves = [Half(units[:cut]), Half(units[cut:])]
    own, (x, y) = halves[rank], samples(last=False)
    part = x[: BATCH // parts]
    with torch.no_grad():
        between, out = halves[0](part), halves[1](halves[0](part))
    between.requires_grad_()
    out.requires_grad_()
    given, made = (part, between) if rank == 0 else (between, out)
    stage = PipelineStage(own, rank, 2, torch.device("cpu"), input_args=(given,), output_args=(made,))
    schedule = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[kind](stage, parts, loss_fn=F.cross_entropy)
    optimizer = sgd(own.parameters())

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            with casting(dtype):
                schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
            optimizer.step()

    return steps


def decoupled(comm: Any, split: list[str], cut: int, dtype: torch.dtype) -> Callable[[], None]:
    """Ticks of FDG with stashed weights."""
    x, y = samples()
    autocast = dtype if dtype != torch.float32 else None
    net = FDG(network(split=split), comm=comm, loss=F.cross_entropy, optimizer=sgd, cuts=[cut], shrink=0.7,
              autocast=autocast)  # fmt: skip

    def ticks() -> None:
        for _ in range(STEPS):
            net.step(x, y)

    return ticks


def row(name: str, baseline: str, other: list[float], lpnet_seconds: list[float], target: float, note: str) -> Row:
    """Baseline's time over lpnet's, pair by pair."""
    ratios = [a / b for a, b in zip(other, lpnet_seconds, strict=True)]
    middle, of = statistics.median, STEPS
    return Row(name, baseline, middle(ratios), min(ratios), max(ratios), middle(lpnet_seconds) / of, middle(other) / of,
               runs=len(ratios), threads=1, ranks=2, target=target, versions=versions(), note=note)  # fmt: skip


def part(runs: int) -> list[Row]:
    """All rows, on two ranks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.rank
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        split, cut, bound = comm.bcast(best_cut(dtype) if rank == 0 else None)
        within = f" ({split[0]} | ...)" if split else ""
        note = f"{str(dtype).removeprefix('torch.')}, cut before unit {cut}{within}, bound of the shares {bound:.2f}"
        sides: dict[str, Callable[[], None]] = {"lpnet": decoupled(comm, split, cut, dtype)}
        for threads, name in OTHER_NAMES.items():
            sides[name] = plain(dtype, threads) if rank == 0 else lambda: None
        if dtype == torch.float32:
            user = plain(torch.float32, 2, last=False)
            sides["plain torch"] = user if rank == 0 else lambda: None
        for kind in ("1F1B", "GPipe"):
            for parts in (4, 8):
                sides[f"{kind} {parts}"] = pipelined(kind, parts, split, cut, dtype, rank)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for round_ in range(runs + 2):
            for name, side in sides.items():
                meet(comm)
                began = time.perf_counter()
                side()
                took = comm.allreduce(time.perf_counter() - began, MPI.MAX)
                if round_ > 1:
                    seconds[name].append(took)
        ours = seconds["lpnet"]
        rows += [row("fdg-2", "BP 1 thread", seconds["BP 1 thread"], ours, 2.0, note),
                 row("fdg-2", "BP 2 threads", seconds["BP 2 threads"], ours, 1.10, note)]  # fmt: skip
        for kind in ("1F1B", "GPipe"):
            best = min((seconds[f"{kind} {parts}"] for parts in (4, 8)), key=statistics.median)
            rows.append(row("fdg-2", kind, best, ours, 1.15, note))
        if dtype == torch.float32:
            user_seconds = seconds["plain torch"]
        else:
            rows.append(row("fdg-train", "plain torch, 2 threads", user_seconds, ours, 3.0, note))
    torch.distributed.destroy_process_group()
    return rows


def main() -> None:
    """Start two ranks and print their table."""
    args = arguments(__doc__.splitlines()[0])
    if args.part:
        rows = part(args.runs)
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 0:
            finish(rows, args.json, quiet=True)
        return
    import subprocess

    result = HERE / f".fdg.{os.getpid()}.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    script = [sys.executable, "-m", "mpi4py", str(Path(__file__).resolve())]
    # not bound: backpropagation on 2 threads needs both cores
    command = ["mpirun", "-n", "2", "--bind-to", "none", *script, "--part", "2", "--json", str(result)]
    try:
        subprocess.run([*command, "--runs", str(min(args.runs, 7))], check=True, env=environment, timeout=230)
        rows = [Row(**entry) for entry in json.loads(result.read_text())]
    finally:
        result.unlink(missing_ok=True)
    finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
