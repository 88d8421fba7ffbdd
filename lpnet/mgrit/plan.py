"""What a configuration would do on a number of ranks, as text: partition, levels, messages, critical path, memory.

Pure arithmetic over the recorded cycle: neither torch nor MPI. No communication.
"""

from __future__ import annotations

from lpnet.config import Config
from lpnet.mgrit.cycle import Cycle
from lpnet.mgrit.hierarchy import build, direction, table
from lpnet.mgrit.programs import evaluations, messages, parts, record, solve_critical_path
from lpnet.parallel.partition import Partition, explicit, uniform

BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def partition_of(config: Config, ranks: int) -> Partition:
    """The partition that a run on `ranks` ranks uses; equal layers cost the same, so by_cost is uniform.

    Raises:
        UsageError: more ranks than layers, or a list that does not fit.
    """
    if isinstance(config.parallel.partition, list):
        return explicit(config.parallel.partition, config.model.layers, ranks)
    return uniform(config.model.layers, ranks)


def plan_text(config: Config, ranks: int, *, batch: int | None = None) -> str:
    """The plan of a run on `ranks` ranks.

    Args:
        config: the run.
        ranks: MPI ranks.
        batch: samples per step; the configuration's batch size or training set otherwise.

    Raises:
        UsageError: more ranks than layers.
    """
    partition = partition_of(config, ranks)
    mgrit = config.mgrit
    if config.method == "serial":
        from dataclasses import replace

        mgrit = replace(mgrit, levels=1)
    hierarchy = build(config.model.layers, mgrit)
    sizes = [high - low for low, high in (partition.block(rank) for rank in range(ranks))]
    samples = batch or config.data.batch_size or config.data.train_samples or 5000
    lines = [
        f"{config.model.layers} layers on {ranks} ranks: {min(sizes)} to {max(sizes)} layers a rank",
        "  rank   "
        + " ".join(f"{rank}:{partition.bounds[rank]}-{partition.bounds[rank + 1] - 1}" for rank in range(min(ranks, 8)))
        + (f" ... {ranks - 1}:{partition.bounds[-2]}-{partition.bounds[-1] - 1}" if ranks > 8 else ""),
        "",
        table(hierarchy, partition, most=12),
        "",
    ]
    for name, adjoint, fixed in (
        ("forward", False, mgrit.forward_iterations),
        ("adjoint", True, mgrit.adjoint_iterations),
    ):
        levels, settings = direction(hierarchy, mgrit, adjoint)
        count = len(levels.levels)
        iterations = 0 if count == 1 else fixed or 1
        programs = parts(iterations, coarse_start=False, levels=count)
        shown = [0, ranks // 2, ranks - 1]
        cycles = {rank: Cycle(levels, partition, rank, settings) for rank in shown}
        one = ["refresh"] if count == 1 else ["refresh", "correct"]
        sent = [sum(messages(record(cycles[rank], part)) for part in one) for rank in shown]
        actions = [action for part in programs for action in record(Cycle(levels, partition, shown[1], settings), part)]
        path = solve_critical_path(levels, settings, partition, programs)
        solve = (
            f"{iterations} iterations"
            if fixed or count == 1
            else "per iteration and final sweep (iterates to a tolerance)"
        )
        lines += [
            f"{name}: {solve}",
            f"  messages per iteration sent by rank {', '.join(map(str, shown))}: {', '.join(map(str, sent))}",
            f"  layer evaluations per level on rank {shown[1]}: "
            + " ".join(map(str, evaluations(actions, count, adjoint=adjoint))),
            f"  critical path: {path} layer evaluations (serial: {config.model.layers}), "
            f"ratio {config.model.layers / max(path, 1):.2f}",
        ]
    lines += ["", memory_text(config, partition, samples)]
    return "\n".join(lines)


def memory_text(config: Config, partition: Partition, samples: int) -> str:
    """States and weights of the fullest rank."""
    width, item = config.model.width, BYTES[config.model.dtype]
    most = max(b - a for a, b in zip(partition.bounds, partition.bounds[1:], strict=False))
    bias = 1 if config.model.bias == "scalar" else width
    coarse = most if config.mgrit.levels == 1 or config.method == "serial" else 0
    c = config.mgrit.coarsening[0] if isinstance(config.mgrit.coarsening, list) else config.mgrit.coarsening
    points = most // c + 2 * c if config.mgrit.storage == "c_points" and not coarse else most
    per_point = (4 * width + 1) * samples * item
    rows = 0 if coarse else 4 * (most // c + 1) * width * samples * item
    states = (points + 1) * per_point + rows
    slots = {"lbfgs": 2 * config.optim.memory, "adam": 2, "adamw": 2}.get(config.optim.name, 1)
    weights = most * ((width * width + bias) * (2 + slots) + 2 * width * (width + 1)) * item
    return (
        f"memory of a rank with {most} layers and {samples} samples: states and adjoints {states / 2**20:.1f} MiB, "
        f"weights, gradients and optimiser {weights / 2**20:.1f} MiB"
    )
