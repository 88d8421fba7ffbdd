"""Matrix products and tanh on views that stay: the fastest library for each on this device.

On a CPU in float32 and float64 they run through numpy, which shares the tensors' memory: for the small matrices of
layer-parallel networks its call costs half of torch's, its batched product needs no copy of strided views (1,024
products of 8 x 9 by 9 x 64 at stride 32: 5 us against 39 us per 32), and its tanh is vectorised (drivers/bench shows
the sums). Elsewhere torch does it. The choice depends on device and dtype only, never on a measurement, so that it
never changes bits between ranks or runs. No communication.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Op = Callable[[], object]


def uses_numpy(tensor: Tensor) -> bool:
    """Whether numpy works on this tensor's memory."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def product(left: Tensor, right: Tensor, out: Tensor) -> Op:
    """out = left @ right, for two matrices or two rows of them."""
    if not uses_numpy(out):
        multiply = torch.mm if out.dim() == 2 else torch.bmm
        return lambda: multiply(left, right, out=out)
    a, b, c = left.numpy(), right.numpy(), out.numpy()
    if out.dim() == 2 and out.is_contiguous():
        dot = np.dot
        return lambda: dot(a, b, c)
    matmul = np.matmul
    return lambda: matmul(a, b, out=c)


def tanh_(z: Tensor) -> Op:
    """z = tanh(z)."""
    if not uses_numpy(z):
        return z.tanh_
    array, tanh = z.numpy(), np.tanh
    return lambda: tanh(array, array)
