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
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

Op = Callable[[], object]
SMALL = 4096  # numbers, up to which three numpy calls are faster than one of torch's operator calls
GRAIN = 32768  # numbers, up to which torch's elementwise operators take one thread: there numpy's are as fast or faster


_VIEWS: WeakValueDictionary[tuple[object, ...], np.ndarray] = WeakValueDictionary()


def array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as a numpy array; equal views are one object.

    Launches that share operands then share what describes them: a training step of small layers reads several hundred
    kilobytes of such descriptions, and has to bring them back into the cache when other work was done in between.
    """
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())  # its memory lives as long as the view
    found = _VIEWS.get(key)
    if found is None:
        found = _VIEWS[key] = tensor.numpy()
    return found


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
    a, b, c = array(left), array(right), array(out)
    if out.dim() == 2 and out.is_contiguous():
        return [partial(np.dot, a, b, c)]
    return [partial(np.matmul, a, b, c)]


def add(left: Tensor, right: Tensor, factor: float, out: Tensor) -> list[Op]:
    """out = left + factor * right; `out` may be `right`, not `left`."""
    if factor == 1.0 and uses_numpy(out) and out.numel() <= GRAIN:
        return [partial(np.add, array(left), array(right), array(out))]
    if not is_small(out):
        return [partial(torch.add, left, right, alpha=factor, out=out)]
    a, b, c = array(left), array(right), array(out)
    scale = c.dtype.type(factor)
    return [partial(np.multiply, b, scale, c), partial(np.add, a, c, c)]


def tanh_(z: Tensor) -> list[Op]:
    """z = tanh(z)."""
    if not uses_numpy(z):
        return [z.tanh_]
    values = array(z)
    return [partial(np.tanh, values, values)]


def tanh_slope_(z: Tensor) -> list[Op]:
    """z = 1 - z^2, the derivative of tanh taken from its value z."""
    if not uses_numpy(z):
        return [partial(torch.addcmul, torch.ones_like(z[..., :1]), z, z, value=-1, out=z)]
    values = array(z)
    return [partial(np.multiply, values, values, values), partial(np.subtract, values.dtype.type(1), values, values)]


def times(left: Tensor, right: Tensor, out: Tensor) -> list[Op]:
    """out = left * right, elementwise."""
    if not uses_numpy(out) or out.numel() > GRAIN:
        return [partial(torch.mul, left, right, out=out)]
    return [partial(np.multiply, array(left), array(right), array(out))]
