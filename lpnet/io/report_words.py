"""What the numbers of a run say, in words. No communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What a run's metrics hold, at a glance; None where it was not measured.

    Args:
        what: data, network and method.
        steps: done.
        wanted: run.steps.
        loss: last training loss.
        accuracy: last validation accuracy in %.
        evaluations: layer evaluations on the longest chain over all ranks.
        compared_share: share of them that compared gradients.
        compared: gradients whose cosine is known.
        below: of the applied ones, how many below the bound.
        bound: mgrit.min_cosine.
        lowest: lowest cosine of an applied gradient, and its step.
        rejected: gradients thrown away.
        serial_share: share of the steps on one level, of those that multigrid could have made.
        seconds: in steps.
        control: mgrit.control.
    """

    what: str
    steps: int
    wanted: int | None
    loss: float | None
    accuracy: float | None
    evaluations: float | None
    compared_share: float | None
    compared: int
    below: int
    bound: float
    lowest: float | None
    lowest_at: int | None
    rejected: int
    serial_share: float | None
    seconds: float | None
    control: str | None


def facts_of(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any], work: Mapping[str, Any]) -> Facts:
    """The facts of a run. No communication.

    Args:
        rows: of metrics.jsonl.
        config: flat settings, "mgrit.levels" and so on.
        work: "evaluations" and "evaluations_compared" on the longest chain, where they are known.
    """
    bound = float(config.get("mgrit.min_cosine", 0.99))
    cosines = [(float(r["gradient_cosine"]), int(r["step"])) for r in rows if r.get("gradient_cosine") is not None]
    evaluations = work.get("evaluations")
    levels = [r["mgrit_levels"] for r in rows if r.get("mgrit_levels") is not None]
    times = [r["seconds"] for r in rows if r.get("seconds") is not None]
    rejected = [r for r in rows if r.get("gradient_cosine_rejected") is not None and r.get("mgrit_levels") != 1]
    lowest = min(cosines, default=None)
    parts = [config.get("data.name"), config.get("model.name"), config.get("method"), config.get("optim.name")]
    layers = config.get("model.layers")
    what = ", ".join(str(part) for part in parts if part is not None)
    return Facts(
        what=what + (f", {layers} layers" if layers is not None and what else ""),
        steps=int(rows[-1]["step"]) if rows else 0,
        wanted=config.get("run.steps"),
        loss=_last(rows, "loss"),
        accuracy=_last(rows, "val_accuracy"),
        evaluations=float(evaluations) if evaluations else None,
        compared_share=float(work.get("evaluations_compared", 0)) / evaluations if evaluations else None,
        compared=len(cosines),
        below=sum(c < bound for c, _ in cosines),
        bound=bound,
        lowest=lowest[0] if lowest is not None else None,
        lowest_at=lowest[1] if lowest is not None else None,
        rejected=len(rejected),
        serial_share=sum(level == 1 for level in levels) / len(levels) if levels else None,
        seconds=float(sum(times)) if times else None,
        control=config.get("mgrit.control") if levels else None,
    )


def _last(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [r[key] for r in rows if r.get(key) is not None]
    return float(values[-1]) if values else None


def verdict(facts: Facts) -> tuple[str, bool]:
    """What is to be thought of a run, and whether that is good. No communication."""
    said, good = [], True
    if facts.wanted is not None and facts.steps < facts.wanted:
        said.append(f"Ended at step {facts.steps} of {facts.wanted}")
        good = False
    else:
        said.append(f"Finished {facts.steps} steps")
    result = [f"loss {facts.loss:.4f}" if facts.loss is not None else ""]
    result.append(f"validation accuracy {facts.accuracy:.2f} % by exact propagation" if facts.accuracy else "")
    said[0] += " with " + " and ".join(part for part in result if part) if any(result) else ""
    if facts.control is None:
        said.append("its gradients are exact, or were not watched")
    elif facts.lowest is None:
        said.append("no gradient was compared with the exact one: nothing is known of their quality")
    elif facts.below == 0:
        said.append(
            f"all {facts.compared} gradients whose cosine with the exact one is known were right (lowest "
            f"{facts.lowest:.4f} at step {facts.lowest_at})"
        )
    else:
        good = False
        said.append(
            f"{facts.below} of {facts.compared} known gradients were wrong (cosine below {facts.bound}; lowest "
            f"{facts.lowest:.3f} at step {facts.lowest_at}): the optimiser was misled"
        )
    if facts.rejected:
        said.append(f"{facts.rejected} inexact gradients were thrown away for exact ones")
    if facts.serial_share:
        said.append(f"{facts.serial_share:.0%} of the steps fell back to serial propagation")
    return "; ".join(said) + ".", good
