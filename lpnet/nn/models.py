"""Named networks: the parts of a configuration's network, built the same for any number of ranks."""

from __future__ import annotations

from typing import Any

import torch

from lpnet.config import ModelConfig
from lpnet.errors import UsageError
from lpnet.nn.ends import Classifier, DenseOpening, ZeroExpand
from lpnet.nn.stack import LayerStack
from lpnet.nn.steps import DenseStep
from lpnet.parallel.partition import Partition
from lpnet.seeding import generator_for

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def opening(model: ModelConfig, features: int, *, seed: int) -> torch.nn.Module:
    """(batch, features) to (batch, width). No communication.

    Raises:
        UsageError: a width that does not fit the features.
    """
    if model.opening == "dense":
        return DenseOpening(
            features, model.width, activation=model.activation, generator=generator_for(seed, "opening")
        )
    if model.opening == "identity":
        if features != model.width:
            raise UsageError(
                f"model.opening identity passes {features} features on; set model.width {features} or another opening"
            )
        return torch.nn.Identity()
    return ZeroExpand(features, model.width)


def network_parts(
    model: ModelConfig, features: int, classes: int, *, comm: Any, seed: int, partition: Partition | None = None
) -> tuple[LayerStack, torch.nn.Module, torch.nn.Module]:
    """Stack, opening and closing of a configuration. Collective over comm (the stack duplicates it).

    Args:
        model: the network.
        features: input features.
        classes: logits.
        comm: ranks that share the layers; None: one rank.
        seed: seed of the initial parameters.
        partition: who owns which layers.
    """
    first = opening(model, features, seed=seed)
    step = DenseStep(width=model.width, activation=model.activation, bias=model.bias, init_scale=model.init_scale)
    stack = LayerStack(
        step,
        num_layers=model.layers,
        final_time=model.final_time,
        comm=comm,
        seed=seed,
        dtype=DTYPES[model.dtype],
        partition=partition,
    )
    return stack, first, Classifier(model.width, classes, generator=generator_for(seed, "closing"))
