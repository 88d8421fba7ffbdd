"""Decoupled modules that are layer-parallel networks: each trains a run of the layers, shared by several ranks.

    module 1   opening, layers 0 .. 7          ranks 0, 1
    module 2   layers 8 .. 15, closing         ranks 2, 3

Layers have the names and initial values of the whole network, so that a checkpoint is the same file for any number of
modules, layer ranks and replicas, and that of method mgrit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lpnet.config import Config
from lpnet.errors import ConfigError, UsageError
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.nn.models import DTYPES, layer_and_ends
from lpnet.nn.stack import LayerStack
from lpnet.parallel.comm import Comm
from lpnet.parallel.partition import explicit, uniform
from lpnet.parallel.shard import Shard
from lpnet.seeding import generator_for

Factory = Callable[[Comm], torch.nn.Module]


class LayerPart(LayerParallel):
    """Layers low .. high - 1 of a configuration's stack, with opening or closing at the network's ends.

    Collective over comm when made.

    Args:
        config: the run.
        shape: of a sample.
        classes: logits.
        comm: ranks that share these layers.
        low: first layer.
        high: one after the last.
    """

    global_names = True
    """Its shards are named as those of the whole network."""

    def __init__(self, config: Config, shape: Sequence[int], classes: int, comm: Comm, low: int, high: int) -> None:
        model = config.model
        step, opening, closing = layer_and_ends(model, shape, classes, seed=config.seed)
        h = model.final_time / model.layers
        stack = LayerStack(
            step,
            num_layers=high - low,
            final_time=h * (high - low),
            comm=comm,
            seed=config.seed,
            dtype=DTYPES[model.dtype],
        )
        stack.h = h
        with torch.no_grad():  # every layer's initial values are those of its place in the whole network
            for row, layer in enumerate(range(low + stack.low, low + stack.high)):
                for name, value in step.initial(generator_for(config.seed, "stack", layer=layer)).items():
                    getattr(stack, name)[row].copy_(value)
        super().__init__(
            stack,
            opening=opening if low == 0 else torch.nn.Identity(),
            closing=closing if high == model.layers else torch.nn.Identity(),
            mgrit=config.mgrit,
        )
        self.first_layer, self.all_layers = low, model.layers

    def shards(self) -> list[Shard]:
        """Local parameters with the names and rows of the whole network. No communication."""
        return [
            shard
            if shard.rows is None
            else replace(
                shard,
                rows=(shard.rows[0] + self.first_layer, shard.rows[1] + self.first_layer),
                layers=self.all_layers,
            )
            for shard in super().shards()
        ]


def bounds_of(config: Config, modules: int) -> tuple[int, ...]:
    """First layer of every module and the number of layers: equally many each, or as fdg.cuts says.

    Raises:
        UsageError: more modules than layers, or cuts that do not fit.
    """
    cuts, layers = config.fdg.cuts, config.model.layers
    if not isinstance(cuts, list):  # equal layers cost the same
        return uniform(layers, modules).bounds
    if len(cuts) != modules - 1 or any(cut >= layers for cut in cuts):
        raise UsageError(
            f"fdg.cuts is {cuts}; {modules} modules of {layers} layers need {modules - 1} increasing layers below "
            f"{layers}: the first layer of every module after the first"
        )
    ends = [0, *cuts, layers]
    return explicit([b - a for a, b in zip(ends, ends[1:], strict=False)], layers, modules).bounds


def factories(config: Config, shape: Sequence[int], classes: int, modules: int) -> list[Factory]:
    """What makes each module from the communicator of its ranks. No communication.

    Raises:
        UsageError: cuts that do not fit.
    """
    bounds = bounds_of(config, modules)

    def factory(low: int, high: int) -> Factory:
        def make(comm: Comm) -> torch.nn.Module:
            return LayerPart(config, shape, classes, comm, low, high)

        return make

    return [factory(low, high) for low, high in zip(bounds, bounds[1:], strict=False)]


def check_layered(config: Config, modules: int, ranks: int) -> None:
    """Refuse what layer-parallel modules cannot do. No communication.

    Raises:
        ConfigError: with the remedy.
        UsageError: more modules or ranks than layers.
    """
    if config.fdg.backward not in (None, "recompute"):
        raise ConfigError(
            f"fdg.backward is {config.fdg.backward}, and layer-parallel modules (parallel.modules) keep no old "
            "weights; set it to recompute, or give fdg.modules in place of parallel.modules"
        )
    if config.model.initial_parameters is not None:
        raise ConfigError("model.initial_parameters is for methods serial and mgrit; leave it out")
    bounds = bounds_of(config, modules)
    for module, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False), 1):
        if high - low < ranks:
            raise UsageError(
                f"module {module} has {high - low} layers, which {ranks} ranks cannot share; use at most {high - low} "
                "ranks for its layers (parallel.layers), or fewer modules"
            )
