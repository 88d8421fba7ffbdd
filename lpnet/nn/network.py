"""Network: opening, stacks of layers, transitions between them, closing; the ranks share all layers together.

A transition is any module that may change the shape of the state; it counts as one layer. No communication but for
making it: collective over `comm`, which is duplicated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.nn import parts
from lpnet.nn.chain import ChainEngine
from lpnet.nn.context import Context
from lpnet.nn.layout import Layout, layout_for
from lpnet.nn.module_engine import ModuleEngine
from lpnet.nn.stack import LayerStack
from lpnet.nn.transition import TransitionEngine, prepare, shape_after
from lpnet.parallel.comm import as_comm
from lpnet.parallel.partition import Partition, uniform
from lpnet.parallel.shard import Shard


class Network(torch.nn.Module):
    """This rank's part of opening -> stack -> transition -> stack -> ... -> closing.

    Args:
        members: the opening, then stacks (LayerStack made without comm, the same on every rank) and transitions (any
            module) in any order, then the closing. Modules only: a network of one-layer stacks.
        comm: an mpi4py communicator or lpnet Comm; None: one rank.
        partition: who owns which layers, transitions included; uniform by default.
        seed: of the masks of dropout.
        dtype: of states where there is no stack.

    Raises:
        UsageError: parts that do not fit, more ranks than layers; on every rank, before any message.
    """

    def __init__(
        self,
        members: Sequence[torch.nn.Module],
        *,
        comm: Any = None,
        partition: Partition | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if len(members) < 3:
            raise UsageError(f"a network is an opening, layers and a closing; got {len(members)} parts")
        for end, module in (("first", members[0]), ("last", members[-1])):
            if isinstance(module, LayerStack):
                raise UsageError(f"the {end} part of a network is a stack; put torch.nn.Identity() there")
        middle: list[torch.nn.Module] = []
        for part in members[1:-1]:
            if middle and isinstance(part, LayerStack) and isinstance(middle[-1], LayerStack):
                middle.append(torch.nn.Identity())  # their layouts in memory may differ
            middle.append(part)
        stacks = [part for part in middle if isinstance(part, LayerStack)]
        if any(stack.comm.size > 1 for stack in stacks):
            raise UsageError("the stacks of a network are made without comm; give comm to the network")
        kinds = {(stack.dtype, stack.compute) for stack in stacks} or {(dtype, dtype)}
        if len(kinds) > 1:
            raise UsageError(f"the stacks of a network have {len(kinds)} precisions; give them the same dtype")
        (self._dtype, self.compute), self.seed, self.h = kinds.pop(), seed, 1.0
        counts = [part.num_layers if isinstance(part, LayerStack) else 1 for part in middle]
        self.bounds = [sum(counts[:k]) for k in range(len(counts) + 1)]
        self.num_layers = self.bounds[-1]
        size = 1 if comm is None else comm.size
        self.partition = partition or uniform(self.num_layers, size)
        if (self.partition.layers, self.partition.ranks) != (self.num_layers, size):
            raise UsageError(
                f"the partition shares {self.partition.layers} layers among {self.partition.ranks} ranks; the network "
                f"has {self.num_layers} layers, transitions included, and {size} ranks"
            )
        self.comm = as_comm(comm)
        self.low, self.high = self.partition.block(self.comm.rank)
        self._part_of = [k for k, count in enumerate(counts) for _ in range(count)]
        self._steps = [(part.step, part.h) if isinstance(part, LayerStack) else None for part in middle]
        self.names = self._named(middle)
        self._plans = [
            None if isinstance(part, LayerStack) else copy.deepcopy(part).to("meta").eval() for part in middle
        ]
        self._ends: tuple[torch.nn.Module, torch.nn.Module] | None = (members[0], members[-1])
        for k, part in enumerate(middle):
            low, high = self.local_rows(k)
            if low < high and isinstance(part, LayerStack):
                begin = self.bounds[k]
                self.add_module(self.names[k], part.part(low - begin, high - begin, begin))
            elif low < high:
                self.add_module(self.names[k], prepare(copy.deepcopy(part), self._dtype))
        self._make_engine()

    def _named(self, middle: Sequence[torch.nn.Module]) -> list[str]:
        counts, names = {"stack": 0, "transition": 0}, []
        for part in middle:
            kind = "stack" if isinstance(part, LayerStack) else "transition"
            names.append(f"{kind}{counts[kind]}")
            counts[kind] += 1
        return names

    def _make_engine(self) -> None:
        engines: dict[str, Any] = {}
        for k, name in self.local_parts():
            module = self._modules[name]
            if isinstance(module, LayerStack):
                engines[name] = module.engine
            else:
                assert module is not None
                engines[name] = TransitionEngine(module, self._dtype, self.compute, self.bounds[k], self.seed)
        self.engine = ChainEngine(self, engines)

    # places

    def part_of(self, point: int) -> int:
        """The part that a point enters; the number of parts for the last point. No communication."""
        return self._part_of[point] if point < self.num_layers else len(self.names)

    def local_rows(self, k: int) -> tuple[int, int]:
        """Global layers of a part that this rank owns. No communication."""
        return max(self.bounds[k], self.low), min(self.bounds[k + 1], self.high)

    def local_parts(self) -> list[tuple[int, str]]:
        """Number and name of the parts with layers on this rank. No communication."""
        rows = [self.local_rows(k) for k in range(len(self.names))]
        return [(k, name) for k, (name, (low, high)) in enumerate(zip(self.names, rows, strict=True)) if low < high]

    def step_size(self, k: int) -> float:
        """h of a stack; 1 for a transition, which has none. No communication."""
        step = self._steps[k]
        return 1.0 if step is None else step[1]

    @property
    def barriers(self) -> list[int]:
        """Points that every level keeps: both ends of every transition."""
        return sorted(set(self.bounds))

    @property
    def starts(self) -> dict[str, int]:
        """First layer of every part, by the first word of its parameters' names."""
        return dict(zip(self.names, self.bounds, strict=False))

    @property
    def local_layers(self) -> int:
        """Layers of this rank."""
        return self.high - self.low

    @property
    def dtype(self) -> torch.dtype:
        """Precision of parameters and states."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where parameters and states live."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def take_ends(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """Opening and closing, once. No communication."""
        if self._ends is None:
            raise UsageError("this network is in a LayerParallel already; make another one")
        ends, self._ends = self._ends, None
        return ends

    # shapes

    def layouts(self, shape: parts.StateShape) -> list[Layout]:
        """Layout of the state that enters each part, and of the last one. No communication.

        Raises:
            UsageError: a part that does not take its state.
        """
        found: list[Layout] = []
        before: Any = None  # the stack that made the state
        for step, plan in zip(self._steps, self._plans, strict=True):
            if step is not None:
                step[0].check(shape)
                before = step[0]
                found.append(layout_for(before, shape))
            else:
                assert plan is not None
                found.append(layout_for(before, shape))
                shape, before = shape_after(plan.to(self._dtype), shape, self._dtype), None
        return [*found, layout_for(before, shape)]

    def check(self, shape: parts.StateShape) -> None:
        """Refuse a first state that does not fit. No communication."""
        self.layouts(shape)

    def final_shape(self, shape: parts.StateShape) -> parts.StateShape:
        """Shape of the last state. No communication."""
        return self.layouts(shape)[-1].shape

    def rehearse(self, shape: parts.StateShape, context: Context) -> None:
        """Try states of these shapes on the local stacks. No communication."""
        layouts = self.layouts(shape)
        for k, name in self.local_parts():
            engine = self.engine.engines[name]
            if isinstance(engine, ModuleEngine) and not isinstance(engine, TransitionEngine):
                engine.rehearse(layouts[k].shape, context)

    # torch

    def forward(self, u: Tensor) -> Tensor:
        """Not used alone: a network is propagated by LayerParallel."""
        raise UsageError("a Network is propagated by LayerParallel(network); call that")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert the parameters; the engines follow."""
        result = super()._apply(fn, recurse)
        floats = [p.dtype for p in self.parameters()]
        if floats and floats[0] != self._dtype:
            self._dtype = self.compute = floats[0]
        self._make_engine()
        return result

    def shards(self, prefix: str = "") -> list[Shard]:
        """Local parameters and buffers with global names. No communication."""
        out: list[Shard] = []
        for _, name in self.local_parts():
            module = self._modules[name]
            if isinstance(module, LayerStack):
                out += module.shards(name)
            else:
                assert module is not None
                out += [Shard(f"{name}.{key}", tensor) for key, tensor in module.state_dict(keep_vars=True).items()]
        return out

    def rows(self) -> list[Any]:
        """Every local layer: copies of a stack's tensors, or a copy of a transition. No communication."""
        out: list[Any] = []
        for _, name in self.local_parts():
            module = self._modules[name]
            out += module.rows() if isinstance(module, LayerStack) else [copy.deepcopy(module)]
        return out

    def serial_layers(self, rows: Sequence[Any]) -> list[torch.nn.Module]:
        """All layers as ordinary torch modules, from the `rows` of all ranks. No communication."""
        layers: list[torch.nn.Module] = []
        for k, step in enumerate(self._steps):
            mine = rows[self.bounds[k] : self.bounds[k + 1]]
            layers += mine if step is None else [step[0].serial_layer(r, step[1], i) for i, r in enumerate(mine)]
        return layers
