"""The mailbox of a rank that owns one module: non-blocking messages over MPI.

Receives are posted at the start of a tick, and make progress between the units of the network. Every wait also listens
for the alarm of a neighbour that has failed, so that an error on one module ends all of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lpnet.errors
from lpnet.errors import LpnetError
from lpnet.fdg.mailbox import STREAMS, UP, Stream
from lpnet.fdg.message import HEADER, Message, decode, encode, payload_for
from lpnet.io import trace
from lpnet.parallel.comm import Comm

_TAGS: dict[str, int] = {"activation": 1, "gradient": 3, "evaluation": 5, "closing": 7}  # the payload's is one more
_ALARM_TAG = 9
_ALARM_BYTES = 2048  # below the eager limit of every MPI: sent without the receiver's help
_ALARM_PATIENCE_S = 1.0
_SPINS = 200

_under_way: dict[int, Any] = {}
"""Requests whose buffers MPI still uses: they outlive a mailbox that is dropped before they are done."""


class _Receive:
    """The next message of a stream on its way: its header, then its payload."""

    def __init__(self, header: Tensor, payload: Tensor | None = None) -> None:
        self.header, self.payload = header, payload
        self._request: Any = None
        self._has_header = True
        self.restored = False
        self._comm: Any = None
        self._source = self._tag = 0

    @classmethod
    def posted(cls, comm: Comm, source: int, tag: int) -> _Receive:
        """Wait for nothing yet."""
        receive = cls(torch.empty(HEADER, dtype=torch.int64))
        receive._comm, receive._source, receive._tag = comm, source, tag
        receive._request = _kept(comm.irecv(receive.header, source, tag), receive.header)
        receive._has_header = False
        return receive

    def done(self) -> bool:
        """Whether all of it is here; posts the receive of the payload once the header tells its size."""
        if self._request is None:
            return True
        if not _tested(self._request):
            return False
        self._request = None
        if not self._has_header:
            self._has_header = True
            self.payload = payload_for(self.header)
            if self.payload is not None and self.payload.numel():
                request = self._comm.irecv(self.payload, self._source, self._tag + 1)
                self._request = _kept(request, self.payload)
                return self.done()
        return True


def _kept(request: Any, *buffers: Any) -> Any:
    _under_way[id(request)] = (request, buffers)
    return request


def _tested(request: Any) -> bool:
    if not request.Test():
        return False
    _under_way.pop(id(request), None)
    return True


class MPIMailbox:
    """The mailbox of a rank that owns a module, or shares one.

    The first rank of a shared module talks to the neighbours and relays what it takes to the others of its group, who
    post nothing. Neighbour messages only, also when made: small receives are posted for alarms.

    Args:
        chain: the (first) ranks of all modules, in order; None on the other ranks of a group.
        group: the ranks that share this module; None: this one alone.
        peers: other ranks to alarm: the same module in other data replicas.
        capacity: messages of a stream that may be under way.
        gradient_dtype: gradients travel in it; None: in their own.
        device: where this module computes; tensors of an accelerator pass through the host.
    """

    def __init__(
        self,
        chain: Comm | None,
        group: Comm | None = None,
        peers: Comm | None = None,
        *,
        capacity: int = 2,
        gradient_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.waited_receive = self.waited_send = 0.0
        self._chain, self._follows = chain, group is not None and group.rank > 0
        self._capacity, self._gradient_dtype, self._device = capacity, gradient_dtype, device
        self._sends: dict[str, deque[list[Any]]] = {stream: deque() for stream in STREAMS}
        self._receives: dict[str, _Receive] = {}
        self._group = group
        self._friends: list[tuple[Comm, int]] = []
        self._any = chain or group or peers or Comm()
        if chain is not None:
            self._friends += [(chain, rank) for rank in (chain.rank - 1, chain.rank + 1) if 0 <= rank < chain.size]
        for comm in (group, peers):
            if comm is not None:
                self._friends += [(comm, rank) for rank in range(comm.size) if rank != comm.rank]
        self._alarms = []
        for comm, rank in self._friends:
            text = torch.zeros(_ALARM_BYTES, dtype=torch.uint8)
            self._alarms.append((_kept(comm.irecv(text, rank, _ALARM_TAG), text), text))

    def _neighbour(self, step: int) -> tuple[Comm, int]:
        if self._chain is None or not 0 <= self._chain.rank + step < self._chain.size:
            raise LpnetError("there is no module to talk to")
        return self._chain, self._chain.rank + step

    # receiving

    def _receive(self, stream: Stream) -> _Receive:
        if stream not in self._receives:
            comm, source = self._neighbour(-1 if stream in UP else 1) if not self._follows else self._leader()
            self._receives[stream] = _Receive.posted(comm, source, _TAGS[stream])
        return self._receives[stream]

    def _leader(self) -> tuple[Comm, int]:
        assert self._group is not None
        return self._group, 0

    def prepare(self, *streams: Stream) -> None:
        """Post the receives of the next messages. Neighbour messages only."""
        for stream in streams:
            self._receive(stream).done()

    def ready(self, stream: Stream) -> bool:
        """Whether the next message is here."""
        return self._receive(stream).done()

    def take(self, stream: Stream) -> Message:
        """The next message of a stream; waits for it. Neighbour messages only.

        Raises:
            LpnetError: a neighbour has failed; its error.
        """
        receive = self._receive(stream)
        self.waited_receive += self._wait(receive.done, f"wait {stream}")
        del self._receives[stream]
        if self._group is not None and not self._follows and not receive.restored:
            for rank in range(1, self._group.size):
                self._send(stream, self._group, rank, receive.header.clone(), receive.payload, clone=True)
        return decode(receive.header, receive.payload, device=self._device)

    def parked(self, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """Header and payload of the next message, which stays; waits for it. Neighbour messages only."""
        receive = self._receive(stream)
        self._wait(receive.done, f"wait {stream}")
        return receive.header, receive.payload

    def restore(self, stream: Stream, header: Tensor, payload: Tensor | None) -> None:
        """Put a message of a checkpoint where `take` finds it. No communication."""
        self._receives[stream] = _Receive(header, payload)
        self._receives[stream].restored = True

    # sending

    def _pending(self, stream: Stream) -> int:
        """Messages of a stream that are under way."""
        queue = self._sends[stream]
        while queue and all(_tested(request) for request in queue[0]):
            queue.popleft()
        return len(queue)

    def vacant(self, stream: Stream) -> bool:
        """Whether a message can be sent without waiting."""
        return self._follows or self._pending(stream) < self._capacity

    def post(self, stream: Stream, message: Message) -> None:
        """Start sending a message; waits while `capacity` of them are under way. Neighbour messages only.

        Raises:
            LpnetError: a neighbour has failed; its error.
        """
        if self._follows:
            return
        header, payload = encode(message, self._gradient_dtype if stream == "gradient" else None)
        comm, dest = self._neighbour(1 if stream in UP else -1)
        self.waited_send += self._wait(lambda: self.vacant(stream), f"wait to send {stream}")
        self._send(stream, comm, dest, header, payload.cpu() if payload is not None else None)

    def _send(
        self, stream: Stream, comm: Comm, dest: int, header: Tensor, payload: Tensor | None, clone: bool = False
    ) -> None:
        tag = _TAGS[stream]
        requests = [_kept(comm.isend(header, dest, tag), header)]
        if payload is not None and payload.numel():
            payload = payload.clone() if clone else payload
            requests.append(_kept(comm.isend(payload, dest, tag + 1), payload))
        self._sends[stream].append(requests)

    def poll(self) -> None:
        """Let messages under way make progress, and pass a neighbour's alarm on.

        Raises:
            LpnetError: a neighbour has failed; its error.
        """
        for receive in self._receives.values():
            receive.done()
        for stream in STREAMS:
            self._pending(stream)
        self._listen()

    def settle(self) -> None:
        """Wait until everything posted has been sent. Neighbour messages only."""
        self.waited_send += self._wait(lambda: max(map(self._pending, STREAMS)) == 0, "wait to send")

    def wait(self, request: Any, name: str) -> None:
        """Wait for a request of another communicator, listening for alarms."""
        self.waited_receive += self._wait(request.Test, name)

    def _wait(self, done: Callable[[], bool], name: str) -> float:
        """Until `done()`; asleep after a while, so that ranks that share a core do not take it from each other.

        Returns:
            Seconds waited.
        """
        self._listen()
        if done():
            return 0.0
        began, span, spins = self._any.now(), trace.begin(), 0
        while not self._any.patiently(done):
            spins += 1
            if spins > _SPINS:
                self._listen()
                time.sleep(5e-5)
        trace.end(span, name)
        return self._any.now() - began

    # failing

    def _listen(self) -> None:
        for request, text in self._alarms:
            if _tested(request):
                self._alarms = []
                kind, _, words = bytes(text.numpy()).rstrip(b"\0").decode(errors="replace").partition("\0")
                error = getattr(lpnet.errors, kind, LpnetError)
                raise error(words)

    def alarm(self, error: BaseException, where: str) -> None:
        """Tell the neighbours that this module has failed; they tell theirs. Neighbour messages only.

        Args:
            error: what was raised.
            where: the module and the tick, for errors whose message does not tell.
        """
        ours = isinstance(error, LpnetError)
        words = str(error) if ours else f"{where}: {type(error).__name__}: {error}"
        kind = type(error).__name__ if ours else "LpnetError"
        data = f"{kind}\0{words}".encode()[: _ALARM_BYTES - 1]
        text = torch.zeros(_ALARM_BYTES, dtype=torch.uint8)
        text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sent = [_kept(comm.isend(text, rank, _ALARM_TAG), text) for comm, rank in self._friends]
        deadline = time.perf_counter() + _ALARM_PATIENCE_S
        while sent and time.perf_counter() < deadline:
            sent = [request for request in sent if not _tested(request)]
            time.sleep(1e-3)

    def close(self) -> None:
        """Withdraw the receives that are still posted. No communication."""
        for request, _ in self._alarms:
            request.Cancel()
            request.Wait()
            _under_way.pop(id(request), None)
        self._alarms = []
