"""What a tick and an evaluation report. No communication."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Staleness:
    """How stale the gradients of one batch were: see `lpnet.fdg.staleness`.

    Args:
        batch: its id.
        cosine: per module, of the gradient that landed and the fresh one; NaN for a module without parameters.
        drift: per module, ||theta now - theta of the forward|| / ||theta now||; the forward's weights are predicted
            ones where prediction is on.
    """

    batch: int
    cosine: tuple[float, ...]
    drift: tuple[float, ...]


@dataclass(frozen=True)
class StepReport:
    """What one tick did, seen from this rank (module 1 where all modules share a process).

    Args:
        tick: ticks before this one.
        batch: the newest batch that has finished here: its gradient landed at this tick; None: none did.
        loss: of that batch, before any module learnt from it.
        staleness: updates made on this module between its forward and its update.
        grad_norm: norm of the gradients of this module and all behind it, before clipping; None without clipping.
        seconds: wall time of the tick.
        wait_receive: of them, waiting for a message of a neighbour.
        wait_send: of them, waiting for room in a queue.
        stop: all modules stop here: some rank asked for it (`request_stop`).
        measured: how stale the gradients of a batch were, at the tick at which it has landed everywhere.
    """

    tick: int
    batch: int | None
    loss: float | None
    staleness: int | None
    grad_norm: float | None
    seconds: float
    wait_receive: float
    wait_send: float
    stop: bool
    measured: Staleness | None = None

    @property
    def busy(self) -> float:
        """Seconds of the tick that were not waited."""
        return self.seconds - self.wait_receive - self.wait_send


@dataclass(frozen=True)
class Evaluation:
    """Scores of a forward-only pass, the same on every rank.

    Args:
        loss: mean over the samples.
        accuracy: per cent of samples whose largest output is at the label; None where labels are no classes.
        samples: how many.
    """

    loss: float
    accuracy: float | None
    samples: int
