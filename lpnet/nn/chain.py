"""Memory and parameters of a network of several stacks on one rank: each point in the layout of the layers it enters.

Every stack and transition has a workspace of its own; this one tells by the point whose it is. The point after the
rank's last layer has an array of its own, for what comes from the right. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lpnet.nn import parts
from lpnet.nn.context import Context
from lpnet.nn.kernels import Op
from lpnet.nn.layout import Layout
from lpnet.nn.steps import Index, Workspace
from lpnet.nn.transition import TransitionEngine

if TYPE_CHECKING:
    from lpnet.nn.network import Network


class Member(NamedTuple):
    """A stack's or transition's local layers low..high-1 (global), its step size and its memory."""

    low: int
    high: int
    h: float
    workspace: Workspace


class ChainEngine:
    """The engines of the local stacks and transitions.

    Args:
        network: whose parameters they follow.
        engines: per local part, by name, in order.
    """

    gradient_block = 0

    def __init__(self, network: Network, engines: dict[str, Any]) -> None:
        self.network, self.engines = network, engines

    def refresh(self) -> tuple[int, ...]:
        """Follow the parameters; a stamp of their versions."""
        return tuple(number for engine in self.engines.values() for number in engine.refresh())

    def stamp(self) -> tuple[int, ...]:
        """Versions of the parameters now."""
        return tuple(number for engine in self.engines.values() for number in engine.stamp())

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters; new tensors."""
        return {f"{name}.{key}": g for name, e in self.engines.items() for key, g in e.gradients().items()}

    def workspace(
        self, shape: Sequence[Any], *, state_slots: int, layer_slots: int, kept_slots: int, adjoint_slots: int
    ) -> ChainWorkspace:
        """States of a batch whose first state has this shape; every point and layer has a slot of its own."""
        return ChainWorkspace(self, shape)


class ChainWorkspace:
    """States of a network whose points differ in shape; slot i is the i-th point or layer of the rank."""

    def __init__(self, engine: ChainEngine, shape: Sequence[Any]) -> None:
        network = engine.network
        self.network, self.layouts = network, network.layouts(tuple(shape))
        self.low, self.high = network.low, network.high
        self.members: list[Member] = []
        for k, name in network.local_parts():
            low, high = network.local_rows(k)
            own = engine.engines[name]
            workspace: Workspace
            if isinstance(own, TransitionEngine):
                workspace = own.between(self.layouts[k], self.layouts[k + 1])
            else:
                count = high - low
                sizes = dict.fromkeys(("state_slots", "layer_slots", "kept_slots", "adjoint_slots"), count)
                workspace = own.workspace(self.layouts[k].shape, **sizes)
            self.members.append(Member(low, high, network.step_size(k), workspace))
        self.of = [member for member in self.members for _ in range(member.low, member.high)]
        self.like = torch.empty(0, dtype=network.dtype, device=network.device)
        self.numbers = max(layout.numbers for layout in self.layouts)
        after = self._layout(self.high).payload
        self.after, self.after_adjoint = self.like.new_zeros(after), self.like.new_zeros(after)

    def _layout(self, point: int) -> Layout:
        return self.layouts[self.network.part_of(point)]

    def _at(self, index: Index) -> tuple[Member, Index]:
        """The part that a slot belongs to, and the slot there."""
        first = index if isinstance(index, int) else index.start
        member = self.of[first]
        shift = member.low - self.low
        if isinstance(index, int):
            return member, index - shift
        return member, slice(index.start - shift, index.stop - shift, index.step)

    def begin(self, context: Context) -> None:
        """A pass begins."""
        for member in self.members:
            member.workspace.begin(context)

    def commit(self) -> None:
        """The states are found."""
        for member in self.members:
            member.workspace.commit()

    def state(self, slot: Index) -> Tensor:
        """Payload of a state."""
        if slot == self.high - self.low:
            return self.after
        member, place = self._at(slot)
        return member.workspace.state(place)

    def adjoint(self, slot: Index) -> Tensor:
        """Payload of an adjoint state."""
        if slot == self.high - self.low:
            return self.after_adjoint
        member, place = self._at(slot)
        return member.workspace.adjoint(place)

    def rows(self, count: int) -> Tensor:
        """A new array of `count` payloads of any point."""
        return self.like.new_zeros(count, self.numbers)

    def fitted(self, rows: Tensor, point: int) -> Tensor:
        """Rows, or one, as payloads of a point."""
        layout = self._layout(point)
        return rows[..., : layout.numbers].view(*rows.shape[:-1], *layout.payload)

    def region(self, point: int) -> int:
        """The part that a point enters; the one after the rank's layers lies apart."""
        return -1 if point == self.high else self.network.part_of(point)

    def evaluate(self, layer: Index, u: Index, z: Index) -> list[Op]:
        """z = F(u)."""
        member, place = self._at(layer)
        return member.workspace.evaluate(place, self._at(u)[1], self._at(z)[1])

    def advance(self, u: Index, z: Index, h: float, out: Tensor, minus: Tensor | None, plus: Tensor | None) -> list[Op]:
        """out = (u + h z) [- minus] [+ plus], in this order; after a transition without u."""
        member, place = self._at(u)
        return member.workspace.advance(place, self._at(z)[1], h * member.h, out, minus, plus)

    def linearise(self, z: slice) -> list[Op]:
        """Values become what `pull` needs of them; all of the rank's layers, which may reach over several parts."""
        return [op for m in self.members for op in m.workspace.linearise(slice(0, m.high - m.low))]

    def pull(
        self,
        layer: Index,
        z: Index,
        d: Index,
        source: Tensor,
        h: float,
        out: Tensor,
        minus: Tensor | None,
        plus: Tensor | None,
    ) -> list[Op]:
        """out = (source + h F'^T source) [- minus] [+ plus]."""
        member, place = self._at(layer)
        kept, values = self._at(d)[1], self._at(z)[1]
        return member.workspace.pull(place, values, kept, source, h * member.h, out, minus, plus)

    def gradient(self, layers: slice, u: slice, d: slice, h: float) -> list[Op]:
        """Gradients of a run of layers, which may reach over several parts."""
        ops: list[Op] = []
        for member in self.members:
            base = member.low - self.low
            run = slice(max(layers.start - base, 0), min(layers.stop - base, member.high - member.low))
            if run.start < run.stop:
                ops += member.workspace.gradient(run, run, run, h * member.h)
        return ops

    def pack(self, u: Tensor, out: Tensor, point: int = 0) -> None:
        """Write a state into the payload of a point."""
        layout = self._layout(point)
        out.copy_(layout.to_payload(parts.split(u.reshape(-1), layout.shape) if parts.is_tuple(layout.shape) else u))

    def unpack(self, payload: Tensor, point: int = 0) -> Tensor:
        """The payload of a point as a state; a copy."""
        return parts.join(self._layout(point).to_state(payload)).clone(memory_format=torch.contiguous_format)
