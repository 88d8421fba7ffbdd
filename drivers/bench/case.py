"""One training step timed: lpnet against ordinary torch networks and serial lpnet.

A multigrid step starts from the states of the step before, one small SGD step ago; its gradient's error and cosine
against exact propagation stand beside its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, alternate, compare, row

import lpnet

LR = 1e-3


def step(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, **how: Any) -> None:
    """Forward, backward and gradients."""
    for p in net.parameters():
        p.grad = None
    F.cross_entropy(net(x, **how), y).backward()


def descend(net: torch.nn.Module) -> None:
    """One small SGD step, so that a warm start is a start from the step before."""
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-LR)


def gradients(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that a rank holds, by name."""
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def case(
    name: str,
    build: Callable[..., lpnet.LayerParallel],
    plain: dict[str, torch.nn.Module],
    x: torch.Tensor,
    y: torch.Tensor,
    comm: Any,
    targets: dict[str, float],
    runs: int,
    **mgrit: Any,
) -> list[Row]:
    """One benchmark: lpnet with `mgrit` on the ranks of comm against baselines on rank 0.

    Args:
        name: id of the row.
        build: makes the network from a communicator and MGRIT settings.
        plain: ordinary torch networks by the name of the baseline; serial lpnet is added.
        x: samples, the same on every rank.
        y: labels.
        comm: mpi4py communicator; None: one rank.
        targets: per baseline.
        runs: rounds.
    """
    rank = 0 if comm is None else comm.rank
    ranks = 1 if comm is None else comm.size
    net, exact, serial = build(comm, **mgrit), build(comm, levels=1), build(None, levels=1)
    baselines = {**plain, "fastest serial lpnet": serial}

    def side(other: torch.nn.Module) -> Callable[[], None]:
        return (lambda: step(other, x, y)) if rank == 0 else (lambda: None)

    sides = {"lpnet": lambda: step(net, x, y, batch=0), **{key: side(other) for key, other in baselines.items()}}
    step(net, x, y, batch=0)
    for _ in range(2):
        descend(net)
        step(net, x, y, batch=0)

    def between() -> None:
        for trained in (net, *baselines.values()):
            descend(trained)

    seconds = alternate(sides, runs=runs, between=between, comm=comm)
    descend(net)
    step(net, x, y, batch=0)
    exact.load_state_dict(net.state_dict())
    step(exact, x, y)
    error, cosine = compare(gradients(net), gradients(exact), comm)
    shown = {} if mgrit.get("levels") == 1 else {"gradient_error": error, "cosine": cosine}
    compared = [key for key in baselines if ranks > 1 or mgrit.get("levels") != 1 or key != "fastest serial lpnet"]
    return [
        row(name, key, seconds["lpnet"], seconds[key], target=targets.get(key), ranks=ranks, **shown)
        for key in compared
    ]
