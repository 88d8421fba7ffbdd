"""How a gradient that has landed becomes an update: accumulation, clipping, learning rate of its batch, remedies.

    land(batch, gradients)   [mean of M]   ->  norm with that of the modules behind  ->  clip  ->  optimiser  ->  rate

Weight decay and momentum act only where a gradient lands, because only then the optimiser steps. No communication.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.fdg.compensation import Compensation, Rule, predicted
from lpnet.fdg.schedule import Schedule

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


class Update:
    """The optimiser of one module.

    Args:
        parameters: of the module, by global name.
        optimizer: makes an optimiser of torch.optim from a list of parameters.
        scheduler: makes a learning-rate scheduler, which steps once per batch; None: a constant rate.
        compensation: the remedies.
        schedule: the delay table.
        module: which one, counted from 1.
        clip_norm: largest norm of the gradients of this module and all behind it; None: no clipping.
        shadows: whether the optimiser works on aliases, whose changes autograd does not see (`mixed`).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        compensation: Compensation,
        schedule: Schedule,
        module: int,
        clip_norm: float | None = None,
        shadows: bool = False,
    ) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(p.data) if shadows else p for name, p in parameters.items()
        }
        self.optimizer: torch.optim.Optimizer | None = None
        self.version = 0  # updates made
        self.grouped = 0  # batches whose gradients wait in .grad
        self.landed = 0  # batches whose gradient has landed since the beginning, which the learning rate follows
        self.accumulate, self.clips = compensation.accumulate, clip_norm is not None
        self._schedule, self._module, self._clip_norm = schedule, module, clip_norm
        self._compensation = compensation
        self._scheduler: Any = None
        if not self.parameters:
            return  # a module of nothing but activations and pooling
        self.optimizer = optimizer(list(self.parameters.values()))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer= returned a {type(self.optimizer).__name__}; it must make an optimiser of torch.optim from "
                "a list of parameters, such as lambda p: torch.optim.SGD(p, lr=0.1)"
            )
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise UsageError("torch.optim.LBFGS evaluates the loss again, which modules cannot; use SGD or Adam")
        compensation.check(self.optimizer)
        self._rule = Rule(self.optimizer, compensation)
        if scheduler is not None:
            self._scheduler = scheduler(self.optimizer)
            if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise UsageError("a learning rate follows the batch, not a metric; ReduceLROnPlateau cannot be used")

    @property
    def rate(self) -> float:
        """Learning rate of the next batch to land; NaN without parameters."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else math.nan

    def predict(self, batch: int) -> dict[str, Tensor] | None:
        """Weights for the forward of a batch (counted from the start of the schedule); None: the current ones."""
        steps = self._compensation.steps_ahead(self._schedule, self._module, batch)
        if steps == 0 or self.optimizer is None:
            return None
        return predicted(self.optimizer, self.parameters, steps, self._factor())

    def _factor(self) -> float:
        """What the learning rate of the next batch to land is multiplied by."""
        return self._compensation.rate_factor(self._schedule.delay(self._module), self.landed)

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of one batch to those that wait."""
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self.grouped += 1

    @property
    def complete(self) -> bool:
        """Whether M batches wait."""
        return self.grouped >= self.accumulate

    def average(self) -> None:
        """Turn the waiting sum into a mean."""
        gradients = self._gradients()
        if self.grouped > 1 and gradients:
            torch._foreach_div_(gradients, float(self.grouped))

    def square(self) -> float:
        """Squared norm of the waiting gradients; 0 without clipping."""
        return float(torch.nn.utils.get_total_norm(self._gradients()).double() ** 2) if self.clips else 0.0

    def clip(self, square: float) -> None:
        """Scale the waiting gradients as torch's clip_grad_norm_ does.

        Args:
            square: squared norm of all gradients that count.
        """
        gradients = self._gradients()
        if self._clip_norm is not None and gradients:
            total = torch.tensor(square, dtype=torch.float64).sqrt().to(gradients[0])  # the root of a square is exact
            owners = [p for p in self.parameters.values() if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(owners, self._clip_norm, total)

    def apply(self, outstanding: int) -> None:
        """Update the parameters from what waits.

        Args:
            outstanding: updates made since the forward of the latest batch that waits.
        """
        if self.optimizer is not None:
            self._rule.step(outstanding, self._factor())
        self.version += 1
        self.skip()

    def skip(self) -> None:
        """Forget the gradients that wait."""
        self.grouped = 0
        for parameter in self.parameters.values():
            parameter.grad = None

    def next_batch(self) -> None:
        """The gradient of one more batch has landed: the learning rate is now that of the next one."""
        self.landed += 1
        if self._scheduler is not None:
            with warnings.catch_warnings():
                # with accumulation, or on replay, the rate moves without an update in between
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self._scheduler.step()

    def replay(self, landed: int) -> None:
        """Move the learning rate of a new optimiser to where it is after so many batches."""
        while self.landed < landed:
            self.next_batch()

    def not_finite(self, gradients: Mapping[str, Tensor]) -> str | None:
        """Name of the last parameter in the order of the layers whose gradient is not finite; None: all are."""
        members = [gradient for gradient in gradients.values() if gradient.numel()]
        if not members:
            return None
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(members, ord=math.inf)])
        if bool(torch.isfinite(norms).all()):
            return None
        names = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
        return names[-1] if names else None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]
