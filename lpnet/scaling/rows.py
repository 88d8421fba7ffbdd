"""The rows of a study's tables: speed-up, efficiency and shares, derived from the profiles of its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lpnet.scaling.cells import Cell, Study
from lpnet.scaling.profile import read_profile


@dataclass(frozen=True)
class Row:
    """One row; None where a cell was not run.

    Args:
        ranks: MPI ranks.
        replicas: data replicas.
        modules: FDG or pipeline modules.
        method: serial, mgrit, pipeline, data (replicas alone) or fdg.
        settings: of the method, where they differ from the base.
        layers: depth.
        layers_per_rank: mean.
        seconds_per_step: of the slowest rank.
        serial_seconds: of method serial on one rank, beside this cell where the study says so.
        speedup: against the fastest serial lpnet on the same network.
        efficiency: speed-up per rank; weak scaling: seconds of the fewest ranks / seconds.
        bound: speed-up by the number of layer evaluations on the critical path alone, of whole batches.
        critical_path: these layer evaluations.
        communication: share of messages, waiting and reductions.
        loss: reached after the timed steps.
        gradient_error: relative, against exact propagation, after ten warm steps.
        cosine: with the exact gradient.
        steps_ratio: steps to the loss of serial training / steps of serial training; 1 for an exact method.
        speedup_to_loss: speed-up to that loss: speedup / steps_ratio.
        times: predicted (emulated) or measured.
        status: done, skipped, diverged, failed.
        reason: why it is not done.
        spans: mean seconds over the ranks by span.
        residuals: of the last forward solve.
    """

    ranks: int
    replicas: int
    modules: int
    method: str
    settings: str
    layers: int
    layers_per_rank: float
    seconds_per_step: float | None = None
    serial_seconds: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    bound: float | None = None
    critical_path: int | None = None
    communication: float | None = None
    loss: float | None = None
    gradient_error: float | None = None
    cosine: float | None = None
    steps_ratio: float | None = None
    speedup_to_loss: float | None = None
    times: str = ""
    status: str = "done"
    reason: str = ""
    spans: dict[str, float] = field(default_factory=dict)
    residuals: tuple[float, ...] = ()

    @property
    def series(self) -> str:
        """Rows that belong to one curve."""
        return f"{self.method} {self.settings}".strip()


COLUMNS = tuple(field.name for field in fields(Row) if field.name not in ("spans", "residuals"))


def derive(study: Study, found: Sequence[tuple[Cell, dict[str, Any]]]) -> list[Row]:
    """Rows from the cells' results, each speed-up against the serial cell of the same depth. No communication."""
    serial: dict[int, float] = {}
    for cell, done in found:
        if cell.method == "serial" and cell.ranks == 1 and done["profile"] is not None:
            serial[cell.layers] = read_profile(done["profile"]).seconds
    fewest: dict[str, tuple[int, float]] = {}
    for cell, done in found:
        if done["profile"] is not None:
            seconds = read_profile(done["profile"]).seconds
            fewest[cell.label()] = min(fewest.get(cell.label(), (cell.ranks, seconds)), (cell.ranks, seconds))
    rows = []
    for cell, done in found:
        replicas = cell.ranks if cell.method == "data" else cell.replicas
        modules = (cell.modules or cell.ranks // replicas) if cell.method == "fdg" else 1
        common = (cell.ranks, replicas, modules, cell.method, cell.label().partition(" ")[2], cell.layers)
        per_rank = cell.layers * replicas / cell.ranks
        if done["profile"] is None:
            rows.append(Row(*common, per_rank, status=done["status"], reason=done["reason"]))
            continue
        profile = read_profile(done["profile"])
        reference = done.get("serial_seconds") or serial.get(cell.layers)
        speedup = reference / profile.seconds if reference is not None else None
        efficiency = speedup / cell.ranks if speedup is not None else None
        if study.scaling == "weak":
            efficiency = fewest[cell.label()][1] / profile.seconds
        path, bound = _bound(cell, profile.critical_path)
        steps_ratio = 1.0 if cell.exact else done.get("steps_ratio")
        rows.append(
            Row(
                *common,
                per_rank,
                profile.seconds,
                reference,
                speedup,
                efficiency,
                bound,
                path,
                profile.communication,
                profile.losses[1],
                done["gradient_error"],
                done["cosine"],
                steps_ratio,
                speedup / steps_ratio if speedup is not None and steps_ratio else None,
                "predicted" if profile.predicted else "measured",
                spans={name: sum(seconds) / profile.ranks for name, seconds in profile.spans.items()},
                residuals=profile.residuals,
            )
        )
    return rows


def _bound(cell: Cell, found: int | None) -> tuple[int | None, float | None]:
    """Layer evaluations one after another, of a replica's samples, and the speed-up that they allow."""
    whole = 2 * cell.layers
    if cell.method == "serial":
        return whole, 1.0
    if cell.method == "data":
        return whole, float(cell.ranks)
    if cell.method == "mgrit":
        path = found or whole
        return path, cell.replicas * whole / path
    if cell.method == "pipeline" and cell.microbatches is not None:
        ranks, parts = cell.ranks // cell.replicas, cell.microbatches
        return None, cell.replicas * ranks * parts / (parts + ranks - 1)
    return None, None
