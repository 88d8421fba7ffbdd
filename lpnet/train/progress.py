"""What a person sees while a run goes on: a bar on a terminal, a line every few seconds elsewhere. No communication."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpnet.train.evaluation import Scores
    from lpnet.train.strategies import StepReport

INTERVAL_S = 5.0

log = logging.getLogger("lpnet.train")


class Progress:
    """Shows steps on rank 0; on other ranks it does nothing.

    Args:
        steps: steps of the whole run.
        first: the step it begins with.
        rank: this rank.
    """

    def __init__(self, steps: int, first: int, *, rank: int) -> None:
        self._steps, self._rank = steps, rank
        self._bar: Any = None
        self._last_line = 0.0
        self._scores = ""
        if rank == 0 and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, step: int, report: StepReport, scores: Scores | None) -> None:
        """Show one step."""
        if self._rank != 0:
            return
        if scores is not None:
            self._scores = f", training {scores.train_accuracy:.1f} %, validation {scores.val_accuracy:.1f} %"
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {_number(report.loss)}{self._scores}{_residual(report)}", refresh=False)
            self._bar.update()
        elif time.monotonic() - self._last_line > INTERVAL_S:
            self._last_line = time.monotonic()
            log.info(
                "step %d/%d: loss %s%s%s%s, %.3f s/step",
                step,
                self._steps,
                _number(report.loss),
                "" if report.grad_norm is None else f", gradient {report.grad_norm:.2e}",
                self._scores,
                _residual(report),
                report.seconds,
            )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _residual(report: StepReport) -> str:
    parts = []
    for name, solve in (("forward", report.forward), ("adjoint", report.adjoint)):
        if solve is not None and solve.residuals:
            parts.append(f"{name} {solve.residuals[-1]:.1e}")
    return f", residual {' '.join(parts)}" if parts else ""
