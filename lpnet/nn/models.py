"""Named networks: the parts of a configuration's network, built the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lpnet.config import ModelConfig
from lpnet.errors import UsageError
from lpnet.nn.conv import ConvStep
from lpnet.nn.ends import Classifier, ConvOpening, DenseOpening, ImageClassifier, Replicate, ZeroExpand
from lpnet.nn.network import Network
from lpnet.nn.ode_resnet import ode_resnet_cifar
from lpnet.nn.resnet import resnet, resnet_cifar, resnet_mnist
from lpnet.nn.stack import LayerStack
from lpnet.nn.steps import DenseStep, Step
from lpnet.nn.wide_resnet import wide_resnet
from lpnet.parallel.partition import Partition
from lpnet.seeding import generator_for

__all__ = ["DTYPES", "network_parts", "ode_resnet_cifar", "resnet", "resnet_cifar", "resnet_mnist", "wide_resnet"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def check_shape(model: ModelConfig, shape: Sequence[int]) -> None:
    """Refuse samples that the layers cannot take. No communication.

    Raises:
        UsageError: with the shape and the remedy.
    """
    images = model.name in ("conv", "ode_resnet")
    if len(shape) != (3 if images else 1):
        remedy = "images (channels, height, width)" if images else "vectors; set model.name conv for images"
        raise UsageError(f"the samples have the shape {tuple(shape)}; model.name {model.name} takes {remedy}")
    if model.name == "ode_resnet":
        return
    if model.opening == "identity" and shape[0] != model.width:
        raise UsageError(
            f"model.opening identity passes {shape[0]} features on; set model.width {shape[0]} or another opening"
        )
    if model.opening == "replicate" and shape[0] != 1:
        raise UsageError(
            f"model.opening replicate copies 1 channel; the images have {shape[0]}: use dense or zero_expand"
        )


def opening(model: ModelConfig, features: int, *, seed: int) -> torch.nn.Module:
    """(batch, features, ...) to (batch, width, ...). No communication."""
    if model.opening == "dense":
        generator = generator_for(seed, "opening")
        if model.name == "conv":
            activation = model.activation
            return ConvOpening(features, model.width, kernel=model.kernel, activation=activation, generator=generator)
        return DenseOpening(features, model.width, activation=model.activation, generator=generator)
    if model.opening == "replicate":
        return Replicate(model.width)
    return torch.nn.Identity() if model.opening == "identity" else ZeroExpand(features, model.width)


def layer_and_ends(
    model: ModelConfig, shape: Sequence[int], classes: int, *, seed: int
) -> tuple[Step, torch.nn.Module, torch.nn.Module]:
    """One layer, opening and closing of a configuration with one stack; arguments and errors as `network_parts`."""
    check_shape(model, shape)
    first, last = opening(model, shape[0], seed=seed), generator_for(seed, "closing")
    step: Step
    closing: torch.nn.Module
    if model.name == "conv":
        step = ConvStep(model.width, model.kernel, activation=model.activation, init_scale=model.init_scale)
        closing = ImageClassifier((model.width, shape[1], shape[2]), classes, pooling=model.pooling, generator=last)
    else:
        step = DenseStep(model.width, model.activation, model.bias, model.init_scale)
        closing = Classifier(model.width, classes, generator=last)
    return step, first, closing


def ode_network(
    model: ModelConfig,
    shape: Sequence[int],
    classes: int,
    *,
    comm: Any,
    seed: int,
    partition: Partition | None = None,
) -> Network:
    """The network of three stacks of a configuration; arguments, errors and communication as `network_parts`."""
    check_shape(model, shape)
    return ode_resnet_cifar(
        model.layers,
        widths=(model.width, 2 * model.width, 4 * model.width),
        classes=classes,
        channels=shape[0],
        final_time=model.final_time,
        norm=None if model.norm == "none" else model.norm,
        comm=comm,
        seed=seed,
        dtype=DTYPES[model.dtype],
        partition=partition,
    )


def network_parts(
    model: ModelConfig,
    shape: Sequence[int],
    classes: int,
    *,
    comm: Any,
    seed: int,
    partition: Partition | None = None,
) -> tuple[LayerStack, torch.nn.Module, torch.nn.Module]:
    """Stack, opening and closing of a configuration. Collective over comm (the stack duplicates it).

    Args:
        model: the network.
        shape: of a sample: (features,), or (channels, height, width).
        classes: logits.
        comm: ranks that share the layers; None: one rank.
        seed: seed of the initial parameters.
        partition: who owns which layers.

    Raises:
        UsageError: samples that the layers cannot take; on every rank, before any message.
    """
    step, first, closing = layer_and_ends(model, shape, classes, seed=seed)
    stack = LayerStack(
        step,
        num_layers=model.layers,
        final_time=model.final_time,
        comm=comm,
        seed=seed,
        dtype=DTYPES[model.dtype],
        partition=partition,
    )
    return stack, first, closing
