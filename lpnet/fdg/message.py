"""What neighbouring modules tell each other, and how it is laid out on the wire: a header of fixed size and a tensor.

The header carries the batch id, shape, dtype and memory format, so that a short last batch needs no agreement, and the
news of the run: loss of the newest finished batch, squared gradient norm, wish to stop, agreed last tick, failure.
No communication.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lpnet.errors import LpnetError, UsageError

HEADER = 40  # 64-bit words
_DIMENSIONS = 8
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
KINDS = ("input", "output", "loss", "gradient")
NO_NEWS = 2**62


@dataclass(frozen=True, order=True)
class Failure:
    """A number that is not finite; of several the first one found counts: the smallest in this order.

    Args:
        tick: when it was found.
        module: where, counted from 1.
        batch: in which batch.
        unit: global index of the unit.
        kind: index in KINDS of what is not finite.
    """

    tick: int
    module: int
    batch: int
    unit: int
    kind: int


@dataclass(frozen=True)
class News:
    """What rides on every message, with a tensor or without.

    Args:
        wish: some module asks to stop.
        stop_at: agreed last tick; NO_NEWS: none.
        failure: the first failure known.
    """

    wish: bool = False
    stop_at: int = NO_NEWS
    failure: Failure | None = None

    def merged(self, other: News) -> News:
        """The news of both."""
        failures = [failure for failure in (self.failure, other.failure) if failure is not None]
        return News(self.wish or other.wish, min(self.stop_at, other.stop_at), min(failures, default=None))


@dataclass(frozen=True)
class Message:
    """One message.

    Args:
        batch: id of the batch; -1: nothing but news.
        tensor: activation, or gradient of the loss with respect to it.
        digest: `digest` of samples and labels as module 1 saw them; 0: unknown.
        loss: of this batch, once it is known.
        square: squared norm of the gradients of the modules behind, for clipping.
        sums: at most 8 numbers, such as the scores of an evaluation.
        news: see `News`.
    """

    batch: int = -1
    tensor: Tensor | None = None
    digest: tuple[int, int] = (0, 0)
    loss: float = math.nan
    square: float = 0.0
    sums: tuple[float, ...] = ()
    news: News = field(default_factory=News)


def dense(tensor: Tensor) -> Tensor:
    """The tensor in one of the two memory formats that travel: contiguous, or channels last where it is."""
    tensor = tensor.detach()
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tensor
    return tensor.contiguous()


def digest(value: Tensor | None) -> int:
    """A number that tells two batches apart: shape, dtype and up to 4096 numbers of it; 0 for None."""
    if value is None:
        return 0
    flat = value.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // 4096)].cpu().contiguous()
    head = f"{tuple(value.shape)} {value.dtype}".encode()
    return 1 + zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), zlib.crc32(head))


def encode(message: Message, gradient_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """Header and dense payload; the payload may share the tensor's memory.

    Args:
        message: what to send.
        gradient_dtype: floating-point tensors travel in it; float16 scaled by a power of two into its range.

    Raises:
        UsageError: a tensor of more than 8 dimensions, or of a dtype that does not travel.
    """
    header = torch.zeros(HEADER, dtype=torch.int64)
    words, numbers = header.numpy(), header.numpy().view(np.float64)
    news, failure = message.news, message.news.failure
    words[:5] = message.batch, news.wish, news.stop_at, *message.digest
    numbers[5], numbers[6] = message.loss, message.square
    words[7] = len(message.sums)
    numbers[8 : 8 + len(message.sums)] = message.sums
    words[16] = failure is not None
    if failure is not None:
        words[17:22] = failure.tick, failure.module, failure.batch, failure.unit, failure.kind
    words[22] = -1
    if message.tensor is None:
        return header, None
    tensor = dense(message.tensor)
    if tensor.dim() > _DIMENSIONS or tensor.dtype not in _DTYPES:
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} cannot be sent to another module; "
            f"at most {_DIMENSIONS} dimensions"
        )
    last = not tensor.is_contiguous()
    payload = tensor.permute(0, 2, 3, 1) if last else tensor
    scale = 1.0
    if gradient_dtype is not None and payload.is_floating_point() and payload.element_size() > 2:
        if gradient_dtype == torch.float16:
            scale = _scale(payload)
            payload = payload * scale if scale != 1.0 else payload
        payload = payload.to(gradient_dtype)
    words[22:26] = tensor.dim(), _DTYPES.index(tensor.dtype), _DTYPES.index(payload.dtype), last
    numbers[26] = scale
    words[27 : 27 + tensor.dim()] = tensor.shape
    return header, payload


def without_wish(header: Tensor) -> Tensor:
    """A header that asks nobody to stop: a stop belongs to the run that was asked, not to the one that goes on."""
    header = header.clone()
    header.numpy()[1:3] = 0, NO_NEWS
    return header


def _scale(payload: Tensor) -> float:
    """A power of two that brings the largest entry near, and not over, the largest float16."""
    largest = float(payload.abs().max()) if payload.numel() else 0.0
    if not (math.isfinite(largest) and largest > 0):
        return 1.0
    return 2.0 ** min(100, 14 - math.frexp(largest)[1])


def payload_for(header: Tensor) -> Tensor | None:
    """An empty tensor for the payload that the header announces; None: there is none."""
    words = header.numpy()
    if words[22] < 0:
        return None
    shape = [int(size) for size in words[27 : 27 + words[22]]]
    if words[25]:
        shape = [shape[0], shape[2], shape[3], shape[1]]
    return torch.empty(shape, dtype=_DTYPES[words[24]])


def decode(header: Tensor, payload: Tensor | None, device: torch.device | None = None) -> Message:
    """The message of a header and its payload, which the tensor takes over."""
    words, numbers = header.numpy(), header.numpy().view(np.float64)
    failure = Failure(*(int(word) for word in words[17:22])) if words[16] else None
    tensor = None
    if payload is not None:
        tensor = payload.to(device) if device is not None else payload
        if words[23] != words[24]:
            tensor = tensor.to(_DTYPES[words[23]])
            if numbers[26] != 1.0:
                tensor.mul_(1.0 / float(numbers[26]))
        if words[25]:
            tensor = tensor.permute(0, 3, 1, 2)
    return Message(
        batch=int(words[0]),
        tensor=tensor,
        digest=(int(words[3]), int(words[4])),
        loss=float(numbers[5]),
        square=float(numbers[6]),
        sums=tuple(float(number) for number in numbers[8 : 8 + words[7]]),
        news=News(bool(words[1]), int(words[2]), failure),
    )


def expect(message: Message, batch: int, what: str, module: int) -> Message:
    """The message, if it belongs to the batch.

    Raises:
        LpnetError: both batch ids.
    """
    if message.batch != batch or message.tensor is None:
        raise LpnetError(
            f"module {module}: the {what} of batch {batch} is due, and that of batch {message.batch} has arrived; "
            "all ranks must make the same calls in the same order"
        )
    return message
