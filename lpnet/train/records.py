"""What is written down of every step: the row in metrics.jsonl, the curves in the trace, the work of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpnet.io import trace

if TYPE_CHECKING:
    from lpnet.train.evaluation import Scores
    from lpnet.train.strategies import StepReport


@dataclass
class Work:
    """Layer evaluations on the longest chain over all ranks, of all steps; those of comparisons among them."""

    evaluations: int = 0
    compared: int = 0

    def add(self, report: StepReport) -> None:
        """Count a step in. No communication."""
        self.evaluations += report.evaluations or 0
        self.compared += report.compared

    def attributes(self) -> dict[str, int]:
        """For checkpoints and env.json. No communication."""
        return {"evaluations": self.evaluations, "evaluations_compared": self.compared}

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Work:
        """Of a checkpoint. No communication."""
        return cls(int(attributes.get("evaluations", 0)), int(attributes.get("evaluations_compared", 0)))


def trace_row(shown: Mapping[str, Any]) -> None:
    """The monitors of a step, as curves in the trace. No communication."""
    trace.count("rho", forward=shown.get("rho_forward"), adjoint=shown.get("rho_adjoint"))
    for key in ("gradient_cosine", "gradient_error", "gradient_cosine_rejected", "mgrit_levels"):
        trace.count(key, value=shown.get(key))
    for key in ("forward_residuals", "adjoint_residuals"):
        trace.count(key, last=(shown.get(key) or [None])[-1])


def completed(new: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A row with what is known of the solve that gave its objective, where a run before made that solve."""
    if new["objective"] is None or any(new[key] != before.get(key) for key in ("step", "objective", "grad_norm")):
        return new
    known = {key: before[key] for key in SOLVE_KEYS if key in before and new.get(key) is None}
    return {**new, **known}


SOLVE_KEYS = (
    "forward_residuals",
    "adjoint_residuals",
    "rho_forward",
    "rho_adjoint",
    "gradient_cosine",
    "gradient_error",
    "gradient_cosine_rejected",
    "mgrit_levels",
    "forward_iterations",
    "adjoint_iterations",
)


def decoupled_keys(report: StepReport) -> dict[str, Any]:
    """What only decoupled modules report: whose loss it is, how stale its gradient was, how long the step waited."""
    keys = {"batch": report.batch, "staleness": report.staleness, "wait_seconds": report.wait_seconds}
    found = report.measured
    if found is None:
        return keys
    names = ("batch", "cosine", "drift")
    return keys | {f"staleness_{name}": getattr(found, name) for name in names}


def watched_keys(report: StepReport | None) -> dict[str, Any]:
    """What steps on several levels report: convergence factors, and the applied gradient beside the exact one."""
    if report is None or report.watched is None:
        return {}
    forward, adjoint, watched = report.forward, report.adjoint, report.watched
    return {
        "rho_forward": forward.rho if forward is not None else None,
        "rho_adjoint": adjoint.rho if adjoint is not None else None,
        "gradient_cosine": watched.cosine,
        "gradient_error": watched.error,
        "gradient_cosine_rejected": watched.rejected,
        "mgrit_levels": watched.rung.levels,
        "forward_iterations": forward.iterations if forward is not None else None,
        "adjoint_iterations": adjoint.iterations if adjoint is not None else None,
    }


def row(step: int, report: StepReport | None, scores: Scores | None) -> dict[str, Any]:
    """One row of metrics.jsonl; None where something was not measured at this step. No communication."""
    forward, adjoint = (report.forward, report.adjoint) if report is not None else (None, None)
    return {
        "step": step,
        "objective": report.objective if report is not None else None,
        "loss": report.loss if report is not None else None,
        "grad_norm": report.grad_norm if report is not None else None,
        "step_size": report.step_size if report is not None else None,
        **({} if report is None or report.batch is None else decoupled_keys(report)),
        "train_accuracy": scores.train_accuracy if scores is not None else None,
        "val_accuracy": scores.val_accuracy if scores is not None else None,
        "forward_residuals": list(forward.residuals) if forward is not None and forward.residuals else None,
        "adjoint_residuals": list(adjoint.residuals) if adjoint is not None and adjoint.residuals else None,
        **watched_keys(report),
        "seconds": report.seconds if report is not None else None,
    }
