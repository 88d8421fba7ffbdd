"""Pictures of how far inexact gradients could be trusted, and of several runs beside each other.

Drawn from metrics.jsonl alone. No communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lpnet.io.plots import (
    ADJOINT,
    FORWARD,
    class_colours,
    draw_residuals,
    finish,
    read_metrics,
    residuals,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOOD, BAD = "#009e73", "#cc79a7"
Rows = Sequence[Mapping[str, Any]]


def series(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where a key was measured and is finite."""
    pairs = [(r["step"], float(r[key])) for r in rows if isinstance(r.get(key), int | float)]
    pairs = [(step, value) for step, value in pairs if math.isfinite(value)]
    return np.array([step for step, _ in pairs], dtype=int), np.array([value for _, value in pairs])


def has_monitors(rows: Rows) -> bool:
    """Whether a run watched its gradients."""
    return any(r.get(key) is not None for r in rows for key in ("rho_forward", "rho_adjoint", "gradient_cosine"))


def solves(metrics: Path, out: Path, *, title: str = "") -> Path | None:
    """Residuals of both solves, convergence factors, cosine and error of the gradient, levels and iterations.

    Over the steps; without monitors the residuals alone. No communication.

    Args:
        metrics: metrics.jsonl.
        out: PNG file to write.
        title: what was trained.

    Returns:
        `out`, or None where the run has neither (serial runs).
    """
    rows = read_metrics(metrics)
    if not has_monitors(rows):
        return residuals(metrics, out, title=title)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(3, 2, sharex=True)
        draw_residuals(figure, list(panels[0]), rows)
        for panel, show in zip(panels[1:].ravel(), (_factors, _cosines, _errors, _effort), strict=True):
            show(panel, rows)

    return save_figure(out, draw, size=(11.0, 10.2), title=title)


def _factors(panel: Axes, rows: Rows) -> None:
    for key, label, colour in (("rho_forward", "forward", FORWARD), ("rho_adjoint", "adjoint", ADJOINT)):
        steps, values = series(rows, key)
        if len(steps):
            panel.plot(
                steps, np.maximum(values, 1e-6), color=colour, label=label, marker="." if len(steps) < 60 else ""
            )
    panel.set_yscale("log")
    panel.axhline(1.0, color="#9aa0a6", linewidth=1, linestyle="--")
    finish(panel, "Convergence factor ρ = ‖r after‖ / ‖r before‖", "step", "above 1 the solve diverges")


def _cosines(panel: Axes, rows: Rows) -> None:
    for key, label, colour, marker in (
        ("gradient_cosine", "applied", GOOD, "o"),
        ("gradient_cosine_rejected", "thrown away, or a probe", BAD, "x"),
    ):
        steps, values = series(rows, key)
        if len(steps):
            panel.plot(steps, values, marker, color=colour, label=label, markersize=4)
    panel.axhline(0.99, color="#9aa0a6", linewidth=1, linestyle="--")
    panel.set_ylim(top=1.05)
    finish(panel, "Cosine with the exact gradient", "step", "")


def _errors(panel: Axes, rows: Rows) -> None:
    steps, values = series(rows, "gradient_error")
    positive = values > 0
    panel.plot(steps[positive], values[positive], "o", color=GOOD, markersize=4, label="applied gradient, inexact")
    if (~positive).any():
        floor = values[positive].min() if positive.any() else 1e-8
        panel.plot(steps[~positive], np.full((~positive).sum(), floor), "v", color=GOOD, alpha=0.4, label="exact")
    if len(values):
        panel.set_yscale("log")
    finish(panel, "Relative error of the gradient", "step", "", legend="best")


def _effort(panel: Axes, rows: Rows) -> None:
    for key, label, colour in (
        ("forward_iterations", "forward iterations", FORWARD),
        ("adjoint_iterations", "adjoint iterations", ADJOINT),
        ("mgrit_levels", "levels (1: serial)", "#22252b"),
    ):
        steps, values = series(rows, key)
        if len(steps):
            panel.step(steps, values, where="post", color=colour, label=label, linestyle="-" if "it" in label else ":")
    finish(panel, "Levels and iterations", "step", "")
    panel.set_ylim(bottom=0)


def comparison(runs: Mapping[str, Path], out: Path, *, title: str = "") -> Path | None:
    """Loss, validation accuracy and gradient cosine of several runs over the steps, and loss over time.

    No communication.

    Args:
        runs: label -> metrics.jsonl.
        out: PNG file to write.
        title: of the comparison.
    """
    tables = {label: read_metrics(path) for label, path in runs.items()}
    if not any(len(series(rows, "loss")[0]) for rows in tables.values()):
        return None
    colours = dict(zip(tables, class_colours(max(len(tables), 2)), strict=False))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(2, 2).ravel()
        for label, rows in tables.items():
            style = {"color": colours[label], "label": label, "linewidth": 1.5}
            steps, loss = series(rows, "loss")
            panels[0].plot(steps, loss, **style)
            at, accuracy = series(rows, "val_accuracy")
            panels[1].plot(at, accuracy, marker=".", **style)
            at, cosine = series(rows, "gradient_cosine")
            panels[2].plot(at, cosine, marker=".", linestyle="none" if len(at) else "-", **_without(style, "linewidth"))
            seconds = np.cumsum([r.get("seconds") or 0 for r in rows])
            index = {r["step"]: i for i, r in enumerate(rows)}
            panels[3].plot([seconds[index[s]] for s in steps], loss, **style)
        for panel in (panels[0], panels[3]):
            values = [v for line in panel.lines for v in np.asarray(line.get_ydata(), dtype=float)]
            if values and min(values) > 0 and max(values) / min(values) > 20:
                panel.set_yscale("log")
        finish(panels[0], "Training loss", "step", "nats per sample", legend=None)
        finish(panels[1], "Validation accuracy", "step", "correct samples in %", legend=None)
        finish(panels[2], "Cosine of the applied gradient", "step", "", legend=None)
        finish(panels[3], "Loss over time in steps", "seconds", "nats per sample", legend=None)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))

    return save_figure(out, draw, size=(11.0, 7.4), title=title)


def _without(style: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in style.items() if name != key}
