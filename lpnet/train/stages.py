"""Nested iteration in depth: the stages of a run, and checkpoints of a network refined in depth.

    steps    0 ..... 100 ..... 300 ..........
    layers   8       16        64             train.stages [8, 16, 64], train.stage_steps [100, 200]

Cyr, Günther, Schroder, "Multilevel initialization for layer-parallel deep neural network training", arXiv 1912.08974.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lpnet.config import Config
from lpnet.configfile import to_yaml
from lpnet.errors import CheckpointError, ConfigError, SaveError
from lpnet.io.checkpoint import Attribute, Checkpoint
from lpnet.io.checkpoint import save as write_checkpoint
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.mgrit.refine import Interpolation, refine, refine_rows
from lpnet.parallel.comm import Comm
from lpnet.parallel.shard import Shard
from lpnet.train.saving import config_of, open_checkpoint
from lpnet.train.strategies import GradientSteps, Strategy, make_strategy

_LBFGS = ("s", "y", "gradient")  # pairs of another space: their scalar products mean nothing after a refinement


def check_stages(config: Config, ranks: int) -> None:
    """Refuse stages that cannot be trained. No communication.

    Raises:
        ConfigError: with the numbers and the remedy.
    """
    train, model = config.train, config.model
    if not train.stages:
        return
    if config.method not in ("serial", "mgrit") or model.name not in ("dense", "conv"):
        raise ConfigError(
            f"train.stages refines one stack of equal layers (methods serial and mgrit, model.name dense or conv), not "
            f"method {config.method} with model.name {model.name}; leave train.stages out"
        )
    if train.stages[-1] != model.layers:
        raise ConfigError(
            f"train.stages ends with {train.stages[-1]} layers, and model.layers is {model.layers}; make them the same"
        )
    if sum(train.stage_steps) >= config.run.steps:
        raise ConfigError(
            f"train.stage_steps {train.stage_steps} take {sum(train.stage_steps)} of {config.run.steps} run.steps; the "
            "last stage needs at least 1"
        )
    if train.stages[0] < ranks:
        raise ConfigError(
            f"the first of train.stages has {train.stages[0]} layers, which {ranks} ranks cannot share; begin with "
            f"{ranks} layers or more"
        )
    if config.mgrit.batching == "auto" or isinstance(config.parallel.partition, list):
        what = "mgrit.batching auto" if config.mgrit.batching == "auto" else "a list in parallel.partition"
        raise ConfigError(
            f"{what} holds for one number of layers, and train.stages has several; choose on or off, or uniform"
        )


def at_layers(config: Config, layers: int | None) -> Config:
    """The configuration with the network of a stage. No communication."""
    return config if layers is None else replace(config, model=replace(config.model, layers=layers))


def refined(
    net: LayerParallel, strategy: Strategy, config: Config, layers: int, batches: int
) -> tuple[LayerParallel, Strategy]:
    """Network and strategy of the next stage. Collective over net.world; messages to the left neighbour.

    Slots of an optimiser of torch.optim are refined with the parameters; L-BFGS starts with an empty memory.
    """
    factor = layers // net.stack.num_layers
    optimizer = strategy.optimizer if isinstance(strategy, GradientSteps) else None
    made, slots = refine(net, factor, interpolation=config.train.interpolation, optimizer=optimizer)
    new = make_strategy(made, config.optim, batches)
    if isinstance(new, GradientSteps) and slots is not None:
        new.optimizer.state.update(slots.state)
    new.steps, new.stop_requested = strategy.steps, strategy.stop_requested
    return made, new


def refine_checkpoint(
    path: str | Path, out: str | Path, factor: int, *, interpolation: Interpolation = "linear"
) -> Path:
    """Write a checkpoint of a network with `factor` times as many layers. No communication.

    Parameters, buffers and slots of a torch optimiser are interpolated in layer time, stack by stack; kept states and
    the memory of L-BFGS, which belong to the coarse network, are left out.

    Args:
        path: a checkpoint file, or a run folder (its newest one).
        out: folder for the new file, which is named after the step.
        factor: k.
        interpolation: constant or linear.

    Returns:
        The file.

    Raises:
        CheckpointError: missing, damaged, or of decoupled modules.
        UsageError: a factor below 1.
        SaveError: it cannot be written.
    """
    refine_rows(torch.zeros(1), factor, interpolation)
    shards: dict[str, list[Shard]] = {"model": [], "optim": []}
    with open_checkpoint(path) as checkpoint:
        config = config_of(checkpoint)
        if checkpoint.attributes.get("method") in ("fdg", "pipeline") or checkpoint.names("fdg"):
            raise CheckpointError(f"{checkpoint.path} is of decoupled modules; refine networks of stacks of layers")
        lbfgs = checkpoint.attributes.get("optimizer") == "LBFGS"
        for section, found in shards.items():
            for name in checkpoint.names(section):
                if section == "optim" and lbfgs:
                    continue
                found.append(_refined(checkpoint, name, section, factor, interpolation))
        if not any(shard.rows for shard in shards["model"]):
            raise CheckpointError(f"{checkpoint.path} holds no stack of layers; there is nothing to refine")
        step, written = checkpoint.step, _attributes(checkpoint, config, factor)
    if lbfgs:
        written.pop("optimizer", None)
        del shards["optim"]
    target = Path(out) / f"step-{step:08d}.h5"
    if target.exists():
        raise SaveError(f"{target} exists; give another folder")
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"{out} cannot be made: {error.strerror}; give a folder you may write to") from error
    return write_checkpoint(out, Comm(), step=step, shards=shards, attributes=written)


def _refined(checkpoint: Checkpoint, name: str, section: str, factor: int, interpolation: Interpolation) -> Shard:
    value, plain = checkpoint.read(name), name.removeprefix(f"{section}/")
    if not checkpoint.datasets[name].stacked:
        return Shard(plain, value)
    rows = refine_rows(value, factor, interpolation)
    return Shard(plain, rows, (0, len(rows)), len(rows))


def _attributes(checkpoint: Checkpoint, config: Config | None, factor: int) -> dict[str, Attribute]:
    """Root attributes with the new numbers of layers."""
    kept = {
        name: value
        for name, value in checkpoint.attributes.items()
        if name in ("method", "epoch", "seed", "position_in_epoch", "optimizer")
    }
    if config is not None:
        model = replace(config.model, layers=config.model.layers * factor)
        kept["config"] = to_yaml(replace(config, model=model, train=type(config.train)()))
    parts = [word.split(":") for word in str(checkpoint.attributes.get("parts", "")).split()]
    layers = int(checkpoint.attributes["layers"])
    if not parts:
        return {**kept, "layers": layers * factor}
    firsts = [*(int(first) for _, first in parts), layers]
    at, words = 0, []
    for (name, _), first, following in zip(parts, firsts[:-1], firsts[1:], strict=True):
        words.append(f"{name}:{at}")
        at += (following - first) * (factor if name.startswith("stack") else 1)
    return {**kept, "layers": at, "parts": " ".join(words)}


def stage_of(checkpoint: Any, config: Config) -> int | None:
    """Layers of a checkpoint of a run with stages; None: there is one stage. No communication.

    Raises:
        CheckpointError: none of the stages has as many.
    """
    if not config.train.stages:
        return None
    layers = int(checkpoint.attributes.get("layers", math.nan))
    if layers not in config.train.stages:
        raise CheckpointError(
            f"{checkpoint.path} has {layers} layers, and train.stages is {config.train.stages}; give the stages of the "
            "run it is of"
        )
    return layers
