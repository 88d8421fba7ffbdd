"""Launches: calls on views that stay, bound once and run many times, by the fastest library for each.

On a CPU in float32 and float64, products and tanh run through numpy, which shares the tensors' memory: for the small
matrices of layer-parallel networks its call costs half of torch's, its batched product needs no copy of strided views
(32 products of 8 x 9 by 9 x 64 out of 1,024: 5 us against 39 us), and its tanh is vectorised. Elsewhere torch does it.
The choice depends on device, dtype and shape only, never on a measurement: it is the same on every rank and in every
run. A launch is a C-level partial where it can be; a Python frame would cost as much as a small kernel.
No communication.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

Op = Callable[[], object]
SMALL = 4096  # numbers, up to which three numpy calls are faster than one of torch's operator calls


def uses_numpy(tensor: Tensor) -> bool:
    """Whether numpy works on this tensor's memory."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def is_small(tensor: Tensor) -> bool:
    """Whether the cost of a call outweighs that of the numbers."""
    return uses_numpy(tensor) and tensor.numel() <= SMALL


def product(left: Tensor, right: Tensor, out: Tensor) -> list[Op]:
    """out = left @ right, for two matrices or two rows of them.

    Where `left` has a smaller precision than `right`, the product is made in the precision of `left`.
    """
    if left.dtype != out.dtype:
        narrow, result = torch.empty_like(right, dtype=left.dtype), torch.empty_like(out, dtype=left.dtype)
        return [partial(narrow.copy_, right), *product(left, narrow, result), partial(out.copy_, result)]
    if not uses_numpy(out):
        return [partial(torch.mm if out.dim() == 2 else torch.bmm, left, right, out=out)]
    a, b, c = left.numpy(), right.numpy(), out.numpy()
    if out.dim() == 2 and out.is_contiguous():
        return [partial(np.dot, a, b, c)]
    return [partial(np.matmul, a, b, c)]


def add(left: Tensor, right: Tensor, factor: float, out: Tensor) -> list[Op]:
    """out = left + factor * right; `out` may be `right`, not `left`."""
    if not is_small(out):
        return [partial(torch.add, left, right, alpha=factor, out=out)]
    a, b, c = left.numpy(), right.numpy(), out.numpy()
    scale = c.dtype.type(factor)
    return [partial(np.multiply, b, scale, c), partial(np.add, a, c, c)]


def tanh_(z: Tensor) -> list[Op]:
    """z = tanh(z)."""
    if not uses_numpy(z):
        return [z.tanh_]
    array = z.numpy()
    return [partial(np.tanh, array, array)]


def tanh_pull(source: Tensor, z: Tensor, out: Tensor) -> list[Op]:
    """out = source (1 - z^2), the derivative of tanh taken from its value z."""
    if not is_small(out):
        return [partial(torch.ops.aten.tanh_backward.grad_input, source, z, grad_input=out)]
    a, b, c = source.numpy(), z.numpy(), out.numpy()
    one = c.dtype.type(1)
    return [partial(np.multiply, b, b, c), partial(np.subtract, one, c, c), partial(np.multiply, c, a, c)]
