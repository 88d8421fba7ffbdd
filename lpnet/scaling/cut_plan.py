"""What a run of decoupled modules would do, as text: the schedule, the cuts, shares, predicted speed-up and memory."""

from __future__ import annotations

import torch

from lpnet.config import Config
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import Samples, load
from lpnet.fdg.cuts import measure, plan
from lpnet.fdg.schedule import Schedule
from lpnet.nn.models import DTYPES
from lpnet.train.decoupled import sample_layout, units


def cut_plan_text(config: Config, ranks: int) -> str:
    """The plan of a run on `ranks` ranks: units are timed on one batch, here. No communication.

    Args:
        config: the run, method fdg or pipeline.
        ranks: MPI ranks, one module each, where fdg.modules is not given.

    Raises:
        DataError: the data cannot be read; the units are timed on them.
        UsageError: more modules than units, or cuts that do not fit.
    """
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
    schedule = Schedule(fdg.modules or ranks, "bp" if config.method == "pipeline" else fdg.schedule, fdg.order)
    cuts = fdg.cuts if isinstance(fdg.cuts, list) else None
    if fdg.cuts == "uniform":
        from lpnet.parallel.partition import uniform

        cuts = list(uniform(len(costs), schedule.modules).bounds[1:-1])
    found = plan(costs, schedule, cuts, backward=fdg.backward or ("recompute" if fdg.schedule == "fr" else "stash"))
    grid = "" if config.method == "pipeline" else f"{schedule.grid(ticks=4 * schedule.modules)}\n\n"
    return f"{len(costs)} units, batch of {len(first)} samples\n\n{grid}{found.text()}"
