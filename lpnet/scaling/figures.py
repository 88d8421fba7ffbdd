"""The pictures of a study: speed-up, efficiency, time by span, critical path, residuals. Only finished cells are drawn.

No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lpnet.io.plots import class_colours, finish, save_figure
from lpnet.scaling.cells import Study
from lpnet.scaling.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 8  # spans with a colour of their own


def draw(study: Study, rows: Sequence[Row], out: Path) -> list[Path]:
    """Write the pictures for which there is something to draw.

    Args:
        study: what was run.
        rows: its results.
        out: folder.
    """
    done = [row for row in rows if row.status == "done"]
    layer_parallel = [row for row in done if row.method != "serial"]
    if not layer_parallel:
        return []
    label = "predicted" if study.run == "emulated" else "measured"
    made = [
        _picture(out / "speedup.png", study, lambda panel: _speedup(panel, study, layer_parallel, label)),
        _picture(out / "efficiency.png", study, lambda panel: _efficiency(panel, study, layer_parallel)),
        _picture(out / "spans.png", study, lambda panel: _spans(panel, layer_parallel)),
        _picture(out / "critical_path.png", study, lambda panel: _critical_path(panel, layer_parallel)),
    ]
    if any(len(row.residuals) > 1 for row in layer_parallel):
        made.append(_picture(out / "residuals.png", study, lambda panel: _residuals(panel, layer_parallel)))
    return made


def _picture(path: Path, study: Study, fill: Callable[[Axes], None]) -> Path:
    def paint(figure: Figure) -> None:
        fill(figure.subplots())

    return save_figure(path, paint, size=(7.5, 4.6), title=study.name)


def _curves(rows: Sequence[Row], study: Study | None = None) -> dict[str, list[Row]]:
    """Rows by curve, by increasing ranks; strong scaling has a curve per depth."""
    depths = {row.layers for row in rows}
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.layers, row.ranks)):
        many = study is not None and study.scaling == "strong" and len(depths) > 1
        found.setdefault(f"N = {row.layers}, {row.series}" if many else row.series, []).append(row)
    return found


def _speedup(panel: Axes, study: Study, rows: Sequence[Row], label: str) -> None:
    curves = _curves(rows, study)
    for colour, (name, curve) in zip(class_colours(len(curves)), curves.items(), strict=True):
        ranks = [row.ranks for row in curve]
        panel.plot(ranks, [row.speedup or 0.0 for row in curve], "o-", color=colour, label=name)
        panel.plot(ranks, [row.bound or 0.0 for row in curve], ":", color=colour)
    ranks = sorted({row.ranks for row in rows})
    panel.plot(ranks, ranks, "--", color="#80868b", label="ideal")
    panel.plot([], [], ":", color="#80868b", label="bound of the critical path")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    finish(panel, f"Speed-up of a training step over serial ({label})", "ranks", "speed-up")


def _efficiency(panel: Axes, study: Study, rows: Sequence[Row]) -> None:
    curves = _curves(rows, study)
    for colour, (name, curve) in zip(class_colours(len(curves)), curves.items(), strict=True):
        values = [row.efficiency or 0.0 for row in curve]
        panel.plot([row.ranks for row in curve], values, "o-", color=colour, label=name)
    panel.set_xscale("log", base=2)
    panel.set_ylim(bottom=0)
    title = "Seconds on the fewest ranks / seconds" if study.scaling == "weak" else "Speed-up / ranks"
    finish(panel, title, "ranks", "efficiency")


def _spans(panel: Axes, rows: Sequence[Row]) -> None:
    """Time by span of the curve with the most rank counts, levels added up."""
    curve = max(_curves(rows).values(), key=len)
    totals: dict[str, list[float]] = {}
    for place, row in enumerate(curve):
        for name, seconds in row.spans.items():
            totals.setdefault(name.split(" level")[0], [0.0] * len(curve))[place] += seconds * 1e3
    ordered = sorted(totals, key=lambda name: -sum(totals[name]))
    if len(ordered) > MOST:
        rest = [sum(values) for values in zip(*(totals[name] for name in ordered[MOST - 1 :]), strict=True)]
        totals, ordered = {**totals, "the rest": rest}, [*ordered[: MOST - 1], "the rest"]
    bottom = [0.0] * len(curve)
    names = [str(row.ranks) if len({r.layers for r in curve}) == 1 else f"{row.ranks}\nN={row.layers}" for row in curve]
    for colour, name in zip(class_colours(len(ordered)), ordered, strict=True):
        panel.bar(range(len(curve)), totals[name], bottom=bottom, color=colour, label=name)
        bottom = [low + high for low, high in zip(bottom, totals[name], strict=True)]
    panel.set_xticks(range(len(curve)), names)
    panel.legend()
    finish(panel, f"Time by span, mean over the ranks ({curve[0].series})", "ranks", "milliseconds", legend=None)


def _critical_path(panel: Axes, rows: Sequence[Row]) -> None:
    curves = _curves(rows)
    for colour, (name, curve) in zip(class_colours(len(curves)), curves.items(), strict=True):
        values = [row.critical_path or 0 for row in curve]
        panel.plot([row.ranks for row in curve], values, "o-", color=colour, label=name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    finish(panel, "Layer evaluations one after another in a step's solves", "ranks", "evaluations")


def _residuals(panel: Axes, rows: Sequence[Row]) -> None:
    """One history per depth and setting: it does not depend on the ranks."""
    histories = {
        f"N = {row.layers}, {row.series}": row.residuals
        for row in sorted(rows, key=lambda row: row.layers)
        if row.residuals
    }
    for colour, (name, values) in zip(class_colours(len(histories)), histories.items(), strict=True):
        panel.semilogy(range(len(values)), values, "o-", color=colour, label=name)
    finish(panel, "Residual of the forward solve of the last step", "iteration", "residual norm")
