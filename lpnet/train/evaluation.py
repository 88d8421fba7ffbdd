"""Accuracy and predictions, always by exact propagation: inexact multigrid states never count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lpnet.config import MGRIT, RESNETS, Config, TrainConfig
from lpnet.data.samples import load as load_data
from lpnet.data.samples import without_inputs
from lpnet.errors import CheckpointError
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.nn.models import DTYPES
from lpnet.parallel.comm import Comm
from lpnet.parallel.grid_shape import layered_modules
from lpnet.train import build
from lpnet.train.saving import config_of, load_model, open_checkpoint
from lpnet.train.stages import at_layers, stage_of

if TYPE_CHECKING:
    from lpnet.data.samples import Data, Source

CHUNK = 8192  # samples propagated at once
VALUES = 1 << 22  # and fewer where they are large: a run is asked to stop, or to show progress, between two parts


@dataclass(frozen=True)
class Scores:
    """Accuracies in per cent and mean cross-entropies, the same on every rank."""

    train_accuracy: float
    val_accuracy: float
    train_loss: float
    val_loss: float


class Parts(Protocol):
    """Data replicas."""

    replicas: int

    def part(self, samples: int) -> tuple[slice, float]:
        """This replica's samples of a batch; weight 0 where it has none."""


class Classifier(Protocol):
    """A network that gives logits on its last rank."""

    @property
    def comm(self) -> Comm:
        """Its ranks; of one data replica, where there are several."""

    @property
    def world(self) -> Comm:
        """The ranks of all data replicas."""

    @property
    def grid(self) -> Parts:
        """Shares batches among the data replicas."""

    @property
    def is_last(self) -> bool:
        """Whether this rank has the logits."""

    def exact_logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """Logits on the last rank, None elsewhere."""


def score(net: Classifier, data: Data, interrupted: Callable[[], bool] | None = None) -> Scores | None:
    """How well a network does on all samples, which data replicas share.

    Collective over net.world: one reduction, and one per part if interrupted.

    Args:
        net: the network.
        data: training and validation samples.
        interrupted: asked before every part of the samples on every rank; what one rank answers holds for all.

    Returns:
        The scores; None where a rank was interrupted.
    """
    if isinstance(net, LayerParallel):
        net.share_buffers()
    sums = np.zeros(4)
    scored = data.scored or data.train
    for k, samples in enumerate((scored, data.validation)):
        found = _sums(net, samples, interrupted)
        if found is None:
            return None
        sums[k], sums[2 + k] = found
    correct_train, correct_val, loss_train, loss_val = net.world.sum(sums)
    n, m = len(scored), len(data.validation)
    return Scores(100 * correct_train / n, 100 * correct_val / m, loss_train / n, loss_val / m)


def _sums(
    net: Classifier, samples: Source, interrupted: Callable[[], bool] | None = None
) -> tuple[float, float] | None:
    """Correct samples and summed loss on the last rank, zeros elsewhere. Neighbour messages, and as `score` says."""
    correct, loss = 0.0, 0.0
    size = max(min(CHUNK, VALUES // max(math.prod(samples.shape), 1)), 1) * net.grid.replicas
    reads = getattr(net, "reads_samples", True)
    labels = (without_inputs(y) for y in samples.y.split(size))
    for part in samples.parts(size) if reads else labels:
        x, y = part.x, part.y
        if interrupted is not None and net.world.sum(np.array([float(interrupted())]))[0]:
            return None
        own, weight = net.grid.part(len(y))
        if weight == 0.0:
            continue
        x, y = x[own], y[own]
        logits = _evaluate(net, x)
        if logits is not None:
            correct += int((logits.argmax(1) == y).sum())
            loss += float(
                torch.nn.functional.cross_entropy(
                    logits.float() if logits.dtype == torch.bfloat16 else logits, y, reduction="sum"
                )
            )
    return correct, loss


def _evaluate(net: Classifier, x: torch.Tensor) -> torch.Tensor | None:
    """Logits in evaluation mode: running statistics, no dropout. Neighbour messages only."""
    if not isinstance(net, torch.nn.Module):
        return net.exact_logits(x)
    training = net.training
    net.eval()
    try:
        return net.exact_logits(x)  # type: ignore[operator]
    finally:
        net.train(training)


def predict(net: Classifier, x: torch.Tensor) -> np.ndarray:
    """Predicted classes (samples,) on every rank. Collective over net.comm."""
    parts = [_evaluate(net, part) for part in x.split(CHUNK)]
    classes = torch.empty(len(x), dtype=torch.int64)
    if net.is_last:
        classes.copy_(torch.cat([part for part in parts if part is not None]).argmax(1))
    return net.comm.broadcast(classes, net.comm.size - 1).numpy()


def evaluate(path: str | Path, comm: Comm, *, data_root: str | None = None) -> int:
    """Print the accuracy of a checkpoint, or of the newest one of a run folder; returns 0. Collective over comm.

    Args:
        path: checkpoint file or run folder.
        comm: ranks; any number up to the number of layers.
        data_root: folder of the data files, where it is not the one of the run.

    Raises:
        CheckpointError: missing, damaged, or without the configuration of a run.
        DataError: the data files cannot be read.
    """
    with open_checkpoint(path, comm) as checkpoint:
        config = config_of(checkpoint)
        if config is None:
            raise CheckpointError(
                f"{checkpoint.path} holds no configuration, so its data are not known; give one that lpnet train wrote"
            )
        config = exact(at_layers(config, stage_of(checkpoint, config)), data_root)
        data = comm.together(lambda: load_data(config.data, config.seed, DTYPES[config.model.dtype]))
        net = build.for_evaluation(config, data, comm)
        load_model(checkpoint, net)
        scores = score(net, data)
        if comm.rank == 0 and scores is not None:
            print(f"{checkpoint.path}: step {checkpoint.step}")
            for name, samples, accuracy, loss in (
                ("training", data.scored or data.train, scores.train_accuracy, scores.train_loss),
                ("validation", data.validation, scores.val_accuracy, scores.val_loss),
            ):
                print(f"{name:10}  {len(samples):6d} samples  accuracy {accuracy:6.2f} %  loss {loss:.6f}")
    return 0


def exact(config: Config, data_root: str | None = None) -> Config:
    """A run's configuration for evaluation on any number of ranks: one level. No communication."""
    data = config.data if data_root is None else replace(config.data, root=data_root)
    model, train = replace(config.model, initial_parameters=None), TrainConfig()
    config = replace(config, model=model, data=data, train=train)
    if layered_modules(config):
        return replace(build.exact_layers(config), method="mgrit")  # its checkpoints are those of method mgrit
    parallel = replace(config.parallel, partition="uniform", replicas=1, modules=None, layers="auto")
    config = replace(config, parallel=parallel)
    if config.method in ("fdg", "pipeline") or config.model.name in RESNETS:
        return config
    return replace(config, method="mgrit", mgrit=MGRIT(levels=1))
