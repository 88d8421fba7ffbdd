"""The CIFAR ResNet as a network of three ODEs: stages of equal residual layers with transitions between them.

He, Zhang, Ren, Sun, CVPR 2016, section 4.2, for the stages; Günther et al. 2020 for layers as time steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lpnet.errors import UsageError
from lpnet.nn.conv import ConvStep
from lpnet.nn.network import Network
from lpnet.nn.stack import LayerStack
from lpnet.nn.steps import Step
from lpnet.nn.units import Convolution, Head, Norm, initialise, normalisation, stem_unit
from lpnet.parallel.partition import Partition
from lpnet.seeding import stream_seed


def ode_resnet_cifar(
    layers: int = 24,
    *,
    widths: tuple[int, int, int] = (16, 32, 64),
    classes: int = 10,
    channels: int = 3,
    final_time: float = 4.0,
    norm: Norm | None = "batch",
    comm: Any = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    partition: Partition | None = None,
) -> Network:
    """(batch, channels, height, width) to (batch, classes), for LayerParallel. Collective over comm (duplicated).

    Args:
        layers: residual layers in all, a multiple of 3; the two transitions, convolutions of stride 2, come on top.
        widths: channels of the three stages.
        classes: logits.
        channels: channels of the images.
        final_time: T of every stage.
        norm: batch or group: u + h conv(relu(norm u)); None: u + h relu(conv u + b), written out and faster.
        comm: ranks that share the layers.
        seed: seed of the initial weights and of dropout masks.
        dtype: precision.
        partition: who owns which of the layers + 2.

    Raises:
        UsageError: layers that three stages cannot share, or an unknown norm.
    """
    if layers < 3 or layers % 3:
        raise UsageError(f"an ODE-ResNet shares {layers} layers among 3 stages; use a multiple of 3")
    ends = torch.nn.Sequential()
    ends.add_module("opening", stem_unit(channels, widths[0], norm))
    for k in (0, 1):
        ends.add_module(f"transition{k}", _down(widths[k], widths[k + 1], norm))
    ends.add_module("closing", Head(widths[2], classes, norm=norm))
    initialise(ends, seed=seed)
    parts: list[torch.nn.Module] = []
    for k, width in enumerate(widths):
        step: Step | Callable[[], torch.nn.Module]
        step = ConvStep(width, activation="relu", init_scale=1.0) if norm is None else _layer(width, norm)
        drawn = stream_seed(seed, f"stage{k}")
        parts += [ends[k], LayerStack(step, num_layers=layers // 3, final_time=final_time, seed=drawn, dtype=dtype)]
    return Network([*parts, ends[3]], comm=comm, partition=partition, seed=seed, dtype=dtype)


def _down(before: int, after: int, norm: Norm | None) -> torch.nn.Module:
    """Half the height and width, more channels."""
    down = torch.nn.Sequential()
    down.add_module("conv", Convolution(before, after, 3, 2))
    if norm is not None:
        down.add_module("norm", normalisation(after, norm))
    return down


def _layer(width: int, norm: Norm) -> Callable[[], torch.nn.Module]:
    def residual() -> torch.nn.Module:
        return torch.nn.Sequential(
            normalisation(width, norm), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        )

    return residual
