"""When an inexact gradient may be trusted, and what is done where it may not: decisions from numbers, no tensors.

Three numbers tell how good a step was: the convergence factor rho of both solves, the residuals after the last
correction, both free; and now and then the cosine and relative error of its gradient against the exact one. rho alone
tells little: on a trained Peaks network a cold start with two iterations has rho 0.33 and cosine -0.6. So the error of
the last comparison is carried forward in proportion to the residuals, and a step whose predicted error is large is
compared at once:

    predicted error = error at the last comparison * largest growth of a residual since then

The controller walks a ladder of rungs, from the settings' own iterations to serial propagation:

    L levels, f + 0, 1, 2, 4 iterations -> L-1 levels ... 2 levels -> serial

    cosine < REJECT, < GROWING with rho > 1, not finite       the gradient is thrown away for the exact one; serial
    cosine < bound                                            the same, one rung up
    cosine >= SAFE, `patience` times in a row                 one rung down, if the error there will be small
    serial: a probe of the rung before it has cosine >= SAFE  back to that rung

Between bound and SAFE nothing changes. After every change the next step is compared. A rung that failed soon after it
was reached doubles the patience. All ranks see the same numbers, so that they decide the same without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lpnet.config import MGRIT
from lpnet.mgrit.comparison import Check, Seen, allowed_error, spacing

__all__ = ["Check", "Controller", "Decision", "Plan", "Rung", "Seen", "allowed_error", "ladder", "spacing"]

RAISES = (0, 1, 2, 4)  # iterations on top of the settings' own
REJECT = 0.9  # a gradient below goes with its rung: serial at once
GROWING = 0.95  # the same where a residual grows
SAFE = 0.999  # hysteresis: only above does a rung go down
FAILED_SOON = 3  # comparisons after a change within which a failure doubles the patience
MOST_PATIENCE = 32
UNKNOWN = -9.0  # stands for NaN in a checkpoint, where it would differ from itself
ALARM = 0.5  # share of the error that the bound allows at which a predicted error is looked at


class Rung(NamedTuple):
    """Levels and iterations of both solves; levels 1 is serial, None iterates to the tolerance."""

    levels: int
    forward: int | None
    adjoint: int | None

    def __str__(self) -> str:
        if self.levels == 1:
            return "serial propagation"
        return f"{self.forward or 'tolerance'}/{self.adjoint or 'tolerance'} iterations on {self.levels} levels"


SERIAL = Rung(1, None, None)


def ladder(mgrit: MGRIT, levels: int) -> tuple[Rung, ...]:
    """All rungs, from the settings' own to serial. No communication.

    Args:
        mgrit: settings.
        levels: that there really are.
    """
    base = Rung(levels, mgrit.forward_iterations, mgrit.adjoint_iterations)
    if mgrit.control != "adaptive" or levels == 1:
        return (base,)
    assert base.forward is not None and base.adjoint is not None
    rungs = [Rung(levels, base.forward + k, base.adjoint + k) for k in RAISES]
    rungs += [rungs[-1]._replace(levels=fewer) for fewer in range(levels - 1, 1, -1)]
    return (*rungs, SERIAL)


@dataclass
class State:
    """What a controller remembers; all of it goes into checkpoints."""

    rung: int = 0
    safe: int = 0  # comparisons in a row above SAFE
    patience: int = 2
    since_change: int = 0  # comparisons since the last change
    compared_at: int = 0  # the latest step that was compared
    wait: int = 1  # steps until the next one; 0: the spacing, which may be another one on another number of ranks
    quiet_until: int = 0  # no alarm before this step
    quiet: int = 1
    probe_wait: int = 1
    forward: float = math.nan  # residuals and error at the last comparison
    adjoint: float = math.nan
    error: float = math.nan
    error_at: int = -1
    rho: float = 0.0
    noise: float = math.nan  # error of the loss at the last comparison
    applied: float = math.nan  # error of the gradient that was applied, as far as it is known
    lowest: float = math.nan  # lowest cosine of an applied gradient, and its step
    lowest_at: int = -1
    warned: float = 1.25  # cosine of the latest warning
    below: int = 0  # comparisons below the bound, and all
    compared: int = 0
    diverging: int = 0  # comparisons in a row with rho > 1 and a useless gradient


class Plan(NamedTuple):
    """How the next step is made.

    Args:
        rung: of the solves whose gradient is applied.
        compare: make a second gradient and compare: the exact one; in serial that of the rung before, a probe.
        other: the rung of the second gradient.
    """

    rung: Rung
    compare: bool
    other: Rung


class Decision(NamedTuple):
    """What follows from a comparison.

    Args:
        reject: apply the exact gradient and keep the exact states.
        severe: so wrong that the gradients before are in doubt too.
        message: what changed and why, with the numbers; empty where nothing did.
        warn: it deserves a warning.
        stop: why training must end; empty where it need not.
    """

    reject: bool = False
    severe: bool = False
    message: str = ""
    warn: bool = False
    stop: str = ""


NOTHING = Decision()


@dataclass
class Controller:
    """Watches the steps of one network; with `mgrit.control: adaptive` also changes rungs. No communication.

    Args:
        mgrit: settings.
        levels: of the network's hierarchy.
        every: steps between comparisons; 0: none.
    """

    mgrit: MGRIT
    levels: int
    every: int
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        self.rungs = ladder(self.mgrit, self.levels)
        self.adaptive = len(self.rungs) > 1
        self.bound = self.mgrit.min_cosine

    @property
    def rung(self) -> Rung:
        """The present one."""
        return self.rungs[self.state.rung]

    @property
    def is_serial(self) -> bool:
        """Whether the present rung propagates exactly."""
        return self.rung.levels == 1

    def plan(self, step: int) -> Plan:
        """How a step is made."""
        s = self.state
        due = step >= s.compared_at + (s.wait or self.every)
        compare = self.every > 0 and due and self.levels > 1
        if self.is_serial:
            return Plan(self.rung, compare and self.adaptive, self.rungs[self.state.rung - 1])
        return Plan(self.rung, compare, SERIAL)

    def alarm(self, step: int, seen: Seen) -> str:
        """Why a step that was not to be compared should be; empty where it should not."""
        if self.every == 0 or self.is_serial or self.levels == 1:
            return ""
        if not seen.finite:
            return "the loss or the gradient is not finite"
        # in quiet only what is worse than it was at the last comparison is heard
        rho, error = (1.0, 0.0) if step >= self.state.quiet_until else (self.state.rho, self.state.error)
        if seen.rho > max(1.0, 1.5 * rho if rho > 1 else 1.0):
            return f"the residual grows ({seen})"
        predicted = self.predicted_error(seen)
        if predicted > max(ALARM * allowed_error(self.bound), 2 * error):
            return f"the residuals predict a gradient error of {predicted:.2g}"
        return ""

    def predicted_error(self, seen: Seen) -> float:
        """Error of the last comparison times the largest growth of a residual since; NaN before the first."""
        s = self.state
        pairs = ((seen.forward, s.forward), (seen.adjoint, s.adjoint))
        growth = [now / then for now, then in pairs if now is not None and then > 0]
        return s.error * max(growth) if growth else math.nan

    def compared(self, step: int, seen: Seen, check: Check) -> Decision:
        """Take in a comparison of a step and decide."""
        s = self.state
        s.compared += 1
        s.since_change += 1
        s.compared_at, s.wait = step, 0
        if self.is_serial and self.adaptive:
            return self._probed(step, seen, check)
        bad = check.below(self.bound)
        s.below += bad
        if math.isfinite(check.error) and seen.finite:
            ahead = self._until_alarm(step, check.error) if self.adaptive else self.every
            s.wait = 0 if ahead >= self.every else max(1, ahead)
            s.error, s.error_at, s.rho = check.error, step, seen.rho
            s.forward, s.adjoint = (math.nan if r is None else r for r in (seen.forward, seen.adjoint))
        useless = check.below(0.5) or not check.error <= 1
        s.diverging = s.diverging + 1 if useless and (seen.rho > 1 or not seen.finite) else 0
        if bad or seen.rho > 1:
            s.quiet_until, s.quiet = step + s.quiet + 1, min(2 * s.quiet, max(self.every, 1))
        else:
            s.quiet = 1
        if self.adaptive:
            return self._adapt(step, seen, check)
        self._note(step, check)
        return self._watch(step, seen, check) if bad else NOTHING

    def _until_alarm(self, step: int, error: float) -> int:
        """Half the steps in which an error that goes on growing as it did since the last comparison is too large."""
        s = self.state
        if s.error_at < 0 or not 0 < s.error < error:
            return self.every
        room = ALARM * allowed_error(self.bound) / error
        if room <= 1:
            return 1
        return math.floor(0.5 * (step - s.error_at) * math.log(room) / math.log(error / s.error))

    def _note(self, step: int, check: Check) -> None:
        """The lowest cosine of a gradient that was applied."""
        s = self.state
        if not check.cosine >= s.lowest:
            s.lowest, s.lowest_at = check.cosine, step

    def _watch(self, step: int, seen: Seen, check: Check) -> Decision:
        """control fixed or residual: say it; end where the solves diverge."""
        s = self.state
        numbers = f"gradient cosine {check.cosine:.3f}, error {check.error:.3g} ({seen}, {self.rung})"
        if s.diverging:
            s.wait = 1
        if s.diverging >= 2:
            return Decision(stop=f"multigrid diverges: {numbers} in two comparisons in a row")
        if not check.cosine >= s.warned - 0.25:  # once, and again where it has become much worse
            s.warned = check.cosine if math.isfinite(check.cosine) else -1.0
            remedy = "raise the iterations, start from kept states, or set mgrit.control adaptive"
            return Decision(
                message=f"step {step}: {numbers} is below mgrit.min_cosine {self.bound}: inexact solves mislead the "
                f"optimiser; {remedy}",
                warn=True,
            )
        return NOTHING

    def _adapt(self, step: int, seen: Seen, check: Check) -> Decision:
        s = self.state
        if check.below(self.bound):
            at_once = check.below(REJECT) or not seen.finite
            at_once |= seen.rho > 1 and (check.below(GROWING) or not check.error <= 1)
            before = self.rung
            if s.since_change <= FAILED_SOON:
                s.patience = min(2 * s.patience, MOST_PATIENCE)
            s.safe, s.since_change = 0, 0
            s.rung = len(self.rungs) - 1 if at_once else s.rung + 1
            if self.is_serial:
                s.probe_wait = 1 if s.patience <= 2 else s.probe_wait
            s.wait = s.probe_wait if self.is_serial else 1
            return Decision(
                True,
                at_once,
                f"step {step}: gradient cosine {check.cosine:.4f}, error {check.error:.3g} ({seen}) with {before}: "
                f"thrown away for the exact one; from now on {self.rung}",
                warn=at_once,
            )
        self._note(step, check)
        s.safe = s.safe + 1 if not check.below(SAFE) and seen.rho < 1 else 0
        if s.rung > 0 and s.safe >= s.patience and self._error_below(seen, check) < ALARM * allowed_error(self.bound):
            s.safe, s.since_change, s.rung = 0, 0, s.rung - 1
            s.wait = 1
            return Decision(message=f"step {step}: gradient cosine {check.cosine:.5f} ({seen}): down to {self.rung}")
        if s.rung > 0 or s.since_change <= FAILED_SOON:
            s.wait = min(s.wait or self.every, max(self.every // 4, 1))
        return NOTHING

    def _error_below(self, seen: Seen, check: Check) -> float:
        """Gradient error to be expected one rung further down: every iteration less divides it by rho."""
        fewer, present = self.rungs[self.state.rung - 1], self.rung
        if fewer.levels != present.levels or not seen.rho > 0:
            return check.error
        assert present.forward is not None and fewer.forward is not None
        return check.error / seen.rho ** (present.forward - fewer.forward)

    def _probed(self, step: int, seen: Seen, check: Check) -> Decision:
        """Serial: the probe's gradient is not applied; a good one leads back."""
        s = self.state
        tried = self.rungs[s.rung - 1]
        if not check.below(SAFE) and seen.rho < 1 and seen.finite:
            s.rung, s.safe, s.since_change, s.probe_wait = s.rung - 1, 0, 0, 1
            s.error, s.forward, s.adjoint = check.error, seen.forward or math.nan, seen.adjoint or math.nan
            s.error_at, s.rho = step, seen.rho
            s.wait, s.quiet_until, s.quiet = 1, 0, 1
            return Decision(
                message=f"step {step}: a probe has gradient cosine {check.cosine:.5f} ({seen}): back to {tried}"
            )
        s.probe_wait = min(2 * s.probe_wait, 2 * max(self.every, 1))
        s.wait = s.probe_wait
        return NOTHING

    def rescue(self, step: int) -> str:
        """Serial from now on, because the optimiser found no decrease; empty where that is no remedy."""
        if not self.adaptive or self.is_serial:
            return ""
        before, s = self.rung, self.state
        s.rung, s.safe, s.since_change = len(self.rungs) - 1, 0, 0
        s.compared_at, s.wait = step, max(self.every // 4, 1)
        return f"step {step}: no decrease with {before}; from now on {self.rung}"

    def summary(self) -> str:
        """The run in words; empty where nothing was compared."""
        s = self.state
        if not s.compared:
            return ""
        lowest = "" if s.lowest_at < 0 else f", lowest applied cosine {s.lowest:.4f} at step {s.lowest_at}"
        return f"{s.compared} gradients compared with exact ones, {s.below} below {self.bound}{lowest}"

    # checkpoints

    def numbers(self) -> list[float]:
        """The state as numbers."""
        return [UNKNOWN if math.isnan(value) else float(value) for value in vars(self.state).values()]

    def restore(self, numbers: Sequence[float]) -> None:
        """The state from numbers; a rung that the present ladder lacks is its last one."""
        names = list(vars(self.state))
        defaults = vars(State())
        known = (math.nan if v == UNKNOWN else v for v in numbers)
        typed = {n: type(defaults[n])(v) for n, v in zip(names, known, strict=True)}
        self.state = replace(State(), **typed)
        self.state.rung = min(self.state.rung, len(self.rungs) - 1)
