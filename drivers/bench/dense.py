"""Dense benchmarks: plain torch against serial and multigrid lpnet on 1 and 2 ranks. About three minutes.

    python drivers/bench/dense.py --json dense.json

Prints the rows dense-serial, dense-mgrit-1, dense-mgrit-2, dense-mgrit-peer and peaks-lbfgs. The baseline is an
ordinary torch network of modules with autograd; "fastest serial lpnet" is the same network in lpnet on one level.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from case import case
from harness import Row, arguments, finish, on_ranks, row

import lpnet


class PlainLayer(torch.nn.Module):
    """One residual layer as a user of torch writes it."""

    def __init__(self, width: int, h: float) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.h = h

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """u + h tanh(W u + b)."""
        return u + self.h * torch.tanh(self.inner(u))


def plain(layers: int, width: int, serial: torch.nn.Module | None) -> torch.nn.Module:
    """The network as a torch.nn.Sequential, with the weights of lpnet's."""
    net = torch.nn.Sequential(
        torch.nn.ConstantPad1d((0, width - 2), 0.0),
        *[PlainLayer(width, 5.0 / layers) for _ in range(layers)],
        torch.nn.Linear(width, 5),
    )
    if serial is not None:
        with torch.no_grad():
            for mine, other in zip(list(net)[1:-1], serial.layers, strict=True):
                mine.inner.weight.copy_(other.weight)
                mine.inner.bias.copy_(other.bias)
            net[-1].weight.copy_(serial.closing.weight)
            net[-1].bias.copy_(serial.closing.bias)
    return net


def parallel(layers: int, width: int, comm: Any, **mgrit: Any) -> lpnet.LayerParallel:
    """The network in lpnet."""
    torch.manual_seed(0)
    stack = lpnet.LayerStack(
        lpnet.nn.DenseStep(width=width, init_scale=1.0), num_layers=layers, final_time=5.0, comm=comm, seed=0
    )
    return lpnet.LayerParallel(
        stack, opening=lpnet.nn.ZeroExpand(2, width), closing=torch.nn.Linear(width, 5), mgrit=lpnet.MGRIT(**mgrit)
    )


def peaks(dtype: str, target: float) -> Row:
    """Seconds of one L-BFGS iteration with one line-search trial, 5,000 Peaks samples, one rank, one level."""
    from lpnet.config import Config, DataConfig, ModelConfig, OptimConfig
    from lpnet.data.samples import load
    from lpnet.mgrit.network import build_network
    from lpnet.nn.models import DTYPES
    from lpnet.train.strategies import make_strategy

    config = Config(
        model=ModelConfig(layers=256, activation="smooth_relu", dtype=dtype),
        data=DataConfig(name="peaks"),
        optim=OptimConfig(name="lbfgs", lr=1.0),
    )
    data = load(config.data, config.seed, DTYPES[dtype])
    strategy = make_strategy(build_network(config, data), config.optim)
    seconds = []
    for index in range(14):
        began = time.perf_counter()
        strategy.step(data.train, 0)
        if index >= 4:
            seconds.append(time.perf_counter() - began)
    return row(
        "peaks-lbfgs",
        f"paper's C++ code, {dtype}: 3.05 s",
        seconds,
        [3.05] * len(seconds),
        target=target / 3.05,
        note="the paper's code was measured once on a core of this kind and is not run here",
    )


def dense(
    name: str, layers: int, batch: int, comm: Any, targets: tuple[float, float | None], runs: int, **mgrit: Any
) -> list[Row]:
    """One dense case of width 8."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(batch, 2, generator=generator), torch.randint(0, 5, (batch,), generator=generator)

    def build(comm: Any, **settings: Any) -> lpnet.LayerParallel:
        return parallel(layers, 8, comm, **settings)

    goals = {"plain torch": targets[0]} | ({} if targets[1] is None else {"fastest serial lpnet": targets[1]})
    return case(
        name,
        build,
        {"plain torch": plain(layers, 8, build(None, levels=1).to_serial())},
        x,
        y,
        comm,
        goals,
        runs,
        **mgrit,
    )


def main() -> None:
    """All rows, or with --part the rows of one mpirun."""
    args = arguments(__doc__.splitlines()[0])
    warm = {"levels": 2, "forward_iterations": 2, "adjoint_iterations": 1, "batching": "on"}
    if args.part:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        rows = dense("dense-mgrit-2", 1024, 64, comm, (0.06, 0.33), args.runs, coarsening=32, **warm)
        rows += dense("dense-mgrit-peer", 256, 200, comm, (0.15, None), args.runs, coarsening=16, **warm)
        if comm.rank == 0:
            finish(rows, args.json, quiet=True)
        return
    rows = dense("dense-serial", 256, 200, None, (0.18, None), args.runs, levels=1)
    rows += dense("dense-mgrit-1", 1024, 64, None, (0.09, 0.50), args.runs, coarsening=32, **warm)
    rows += on_ranks(str(Path(__file__).resolve()), 2, ["--runs", str(args.runs)])
    rows += [peaks("float64", 0.15), peaks("float32", 0.09)]
    finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
