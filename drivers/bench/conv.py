"""Convolutional benchmarks: plain torch as is and channels last against serial and multigrid lpnet. Two minutes.

    python drivers/bench/conv.py --json conv.json

64 residual 3x3 convolutions, 4 channels of 28 x 28, tanh, batch 64: conv-serial on 1 rank, conv-mgrit on 2.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from case import case
from harness import Row, arguments, finish, on_ranks

import lpnet

LAYERS, CHANNELS, SIZE, BATCH = 64, 4, 28, 64


class PlainLayer(torch.nn.Module):
    """One residual layer as a user of torch writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.h = 5.0 / LAYERS

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """u + h tanh(conv(u))."""
        return u + self.h * torch.tanh(self.inner(u))


class Flat(torch.nn.Module):
    """A linear classifier of the flattened state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(CHANNELS * SIZE * SIZE, 10)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) to logits."""
        return self.inner(u.flatten(1))


def build(comm: Any, **mgrit: Any) -> lpnet.LayerParallel:
    """The network in lpnet."""
    torch.manual_seed(0)
    step = lpnet.nn.ConvStep(channels=CHANNELS, init_scale=1.0)
    stack = lpnet.LayerStack(step, num_layers=LAYERS, final_time=5.0, comm=comm, seed=0)
    opening = torch.nn.Conv2d(1, CHANNELS, 3, padding=1)
    return lpnet.LayerParallel(stack, opening=opening, closing=Flat(), mgrit=lpnet.MGRIT(**mgrit))


class ChannelsLast(torch.nn.Module):
    """The same network fed with channels-last images."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to logits."""
        return self.net(x.to(memory_format=torch.channels_last))


def baselines() -> dict[str, torch.nn.Module]:
    """Plain torch networks with lpnet's weights."""
    serial = build(None, levels=1).to_serial()
    assert serial is not None
    net = torch.nn.Sequential(serial.opening, *[PlainLayer() for _ in range(LAYERS)], serial.closing)
    with torch.no_grad():
        for mine, other in zip(list(net)[1:-1], serial.layers, strict=True):
            mine.inner.weight.copy_(other.weight)
            mine.inner.bias.copy_(other.bias)
    return {"as is": net, "channels_last": ChannelsLast(copy.deepcopy(net))}


def rows(name: str, comm: Any, targets: dict[str, float], runs: int, **mgrit: Any) -> list[Row]:
    """The rows of one case."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 1, SIZE, SIZE, generator=generator)
    y = torch.randint(0, 10, (BATCH,), generator=generator)
    return case(name, build, baselines(), x, y, comm, targets, runs, **mgrit)


def main() -> None:
    """All rows, or with --part the rows of one mpirun."""
    args = arguments(__doc__.splitlines()[0])
    runs = min(args.runs, 10)
    if args.part:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        found = rows(
            "conv-mgrit",
            comm,
            {"as is": 0.25},
            runs,
            levels=2,
            coarsening=8,
            forward_iterations=2,
            adjoint_iterations=1,
        )
        if comm.rank == 0:
            finish(found, args.json, quiet=True)
        return
    found = rows("conv-serial", None, {"as is": 0.40, "channels_last": 0.90}, runs, levels=1)
    found += on_ranks(str(Path(__file__).resolve()), 2, ["--runs", str(runs)])
    finish(found, args.json)


if __name__ == "__main__":
    sys.exit(main())
