"""One pass through the network in torch's autograd graph: its nodes, and how long its states are needed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpnet.mgrit.propagator import Propagator
from lpnet.nn.context import Context
from lpnet.parallel.comm import Comm

if TYPE_CHECKING:
    from lpnet.mgrit.layer_parallel import LayerParallel


class Flight:
    """One forward pass whose backward may still come: holds the states until it is over.

    Args:
        net: the network.
        propagator: memory and solvers.
        batch: id of the samples.
        context: what evaluations see.
        names: of the stack's parameters, in the order in which `Propagate` takes them.
        classes: of the samples (batch,), for class means.
        exact: propagate exactly and keep nothing.
        keeps: keep the states at the end.
    """

    def __init__(
        self,
        net: LayerParallel,
        propagator: Propagator,
        batch: int | None,
        context: Context,
        names: Sequence[str],
        *,
        classes: Tensor | None = None,
        exact: bool = False,
        keeps: bool = True,
    ) -> None:
        self.net, self.propagator, self.batch, self.context, self.names = net, propagator, batch, context, names
        self.classes, self.exact, self.keeps = classes, exact, keeps
        self.levels = 1 if exact else net.rung.levels if net.rung is not None else None
        self.node: weakref.ref[Any] | None = None

    def is_over(self) -> bool:
        """The graph has died, or its buffers have been freed by a backward."""
        node = self.node() if self.node is not None else None
        if node is None:
            return True
        try:
            node.saved_tensors  # noqa: B018  torch raises once the buffers are freed
        except RuntimeError:
            return True
        return False


class Propagate(torch.autograd.Function):
    """u_0 to u_N over all ranks, and back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, flight: Flight, u0: Tensor, anchor: Tensor, *parameters: Tensor
    ) -> Tensor:
        """u_N on the last rank, a scalar elsewhere. Neighbour messages only."""
        net = flight.net
        net.solve_states(flight, u0 if net.is_first else None)
        ctx.flight = flight
        flight.node = weakref.ref(ctx)
        flight.propagator.flight = weakref.ref(flight)
        ctx.save_for_backward(
            anchor
        )  # freed by torch with the rest of the graph: tells when the states may be used again
        return flight.propagator.last_state() if net.is_last else anchor.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The adjoint solve and the gradients. Neighbour messages only."""
        ctx.saved_tensors  # noqa: B018  torch's own error where the graph has been freed
        flight: Flight = ctx.flight
        net = flight.net
        net.solve_adjoints(flight, grad if net.is_last else None)
        gradients = flight.propagator.gradients()
        u0 = flight.propagator.first_adjoint() if net.is_first and ctx.needs_input_grad[1] else None
        wanted = zip(flight.names, ctx.needs_input_grad[3:], strict=True)
        return None, u0, None, *(gradients[name] if need else None for name, need in wanted)


class Everywhere(torch.autograd.Function):
    """The last rank's logits on every rank; every rank's gradient of them is the same, the last rank's is used."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, comm: Comm, shape: tuple[int, ...], dtype: torch.dtype, logits: Tensor
    ) -> Tensor:
        """Broadcast. Collective."""
        ctx.is_last = comm.rank == comm.size - 1
        ctx.dummy = (logits.shape, logits.dtype)
        out = logits.detach().clone() if ctx.is_last else torch.empty(shape, dtype=dtype)
        return comm.broadcast(out.contiguous(), comm.size - 1)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The last rank's gradient. No communication."""
        shape, dtype = ctx.dummy
        return None, None, None, grad if ctx.is_last else grad.new_zeros(shape, dtype=dtype)
