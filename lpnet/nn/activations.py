"""Activations in place, and their derivative from the activated value: tanh, relu, smooth_relu.

smooth_relu(x) = x^2/(4 eta) + x/2 + eta/4 for |x| < eta = 0.1, else relu(x) (Günther et al. 2020, section 4).
It is written as t^2/(4 eta) + relu(x - eta) with t = clamp(x, -eta, eta) + eta, so that the derivative
t/(2 eta) = min(1, sqrt(z/eta)) can be had from the value z alone: one array per layer is kept, not two.
No communication.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lpnet.config import Activation
from lpnet.nn.kernels import Op, tanh_, tanh_slope_

ETA = 0.1


def smooth_relu(x: Tensor) -> Tensor:
    """smooth_relu of any tensor, differentiable."""
    t = x.clamp(-ETA, ETA) + ETA
    return t * t / (4 * ETA) + torch.relu(x - ETA)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu, "smooth_relu": smooth_relu}


def activate_(name: Activation, z: Tensor, scratch: Tensor) -> list[Op]:
    """z = sigma(z); `scratch` has the shape of z and is used by smooth_relu."""
    if name == "tanh":
        return tanh_(z)
    if name == "relu":
        return [partial(torch.relu_, z)]
    return [
        partial(torch.clamp, z, -ETA, ETA, out=scratch),
        partial(scratch.add_, ETA),
        partial(z.sub_, ETA),
        z.relu_,
        partial(torch.addcmul, z, scratch, scratch, value=1 / (4 * ETA), out=z),
    ]


def slope_(name: Activation, z: Tensor) -> list[Op]:
    """z = sigma'(.), taken from the activated value z."""
    if name == "tanh":
        return tanh_slope_(z)
    if name == "relu":
        return [z.sign_]
    return [partial(z.mul_, 1 / ETA), partial(z.clamp_, 0, 1), z.sqrt_]


def pull(name: Activation, source: Tensor, z: Tensor, out: Tensor) -> list[Op]:
    """out = sigma'(.) * source, with the derivative taken from the activated value z."""
    if name == "tanh":
        return [partial(torch.ops.aten.tanh_backward.grad_input, source, z, grad_input=out)]
    if name == "relu":
        return [partial(torch.ops.aten.threshold_backward.grad_input, source, z, 0, grad_input=out)]
    return [
        partial(torch.mul, z, 1 / ETA, out=out),
        partial(out.clamp_, 0, 1),
        out.sqrt_,
        partial(out.mul_, source),
    ]
