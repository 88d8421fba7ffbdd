"""How modules train, checked before the first message, and how a module is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lpnet.errors import UsageError
from lpnet.fdg.chain import Chain
from lpnet.fdg.compensation import Compensation
from lpnet.fdg.schedule import Schedule
from lpnet.fdg.stage import Backward, Loss, Stage
from lpnet.fdg.update import OptimizerFactory, SchedulerFactory, Update
from lpnet.parallel.comm import Comm


@dataclass(frozen=True)
class Options:
    """Settings that all modules share; `FDG` describes them.

    Raises:
        UsageError: an unknown word, or a number out of its range.
    """

    schedule: Schedule
    backward: Backward = "stash"
    compensation: Compensation = Compensation()
    clip_norm: float | None = None
    gradient_dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.backward not in ("stash", "recompute", "mixed"):
            raise UsageError(f"backward is {self.backward!r}; it must be stash, recompute or mixed")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UsageError(f"clip_norm is {self.clip_norm}; it must be greater than 0, or None for no clipping")
        if self.backward == "mixed" and self.autocast is not None:
            raise UsageError("backward mixed sees the weights that autocast has rounded, the old ones; use stash")
        for name, dtype in (("gradient_dtype", self.gradient_dtype), ("autocast", self.autocast)):
            if dtype not in (None, torch.float16, torch.bfloat16):
                raise UsageError(f"{name} is {dtype}; it must be torch.float16, torch.bfloat16 or None")


@dataclass(frozen=True)
class Makers:
    """What the user gives to make optimisers, learning-rate schedulers and losses with."""

    loss: Loss
    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None


def make_stage(
    options: Options, makers: Makers, module: int, chain: Chain, *, capacity: int | None = None, shared: bool = False
) -> Stage:
    """The units of a module at work. No communication.

    Args:
        options: settings.
        makers: of the loss.
        module: which one, counted from 1.
        chain: its units.
        capacity: batches in flight at most; None: as the schedule says.
        shared: whether several ranks share the module.

    Raises:
        UsageError: a shared module that is to keep old weights.
    """
    schedule = options.schedule
    if shared and schedule.delay(module) and options.backward != "recompute":
        raise UsageError(
            f"module {module} is shared by several ranks, which keep no old weights; use backward='recompute'"
        )
    return Stage(
        chain,
        backward=options.backward if schedule.delay(module) else "live",
        first=module == 1,
        loss=makers.loss if module == schedule.modules else None,
        capacity=capacity or schedule.stash(module),
        autocast=options.autocast,
        linearise=shared,
    )


def make_update(options: Options, makers: Makers, module: int, stage: Stage) -> Update:
    """The optimiser of a module. No communication.

    Raises:
        UsageError: a remedy that the optimiser cannot do.
    """
    return Update(
        stage.trainable(),
        optimizer=makers.optimizer,
        scheduler=makers.scheduler,
        compensation=options.compensation,
        schedule=options.schedule,
        module=module,
        clip_norm=options.clip_norm,
        shadows=stage.kind == "mixed",
    )


def check_same(units: Mapping[str, torch.nn.Module], options: object, comm: Comm) -> None:
    """Refuse ranks that were given different networks or options. Collective over comm.

    Raises:
        UsageError: on every rank; the first rank that differs from rank 0, and in what.
    """
    if comm.size == 1:
        return
    shapes = [
        (f"{name}.{local}", tuple(tensor.shape), str(tensor.dtype))
        for name, unit in units.items()
        for local, tensor in [*unit.named_parameters(), *unit.named_buffers()]
    ]
    mine = (list(units), shapes, repr(options))
    theirs = comm.broadcast_object(mine)
    error = None
    if mine != theirs:
        what = "the network has other names, shapes or dtypes" if mine[:2] != theirs[:2] else "the options differ"
        error = UsageError(f"rank {comm.rank}/{comm.size}: {what} than on rank 0: {_first(mine[2], theirs[2])}")
    comm.agree(error)


def _first(mine: str, theirs: str) -> str:
    return "give all ranks the same" if mine == theirs else f"{mine} here, {theirs} there"
