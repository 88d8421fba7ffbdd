"""What the layers of a network cost on this processor: measured as the engine runs them, floor and samples apart.

The cost of a call grows with the batch as floor + samples * each; a batch is small while it is below floor / each, and
then several ranks cannot share its samples to any use. No communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from lpnet.config import MGRIT, Config
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import Data, load
from lpnet.fdg.cuts import UnitCost
from lpnet.fdg.cuts import measure as time_units
from lpnet.mgrit.batching import fixed_choice, lies_side_by_side, sweep_seconds
from lpnet.mgrit.cycle import Action, Cycle, Edges
from lpnet.mgrit.hierarchy import Hierarchy, build
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.mgrit.network import build_network
from lpnet.mgrit.problems import AdjointProblem, StateProblem
from lpnet.mgrit.propagator import Propagator
from lpnet.nn.models import DTYPES
from lpnet.train.decoupled import sample_layout, units

LAYERS = 16  # of the network that is measured
SIDE_BY_SIDE = 4  # intervals of it
RUNS = 7


@dataclass(frozen=True)
class LayerCost:
    """Seconds per layer at one batch size.

    Args:
        samples: of the batch.
        evaluate: F of a layer, forward.
        advance: the update that follows it.
        pull: a step of the adjoint.
        gradient: parameters' gradient.
        copy: of a state; what relaxation and residuals cost.
        payload: bytes of a state.
        beside: what a further layer costs in a call that does several side by side, relative to the first.
    """

    samples: int
    evaluate: float
    advance: float
    pull: float
    gradient: float
    copy: float
    payload: int
    beside: float = 1.0

    @property
    def step(self) -> float:
        """Forward, adjoint and gradient of one layer: serial training."""
        return self.evaluate + self.advance + self.pull + self.gradient

    def of(self, action: Action, *, adjoint: bool, overhead: float) -> float:
        """Seconds of a recorded action."""
        alike = action.edges.number if action.edges is not None else 1
        number = (1 + (alike - 1) * self.beside) * action.work
        if action.kind == "evaluate":
            return self.evaluate * number
        if action.kind in ("step", "fas"):
            return (self.pull if adjoint else self.advance) * number
        if action.kind == "recompute":
            return (self.evaluate + self.advance) * number
        if action.kind == "gradient":
            return self.gradient * number
        if action.kind in ("send", "post", "halo_send", "halo_post"):
            return overhead
        return self.copy


@dataclass(frozen=True)
class Costs:
    """Costs at the run's batch, and how they depend on it.

    Args:
        at_batch: per layer at the run's batch.
        floor: seconds of a layer's training step without samples.
        each: further seconds per sample.
        small: per layer at an eighth of the batch; None: as if all costs grew with the samples alone.
    """

    at_batch: LayerCost
    floor: float
    each: float
    small: LayerCost | None = None

    def at(self, samples: int) -> LayerCost:
        """Costs per layer at any batch size, on a straight line through the two measured ones."""
        full, low = self.at_batch, self.small
        if samples == full.samples:
            return full

        def between(key: str) -> float:
            high = float(getattr(full, key))
            if low is None or low.samples == full.samples:
                return high * samples / full.samples
            rest = float(getattr(low, key))
            slope = max(high - rest, 0.0) / (full.samples - low.samples)
            floor = max(rest - slope * low.samples, 0.0)
            return floor + slope * samples

        costs = {key: between(key) for key in ("evaluate", "advance", "pull", "gradient", "copy")}
        beside = full.beside
        if low is not None and low.samples < full.samples:
            part = min(max((samples - low.samples) / (full.samples - low.samples), 0.0), 1.0)
            beside = low.beside + part * (full.beside - low.beside)
        return LayerCost(samples, **costs, payload=full.payload * samples // full.samples, beside=beside)

    @property
    def half_batch(self) -> float:
        """Samples that cost as much as the call floor."""
        return self.floor / max(self.each, 1e-15)


def measure(config: Config) -> Costs:
    """Time the layers of a configuration on this processor, one thread. No communication."""
    data = load(config.data, config.seed, DTYPES[config.model.dtype])
    samples = _samples(config, data)
    small = max(samples // 8, 1)
    full, part = (_at(config, data, count) for count in (samples, small))
    each = max(full.step - part.step, 0.0) / max(samples - small, 1)
    return Costs(full, max(full.step - each * samples, 0.0), each, part)


def batch_size(config: Config) -> int:
    """Samples per step. No communication."""
    return _samples(config, load(config.data, config.seed, DTYPES[config.model.dtype]))


def _samples(config: Config, data: Data) -> int:
    order = BatchOrder(len(data.train), config.data.batch_size, config.seed, "fixed")
    return len(data.train) if order.full else int(config.data.batch_size or len(data.train))


def measure_units(config: Config) -> tuple[UnitCost, ...]:
    """Time the units of a network of units on one batch, one thread. No communication."""
    data = load(config.data, config.seed, DTYPES[config.model.dtype])
    first = data.train.take(torch.arange(_samples(config, data)))
    network, narrow = units(config, data), config.model.dtype == "bfloat16"
    dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
    found = time_units(
        dict(sample_layout(network.to(dtype)).named_children()),
        sample_layout(first.x.to(dtype)),
        first.y,
        torch.nn.functional.cross_entropy,
        autocast=torch.bfloat16 if narrow else None,
    )
    return tuple(found)


def _at(config: Config, data: Data, samples: int) -> LayerCost:
    """Costs at a batch size."""
    short = replace(config, method="serial", model=replace(config.model, layers=LAYERS, initial_parameters=None))
    net = build_network(short, data)
    assert net.opening is not None
    u0 = net.opening(data.train.x[:samples].to(net.stack.dtype)).detach()
    propagator = Propagator(net.stack, net.hierarchy, net.mgrit, tuple(u0.shape))
    propagator.forward(u0, start="zero", iterations=0)
    propagator.adjoint(u0, start="zero", iterations=0)
    state, adjoint = propagator.forward_solver.problem, propagator.adjoint_solver.problem
    assert isinstance(state, StateProblem) and isinstance(adjoint, AdjointProblem)
    layers = range(LAYERS - 1)  # the last one brings the end of the network with it
    rows = propagator.workspace.rows(2)
    if propagator.slots.block:  # made block by block on the way back
        gradients = [op for i in range(LAYERS) for op in adjoint.bind([Action("gradient", 0, Edges(i, 1))])]
    else:
        gradients = adjoint.all_gradients()
    return LayerCost(
        samples,
        _time([op for i in layers for op in state.bind([Action("evaluate", 0, Edges(i, 1))])]) / len(layers),
        _time([op for i in layers for op in state.bind([Action("step", 0, Edges(i, 1))])]) / len(layers),
        _time([op for i in layers for op in adjoint.bind([Action("step", 0, Edges(i, 1))])]) / len(layers),
        _time(gradients) / LAYERS,
        _time([lambda: rows[0].copy_(rows[1])]),
        rows[0].numel() * rows.element_size(),
        _beside(net, tuple(u0.shape)),
    )


def _beside(net: LayerParallel, shape: tuple[int, ...]) -> float:
    """What a further interval costs beside another one, of four."""
    if not lies_side_by_side(net.stack):
        return 1.0
    mgrit = MGRIT(levels=2, coarsening=LAYERS // SIDE_BY_SIDE)
    alone, together = sweep_seconds(net.stack, build(LAYERS, mgrit), mgrit, shape, runs=RUNS)[:, 0]
    return float(min(max((SIDE_BY_SIDE * together / alone - 1) / (SIDE_BY_SIDE - 1), 0.0), 2.0))


def _time(ops: Sequence[Callable[[], object]]) -> float:
    found = []
    for _ in range(RUNS):
        began = time.thread_time()
        for op in ops:
            op()
        found.append(time.thread_time() - began)
    return median(found)


def program_cycles(hierarchy: Hierarchy, config: Config, ranks: int) -> list[Cycle]:
    """Recorders of all ranks. No communication."""
    from lpnet.mgrit.plan import partition_of

    partition, batched = partition_of(config, ranks), fixed_choice(config.mgrit) or ()
    return [Cycle(hierarchy, partition, rank, config.mgrit, batched) for rank in range(ranks)]
