"""The tables of a study: JSON, CSV and Markdown, and its pictures. A cell that was not run has blanks and a reason."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lpnet.scaling import figures
from lpnet.scaling.cells import Study
from lpnet.scaling.rows import COLUMNS, Row

_FORMATS = {
    "layers_per_rank": "{:g}",
    "seconds_per_step": "{:.3e}",
    "speedup": "{:.2f}",
    "efficiency": "{:.3f}",
    "bound": "{:.1f}",
    "communication": "{:.0%}",
    "loss": "{:.4f}",
    "gradient_error": "{:.1e}",
    "cosine": "{:.4f}",
    "steps_ratio": "{:.2f}",
    "speedup_to_loss": "{:.2f}",
}


def write_tables(study: Study, rows: Sequence[Row], out: Path) -> None:
    """Write study.json, study.csv, study.md and the pictures. No communication.

    Args:
        study: what was run.
        rows: its results.
        out: folder.
    """
    content = {
        "name": study.name,
        "scaling": study.scaling,
        "run": study.run,
        "network": study.network.as_dict() if study.run == "emulated" else None,
        "steps": study.steps,
        "rows": [asdict(row) for row in rows],
    }
    (out / "study.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = asdict(row)
        writer.writerow(["" if values[name] is None else values[name] for name in COLUMNS])
    (out / "study.csv").write_text(text.getvalue(), encoding="utf-8")
    (out / "study.md").write_text(markdown(study, rows), encoding="utf-8")
    figures.draw(study, rows, out)


def markdown(study: Study, rows: Sequence[Row]) -> str:
    """The table with what it was made by. No communication."""
    head = f"{study.name}: {study.scaling} scaling, {study.steps} steps timed after warm-up."
    if study.run == "emulated":
        head += f" Times are predicted by emulation on {study.network.describe()}; they err on the slow side."
    lines = [
        head,
        "Speed-ups are against method serial on one rank, on the same network; bound is the ratio of layer evaluations "
        "one after another.",
        "",
        "| " + " | ".join(name.replace("_", " ") for name in COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        values = asdict(row)
        cells = [
            "" if values[name] is None else _FORMATS.get(name, "{}").format(values[name]).replace("|", "/")
            for name in COLUMNS
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += _residuals(rows)
    return "\n".join(lines) + "\n"


def _residuals(rows: Sequence[Row]) -> list[str]:
    """One history per depth and setting, which does not depend on the ranks."""
    found = {(row.layers, row.series): row.residuals for row in rows if len(row.residuals) > 1}
    if not found:
        return []
    most = max(map(len, found.values()))
    lines = ["", "Residual of the last forward solve, before the first iteration and after every one:", ""]
    lines += ["| layers | method | " + " | ".join(map(str, range(most))) + " |", "|" + "---|" * (most + 2)]
    for (layers, series), values in sorted(found.items()):
        cells = [f"{value:.1e}" for value in values] + [""] * (most - len(values))
        lines.append(f"| {layers} | {series} | " + " | ".join(cells) + " |")
    return lines
