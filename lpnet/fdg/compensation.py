"""Remedies for stale gradients; any of them may be combined.

    shrink       c_k = beta^(K - k): the gradient is multiplied by beta whenever it enters a module (arXiv 1906.09108)
    prediction   forward at theta - lr s velocity, s updates ahead: Chen, Yang, Cheng, "Efficient and robust parallel
                 DNN training through model parallelism on multi-GPU platform" (SpecTrain), arXiv 1809.02839
    spike        theta -= lr (a v + b g), a = m^D, b = (1 - m^D) / (1 - m): Kosson, Chiley, Venigalla, Hestness,
                 Koester, "Pipelined backpropagation at scale", arXiv 2003.11666
    accumulate   mean of the gradients of M batches: Zhuang, Lin, Toh, "Accumulated decoupled learning", ICML 2021
    anneal       lr / max(d, 1)^p, p falling from 1 to 0: Yang, Zhang, Li, Ré, Aberger, De Sa, "PipeMare", arXiv
                 1910.05124
    nesterov     Nesterov momentum with the gradient times (1 - m): Ajanthan, Ramasinghe, Zuo, Avraham, Long,
                 "Nesterov method for asynchronous pipeline parallel optimization", ICML 2025

No communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lpnet.errors import UsageError
from lpnet.fdg.schedule import Schedule

Horizon = Literal["full", "half"]


@dataclass(frozen=True)
class Compensation:
    """Which remedies are on; the default is none.

    Args:
        shrink: beta, in (0, 1]; 1 is off.
        prediction: how far ahead: full: as many updates as really are outstanding when the gradient will land; half:
            K - k, the published value for another schedule, or fewer while the modules fill; None: off.
        spike: spike compensation, for SGD with momentum.
        accumulate: M, batches per update.
        anneal: batches over which p falls from 1 to 0; 0: off.
        nesterov: discounted Nesterov momentum, for SGD with momentum.

    Raises:
        UsageError: a number out of its range.
    """

    shrink: float = 1.0
    prediction: Horizon | None = None
    spike: bool = False
    accumulate: int = 1
    anneal: int = 0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.shrink <= 1:
            raise UsageError(f"shrink is {self.shrink}; it must lie in (0, 1], where 1 shrinks nothing")
        if self.accumulate < 1:
            raise UsageError(f"accumulate is {self.accumulate}; an update needs 1 batch or more")
        if self.anneal < 0:
            raise UsageError(f"anneal is {self.anneal}; give a number of batches, or 0 for off")
        if self.prediction not in (None, "full", "half"):
            raise UsageError(f"prediction is {self.prediction!r}; it must be full, half or None")

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what an optimiser cannot do.

        Raises:
            UsageError: the remedy, the optimiser and what would work.
        """
        name = type(optimizer).__name__
        momentum = min((group.get("momentum", 0.0) for group in optimizer.param_groups), default=0.0)
        sgd = isinstance(optimizer, torch.optim.SGD)
        if (self.spike or self.nesterov) and not (sgd and momentum > 0):
            which = "spike compensation" if self.spike else "discounted Nesterov momentum"
            more = "; NAdam discounts its gradient by itself" if name == "NAdam" else ""
            raise UsageError(
                f"{which} needs torch.optim.SGD with momentum; this is {name} with momentum {momentum}{more}"
            )
        adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        if self.prediction and not adam and not (sgd and momentum > 0):
            raise UsageError(
                f"weight prediction needs the velocity of torch.optim.SGD with momentum, Adam or AdamW; this is {name} "
                f"with momentum {momentum}"
            )

    def steps_ahead(self, schedule: Schedule, module: int, batch: int) -> int:
        """Updates that prediction looks ahead for a forward. `batch` counts from the start of the schedule."""
        if self.prediction is None:
            return 0
        outstanding = schedule.outstanding(module, batch, self.accumulate)
        return outstanding if self.prediction == "full" else min(outstanding, schedule.modules - module)

    def rate_factor(self, delay: int, batch: int) -> float:
        """What the learning rate of a module is multiplied by at a batch."""
        if not self.anneal or batch >= self.anneal:
            return 1.0
        return float(max(delay / self.accumulate, 1.0) ** -(1.0 - batch / self.anneal))


def predicted(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], steps: int, factor: float = 1.0
) -> dict[str, Tensor]:
    """theta - lr s velocity, in new memory: the weights expected after some more updates.

    SGD: the velocity is the momentum buffer. Adam: bias-corrected m / (sqrt(v) + eps). Before the first update, where
    there is no velocity, theta itself.

    Args:
        optimizer: on these parameters.
        parameters: theta, by name.
        steps: s.
        factor: what the learning rate is multiplied by.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    out = {}
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                value = parameter.detach().clone()
                buffer = state.get("momentum_buffer")
                step = float(group["lr"]) * factor * steps
                if buffer is not None:
                    value.add_(buffer, alpha=-step)
                elif "exp_avg" in state:
                    beta1, beta2 = group["betas"]
                    count = float(state["step"])
                    scale = 1 - float(beta1) ** count
                    root = (state["exp_avg_sq"] / (1 - float(beta2) ** count)).sqrt_().add_(group["eps"])
                    value.addcdiv_(state["exp_avg"], root, value=-step / scale)
                if parameter in names:
                    out[names[parameter]] = value
        for name, parameter in parameters.items():
            if name not in out:  # outside the optimiser
                out[name] = parameter.detach().clone()
    return out


class Rule:
    """One update of an optimiser of torch.optim with the remedies that change it.

    Args:
        optimizer: whose `step` makes the update.
        compensation: the remedies.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, compensation: Compensation) -> None:
        self.optimizer, self.compensation = optimizer, compensation
        if compensation.nesterov:
            for group in optimizer.param_groups:
                group["nesterov"], group["dampening"] = True, 0.0

    @torch.no_grad()
    def step(self, outstanding: int, factor: float) -> None:
        """Update the parameters from their .grad.

        Args:
            outstanding: D, updates made since the forward of the gradient.
            factor: what the learning rate is multiplied by.
        """
        groups = self.optimizer.param_groups
        spike = self.compensation.spike and outstanding > 0  # without delay it changes nothing
        kept = [(group["lr"], group.get("weight_decay")) for group in groups]
        gradients: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]] = []
        for group in groups:
            if factor != 1.0:
                group["lr"] = group["lr"] * factor
            if spike or self.compensation.nesterov:
                members = [p for p in group["params"] if p.grad is not None]
                gradients.append((group, members, self._fold(group, members)))
        self.optimizer.step()
        if spike:
            for group, members, folded in gradients:
                self._correct(group, members, folded, outstanding)
        for group, (rate, decay) in zip(groups, kept, strict=True):
            group["lr"] = rate
            if decay is not None:
                group["weight_decay"] = decay

    def _fold(self, group: dict[str, Any], members: list[Tensor]) -> list[Tensor]:
        """Weight decay moves into the gradient g, which Nesterov's rule then discounts as a whole."""
        gradients = [p.grad for p in members if p.grad is not None]
        if group.get("maximize"):
            raise UsageError("spike compensation and discounted Nesterov momentum minimise; set maximize=False")
        if group["weight_decay"] and members:
            torch._foreach_add_(gradients, members, alpha=group["weight_decay"])
        group["weight_decay"] = 0.0
        if self.compensation.nesterov and gradients:
            torch._foreach_mul_(gradients, 1.0 - group["momentum"])
        # torch's Nesterov step writes on .grad
        return [g.clone() for g in gradients] if group["nesterov"] and self.compensation.spike else gradients

    def _correct(self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor], outstanding: int) -> None:
        """From theta - lr v to theta - lr (a v + b g).

        Nesterov's update, lr (m v + g), is the same with D = 1, so that both together look D + 1 ahead.
        """
        if not members:
            return
        m, rate = float(group["momentum"]), float(group["lr"])
        ahead = outstanding + (1 if group["nesterov"] else 0)
        a, b = m**ahead, (1 - m**ahead) / (1 - m)
        done_a, done_b = (m, 1.0) if group["nesterov"] else (1.0, 0.0)
        velocities = [self.optimizer.state[p]["momentum_buffer"] for p in members]
        torch._foreach_add_(members, velocities, alpha=-rate * (a - done_a))
        torch._foreach_add_(members, gradients, alpha=-rate * (b - done_b))
