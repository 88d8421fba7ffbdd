"""Messages of coarse levels in fewer bits than the states have.

What a coarse level sends along is a correction, so that rounding it costs only a part of the correction: forward
Phi_c(new) - Phi_c(old) as it is; in the adjoint, whose steps need the value itself, the difference from the value that
went along when the coarse step of the old values was made. A value that has not changed travels as zero: an exact guess
stays a bitwise fixed point. No communication here; `binding` sends the buffers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lpnet.nn.kernels import Op

DTYPES = {"own": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Short:
    """The buffers of one direction on one rank.

    Args:
        dtype: what travels.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._bases: dict[int, Tensor] = {}

    def buffer(self, use: str, level: int, like: Tensor) -> Tensor:
        """What travels in place of a tensor."""
        key = (use, level)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(like.shape, dtype=self.dtype, device=like.device)
        return self._buffers[key]

    # forward: corrections, rounded

    def pack(self, use: str, level: int, correction: Tensor) -> Op:
        """Round what is about to be sent."""
        return partial(self.buffer(use, level, correction).copy_, correction)

    def unpack(self, use: str, level: int, to: Tensor) -> Op:
        """What has arrived, in full width."""
        return partial(to.copy_, self.buffer(use, level, to))

    # adjoint: an old value rounded, then its change

    def pack_old(self, level: int, value: Tensor) -> list[Op]:
        """Round an old value, and keep it to tell its change."""
        base = self._bases.setdefault(level, torch.zeros_like(value, memory_format=torch.contiguous_format))
        return [partial(base.copy_, value), self.pack("old out", level, value)]

    def pack_change(self, use: str, level: int, value: Tensor) -> Op:
        """Round the change of a value since `pack_old`."""
        return partial(torch.sub, value, self._bases[level], out=self.buffer(use, level, value))

    def unpack_change(self, level: int, to: Tensor) -> Op:
        """The value that a change belongs to, in full width."""
        return partial(torch.add, self.buffer("old in", level, to), self.buffer("in", level, to), out=to)
