"""The network and the strategy of a configuration, whatever the method."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lpnet.config import MGRIT, RESNETS, Config
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import Samples
from lpnet.errors import ConfigError, UsageError
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.mgrit.network import build_network
from lpnet.parallel.comm import Comm
from lpnet.parallel.grid_shape import grid_of, layered_modules
from lpnet.train.decoupled import DecoupledNet, DecoupledSteps, check_optimiser
from lpnet.train.layered import check_layered
from lpnet.train.stages import check_stages
from lpnet.train.strategies import Strategy, make_strategy

if TYPE_CHECKING:
    from lpnet.data.samples import Data

Network = LayerParallel | DecoupledNet


def check(config: Config, ranks: int) -> None:
    """What cannot run is refused before anything is written. No communication.

    Raises:
        UsageError: on every rank.
    """
    method, model = config.method, config.model.name
    if method != "serial":
        shape = grid_of(config, ranks)
        if layered_modules(config):
            check_layered(config, shape.modules, shape.layers)
    check_stages(config, ranks if method == "serial" else shape.layers)
    if is_decoupled(config):
        check_optimiser(config.optim)
    if method == "pipeline" and config.fdg.staleness_every:
        raise ConfigError("fdg.staleness_every measures stale gradients, and method pipeline has none; leave it out")
    if method == "serial" and ranks > 1:
        raise UsageError(
            f"method serial runs on one rank, and there are {ranks}; use --method mgrit --mgrit.levels 1 for exact "
            "propagation over several ranks, or start it without mpirun"
        )
    if config.data.name == "image_folder" and not is_decoupled(config):
        raise ConfigError(
            f"data.name image_folder is for networks of units, which {model} with method {method} is not; set "
            f"model.name to {', '.join(RESNETS)}, or method to fdg or pipeline"
        )
    if method == "mgrit" and model in RESNETS:
        raise ConfigError(
            f"method mgrit trains stacks of equal layers (model.name dense, conv or ode_resnet), not {model}; "
            "use method fdg or pipeline"
        )
    if method == "mgrit" and config.data.augment != "none" and keeps_states(config):
        raise ConfigError(
            "data.augment changes the samples of a batch, and fixed multigrid iterations start from the states the "
            "same samples had; set data.augment none, or leave mgrit.forward_iterations and adjoint_iterations out"
        )


def keeps_states(config: Config) -> bool:
    """Whether solves of fixed iterations start from states kept per batch, so that batches keep their members."""
    mgrit = config.mgrit
    fixed = mgrit.forward_iterations is not None or mgrit.adjoint_iterations is not None
    kept = mgrit.initial_guess == "kept" and not mgrit.skip_first_down
    return config.method == "mgrit" and mgrit.levels > 1 and fixed and kept


def is_decoupled(config: Config) -> bool:
    """Whether units train in modules; else layers in a stack."""
    return config.method in ("fdg", "pipeline") or config.model.name in RESNETS


def build(config: Config, data: Data, order: BatchOrder, comm: Comm) -> tuple[Network, Strategy, Config]:
    """Network, strategy, and the configuration with every choice that was measured. Collective over comm.

    Args:
        config: the run.
        data: samples.
        order: batches; the first one is what choices are measured on.
        comm: ranks.

    Raises:
        UsageError: on every rank: a network that the ranks, the data or the method do not allow.
    """
    first = Samples(data.train.x, data.train.y) if order.full else data.train.take(order.at(0).indices)
    if is_decoupled(config):
        net = DecoupledNet(config, data, comm, example=(first.x, first.y), batches=order.batches)
        return net, DecoupledSteps(net, config.optim), net.resolved(config)
    layers = build_network(config, data, comm)
    if config.method == "mgrit" and config.mgrit.batching == "auto":
        layers.prepare(first.x[layers.grid.part(len(first))[0]])  # of this data replica
        config = replace(config, mgrit=layers.mgrit)
    return layers, make_strategy(layers, config.optim, order.batches), config


def measured_before(config: Config, saved: Config | None, ranks: int) -> Config:
    """A configuration with what the run of its checkpoint has measured: measured again it could turn out otherwise, and
    the run that goes on would not have the same numbers. No communication.

    Args:
        config: the run that goes on.
        saved: the configuration in the checkpoint.
        ranks: of the run that goes on.
    """
    if saved is None or saved.method != config.method:
        return config
    fdg, mgrit = config.fdg, config.mgrit
    modules = ranks if fdg.modules is None else fdg.modules
    if fdg.cuts == "by_cost" and isinstance(saved.fdg.cuts, list) and modules == saved.fdg.modules:
        config = replace(config, fdg=replace(fdg, cuts=saved.fdg.cuts))
    if mgrit.batching == "auto" and replace(saved.mgrit, batching="auto") == mgrit:
        config = replace(config, mgrit=saved.mgrit)
    return config


def for_evaluation(config: Config, data: Data, comm: Comm) -> Network:
    """A network to be filled from a checkpoint, on any number of ranks that has enough layers or units. Collective."""
    if not is_decoupled(config):
        return build_network(config, data, comm)
    whole = replace(config.fdg, modules=comm.size, cuts="uniform", schedule="bp")
    example = data.train.take(torch.arange(1))
    return DecoupledNet(replace(config, fdg=whole, method="fdg"), data, comm, example=(example.x, example.y), batches=1)


def exact_layers(config: Config) -> Config:
    """All ranks share all layers, which propagate exactly. No communication."""
    parallel = replace(config.parallel, partition="uniform", replicas=1, modules=None, layers="auto")
    return replace(config, parallel=parallel, mgrit=MGRIT(levels=1))


def describe(net: Network, config: Config) -> str:
    """The network and its ranks, in words. No communication."""
    if isinstance(net, DecoupledNet):
        return net.describe()
    return f"{net.partition.layers} layers"
