"""The optimiser a configuration names, and its state as shards that any number of ranks can load.

Any torch.optim works on the local tensors as it is: its updates are elementwise, so that a stacked parameter is
updated the same way however its rows are shared. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lpnet.config import OptimConfig
from lpnet.errors import CheckpointError, ConfigError
from lpnet.optim.rows import trainable
from lpnet.parallel.shard import Shard


def torch_optimizer(config: OptimConfig, shards: Sequence[Shard]) -> torch.optim.Optimizer:
    """The optimiser of torch.optim that `config` names, on the local parameters. No communication.

    Raises:
        ConfigError: lbfgs, which is no optimiser of torch.optim here (see `lpnet.optim.lbfgs`).
    """
    parameters = [shard.tensor for shard in trainable(shards)]
    decay = config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=decay)
    if config.name == "adam":
        return torch.optim.Adam(parameters, lr=config.lr, weight_decay=decay)
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=decay)
    if config.name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=config.lr, momentum=config.momentum, weight_decay=decay)
    if config.name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=config.lr, weight_decay=decay)
    raise ConfigError(f"optim.name {config.name} is not one of torch.optim; use sgd, adam, adamw, rmsprop or adagrad")


def optimizer_shards(
    optimizer: torch.optim.Optimizer, shards: Sequence[Shard], *, rank: int, by_layer: bool = False
) -> list[Shard]:
    """An optimiser's slots: "<parameter>/<slot>", stacked like the parameter; numbers such as the step count whole.

    No communication.

    Args:
        optimizer: on the local parameters.
        shards: those parameters.
        rank: this rank; a stacked parameter's numbers, the same on all ranks, are handed in by rank 0 or, where
            it has none of its rows, by the owner of the first one.
        by_layer: numbers of a stacked parameter have a row per layer: decoupled modules have done different numbers
            of updates while work is in flight. Rows that have not been updated, while others have, are zeros.
    """
    out = []
    for shard in shards:
        slots = optimizer.state.get(shard.tensor, {})
        if by_layer and shard.rows is not None and not slots:
            slots = _zero_slots(optimizer, shard.tensor)
        for slot, value in sorted(slots.items()):
            name = f"{shard.name}/{slot}"
            if torch.is_tensor(value) and value.shape == shard.tensor.shape:
                out.append(Shard(name, value.detach(), shard.rows, shard.layers))
            elif value is not None and by_layer and shard.rows is not None:
                count = torch.as_tensor(value).detach().expand(shard.rows[1] - shard.rows[0]).clone()
                out.append(Shard(name, count, shard.rows, shard.layers))
            elif value is not None and (rank == 0 or shard.rows is None or shard.rows[0] == 0):
                out.append(Shard(name, torch.as_tensor(value).detach()))
    return out


def _zero_slots(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The slots that an update would make, all zero: the rows of a file have no gaps. None outside the optimiser."""
    for group in optimizer.param_groups:
        if any(parameter is member for member in group["params"]):
            copy = torch.zeros_like(parameter, requires_grad=True)
            copy.grad = torch.zeros_like(copy)
            probe = type(optimizer)([{**group, "params": [copy]}])  # type: ignore[call-arg]
            probe.step()
            made = probe.state.get(copy, {})
            return {n: torch.zeros_like(torch.as_tensor(v)) for n, v in made.items() if v is not None}
    return {}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    shards: Sequence[Shard],
    names: Sequence[str],
    read: Callable[[Shard], torch.Tensor],
    *,
    by_layer: bool = False,
) -> None:
    """Take slots over from a checkpoint of any number of ranks. Communicates as `read` does.

    Args:
        optimizer: on the local parameters; its state is replaced.
        shards: those parameters.
        names: "<parameter>/<slot>" of all entries in the checkpoint.
        read: given a shard (name, a tensor of the wanted shape and type, rows), returns its values; every rank asks
            for the numbers of a stacked parameter.
        by_layer: as in `optimizer_shards`; zeros are left out again, for to an optimiser no slot and a slot of zeros
            are not always the same (weight prediction from Adam's would divide by zero).

    Raises:
        CheckpointError: an entry belongs to no parameter of the optimiser's groups.
    """
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for shard in trainable(shards):
        if id(shard.tensor) not in owned:
            raise CheckpointError(f"the optimiser has no parameter {shard.name}; give it net.parameters()")
        slots = {}
        for name in sorted(names):
            parameter, _, slot = name.rpartition("/")
            if parameter != shard.name:
                continue
            if slot == "step" and by_layer and shard.rows is not None:
                first = shard.rows[0]
                slots[slot] = read(Shard(name, torch.zeros(1), (first, first + 1), shard.layers))[0]
            elif slot == "step":
                slots[slot] = read(Shard(name, torch.zeros((), dtype=torch.float32)))
            else:
                slots[slot] = read(
                    Shard(name, torch.empty_like(shard.tensor, requires_grad=False), shard.rows, shard.layers)
                )
        # Adagrad has slots from the start
        unused = by_layer and shard.rows is not None and not optimizer.state.get(shard.tensor)
        if slots and not (unused and not any(value.any() for value in slots.values())):
            state[shard.tensor] = slots
    optimizer.state.clear()
    optimizer.state.update(state)
