"""The layer-parallel network of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lpnet.config import Config
from lpnet.errors import DataError
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.mgrit.plan import partition_of
from lpnet.nn.models import network_parts, ode_network
from lpnet.parallel.grid import Grid

if TYPE_CHECKING:
    from lpnet.data.samples import Data


def build_network(config: Config, data: Data, comm: Any = None) -> LayerParallel:
    """The network that a configuration describes, for the features and classes of its data. Collective over comm.

    Raises:
        UsageError: more ranks than layers, a grid that does not fit the ranks, a width that does not fit.
        DataError: initial parameters that are missing or have another shape.
    """
    return network_for(config, data.train.shape, data.classes, comm)


def network_for(config: Config, shape: Sequence[int], classes: int, comm: Any = None) -> LayerParallel:
    """The same for samples of a shape and a number of classes. Collective over comm."""
    parallel = config.parallel
    grid = Grid(comm, replicas=parallel.replicas, layers=parallel.layers)
    partition = partition_of(config, grid.layers.size)
    mgrit = config.mgrit if config.method == "mgrit" else replace(config.mgrit, levels=1, microbatches=1)
    shared: dict[str, Any] = {"comm": grid.layers, "seed": config.seed, "partition": partition}
    if config.model.name == "ode_resnet":
        return LayerParallel(ode_network(config.model, shape, classes, **shared), mgrit=mgrit, grid=grid)
    stack, opening, closing = network_parts(config.model, shape, classes, **shared)
    net = LayerParallel(stack, opening=opening, closing=closing, mgrit=mgrit, grid=grid)
    if config.model.initial_parameters is not None:
        load_initial(net, Path(config.data.root or ".") / config.model.initial_parameters)
    return net


def load_initial(net: LayerParallel, path: Path) -> None:
    """Set the parameters from an .npz file with hidden_* and classifier_* weight and bias. No communication.

    Raises:
        DataError: a file or array that is missing or has another shape.
    """
    import numpy

    if not path.is_file():
        raise DataError(
            f"model.initial_parameters: {path} does not exist; give the .npz file's name relative to data.root"
        )
    low, high = net.stack.low, net.stack.high
    targets = {"hidden_weight": (net.stack.weight, slice(low, high)), "hidden_bias": (net.stack.bias, slice(low, high))}
    if net.closing is not None:
        targets |= {
            "classifier_weight": (net.closing.weight, slice(None)),
            "classifier_bias": (net.closing.bias, slice(None)),
        }
    with numpy.load(path, allow_pickle=False) as arrays:
        for name, (parameter, rows) in targets.items():
            if name not in arrays:
                raise DataError(f"{path} has no array {name!r}; it holds {', '.join(arrays.files)}")
            assert isinstance(parameter, torch.Tensor)
            value = torch.from_numpy(arrays[name])[rows]
            if value.numel() != parameter.numel():
                raise DataError(
                    f"{path}: {name} has the shape {tuple(arrays[name].shape)}, whose rows {low}..{high - 1} do not "
                    f"fit {tuple(parameter.shape)}"
                )
            with torch.no_grad():
                parameter.copy_(value.reshape(parameter.shape))
