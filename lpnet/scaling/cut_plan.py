"""What a run of decoupled modules would do, as text: the schedule, the cuts, shares, predicted speed-up and memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from lpnet.config import Config, ParallelConfig
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import Samples, load
from lpnet.fdg.cuts import measure, plan
from lpnet.fdg.schedule import Schedule
from lpnet.mgrit.plan import plan_text
from lpnet.nn.models import DTYPES
from lpnet.parallel.grid_shape import GridShape, grid_of, layered_modules
from lpnet.train.decoupled import sample_layout, units
from lpnet.train.layered import bounds_of, check_layered


def cut_plan_text(config: Config, ranks: int) -> str:
    """The plan of a run on `ranks` ranks: units are timed on one batch, here. No communication.

    Args:
        config: the run, method fdg or pipeline.
        ranks: MPI ranks, one module each, where fdg.modules is not given.

    Raises:
        DataError: the data cannot be read; the units are timed on them.
        UsageError: more modules than units, or cuts that do not fit.
    """
    shape = grid_of(config, ranks)
    head = f"{shape.table()}\n\n" if ranks > shape.modules else ""
    if layered_modules(config):
        return head + _layered_text(config, shape)
    fdg = config.fdg
    data = load(config.data, config.seed, DTYPES[config.model.dtype])
    order = BatchOrder(len(data.train), config.data.batch_size, config.seed, "reshuffled")
    first = Samples(data.train.x, data.train.y) if order.full else data.train.take(order.at(0).indices)
    network, narrow = units(config, data), config.model.dtype == "bfloat16"
    dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
    costs = measure(
        dict(sample_layout(network.to(dtype)).named_children()),
        sample_layout(first.x.to(dtype)),
        first.y,
        torch.nn.functional.cross_entropy,
        autocast=torch.bfloat16 if narrow else None,
    )
    schedule = Schedule(shape.modules, "bp" if config.method == "pipeline" else fdg.schedule, fdg.order)
    cuts = fdg.cuts if isinstance(fdg.cuts, list) else None
    if fdg.cuts == "uniform":
        from lpnet.parallel.partition import uniform

        cuts = list(uniform(len(costs), schedule.modules).bounds[1:-1])
    found = plan(costs, schedule, cuts, backward=fdg.backward or ("recompute" if fdg.schedule == "fr" else "stash"))
    grid = "" if config.method == "pipeline" else f"{schedule.grid(ticks=4 * schedule.modules)}\n\n"
    part = "" if shape.replicas == 1 else f" shared by {shape.replicas} replicas"
    return f"{head}{len(costs)} units, batch of {len(first)} samples{part}\n\n{grid}{found.text()}"


def _layered_text(config: Config, shape: GridShape) -> str:
    """Modules that are layer-parallel networks: the schedule, and the plan of one module's layers."""
    check_layered(config, shape.modules, shape.layers)
    bounds = bounds_of(config, shape.modules)
    schedule = Schedule(shape.modules, config.fdg.schedule, config.fdg.order)
    lines = [schedule.grid(ticks=4 * shape.modules), ""]
    for module, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False), 1):
        lines.append(f"module {module}: layers {low} to {high - 1}, delay {schedule.delay(module)}")
    most = max(range(shape.modules), key=lambda k: bounds[k + 1] - bounds[k])
    own = replace(
        config,
        method="mgrit",
        model=replace(config.model, layers=bounds[most + 1] - bounds[most]),
        parallel=ParallelConfig(),
    )
    batch = config.data.batch_size or config.data.train_samples or 5000
    lines += ["", f"module {most + 1}:", plan_text(own, shape.layers, batch=-(-batch // shape.replicas))]
    return "\n".join(lines)
