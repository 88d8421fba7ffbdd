"""What a configuration would do on a number of ranks, as text: partition, levels, messages, critical path, memory.

Pure arithmetic over the recorded cycle: neither torch nor MPI. No communication.
"""

from __future__ import annotations

from lpnet.config import Config
from lpnet.mgrit.cycle import Cycle
from lpnet.mgrit.hierarchy import Hierarchy, build, direction, table
from lpnet.mgrit.programs import evaluations, messages, parts, record, solve_critical_path
from lpnet.parallel.grid_shape import grid_of
from lpnet.parallel.partition import Partition, explicit, uniform

BYTES = {"float32": 4, "float64": 8, "bfloat16": 4}  # bfloat16 computes in it and keeps float32
BLOCKS = {"dense": 32, "conv": 8}  # layers whose gradients are made at once
PIXELS = {"mnist": 28 * 28, "cifar10": 32 * 32, "cifar100": 32 * 32}


def partition_of(config: Config, ranks: int) -> Partition:
    """The partition that a run on `ranks` ranks uses; equal layers cost the same, so by_cost is uniform.

    Raises:
        UsageError: more ranks than layers, or a list that does not fit.
    """
    if isinstance(config.parallel.partition, list):
        return explicit(config.parallel.partition, config.model.all_layers, ranks)
    return uniform(config.model.all_layers, ranks)


def plan_text(config: Config, ranks: int, *, batch: int | None = None) -> str:
    """The plan of a run on `ranks` ranks.

    Args:
        config: the run.
        ranks: MPI ranks, of all data replicas.
        batch: samples per step; the configuration's batch size or training set otherwise.

    Raises:
        UsageError: more ranks than layers.
    """
    grid = grid_of(config, ranks)
    ranks, model = grid.layers, config.model
    partition = partition_of(config, ranks)
    mgrit = config.mgrit
    if config.method == "serial":
        from dataclasses import replace

        mgrit = replace(mgrit, levels=1)
    hierarchy = build(model.all_layers, mgrit, barriers=model.barriers)
    sizes = [high - low for low, high in (partition.block(rank) for rank in range(ranks))]
    samples = batch or config.data.batch_size or config.data.train_samples or 5000
    joined, samples = samples, -(-samples // grid.replicas)
    head = [grid.table(), f"  a batch of {joined} samples is shared by the replicas, {samples} each", ""]
    stages = f" (stacks and transitions of {', '.join(map(str, model.stages))} layers)" if model.barriers else ""
    lines = [
        *(head if grid.replicas > 1 else []),
        f"{model.all_layers} layers{stages} on {ranks} ranks: {min(sizes)} to {max(sizes)} layers a rank",
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
            f"  critical path: {path} layer evaluations (serial: {model.all_layers}), "
            f"ratio {model.all_layers / max(path, 1):.2f}",
        ]
    if mgrit.spatial != "none" and len(hierarchy.levels) > 1:
        factors = ", ".join(map(str, mgrit.spatial_factors[1 : len(hierarchy.levels)]))
        lines.append(f"spatial coarsening ({mgrit.spatial}): levels 1 to {len(hierarchy.levels) - 1} by {factors}")
    if mgrit.coarse != "injected" and len(hierarchy.levels) > 1:
        lines.append(f"coarse steps: {mgrit.coarse} weights")
    if mgrit.coarse_messages != "own" and len(hierarchy.levels) > 1:
        lines.append(f"messages of coarse levels: {message_bytes(config)} bytes per number")
    if mgrit.initial_guess == "kept" and len(hierarchy.levels) > 1:
        lines.append(warm_text(config, hierarchy, partition, samples))
    lines += ["", memory_text(config, partition, samples)]
    return "\n".join(lines)


def message_bytes(config: Config) -> int:
    """Bytes of a number that travels on a coarse level. No communication."""
    return {"own": BYTES[config.model.dtype], "float32": 4, "bfloat16": 2}[config.mgrit.coarse_messages]


def memory_bytes(config: Config, partition: Partition, samples: int) -> tuple[int, int]:
    """Bytes of the fullest rank: states and adjoints; weights, gradients and optimiser. No communication.

    Args:
        config: the run.
        partition: who owns which layers.
        samples: per step.
    """
    model, mgrit = config.model, config.mgrit
    item = BYTES[model.dtype]
    images = model.name in ("conv", "ode_resnet")
    pixels = PIXELS.get(config.data.name, 1) if images else 1  # ode_resnet: later stages are half as large each
    most = max(b - a for a, b in zip(partition.bounds, partition.bounds[1:], strict=False))
    payload = model.width * pixels * samples * item
    levels = 1 if config.method == "serial" else mgrit.levels
    kept, rows, block = most, 0, BLOCKS.get(model.name, most)
    if levels > 1:
        hierarchy = build(model.all_layers, mgrit, barriers=model.barriers)
        shares = [len(points) / partition.ranks for points in hierarchy.levels[1:]]
        # E and K of both directions per level; kept states and residuals of both on level 1
        rows = sum(int(4 * share) + 5 for share in shares) + int(4 * shares[0])
        # values and slopes of coarse steps with weights of their own, and the middles of half steps
        rows += {"injected": 0, "averaged": 2, "half_steps": 6}[mgrit.coarse] * int(sum(shares) + len(shares))
        if mgrit.storage == "c_points":
            kept = int(shares[0]) + max(
                b - a for a, b in zip(hierarchy.levels[1], hierarchy.levels[1][1:], strict=False)
            )
            block = kept
    # states, values, adjoints, and what the gradients of a block of layers need
    states = (3 * (kept + 1) + min(kept, block) + rows) * payload + (kept + 1) * samples * item * (
        model.name == "dense"
    )
    if mgrit.spatial != "none" and levels > 1:  # states, values and adjoints of restricted states, per factor
        states += sum(3 * (kept + 1) * payload // f**2 for f in sorted(set(mgrit.spatial_factors)) if f > 1)
    fan_in = model.width * (model.kernel**2 if images else 1)
    bias = 1 if model.bias == "scalar" else model.width
    slots = {"lbfgs": 2 * config.optim.memory, "adam": 2, "adamw": 2, "sgd": int(config.optim.momentum > 0)}
    copies = 2 + slots.get(config.optim.name, 1)
    widest = 16 if model.name == "ode_resnet" else 1  # layers of the last stage have the most weights
    return states, most * (model.width * fan_in * widest + bias) * (copies + 2) * item


def warm_text(config: Config, hierarchy: Hierarchy, partition: Partition, samples: int) -> str:
    """States and adjoints that are kept for warm starts, on the fullest rank."""
    model, c_points = config.model, hierarchy.c_points(0)
    blocks = [partition.block(rank) for rank in range(partition.ranks)]
    most = max(sum(low <= p < high for p in c_points) for low, high in blocks) + 1
    pixels = PIXELS.get(config.data.name, 1) if model.name in ("conv", "ode_resnet") else 1
    each = 2 * most * model.width * pixels * samples * BYTES[model.dtype] / 2**20
    bound = config.mgrit.cache_mib
    return f"warm starts: {each:.1f} MiB per batch id, {'all are kept' if bound is None else f'{bound:g} MiB in all'}"


def memory_text(config: Config, partition: Partition, samples: int) -> str:
    """States and weights of the fullest rank."""
    states, weights = memory_bytes(config, partition, samples)
    most = max(b - a for a, b in zip(partition.bounds, partition.bounds[1:], strict=False))
    return (
        f"memory of a rank with {most} layers and {samples} samples: states and adjoints {states / 2**20:.1f} MiB, "
        f"weights, gradients and optimiser {weights / 2**20:.1f} MiB"
    )
