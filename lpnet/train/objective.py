"""Loss and regularisation of one batch, forward and backward, and the place where a number is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from lpnet.errors import NumericsError
from lpnet.optim.regularization import Regularization
from lpnet.optim.rows import RowSum, trainable

if TYPE_CHECKING:
    from lpnet.data.samples import Samples
    from lpnet.mgrit.layer_parallel import LayerParallel


class Objective:
    """Loss and regularisation of one batch, forward and backward, on local parameters."""

    def __init__(self, net: LayerParallel, regularization: Regularization) -> None:
        self.net, self.regularization = net, regularization
        self.shards = trainable(net.shards())
        self.rows = RowSum(self.shards, net.partition, starts=net.stack.starts)
        self.stop_requested = False
        self.step = 0  # trials of one step draw the same masks
        self._objectives: list[torch.Tensor] = []  # of the parts of the batch

    def forward(
        self, samples: Samples, batch: int | None, *, exact: bool = False, keeps: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Local loss and stop flag, and the regularisation's terms. Neighbour messages only.

        Args:
            samples: the batch.
            batch: its id.
            exact: propagate exactly and keep nothing.
            keeps: the backward keeps states for the next visit.
        """
        self._objectives = []  # the graphs of a rejected trial die before the next forward
        net, replicas = self.net, self.net.grid.replicas
        own, weight = net.grid.part(len(samples))  # of this data replica
        by_class = net.mgrit.initial_guess == "class_mean"
        parts = min(net.mgrit.microbatches, own.stop - own.start)
        bounds = [own.start + (own.stop - own.start) * k // parts for k in range(parts + 1)]
        for low, high in zip(bounds, bounds[1:], strict=False):
            net.begin_step(self.step, first=low)
            objective = net.local_logits(
                samples.x[low:high],
                batch if parts == 1 else None,
                classes=samples.y[low:high] if by_class else None,
                exact=exact,
                keeps=keeps,
            )
            if net.is_last:
                objective = torch.nn.functional.cross_entropy(objective, samples.y[low:high])
                if replicas * parts > 1:
                    objective = objective * (weight * (high - low) / (own.stop - own.start))
            self._objectives.append(objective)
        # read when all parts are on their way
        loss = sum(float(objective.detach()) for objective in self._objectives) / replicas if net.is_last else 0.0
        return np.array([loss, float(self.stop_requested)]), self.regularization.terms()

    def counted(self, packed: np.ndarray) -> np.ndarray:
        """Terms of parameters, which all data replicas have alike, for a sum over all ranks. No communication."""
        return packed.ravel() * float(self.net.grid.leads)

    def backward(self) -> None:
        """Gradients of the latest forward in .grad, regularisation included. Neighbour messages only."""
        for shard in self.shards:
            shard.tensor.grad = None
        # one pass: the parts in the reverse order on every rank, each parameter's gradient finished once
        torch.autograd.backward(self._objectives)
        self._objectives = []
        self.regularization.add_gradient()

    def first_problem(self, what: str, step: int, samples: Samples) -> NumericsError:
        """The error for a value that is not finite, naming rank and layer where they can be told. Collective."""
        comm = self.net.world
        places = [place for place in comm.all_gather_objects(self._first_parameter()) if place is not None]
        seen = [] if places else [text for text in comm.all_gather_objects(self._first_state(samples)) if text]
        seen.sort(key=lambda text: not text.startswith("first seen"))  # the samples of one data replica may do it alone
        found = places[0] if places else seen[0]
        return NumericsError(f"step {step}: the {what} is not finite; {found}. Lower optim.lr, or set optim.clip_norm")

    def _first_parameter(self) -> str | None:
        """The first parameter of this rank that is not finite. No communication."""
        rank = f"on rank {self.net.comm.rank}/{self.net.comm.size}"
        for shard in self.shards:
            rows = torch.isfinite(shard.tensor).reshape(shard.tensor.shape[0], -1).all(1)
            if not rows.all():
                first = int((~rows).nonzero()[0])
                layer = "" if shard.rows is None else f", layer {shard.rows[0] + first}"
                return f"so is the parameter {shard.name}{layer}, {rank}"
        return None

    @torch.no_grad()
    def _first_state(self, samples: Samples) -> str | None:
        """Where exact propagation leaves the finite numbers, found on rank 0. Collective."""
        serial = self.net.to_serial()
        if serial is None:
            return None
        ranks = self.net.partition.ranks
        part, _ = self.net.grid.part(len(samples))
        u = serial.opening(samples.x[part].to(self.net.stack.dtype))  # type: ignore[operator]
        if not torch.isfinite(u).all():
            return f"first seen in the state after the opening, on rank 0/{ranks}"
        for layer, module in enumerate(serial.layers):  # type: ignore[arg-type]
            u = module(u)
            if not torch.isfinite(u).all():
                return f"first seen in the state after layer {layer}, on rank {self.net.partition.owner(layer)}/{ranks}"
        if len(self.net.hierarchy.levels) > 1:
            return "exact propagation is finite, so multigrid diverges: raise its iterations or lower mgrit.levels"
        return "all states and parameters are finite"
