"""What a tick and an evaluation report. No communication."""

from __future__ import annotations

from dataclasses import dataclass


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
