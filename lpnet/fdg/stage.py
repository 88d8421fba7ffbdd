"""One module's work on one batch: forward, stash, delayed backward.

What the delayed backward sees (`backward`):

    stash      the weights of the forward: it ran on copies of the parameters, one set per version (Harlap et al.,
               "PipeDream", arXiv 1806.03377); the gradient is exact for them
    recompute  the current weights: only the input is kept, and the forward runs again (features replay)
    mixed      old activations, current weights: what the published numbers of arXiv 1906.09108 used

A module without delay runs on its parameters as they are. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lpnet.errors import LpnetError
from lpnet.fdg.chain import Chain, is_finite

Backward = Literal["stash", "recompute", "mixed"]
Loss = Callable[[Tensor, Tensor], Tensor]
Ready = Callable[[str, Tensor], None]


@dataclass
class Flight:
    """A batch between its forward and its backward.

    Args:
        batch: its id.
        x: input, a leaf of the graph.
        out: output, or loss on the last module, with its graph; None: it will be computed again.
        version: updates made before the forward.
        weights: copies the forward ran on, by name; None: the parameters themselves.
    """

    batch: int
    x: Tensor
    out: Tensor | None
    version: int
    weights: dict[str, Tensor] | None


class Stage:
    """Forward and delayed backward of one module.

    Args:
        chain: its units.
        backward: stash | recompute | mixed; live: no update happens between forward and backward.
        first: whether the input is data, which needs no gradient.
        loss: on the last module, of output and labels; None elsewhere.
        capacity: batches in flight at most.
        autocast: dtype of torch.autocast for the forward; None: off.
        linearise: whether a forward whose graph is thrown away makes one all the same: layer-parallel units propagate
            serially without.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        backward: Backward | Literal["live"],
        first: bool,
        loss: Loss | None,
        capacity: int,
        autocast: torch.dtype | None = None,
        linearise: bool = False,
    ) -> None:
        self.chain, self.kind, self.is_first, self.capacity = chain, backward, first, capacity
        self.flights: dict[int, Flight] = {}
        self._loss, self._autocast, self._linearise = loss, autocast, linearise
        self._copies: dict[int, dict[str, Tensor]] = {}
        self._protect: bool | None = None  # whether the first unit writes on its input; None: not seen yet

    @property
    def is_last(self) -> bool:
        """Whether this module makes the loss."""
        return self._loss is not None

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that require a gradient, by global name."""
        return {name: p for name, p in self.chain.named_parameters() if p.requires_grad}

    # forward

    def forward(
        self,
        batch: int,
        x: Tensor,
        y: Tensor | None = None,
        *,
        version: int = 0,
        predicted: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Output of the module, or the loss on the last one; kept until `backward`.

        Args:
            batch: id.
            x: (batch, ...), which this stage takes over.
            y: labels, on the last module.
            version: updates made so far.
            predicted: weights to use in place of the current ones, by name.

        Raises:
            LpnetError: more batches in flight than the schedule allows, or a unit that returns no tensor.
        """
        if len(self.flights) >= self.capacity:
            raise LpnetError(
                f"batch {batch} finds {sorted(self.flights)} in flight; this module holds at most {self.capacity}"
            )
        weights = predicted
        if self.kind == "stash" and weights is None:
            weights = self._copy(version)
        if weights is not None:
            for tensor in weights.values():
                tensor.requires_grad_(self.kind == "stash")
        flight = Flight(batch, self._leaf(x), None, version, weights if self.kind == "stash" else None)
        with torch.set_grad_enabled(self.kind != "recompute" or self._linearise):
            if self.kind == "mixed" and predicted is not None:
                with self._swapped(predicted):
                    out = self._run(flight, y)
            else:
                out = self._run(flight, y, weights)
        if self.kind != "recompute":
            flight.out = out
        self.flights[batch] = flight
        return out.detach()

    def _leaf(self, x: Tensor) -> Tensor:
        leaf = x.detach()
        if not self.is_first and leaf.is_floating_point():
            leaf.requires_grad_(True)
        return leaf

    def _run(self, flight: Flight, y: Tensor | None = None, replace: Mapping[str, Tensor] | None = None) -> Tensor:
        """The units on a protected input, then the loss where labels are given."""
        self.chain.batch = flight.batch
        leaf = flight.x
        inner = leaf.clone() if self._protect is not False else leaf
        before = inner._version
        with self._precision():
            if replace:
                out: Tensor = torch.func.functional_call(self.chain, dict(replace), (inner,))
            else:
                out = self.chain(inner)
            if self._loss is not None and y is not None:
                out = self._loss(out, y)
                if not isinstance(out, Tensor) or out.numel() != 1:
                    raise LpnetError(
                        f"the loss returns {_what(out)}; it must return one number as a tensor (reduction 'mean')"
                    )
        self._watch(inner._version != before)
        if self._loss is None and not out.is_floating_point():
            raise LpnetError(
                f"unit {self.chain.high - 1} ({self.chain.names[self.chain.high - 1]!r}) returns {_what(out)} at a "
                "cut; only floating-point tensors carry a gradient: cut elsewhere"
            )
        base = out if out._base is None else out._base
        return out.clone() if isinstance(base, torch.nn.Parameter) else out

    def _watch(self, written: bool) -> None:
        """The first forward tells whether the first unit writes on its input, which must then be a copy."""
        if self._protect is None:
            self._protect = written
        elif written and not self._protect:
            raise LpnetError(
                f"unit {self.chain.low} ({self.chain.names[self.chain.low]!r}) wrote on its input, which it had not "
                "done before; let it clone its input"
            )

    def _copy(self, version: int) -> dict[str, Tensor]:
        """The parameters at a version, copied once for all forwards on it."""
        if version not in self._copies:
            self._copies[version] = {name: p.detach().clone() for name, p in self.trainable().items()}
        return self._copies[version]

    @contextmanager
    def _swapped(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Other values in the very memory of the parameters, behind autograd's back."""
        parameters = self.trainable()
        kept = {name: p.data.clone() for name, p in parameters.items()}
        try:
            for name, p in parameters.items():
                p.data.copy_(values[name])
            yield
        finally:
            for name, p in parameters.items():
                p.data.copy_(kept[name])

    # backward

    def backward(
        self, batch: int, gradient: Tensor | None = None, *, weight: float = 1.0, ready: Ready | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Gradients of a batch, whose stash is freed.

        Args:
            batch: id of a batch in flight.
            gradient: of the loss with respect to the output; None: the output is the loss.
            weight: of the loss, where the output is the loss.
            ready: called with the name and the gradient of a parameter as soon as that is known.

        Returns:
            Gradient with respect to the input (None on the first module), gradients of the parameters by name.
        """
        flight = self.flights.pop(batch)
        with torch.enable_grad():
            if flight.out is None:
                flight.out = self._run(flight, None, self._buffers())
            if weight != 1.0:
                gradient = torch.full_like(flight.out, weight)
            leaves: Mapping[str, Tensor] = flight.weights if flight.weights is not None else self.trainable()
            with _told(leaves, ready):
                if flight.out.requires_grad:
                    torch.autograd.backward(flight.out, gradient)
        flight.out = None
        gradients = {}
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name] = leaf.grad
                leaf.grad = None
        if all(other.version != flight.version for other in self.flights.values()):
            self._copies.pop(flight.version, None)
        if self.is_first:
            return None, gradients
        back = flight.x.grad
        return back if back is not None else torch.zeros_like(flight.x), gradients

    def _buffers(self) -> dict[str, Tensor]:
        """Throw-away buffers: running statistics have moved in the first forward and must not move again."""
        return {name: buffer.clone() for name, buffer in self.chain.named_buffers()}

    # measurements

    def fresh_forward(self, batch: int, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Input, as a leaf, and output or loss with the current parameters; buffers and batches in flight stay."""
        flight = Flight(batch, self._leaf(x), None, 0, None)
        with torch.enable_grad():
            return flight.x, self._run(flight, y, self._buffers())

    def fresh_backward(
        self, leaf: Tensor, out: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Gradients with respect to the input and the parameters, which go nowhere else.

        Args:
            leaf: input.
            out: output with its graph.
            gradient: of the loss with respect to it; None: it is the loss.
        """
        parameters = self.trainable()
        wanted = [*parameters.values(), *([leaf] if leaf.requires_grad else [])]
        if not wanted or not out.requires_grad:
            return (None if self.is_first else torch.zeros_like(leaf)), {}
        found = list(torch.autograd.grad(out, wanted, gradient, allow_unused=True))
        back = found.pop() if leaf.requires_grad else None
        if back is None and not self.is_first:
            back = torch.zeros_like(leaf)
        return back, {name: g for name, g in zip(parameters, found, strict=True) if g is not None}

    # checkpoints and diagnosis

    def restore(self, batch: int, x: Tensor, version: int, weights: dict[str, Tensor] | None) -> None:
        """Put a batch of a checkpoint back in flight: its graph is rebuilt, buffers do not move.

        Args:
            batch: id.
            x: its input.
            version: updates made before its forward.
            weights: what the forward ran on, for `stash`; batches of one version may share it.
        """
        flight = Flight(batch, self._leaf(x), None, version, weights)
        if self.kind == "stash":
            assert weights is not None
            for tensor in weights.values():
                tensor.requires_grad_(True)
            with torch.enable_grad():
                flight.out = self._run(flight, None, {**weights, **self._buffers()})
        self.flights[batch] = flight

    def diagnose(self, batch: int) -> tuple[int, Literal["input", "output", "loss"]]:
        """Global index of the unit that made a batch in flight not finite, and what is not finite."""
        flight = self.flights[batch]
        if not is_finite(flight.x):
            return self.chain.low, "input"
        found = self.chain.first_bad_unit(flight.x, flight.weights or {})
        return (found, "output") if found is not None else (self.chain.high - 1, "loss" if self.is_last else "output")

    # evaluation

    def evaluate(self, x: Tensor) -> Tensor:
        """Output in evaluation mode without gradients; afterwards every unit is in the mode it was in."""
        modes = [(module, module.training) for module in self.chain.modules()]
        self.chain.eval()
        try:
            with torch.no_grad(), self._precision():
                out: Tensor = self.chain(x if self._protect is False else x.clone())
            return out
        finally:
            for module, mode in modes:
                module.training = mode

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.chain.device.type, dtype=self._autocast, enabled=self._autocast is not None)


@contextmanager
def _told(leaves: Mapping[str, Tensor], ready: Ready | None) -> Iterator[None]:
    """Let `ready` hear of every gradient of a backward."""
    handles = []
    if ready is not None:
        for name, leaf in leaves.items():
            tell: Callable[[Tensor], None] = lambda leaf, name=name: ready(name, leaf.grad)  # type: ignore[misc]  # noqa: E731
            handles.append(leaf.register_post_accumulate_grad_hook(tell))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
