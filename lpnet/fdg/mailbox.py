"""Bounded queues between neighbouring modules: what a mailbox is, and that of modules that share a process.

    stream      from module   to      carries
    activation  k             k + 1   outputs, in training
    gradient    k             k - 1   gradients of the loss with respect to the inputs, in training
    evaluation  k             k + 1   outputs, in evaluation and while the modules agree
    closing     k             k - 1   sums and verdicts at the end of either

Each stream is first in, first out. Nothing waits for a receiver unless `capacity` messages are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lpnet.errors import LpnetError
from lpnet.fdg.message import Message, decode, encode

Stream = Literal["activation", "gradient", "evaluation", "closing"]
UP: tuple[Stream, ...] = ("activation", "evaluation")
DOWN: tuple[Stream, ...] = ("gradient", "closing")
STREAMS = (*UP, *DOWN)


class Mailbox(Protocol):
    """One module's ends of the queues. Neighbour messages only."""

    waited_receive: float
    waited_send: float

    def prepare(self, *streams: Stream) -> None:
        """Post the receives of the next messages, so that they arrive while this module computes."""

    def ready(self, stream: Stream) -> bool:
        """Whether `take` would return at once."""

    def take(self, stream: Stream) -> Message:
        """The next message of a stream."""

    def parked(self, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """Header and payload of the next message, which stays where it is: for checkpoints."""

    def restore(self, stream: Stream, header: Tensor, payload: Tensor | None) -> None:
        """Put a message of a checkpoint where `take` finds it."""

    def vacant(self, stream: Stream) -> bool:
        """Whether `post` would return at once."""

    def post(self, stream: Stream, message: Message) -> None:
        """Send a message; its tensor must not be changed afterwards."""

    def poll(self) -> None:
        """Let messages under way make progress."""

    def settle(self) -> None:
        """Wait until everything posted has been sent."""

    def wait(self, request: Any, name: str) -> None:
        """Wait for a request of another communicator."""

    def alarm(self, error: BaseException, where: str) -> None:
        """Tell the neighbours that this module has failed."""

    def close(self) -> None:
        """Give up what is still posted."""


class MemoryMailbox:
    """The mailbox of one of several modules in one process. No communication.

    Args:
        capacity: messages of a stream that may be under way.
        gradient_dtype: gradients are rounded to it, as on the wire.
        device: where this module computes.
    """

    def __init__(
        self, *, capacity: int = 2, gradient_dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        self.waited_receive = self.waited_send = 0.0
        self._capacity, self._gradient_dtype, self._device = capacity, gradient_dtype, device
        self._incoming: dict[str, deque[tuple[Tensor, Tensor | None]]] = {stream: deque() for stream in STREAMS}
        self._next: MemoryMailbox | None = None
        self._before: MemoryMailbox | None = None

    def _peer(self, stream: Stream) -> MemoryMailbox:
        peer = self._next if stream in UP else self._before
        if peer is None:
            raise LpnetError(f"stream {stream}: there is no module to send to")
        return peer

    def prepare(self, *streams: Stream) -> None:
        """Nothing to do."""

    def ready(self, stream: Stream) -> bool:
        """Whether a message is there."""
        return bool(self._incoming[stream])

    def take(self, stream: Stream) -> Message:
        """The oldest message of a stream.

        Raises:
            LpnetError: there is none.
        """
        if not self._incoming[stream]:
            raise LpnetError(f"stream {stream}: a message is taken before it was posted")
        header, payload = self._incoming[stream].popleft()
        return decode(header, payload, device=self._device)

    def parked(self, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """Header and payload of the oldest message."""
        return self._incoming[stream][0]

    def restore(self, stream: Stream, header: Tensor, payload: Tensor | None) -> None:
        """Put a message of a checkpoint where `take` finds it."""
        self._incoming[stream].append((header, payload))

    def vacant(self, stream: Stream) -> bool:
        """Whether the queue has room."""
        return len(self._peer(stream)._incoming[stream]) < self._capacity

    def post(self, stream: Stream, message: Message) -> None:
        """Put a copy of a message into the neighbour's queue."""
        header, payload = encode(message, self._gradient_dtype if stream == "gradient" else None)
        if payload is not None:
            payload = payload.clone(memory_format=torch.contiguous_format)
        self._peer(stream)._incoming[stream].append((header, payload))

    def poll(self) -> None:
        """Nothing to do."""

    def settle(self) -> None:
        """Nothing to do."""

    def wait(self, request: Any, name: str) -> None:
        """Wait for a request of another communicator."""
        request.Wait()

    def alarm(self, error: BaseException, where: str) -> None:
        """Nothing to do: the error passes through all modules of the process."""

    def close(self) -> None:
        """Nothing to do."""


def in_memory(
    modules: int, *, capacity: int = 2, gradient_dtype: torch.dtype | None = None, device: torch.device | None = None
) -> list[MemoryMailbox]:
    """The mailboxes of all modules of one process, in order. No communication.

    Args:
        modules: K.
        capacity: messages of a stream that may be under way between two modules.
        gradient_dtype: gradients are rounded to it.
        device: where the modules compute.
    """
    boxes = [MemoryMailbox(capacity=capacity, gradient_dtype=gradient_dtype, device=device) for _ in range(modules)]
    for before, after in zip(boxes, boxes[1:], strict=False):
        before._next, after._before = after, before
    return boxes


def waited(boxes: Sequence[Mailbox]) -> tuple[float, float]:
    """Seconds waited to receive and to send by some mailboxes since they were made. No communication."""
    return sum(box.waited_receive for box in boxes), sum(box.waited_send for box in boxes)
