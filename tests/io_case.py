"""A small set of shards with everything a checkpoint may hold, and a program that saves it and comes to grief."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from lpnet.parallel.partition import uniform
from lpnet.parallel.shard import Shard

LAYERS = 13


def numbers(step: int = 0) -> dict[str, torch.Tensor]:
    """The global tensors; names that begin with "stack" or "state" have a row per layer."""
    g = torch.Generator().manual_seed(step)
    weight = torch.randn(LAYERS, 5, 3, generator=g, dtype=torch.float64)
    return {
        "model/stack.weight": weight,
        "model/stack.bias": torch.randn(LAYERS, 1, generator=g),
        "model/stack.half": weight.bfloat16(),
        "model/stack.count": torch.arange(LAYERS),
        "model/opening.weight": torch.randn(3, 4, generator=g),
        "model/closing.weight": torch.randn(2, 2, generator=g).to(torch.float16),
        "model/closing.mask": torch.tensor([True, False, True]),
        "model/closing.empty": torch.empty(0, 3),
        "optim/stack.weight/exp_avg": 2 * weight,
        "optim/closing.weight/step": torch.tensor(float(step)),
        "mgrit/state/0": torch.randn(2, 4, generator=g),
    }


def is_stacked(name: str) -> bool:
    """Whether a name has a row per layer."""
    return name.split("/")[1].startswith(("stack", "state"))


def shards_of(tensors: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, list[Shard]]:
    """The part of one rank; the two rows of mgrit/state are on one rank, the others hold none or none is named."""
    found: dict[str, list[Shard]] = {"model": [], "optim": [], "mgrit": []}
    lo, hi = uniform(LAYERS, size).block(rank)
    for name, tensor in tensors.items():
        section, short = name.split("/", 1)
        if name == "mgrit/state/0":
            if rank == size // 2:  # two blocks of a row each
                found[section] += [Shard(short, tensor[row : row + 1], (row, row + 1), 2) for row in (1, 0)]
            elif rank == 0:
                found[section].append(Shard(short, tensor[:0], (0, 0), 2))
        elif is_stacked(name):
            found[section].append(Shard(short, tensor[lo:hi], (lo, hi), LAYERS))
        elif rank == (0 if short.startswith("opening") else size - 1):
            found[section].append(Shard(short, tensor))
    return found


def main(folder: str, step: str, moment: str, who: str) -> None:
    """Save on all ranks; at MOMENT the rank WHO kills itself, or raises where the moment ends in "-raise"."""
    from mpi4py import MPI

    from lpnet.errors import SaveError
    from lpnet.io import checkpoint, checkpoint_rows, checkpoint_write, publish
    from lpnet.parallel.comm import Comm

    comm = Comm(MPI.COMM_WORLD)
    places: dict[str, tuple[Any, str]] = {
        "build": (checkpoint_write, "_allocate"),
        "write": (checkpoint_rows, "_write_rows"),
        "read": (checkpoint_write, "read_back"),
        "sidecar": (publish, "_sync_folder"),
    }
    name = moment.removesuffix("-raise")
    if name in places and comm.rank == int(who):
        module, attribute = places[name]
        real = getattr(module, attribute)

        def grief(*args: Any) -> None:
            real(*args)
            if moment.endswith("-raise"):
                raise RuntimeError("came to grief")
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, attribute, grief)
    if name == "renamed" and comm.rank == 0:
        real_text = publish._write_text

        def after_rename(path: Any, text: str) -> None:
            if path.name == "latest":
                os.kill(os.getpid(), signal.SIGKILL)
            real_text(path, text)

        publish._write_text = after_rename
    try:
        big = {"big": [Shard("x", torch.ones(100_000, dtype=torch.float64))] if comm.rank == 0 else []}
        parts = shards_of(numbers(int(step)), comm.rank, comm.size) | (big if moment == "big" else {})
        path = checkpoint.save(folder, comm, step=int(step), shards=parts, attributes={"seed": 3})
        print(f"rank {comm.rank} saved {path.name}", flush=True)
    except SaveError as error:
        print(f"rank {comm.rank} SaveError {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
