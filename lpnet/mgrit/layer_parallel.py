"""LayerParallel: a network whose layers are shared by the ranks, as an ordinary torch module.

    opening (first rank) -> Propagate: u_0 to u_N over all ranks -> closing (last rank) -> Everywhere: logits on all

Propagate is one node of the autograd graph on every rank: its forward is the multigrid solve for the
states, its backward the one for the adjoints, so that `loss.backward()` works in an ordinary loop. Ranks
that hold neither opening nor closing pass a scalar through the graph in their place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from lpnet.config import MGRIT
from lpnet.errors import UsageError
from lpnet.mgrit import coarse
from lpnet.mgrit.averaging import Replicated
from lpnet.mgrit.batching import as_setting, fixed_choice, lies_side_by_side, measure
from lpnet.mgrit.direct import DirectSolves
from lpnet.mgrit.flight import Everywhere, Flight, Propagate
from lpnet.mgrit.hierarchy import build
from lpnet.mgrit.propagator import Propagator
from lpnet.mgrit.warm import WarmStarts
from lpnet.nn import dropout, parts
from lpnet.nn.context import Context, MaskKey, call, prepared, signature
from lpnet.nn.network import Network
from lpnet.nn.spatial import Transfer, rehearse, transfers
from lpnet.nn.stack import LayerStack
from lpnet.parallel.comm import Comm
from lpnet.parallel.grid import Grid
from lpnet.parallel.shard import Shard


class LayerParallel(WarmStarts, DirectSolves, Replicated, torch.nn.Module):
    """opening -> stack -> closing, trained in parallel across its layers.

    Every rank gives the same batch x and gets the logits; parameters() are this rank's own, for any torch optimiser.
    With gradients enabled the states are found by multigrid as `mgrit` says; without (evaluation) by exact propagation.

    Args:
        stack: the layers; or a Network, which brings opening and closing along (also as `network`).
        opening: (batch, ...) to the state (batch, width), or a tuple of tensors; kept on the first rank only.
        closing: state to logits; kept on the last rank only.
        mgrit: settings; fixed iterations need a warm start: `net(x, batch=id)`, the same samples under the same id.
            A start without kept states iterates to the tolerance instead.
        grid: data replicas, where there are any: the stack is made with comm=grid.layers, every replica gives its
            part of the batch (`grid.part`), and the backward averages the gradients over the replicas.
        transfer: restriction and prolongation of states for coarse levels, with MGRIT(spatial="user").

    Raises:
        UsageError: on every rank: parts that do not fit.
    """

    def __init__(
        self,
        stack: LayerStack | Network | None = None,
        *,
        opening: torch.nn.Module | None = None,
        closing: torch.nn.Module | None = None,
        mgrit: MGRIT | None = None,
        network: Network | None = None,
        grid: Grid | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        super().__init__()
        stack = network if stack is None else stack
        if stack is None or (isinstance(stack, Network) == (opening is not None or closing is not None)):
            raise UsageError(
                "LayerParallel takes a LayerStack with opening= and closing=, or a Network, which has both"
            )
        if isinstance(stack, Network):
            opening, closing = stack.take_ends()
        if opening is None or closing is None:
            raise UsageError("a LayerStack needs an opening and a closing; give torch.nn.Identity() for none")
        self.stack = stack
        self.mgrit = mgrit or MGRIT()
        several = isinstance(stack, Network)
        self.transfers = transfers(self.mgrit, transfer, None if several else cast(LayerStack, stack).step)
        if several and self.mgrit.levels > 1:
            self._check_several()
        coarse.check(self.mgrit, stack)
        self.is_first, self.is_last = stack.low == 0, stack.high == stack.num_layers
        self.opening: torch.nn.Module | None = opening.to(stack.dtype) if self.is_first else None
        self.closing: torch.nn.Module | None = closing.to(stack.dtype) if self.is_last else None
        self.hierarchy = build(stack.num_layers, self.mgrit, barriers=stack.barriers)
        # None until it is measured; intervals of different stacks do not lie side by side
        self.batched = (False,) if several else fixed_choice(self.mgrit)
        self.grid = self._checked(grid or Grid(stack.comm), stack.comm.size)
        self._mean = None
        self._join_replicas()
        self._anchor = torch.zeros((), dtype=stack.dtype, requires_grad=True)
        self._pools: dict[tuple[parts.StateShape, str], list[Propagator]] = {}
        self._flight: Flight | None = None  # the newest pass
        self._shapes: dict[Any, parts.StateShape] = {}
        self._key = MaskKey()  # of the next pass in train mode
        self._logits: dict[tuple[Any, ...], tuple[tuple[int, ...], torch.dtype]] = {}
        self._latest: Propagator | None = None  # of the newest pass that is not a comparison
        self._latest_adjoint = False
        self._begin_cache()

    def _check_several(self) -> None:
        if self.mgrit.batching not in ("off", "auto") and self.mgrit.batching != ["off"]:
            raise UsageError(
                f"mgrit.batching is {self.mgrit.batching}; intervals of a network of several stacks differ and do not "
                f"lie side by side: set it to off"
            )
        if self.mgrit.storage != "all" or self.mgrit.initial_guess in ("constant", "class_mean"):
            raise UsageError(
                f"mgrit.storage {self.mgrit.storage} and initial_guess {self.mgrit.initial_guess}: a network of "
                f"several stacks takes storage all and the guess kept, zero or coarse, as its states differ in shape"
            )

    @property
    def comm(self) -> Comm:
        """The ranks of the stack: of one replica, where there are several."""
        return self.stack.comm

    @property
    def partition(self) -> Any:
        """Who owns which layers."""
        return self.stack.partition

    # forward

    def begin_step(self, step: int, *, first: int = 0) -> None:
        """The passes from here on belong to this training step: dropout draws new masks, the same in a repetition.

        Without it every pass in train mode draws new masks. No communication.

        Args:
            step: number of the step.
            first: global index of the first sample of x, where replicas share a batch.
        """
        self._key = MaskKey(step, 0, first)

    def forward(self, x: Tensor, batch: int | None = None, side: Any = None, classes: Tensor | None = None) -> Tensor:
        """Logits on every rank. Collective over comm; so is the backward of what is made from them.

        Args:
            x: (batch, ...), the same on every rank.
            batch: id of these very samples; their states start the next solve under this id.
            side: a tensor, or a tuple or dict of tensors, that does not change over depth (a mask); given to every
                layer, and to an opening or closing that takes one, as `side=`. The same on every rank.
            classes: (batch,) of the samples, whole numbers from 0: for mgrit.initial_guess class_mean.
        """
        logits = self.local_logits(x, batch, side, classes) if torch.is_grad_enabled() else self.exact_logits(x, side)
        if self.comm.size == 1:
            return cast(Tensor, logits)
        key = (tuple(x.shape), x.dtype)
        if key not in self._logits:
            mine = (tuple(logits.shape), logits.dtype) if self.is_last and logits is not None else None
            self._logits[key] = self.comm.broadcast_object(mine, self.comm.size - 1)
        shape, dtype = self._logits[key]
        return cast(Tensor, Everywhere.apply(self.comm, shape, dtype, self._anchor if logits is None else logits))

    def local_logits(
        self,
        x: Tensor,
        batch: int | None = None,
        side: Any = None,
        classes: Tensor | None = None,
        *,
        exact: bool = False,
        keeps: bool = True,
    ) -> Tensor:
        """Logits on the last rank, elsewhere a scalar connected to the graph.

        Neighbour messages only, in the backward too, which every rank must run. A cold start to a tolerance reduces.

        Args:
            x, batch, side, classes: as `forward`.
            exact: propagate exactly, forward and back, and keep nothing: the gradient to compare with.
            keeps: the backward keeps states and adjoints for the next visit of the batch.
        """
        self._check_batch(batch, tuple(x.shape))
        self._follow_parameters()
        context = self._context(side, graphs=True)
        u0, shape = self._enter(x, context)
        serial = exact or (self.rung is not None and self.rung.levels == 1)
        propagator = self._take(shape, "exact" if serial and self.mgrit.storage == "c_points" else "solve")
        named = dict(self.stack.named_parameters())
        self._flight = Flight(self, propagator, batch, context, list(named), classes=classes, exact=exact, keeps=keeps)
        out = Propagate.apply(self._flight, u0 if u0 is not None else self._anchor, self._anchor, *named.values())
        return out if self.closing is None else self._close(out, shape, context)

    @torch.no_grad()
    def exact_logits(self, x: Tensor, side: Any = None) -> Tensor | None:
        """Logits by exact propagation on the last rank, None elsewhere. Neighbour messages only."""
        context = self._context(side, graphs=False)
        u0, shape = self._enter(x, context)
        propagator = self._take(shape, "evaluate")
        propagator.forward(u0, start="zero", iterations=0, context=context)
        return None if self.closing is None else self._close(propagator.last_state(), shape, context)

    def _context(self, side: Any, *, graphs: bool) -> Context:
        key = self._key if self.training else None
        if key is not None:
            self._key = replace(key, micro=key.micro + 1)
        return Context(self.training, prepared(side, self.stack.dtype), key, graphs)

    def _enter(self, x: Tensor, context: Context) -> tuple[Tensor | None, parts.StateShape]:
        """u_0 on the first rank, and the shape of the states on every rank, agreed and tried once per shape of x."""
        key = (tuple(x.shape), signature(context.side), context.training)
        if key in self._shapes:
            u0 = self._open(x, context)
            return None if u0 is None else parts.join(u0), self._shapes[key]
        u0 = self.comm.together(lambda: self._open(x, context))
        shape = self.comm.broadcast_object(None if u0 is None else parts.shape_of(u0))
        self.comm.together(lambda: self._rehearse(shape, context))
        self._shapes[key] = shape
        return None if u0 is None else parts.join(u0), shape

    def _rehearse(self, shape: parts.StateShape, context: Context) -> None:
        self.stack.rehearse(shape, context)
        if self.transfers:
            rehearse(self.transfers, shape, self.stack, context)

    def _open(self, x: Tensor, context: Context) -> Any:
        if x.dim() < 1 or x.shape[0] < 1:
            raise UsageError(f"a batch needs at least 1 sample; x has the shape {tuple(x.shape)}")
        if self.opening is None:
            return None
        self._begin_masks(self.opening, -1, x.shape[0], context)
        u0 = call(self.opening, x.to(self.stack.dtype) if x.is_floating_point() else x, context.side)
        self.stack.check(parts.shape_of(u0))
        return u0

    def _close(self, last: Tensor, shape: parts.StateShape, context: Context) -> Tensor:
        assert self.closing is not None
        self._begin_masks(self.closing, self.stack.num_layers, parts.samples(shape), context)
        return cast(Tensor, call(self.closing, parts.split(last, self.stack.final_shape(shape)), context.side))

    def _begin_masks(self, module: torch.nn.Module, layer: int, batch: int, context: Context) -> None:
        """Masks of the opening (layer -1) and closing (layer N)."""
        found = dropout.dropouts(module)
        dropout.begin(found, context.key, {}, seed=self.stack.seed, layer=layer, batch=batch)

    def _take(self, shape: parts.StateShape, use: str = "solve") -> Propagator:
        """States that no live graph holds: to solve for, to show afterwards, to propagate exactly or to evaluate."""
        pool = self._pools.setdefault((shape, use), [])
        for propagator in pool:
            if propagator.stack is self.stack and not propagator.in_use():
                return propagator.select()
        if use in ("solve", "show"):
            batched = self.choose_batching(shape)
            more: Any = {"batched": batched, "show": use == "show", "grid": self.grid, "transfers": self.transfers}
            made = Propagator(self.stack, self.hierarchy, self.mgrit, shape, **more)
        else:
            one, keep = MGRIT(levels=1), use == "exact"
            made = Propagator(self.stack, build(self.stack.num_layers, one), one, shape, keep=keep, show=keep)
        pool.append(made)
        return made

    def prepare(self, x: Tensor) -> None:
        """Agree on the shape of the states for a batch like x, and measure what is to be measured. Collective."""
        context = Context(self.training, prepared(None, self.stack.dtype), None, False)
        with torch.no_grad():
            _, shape = self._enter(x, context)
        self.choose_batching(shape)

    def choose_batching(self, shape: parts.StateShape) -> tuple[bool, ...]:
        """Per level, whether intervals are relaxed side by side. With `mgrit.batching: auto` the first call measures
        (collective over all replicas, one reduction); the choice is written to `self.mgrit` and never changes again.

        Args:
            shape: of a state, (batch, ...).
        """
        if self.batched is None:
            if lies_side_by_side(self.stack):
                self.batched = measure(self.stack, self.hierarchy, self.mgrit, shape, self.world)
            else:
                self.batched = (False,)
            self.mgrit = as_setting(self.batched, self.mgrit)
        return self.batched

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the parameters and settings, not the states in memory."""
        fresh = WarmStarts.__new__(WarmStarts)
        fresh.mgrit = self.mgrit
        fresh._begin_cache()
        state = {**super().__getstate__(), **vars(fresh)}  # type: ignore[dict-item]
        return {**state, "_pools": {}, "_latest": None, "_flight": None, "_mean": None}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moving or converting the parameters makes all states anew."""
        result = super()._apply(fn, recurse)
        self._anchor = torch.zeros(
            (), dtype=self.stack.dtype, device=next(self.parameters(), self._anchor).device, requires_grad=True
        )
        self._pools.clear()
        self._cache.clear()
        self._latest = self._flight = None
        self._solvers = []
        self._join_replicas()
        return result

    # parameters by global name

    def shards(self) -> list[Shard]:
        """Local parameters and buffers with global names. No communication."""
        out = self.stack.shards()
        for prefix, module in (("opening", self.opening), ("closing", self.closing)):
            if module is not None:
                saved = module.state_dict(keep_vars=True)  # without buffers that are not persistent
                out += [Shard(f"{prefix}.{n}", t) for n, t in saved.items() if isinstance(t, Tensor)]
        return out

    def to_serial(self) -> torch.nn.Module | None:
        """The equivalent ordinary torch module on rank 0, None elsewhere. Collective over comm."""
        from lpnet.mgrit.serial import gather_serial

        return gather_serial(self)
