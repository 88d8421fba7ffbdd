"""LayerParallel: a network whose layers are shared by the ranks, as an ordinary torch module.

    opening (first rank) -> Propagate: u_0 to u_N over all ranks -> closing (last rank) -> Everywhere: logits on all

Propagate is one node of the autograd graph on every rank: its forward is the multigrid solve for the
states, its backward the one for the adjoints, so that `loss.backward()` works in an ordinary loop. Ranks
that hold neither opening nor closing pass a scalar through the graph in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lpnet.config import MGRIT
from lpnet.errors import UsageError
from lpnet.mgrit.averaging import Replicated
from lpnet.mgrit.batching import as_setting, fixed_choice, measure
from lpnet.mgrit.direct import DirectSolves
from lpnet.mgrit.flight import Everywhere, Flight, Propagate
from lpnet.mgrit.hierarchy import build, direction, local_level
from lpnet.mgrit.propagator import Kept, Propagator, Start
from lpnet.mgrit.solver import Solver, SolveReport
from lpnet.nn import dropout, parts
from lpnet.nn.context import Context, MaskKey, call, prepared, signature
from lpnet.nn.module_step import ModuleStep
from lpnet.nn.network import Network
from lpnet.nn.spatial import Transfer, rehearse, transfers
from lpnet.nn.stack import LayerStack
from lpnet.parallel.comm import Comm
from lpnet.parallel.grid import Grid
from lpnet.parallel.shard import Shard


class LayerParallel(DirectSolves, Replicated, torch.nn.Module):
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
        self._pools: dict[tuple[parts.StateShape, bool, bool], list[Propagator]] = {}
        self._shapes: dict[Any, parts.StateShape] = {}
        self._key = MaskKey()  # of the next pass in train mode
        self._kept: dict[int, tuple[Kept, Kept | None]] = {}
        self._batches: dict[int, tuple[int, ...]] = {}
        self._logits: dict[tuple[Any, ...], tuple[tuple[int, ...], torch.dtype]] = {}
        self._latest: Propagator | None = None
        self._latest_adjoint = False
        self._warned = False

    def _check_several(self) -> None:
        if self.mgrit.storage != "all" or self.mgrit.initial_guess == "constant":
            raise UsageError(
                f"mgrit.storage {self.mgrit.storage} and initial_guess {self.mgrit.initial_guess}: a network of "
                f"several stacks takes storage all and another guess than constant, as its states differ in shape"
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

    def forward(self, x: Tensor, batch: int | None = None, side: Any = None) -> Tensor:
        """Logits on every rank. Collective over comm; so is the backward of what is made from them.

        Args:
            x: (batch, ...), the same on every rank.
            batch: id of these very samples; their states start the next solve under this id.
            side: a tensor, or a tuple or dict of tensors, that does not change over depth (a mask); given to every
                layer, and to an opening or closing that takes one, as `side=`. The same on every rank.
        """
        logits = self.local_logits(x, batch, side) if torch.is_grad_enabled() else self.exact_logits(x, side)
        if self.comm.size == 1:
            return cast(Tensor, logits)
        key = (tuple(x.shape), x.dtype)
        if key not in self._logits:
            mine = (tuple(logits.shape), logits.dtype) if self.is_last and logits is not None else None
            self._logits[key] = self.comm.broadcast_object(mine, self.comm.size - 1)
        shape, dtype = self._logits[key]
        return cast(Tensor, Everywhere.apply(self.comm, shape, dtype, self._anchor if logits is None else logits))

    def local_logits(self, x: Tensor, batch: int | None = None, side: Any = None) -> Tensor:
        """Logits on the last rank, elsewhere a scalar connected to the graph.

        Neighbour messages only, in the backward too, which every rank must run. A cold start to a tolerance reduces.
        """
        self._check_batch(batch, tuple(x.shape))
        self._follow_parameters()
        context = self._context(side, graphs=True)
        u0, shape = self._enter(x, context)
        propagator = self._take(shape)
        parameters = list(self.stack.parameters())
        out = Propagate.apply(
            Flight(self, propagator, batch, context), u0 if u0 is not None else self._anchor, self._anchor, *parameters
        )
        return out if self.closing is None else self._close(out, shape, context)

    @torch.no_grad()
    def exact_logits(self, x: Tensor, side: Any = None) -> Tensor | None:
        """Logits by exact propagation on the last rank, None elsewhere. Neighbour messages only."""
        context = self._context(side, graphs=False)
        u0, shape = self._enter(x, context)
        propagator = self._take(shape, exact=True)
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

    def _check_batch(self, batch: int | None, shape: tuple[int, ...]) -> None:
        """The same id means the same samples."""
        if batch is not None and self._batches.setdefault(batch, shape) != shape:
            raise UsageError(
                f"batch id {batch} was used for samples of shape {self._batches[batch]} and now for {shape}; "
                f"an id stands for the same samples: give other samples another id"
            )

    def _take(self, shape: parts.StateShape, exact: bool = False, show: bool = False) -> Propagator:
        """States that no live graph holds."""
        pool = self._pools.setdefault((shape, exact, show), [])
        for propagator in pool:
            if propagator.stack is self.stack and not propagator.in_use():
                return propagator
        if exact:
            one = MGRIT(levels=1)
            made = Propagator(self.stack, build(self.stack.num_layers, one), one, shape, keep=False)
        else:
            batched = self.choose_batching(shape)
            more: Any = {"batched": batched, "show": show, "grid": self.grid, "transfers": self.transfers}
            made = Propagator(self.stack, self.hierarchy, self.mgrit, shape, **more)
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
        (collective over comm, one reduction); the choice is written to `self.mgrit` and never changes again.

        Args:
            shape: of a state, (batch, ...).
        """
        if self.batched is None:
            stack = self.stack  # modules run one by one in any case
            alone = isinstance(stack, Network) or isinstance(stack.step, ModuleStep)
            self.batched = (False,) if alone else measure(cast(LayerStack, stack), self.hierarchy, self.mgrit, shape)
            self.mgrit = as_setting(self.batched, self.mgrit)
        return self.batched

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the parameters and settings, not the states in memory."""
        return {**super().__getstate__(), "_pools": {}, "_kept": {}, "_latest": None, "_mean": None}  # type: ignore[dict-item]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moving or converting the parameters makes all states anew."""
        result = super()._apply(fn, recurse)
        self._anchor = torch.zeros(
            (), dtype=self.stack.dtype, device=next(self.parameters(), self._anchor).device, requires_grad=True
        )
        self._pools.clear()
        self._kept.clear()
        self._latest = None
        self._join_replicas()
        return result

    # how a solve starts and what it leaves

    def _plan(self, solver: Solver, kept: Kept | None, iterations: int | None) -> tuple[Start, int | None]:
        """Where a solve starts and how long it runs: fixed iterations need kept states."""
        guess = solver.mgrit.initial_guess
        if solver.levels == 1:
            return "zero", 0
        if guess == "kept" and not self.mgrit.skip_first_down:
            return ("given", iterations) if kept is not None else ("coarse", None)
        if iterations is not None and not self._warned:
            self._warned = True
            logging.getLogger("lpnet").warning(
                "%s iterations from a cold start (initial_guess %s) can give gradients that point the wrong way; use "
                "initial_guess kept with net(x, batch=id), or leave the iterations out to iterate to a tolerance",
                iterations,
                guess,
            )
        return ("coarse" if self.mgrit.skip_first_down or guess == "coarse" else cast(Start, guess)), iterations

    def solve_states(self, flight: Flight, u0: Tensor | None) -> None:
        """The forward solve of a pass. Neighbour messages only, but for a cold start."""
        kept = self._kept.get(flight.batch, (None, None))[0] if flight.batch is not None else None
        start, iterations = self._plan(flight.propagator.forward_solver, kept, self.mgrit.forward_iterations)
        flight.propagator.forward(u0, start=start, kept=kept, iterations=iterations, context=flight.context)
        self._latest, self._latest_adjoint = flight.propagator, False

    def solve_adjoints(self, flight: Flight, lam: Tensor | None) -> None:
        """The adjoint solve of a pass; its states and adjoints are kept under its batch id. Messages as forward."""
        propagator = flight.propagator
        before = self._kept.get(flight.batch, (None, None)) if flight.batch is not None else (None, None)
        start, iterations = self._plan(propagator.adjoint_solver, before[1], self.mgrit.adjoint_iterations)
        propagator.adjoint(lam, start=start, kept=before[1], iterations=iterations)
        self._latest, self._latest_adjoint = propagator, True
        if flight.batch is not None and max(propagator.forward_solver.levels, propagator.adjoint_solver.levels) > 1:
            self._kept[flight.batch] = (
                propagator.kept(propagator.forward_solver, before[0]),
                propagator.kept(propagator.adjoint_solver, before[1]),
            )

    def _latest_solvers(self) -> list[Solver]:
        if self._latest is None:
            return []
        return [self._latest.forward_solver] + ([self._latest.adjoint_solver] if self._latest_adjoint else [])

    def residual_squares(self) -> np.ndarray:
        """Squared residuals of the latest forward and adjoint solve, zero at other ranks' points. No communication."""
        parts = [solver.pending() for solver in self._latest_solvers()]
        return np.concatenate(parts) if parts else np.zeros(0)

    def solve_reports(
        self, summed: np.ndarray, batch_size: int | None = None
    ) -> tuple[SolveReport | None, SolveReport | None]:
        """Reports of the latest forward and adjoint solve, from summed `residual_squares`. No communication.

        Args:
            summed: over net.comm, or over net.world where there are data replicas.
            batch_size: samples of the joined batch, where there are data replicas.
        """
        reports: list[SolveReport | None] = []
        at = 0
        for solver in self._latest_solvers():
            size = solver.pending().size
            reports.append(solver.report(summed[at : at + size], batch_size if self.grid.replicas > 1 else None))
            at += size
        return (*reports, None, None)[0], (*reports, None, None)[1]

    def forget(self) -> None:
        """Drop all kept states: the next solves start cold. No communication."""
        self._kept.clear()
        self._batches.clear()

    def kept_points(self, kind: str) -> list[int]:
        """Points of this rank whose states ("state") or adjoints ("adjoint") are kept. No communication."""
        levels, _ = direction(self.hierarchy, self.mgrit, adjoint=kind == "adjoint")
        if len(levels.levels) == 1:
            return []
        part = local_level(levels, 0, self.partition, self.comm.rank)
        return [p for p in part.c_points if p != levels.start]

    def kept_state(self) -> Iterator[tuple[str, int, Tensor]]:
        """Kept states as (name, point, payload), for checkpoints. No communication."""
        for batch, (states, adjoints) in sorted(self._kept.items()):
            for kind, kept in (("state", states), ("adjoint", adjoints)):
                if kept is not None:
                    for point, payload in zip(self.kept_points(kind), kept.states, strict=True):
                        yield f"mgrit/{kind}/{batch}", point, payload

    def load_kept_state(self, batch: int, blocks: dict[str, Callable[[int], Tensor]]) -> None:
        """Set the kept states of a batch id from functions point -> payload. No communication."""
        loaded: dict[str, Kept] = {}
        for kind, read in blocks.items():
            rows = [read(point).to(self.stack.dtype) for point in self.kept_points(kind)]
            loaded[kind] = Kept(torch.stack(rows) if rows else torch.empty(0, dtype=self.stack.dtype))
        if "state" in loaded:
            self._kept[batch] = (loaded["state"], loaded.get("adjoint"))

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
