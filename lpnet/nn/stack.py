"""LayerStack: one rank's block of equal residual layers, as a few tensors with a leading layer axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.nn.context import Block, Context
from lpnet.nn.module_engine import ModuleEngine
from lpnet.nn.module_step import ModuleStep
from lpnet.nn.parts import StateShape
from lpnet.nn.steps import Step
from lpnet.parallel.comm import as_comm
from lpnet.parallel.partition import Partition, uniform
from lpnet.parallel.shard import Shard
from lpnet.seeding import generator_for


class LayerStack(torch.nn.Module):
    """N equal layers u_{i+1} = u_i + h F(u_i; theta_i), h = final_time / N, shared by the ranks.

    Collective over `comm` (it is duplicated). Every layer's initial parameters come from (seed, layer), so that
    they do not depend on the number of ranks.

    Args:
        step: the layer; or a function without arguments that makes the torch module F of one layer.
        num_layers: N.
        final_time: T.
        comm: an mpi4py communicator or lpnet Comm; None: one rank.
        seed: seed of the initial parameters.
        dtype: precision of parameters and states; bfloat16: float32 parameters and states, F in bfloat16.
        partition: who owns which layers; uniform by default.

    Raises:
        UsageError: more ranks than layers, on every rank, before any message.
    """

    def __init__(
        self,
        step: Step | Callable[[], torch.nn.Module],
        *,
        num_layers: int,
        final_time: float = 1.0,
        comm: Any = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        partition: Partition | None = None,
    ) -> None:
        super().__init__()
        size = 1 if comm is None else comm.size
        if final_time <= 0:
            raise UsageError(f"final_time is {final_time}; it must be greater than 0")
        self.partition = partition or uniform(num_layers, size)
        if self.partition.layers != num_layers or self.partition.ranks != size:
            raise UsageError(
                f"the partition shares {self.partition.layers} layers among {self.partition.ranks} ranks; "
                f"the stack has {num_layers} layers and {size} ranks"
            )
        self.comm = as_comm(comm)
        self.step: Step = ModuleStep(step) if callable(step) else step
        self.compute, self.seed = dtype, seed
        self.num_layers, self.offset = num_layers, 0
        self.h = final_time / num_layers
        self.low, self.high = self.partition.block(self.comm.rank)
        self.comm.alike("first" if self.low == 0 else "last" if self.high == num_layers else "middle")
        kept = torch.float32 if dtype == torch.bfloat16 else dtype
        rows = [self.step.initial(generator_for(seed, "stack", layer=layer)) for layer in range(self.low, self.high)]
        modules = isinstance(self.step, ModuleStep)
        transient = self.step.transient() if isinstance(self.step, ModuleStep) else set()
        for name, first in rows[0].items():
            stacked = torch.stack([row[name].detach() for row in rows])
            stacked = stacked.to(kept) if stacked.is_floating_point() else stacked
            if modules and not isinstance(first, torch.nn.Parameter):
                self.register_buffer(name, stacked, persistent=name not in transient)
            else:
                wanted = first.requires_grad or not modules
                self.register_parameter(name, torch.nn.Parameter(stacked, requires_grad=wanted))
        self._make_engine()

    def _make_engine(self) -> None:
        tensors: dict[str, Any] = {**self._parameters, **self._buffers}
        self.engine = self.step.engine(tensors, self.compute, Block(self.low, self.h, self.seed, self.offset))

    @property
    def starts(self) -> dict[str, int] | None:
        """None: rows are layers of the network."""
        return None

    @property
    def barriers(self) -> tuple[int, ...]:
        """Points that every level keeps: none."""
        return ()

    @property
    def local_layers(self) -> int:
        """Layers of this rank."""
        return self.high - self.low

    @property
    def dtype(self) -> torch.dtype:
        """Precision of parameters and states."""
        return next(self.parameters()).dtype

    def extra_repr(self) -> str:
        """Settings, without communication."""
        return f"{self.step}, layers {self.low}..{self.high - 1} of {self.num_layers}, h={self.h:.6g}"

    def forward(self, u: Tensor) -> Tensor:
        """Not used alone: a stack is propagated by LayerParallel."""
        raise UsageError("a LayerStack is propagated by LayerParallel(stack, ...); call that")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert the parameters (net.double(), net.to(...)); the fused weights follow."""
        result = super()._apply(fn, recurse)
        self.compute = self.dtype if self.compute != torch.bfloat16 else self.compute
        self._make_engine()
        return result

    def shards(self, prefix: str = "stack") -> list[Shard]:
        """The local parameters and buffers with their global names and rows. No communication."""
        kept = [(n, b) for n, b in self.named_buffers() if n not in self._non_persistent_buffers_set]
        return [
            Shard(f"{prefix}.{name.replace('/', '.')}", tensor, (self.low, self.high), self.num_layers)
            for name, tensor in [*self.named_parameters(), *kept]
        ]

    def rehearse(self, shape: Sequence[Any], context: Context) -> None:
        """Try a state of this shape on the first layer. No communication.

        Raises:
            UsageError: the layer does not take it, or changes its shape.
        """
        if isinstance(self.engine, ModuleEngine):
            self.engine.rehearse(shape, context)

    def check(self, shape: Sequence[Any]) -> None:
        """Refuse a first state that does not fit. No communication."""
        self.step.check(shape)

    def final_shape(self, shape: StateShape) -> StateShape:
        """Shape of the last state; all are alike. No communication."""
        return shape

    def part(self, low: int, high: int, offset: int) -> LayerStack:
        """A stack with copies of the rows low..high-1, for a network that begins it after `offset` layers."""
        part = LayerStack.__new__(LayerStack)
        torch.nn.Module.__init__(part)
        part.partition, part.comm, part.step = self.partition, self.comm, self.step
        part.compute, part.seed, part.num_layers, part.h = self.compute, self.seed, self.num_layers, self.h
        part.low, part.high, part.offset = low, high, offset
        for name, parameter in self.named_parameters():
            rows = parameter.detach()[low:high].clone()
            part.register_parameter(name, torch.nn.Parameter(rows, requires_grad=parameter.requires_grad))
        for name, buffer in self.named_buffers():
            kept = name not in self._non_persistent_buffers_set
            part.register_buffer(name, buffer[low:high].clone(), persistent=kept)
        part._make_engine()
        return part

    def rows(self) -> list[Any]:
        """Copies of the parameters and buffers of every local layer. No communication."""
        found = [*self.named_parameters(), *self.named_buffers()]
        return [{name: tensor[i].detach().clone() for name, tensor in found} for i in range(self.local_layers)]

    def serial_layers(self, rows: Sequence[Any]) -> list[torch.nn.Module]:
        """All layers as ordinary torch modules, from the `rows` of all ranks. No communication."""
        return [self.step.serial_layer(tensors, self.h, i) for i, tensors in enumerate(rows)]
