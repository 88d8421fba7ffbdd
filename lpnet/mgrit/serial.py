"""The serial twin of a layer-parallel network: plain torch modules with the gathered parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lpnet.mgrit.layer_parallel import LayerParallel


class SerialNetwork(torch.nn.Module):
    """opening -> layers.0 ... layers.N-1 -> closing, on one process, for any use of torch."""

    def __init__(self, opening: torch.nn.Module, layers: list[torch.nn.Module], closing: torch.nn.Module) -> None:
        super().__init__()
        self.opening, self.layers, self.closing = opening, torch.nn.ModuleList(layers), closing

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) to logits."""
        u: Tensor = self.opening(x)
        for layer in self.layers:
            u = layer(u)
        out: Tensor = self.closing(u)
        return out


def gather_serial(net: LayerParallel) -> SerialNetwork | None:
    """The serial twin on rank 0, None elsewhere. Collective over net.comm."""
    import copy

    block = [
        {name: parameter[i].detach().clone() for name, parameter in net.stack.named_parameters()}
        for i in range(net.stack.local_layers)
    ]
    opening = copy.deepcopy(net.opening) if net.opening is not None else None
    closing = copy.deepcopy(net.closing) if net.closing is not None else None
    gathered = net.comm.gather_objects((block, opening, closing))
    if gathered is None:
        return None
    layers = [net.stack.step.serial_layer(parameters, net.stack.h) for part in gathered for parameters in part[0]]
    return SerialNetwork(gathered[0][1], layers, gathered[-1][2])


def gather_state_dict(net: LayerParallel) -> dict[str, Tensor] | None:
    """A plain state_dict of the serial twin on rank 0, None elsewhere. Collective over net.comm."""
    serial = net.to_serial()
    return None if serial is None else serial.state_dict()
