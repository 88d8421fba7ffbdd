"""The serial twin of a layer-parallel network: plain torch modules with the gathered parameters and buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpnet.nn import dropout
from lpnet.nn.context import MaskKey, call
from lpnet.nn.module_step import SerialModuleLayer

if TYPE_CHECKING:
    from lpnet.mgrit.layer_parallel import LayerParallel


class SerialNetwork(torch.nn.Module):
    """opening -> layers.0 ... layers.N-1 -> closing, on one process, for any use of torch.

    Its dropout draws the masks of the network it is made from: the next pass in train mode those of its next one.
    """

    def __init__(
        self,
        opening: torch.nn.Module,
        layers: list[torch.nn.Module],
        closing: torch.nn.Module,
        *,
        seed: int = 0,
        key: MaskKey | None = None,
    ) -> None:
        super().__init__()
        self.opening, self.layers, self.closing = opening, torch.nn.ModuleList(layers), closing
        self._seed, self._key = seed, key or MaskKey()

    def begin_step(self, step: int, *, first: int = 0) -> None:
        """As LayerParallel.begin_step."""
        self._key = MaskKey(step, 0, first)

    def forward(self, x: Tensor, side: Any = None) -> Tensor:
        """(batch, ...) to logits."""
        for i, module in enumerate((self.opening, *self.layers, self.closing)):
            found = dropout.dropouts(module.module if isinstance(module, SerialModuleLayer) else module)
            if found:
                key = self._key if self.training else None
                dropout.begin(found, key, {}, seed=self._seed, layer=i - 1, batch=x.shape[0])
        if self.training:
            self._key = replace(self._key, micro=self._key.micro + 1)
        u = call(self.opening, x, side)
        for layer in self.layers:
            u = call(layer, u, side)
        out: Tensor = call(self.closing, u, side)
        return out


def gather_serial(net: LayerParallel) -> SerialNetwork | None:
    """The serial twin on rank 0, None elsewhere. Collective over net.comm."""
    import copy

    block = net.stack.rows()
    opening = copy.deepcopy(net.opening) if net.opening is not None else None
    closing = copy.deepcopy(net.closing) if net.closing is not None else None
    gathered = net.comm.gather_objects((block, opening, closing))
    if gathered is None:
        return None
    layers = net.stack.serial_layers([row for part in gathered for row in part[0]])
    twin = SerialNetwork(gathered[0][1], layers, gathered[-1][2], seed=net.stack.seed, key=net._key)
    return twin.train(net.training)


def gather_state_dict(net: LayerParallel) -> dict[str, Tensor] | None:
    """A plain state_dict of the serial twin on rank 0, None elsewhere. Collective over net.comm."""
    serial = net.to_serial()
    return None if serial is None else serial.state_dict()
