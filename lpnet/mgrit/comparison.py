"""What a step showed of its solves, and its gradient beside the exact one. No communication."""

from __future__ import annotations

import math
from typing import NamedTuple


class Seen(NamedTuple):
    """What a step's solves showed; None where it is undefined or was not looked at.

    Args:
        rho_forward, rho_adjoint: convergence factors.
        forward, adjoint: residual norms after the last correction.
        finite: loss, gradient and residuals are.
    """

    rho_forward: float | None = None
    rho_adjoint: float | None = None
    forward: float | None = None
    adjoint: float | None = None
    finite: bool = True

    @property
    def rho(self) -> float:
        """The larger convergence factor; 0 where none is defined."""
        return max((r for r in (self.rho_forward, self.rho_adjoint) if r is not None), default=0.0)

    def __str__(self) -> str:
        shown = [f"{r:.3g}" if r is not None else "-" for r in (self.rho_forward, self.rho_adjoint)]
        return f"rho forward {shown[0]}, adjoint {shown[1]}" + ("" if self.finite else ", not finite")


class Check(NamedTuple):
    """An inexact gradient beside the exact one; NaN where it is not finite."""

    cosine: float
    error: float

    @classmethod
    def of(cls, inexact: float, both: float, exact: float) -> Check:
        """From the scalar products of the gradients with themselves and each other."""
        if not (math.isfinite(inexact) and math.isfinite(both)):
            return cls(math.nan, math.nan)
        if exact == 0 or inexact == 0:
            same = exact == inexact
            return cls(1.0 if same else 0.0, 0.0 if same else 1.0)
        square = max(inexact - 2 * both + exact, 0.0) / exact
        return cls(max(-1.0, min(1.0, both / math.sqrt(inexact) / math.sqrt(exact))), math.sqrt(square))

    def below(self, bound: float) -> bool:
        """Whether the cosine is below, or not a number."""
        return not self.cosine >= bound


def allowed_error(cosine: float) -> float:
    """The relative error at which two gradients of equal norm have this cosine."""
    return math.sqrt(2 * (1 - cosine)) if cosine < 1 else 0.0


def spacing(check_every: int | str, *, check: float, step: float, budget: float = 0.025) -> int:
    """Steps between comparisons; `auto` keeps what they cost below a share of the steps. No communication.

    Args:
        check_every: setting.
        check: cost of a comparison: layer evaluations of exact propagation, forward and back.
        step: cost of a step in the same unit.
        budget: that share; a little below 3 %, for what a comparison costs besides layers.
    """
    if not isinstance(check_every, str):
        return check_every
    return max(1, math.ceil(check / max(budget * step, 1e-9)))
