"""Decoupled modules and the exact pipeline in the trainer: a network and a strategy with the trainer's interface.

A step is a tick: a batch goes in, and the newest batch that has finished comes back with its loss. Evaluation and
checkpoints happen at tick boundaries with the work in flight parked or saved; at the end of a run it is drained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from lpnet.config import RESNETS, Config, OptimConfig, ParallelConfig
from lpnet.errors import ConfigError
from lpnet.fdg.compensation import Compensation
from lpnet.fdg.decoupled import FDG
from lpnet.fdg.pipeline import Pipeline
from lpnet.fdg.times import ModuleTime
from lpnet.mgrit.network import network_for
from lpnet.mgrit.serial import SerialNetwork
from lpnet.nn.models import resnet, resnet_cifar, resnet_mnist, wide_resnet
from lpnet.optim.select import load_optimizer, optimizer_shards, torch_optimizer
from lpnet.parallel.grid import Shares
from lpnet.parallel.grid_shape import grid_of, layered_modules
from lpnet.parallel.shard import Shard
from lpnet.train.layered import Factory, bounds_of, factories
from lpnet.train.strategies import StepReport, rate_factor

if TYPE_CHECKING:
    from lpnet.data.samples import Data, Samples
    from lpnet.parallel.comm import Comm

PART = 512  # samples evaluated at once
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def units(config: Config, data: Data) -> torch.nn.Sequential:
    """The network as a sequence of units with global names, the same on every rank. No communication.

    Raises:
        UsageError: a depth that the family does not have, or samples that the layers cannot take.
    """
    model, shape, classes = config.model, data.train.shape, data.classes
    if model.name in RESNETS and len(shape) != 3:
        raise ConfigError(
            f"model.name {model.name} takes images; data.name {config.data.name} has samples {tuple(shape)}"
        )
    how = {"seed": config.seed, "classes": classes, "norm": model.norm}
    split = model.split
    if model.name == "resnet_cifar":
        return resnet_cifar(model.depth, channels=shape[0], split=split, **how)  # type: ignore[arg-type]
    if model.name == "resnet_mnist":
        return resnet_mnist(model.depth, split=split, **how)  # type: ignore[arg-type]
    if model.name == "resnet":
        return resnet(model.depth, stem=model.stem, channels=shape[0], split=split, **how)  # type: ignore[arg-type]
    if model.name == "wide_resnet":
        more = {"channels": shape[0], "dropout": model.dropout, "split": split, **how}
        return wide_resnet(model.depth, model.widen, **more)  # type: ignore[arg-type]
    serial = network_for(replace(config, method="serial", parallel=ParallelConfig()), shape, classes).to_serial()
    assert isinstance(serial, SerialNetwork)
    parts = OrderedDict(
        [
            ("opening", serial.opening),
            *((f"layer{i}", layer) for i, layer in enumerate(serial.layers)),
            ("closing", serial.closing),
        ]
    )
    return torch.nn.Sequential(parts)


Laid = TypeVar("Laid", Tensor, torch.nn.Sequential)


def sample_layout(what: Laid) -> Laid:
    """A network or images in channels-last layout: several times faster backward on a CPU."""
    if isinstance(what, Tensor) and what.dim() != 4:
        return what
    return what.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


class DecoupledNet:
    """A cut network as the trainer sees networks.

    Collective over comm when made: cuts by_cost are measured on `example`.

    Args:
        config: the run.
        data: samples, for shapes and classes.
        comm: ranks: replicas x modules x ranks of a module; one rank: all modules.
        example: (samples, labels) to measure cuts on.
        batches: per epoch, for the learning rate's decay.
    """

    def __init__(self, config: Config, data: Data, comm: Comm, *, example: tuple[Tensor, Tensor], batches: int) -> None:
        self._comm, self._config = comm, config
        fdg, optim = config.fdg, config.optim
        shape = grid_of(config, comm.size)
        self.layered = layered_modules(config)
        dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
        self.dtype = dtype
        network: torch.nn.Sequential | list[Factory]
        if self.layered:
            network = factories(config, data.train.shape, data.classes, shape.modules)
            fdg = replace(fdg, cuts=list(range(1, shape.modules)), backward="recompute")
            self.unit_count = config.model.layers
        else:
            network = units(config, data)
            self.unit_count = len(network)
            network = sample_layout(network.to(dtype)) if len(data.train.shape) == 3 else network.to(dtype)

        def optimizer(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
            return torch_optimizer(optim, [Shard(str(i), p) for i, p in enumerate(parameters)])

        alone = config.method == "serial"
        shared = {
            "comm": comm,
            "loss": joined_loss if shape.replicas > 1 else torch.nn.functional.cross_entropy,
            "optimizer": optimizer,
            "modules": 1 if alone else shape.modules,
            "cuts": "uniform" if alone else fdg.cuts,
            "scheduler": (lambda made: rate_decay(made, optim, batches)) if optim.decay_epochs else None,
            "clip_norm": optim.clip_norm,
            "autocast": torch.bfloat16 if config.model.dtype == "bfloat16" and not self.layered else None,
            "seed": config.seed,
            "example": (self.prepare(example[0]), joined_labels(example[1], 1) if shape.replicas > 1 else example[1]),
        }
        ranks_per_module = [shape.layers] * shape.modules if shape.layers > 1 else None
        self.inner: FDG | Pipeline
        if config.method == "pipeline":
            order, parts = fdg.pipeline_order, fdg.microbatches
            self.inner = Pipeline(network, micro_batches=parts, order=order, **shared)  # type: ignore[arg-type]
            self.grid = Shares(self.inner.place.replicas, self.inner.place.replica)
            return
        remedies = Compensation(fdg.shrink, fdg.prediction, fdg.spike, fdg.accumulate, fdg.anneal, fdg.nesterov)
        self.inner = FDG(
            network,  # type: ignore[arg-type]
            schedule="bp" if alone else fdg.schedule,
            order=fdg.order,
            backward=fdg.backward,
            compensation=Compensation() if alone else remedies,
            gradient_dtype=HALVES[fdg.gradient_dtype] if fdg.gradient_dtype else None,
            staleness_every=0 if alone else fdg.staleness_every,
            ranks_per_module=ranks_per_module,
            **shared,  # type: ignore[arg-type]
        )
        self.grid = Shares(self.inner.place.replicas, self.inner.place.replica)

    @property
    def comm(self) -> Comm:
        """The ranks: replicas x modules x ranks of a module."""
        return self._comm

    @property
    def world(self) -> Comm:
        """The same."""
        return self._comm

    @property
    def is_last(self) -> bool:
        """Whether this rank has the logits for all: the last one of its replica."""
        group = self.inner.place.group
        return self.inner.is_last and (group is None or group.rank == group.size - 1)

    @property
    def saves(self) -> bool:
        """Whether this rank's parameters count for checkpoints: those of other replicas are the same."""
        return self.inner.place.saves

    @property
    def reads_samples(self) -> bool:
        """Whether this rank needs inputs, not labels alone."""
        return self.inner.is_first

    def tell(self, error: BaseException) -> None:
        """Let the other modules fail with an error that this rank met outside a step. Neighbour messages only."""
        self.inner.fail(error, "samples")

    def module_times(self) -> list[ModuleTime]:
        """Seconds of every module at work and waiting, since this process began, on every rank. Collective."""
        return list(self.inner.stopwatch.all())

    def describe(self) -> str:
        """The network and its cuts, in words. No communication."""
        inner = self.inner
        if self.layered:
            bounds = bounds_of(self._config, inner.modules)
            layers = ", ".join(f"{a} to {b - 1}" for a, b in zip(bounds, bounds[1:], strict=False))
            shared = "" if inner.place.group is None else f", each on {inner.place.group.size} ranks"
            return f"{self.unit_count} layers in {inner.modules} module(s) of layers {layers}{shared}"
        cuts = f"cut before unit {', '.join(map(str, inner.cuts))}" if inner.cuts else "in one piece"
        return f"{self.unit_count} units in {inner.modules} module(s), {cuts}"

    def resolved(self, config: Config) -> Config:
        """The configuration with the cuts that were measured. No communication."""
        if config.method == "serial":
            return config
        cuts = list(bounds_of(config, self.inner.modules)[1:-1]) if self.layered else self.inner.cuts
        return replace(config, fdg=replace(config.fdg, modules=self.inner.modules, cuts=cuts))

    def prepare(self, x: Tensor) -> Tensor:
        """Samples in the precision and memory layout of the network."""
        return sample_layout(x.to(self.dtype)) if x.dim() == 4 else x.to(self.dtype)

    def exact_logits(self, x: Tensor) -> Tensor | None:
        """Logits in evaluation mode on the last rank, None elsewhere. Neighbour messages only."""
        parts = [self.inner.predict(self.prepare(part)) for part in x.split(PART)]
        return torch.cat([part for part in parts if part is not None]) if self.is_last else None

    def shards(self) -> list[Shard]:
        """Parameters and buffers of this rank's modules, on the first replica. No communication."""
        return self.inner.shards()

    def all_shards(self) -> list[Shard]:
        """The same on all replicas: what is filled from a checkpoint. No communication."""
        return self.inner.all_shards()

    def flight_shards(self) -> list[Shard]:
        """The work in flight, for a checkpoint. Neighbour messages only."""
        return self.inner.state_shards()

    def load_flight(self, names: Sequence[str], read: Callable[[str], Tensor]) -> None:
        """Take the work in flight over from a checkpoint. Communicates as `read` does."""
        self.inner.load_state(names, read)

    def kept_state(self) -> Iterator[tuple[str, int, Tensor]]:
        """No multigrid states are kept."""
        return iter(())

    def forget(self) -> None:
        """No multigrid states are kept."""

    def residual_squares(self) -> np.ndarray:
        """No multigrid residuals."""
        return np.zeros(0)


def joined_labels(y: Tensor, replicas: int, weight: float = 1.0, samples: int | None = None) -> Tensor:
    """Labels (samples, 3) of a replica's part of a batch: with its weight as a fraction, for `joined_loss`.

    Args:
        y: labels (samples,).
        replicas: data replicas.
        weight: 0 where the part is empty, and y stands in for it.
        samples: of the joined batch; None: y is all of it.
    """
    own = 0 if weight == 0.0 else len(y)
    fraction = torch.tensor([own * replicas, samples or len(y)]).expand(len(y), 2)
    return torch.cat([y[:, None], fraction], 1)


def joined_loss(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy whose mean over replicas is that of the joined batch."""
    if y.dim() == 1:
        return torch.nn.functional.cross_entropy(out, y)
    return torch.nn.functional.cross_entropy(out, y[:, 0]) * (y[0, 1] / y[0, 2])


def rate_decay(
    optimizer: torch.optim.Optimizer, config: OptimConfig, batches: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate times `decay` after every epoch of decay_epochs, stepped once per batch. No communication."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: rate_factor(config, batch, batches))


def check_optimiser(config: OptimConfig) -> None:
    """Refuse what decoupled modules cannot do. No communication.

    Raises:
        ConfigError: with the remedy.
    """
    for key in ("tikhonov", "classifier_tikhonov", "ddt"):
        if getattr(config, key):
            raise ConfigError(f"optim.{key} is a term of method mgrit and serial layers; use optim.weight_decay here")
    if config.name == "lbfgs":
        raise ConfigError("optim.name lbfgs needs one objective for all layers; use sgd or adam with decoupled modules")


class DecoupledSteps:
    """Ticks of FDG, or steps of the pipeline.

    Args:
        net: the cut network.
        config: the optimiser.
    """

    def __init__(self, net: DecoupledNet, config: OptimConfig) -> None:
        self._net, self._config = net, config
        self.stop_requested = False
        self.steps = 0
        self.kind: str = config.name

    @property
    def current(self) -> StepReport | None:
        """Nothing is known between the ticks."""
        return None

    def step(self, samples: Samples, batch: int | None) -> StepReport:
        """One tick. Neighbour messages only.

        Raises:
            NumericsError: on every rank; names module, batch and unit.
        """
        began = self._net.comm.now()
        inner = self._net.inner
        if self.stop_requested:
            inner.request_stop()
        part, weight = self._net.grid.part(len(samples))  # of this data replica
        x, y = samples.x[part], samples.y[part]
        if self._net.grid.replicas > 1:
            y = joined_labels(y, self._net.grid.replicas, weight, len(samples))
        report = inner.step(self._net.prepare(x) if self._net.reads_samples else None, y)
        self.steps += 1
        return StepReport(
            objective=report.loss,
            loss=report.loss,
            grad_norm=report.grad_norm,
            step_size=inner.lr,
            seconds=self._net.comm.now() - began,
            stop=report.stop,
            batch=report.batch,
            staleness=report.staleness,
            wait_seconds=report.wait_receive + report.wait_send,
            measured=report.measured,
        )

    def finish(self) -> None:
        """Drain: every batch lands on every module. Neighbour messages only."""
        self._net.inner.flush()

    def before_save(self) -> None:
        """What a checkpoint needs first: `mixed` drains. Neighbour messages only."""
        self._net.inner.drain_before_save()

    def shards(self) -> list[Shard]:
        """Slots of the modules' optimisers. No communication."""
        rank = self._net.comm.rank
        return [
            slot
            for optimizer, shards in self._net.inner.optimizers
            for slot in optimizer_shards(optimizer, shards, rank=rank, by_layer=self._net.layered)
        ]

    def load(self, names: Sequence[str], read: Callable[[Shard], Tensor]) -> None:
        """Take the slots over. Communicates as `read` does."""
        for optimizer, shards in self._net.inner.optimizers:
            load_optimizer(optimizer, shards, names, read, by_layer=self._net.layered)
