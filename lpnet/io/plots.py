"""Pictures of a run: curves, residuals, decision regions, class maps.

Everything is drawn from files and plain numpy arrays, never from networks, so that a picture can be redrawn long
after the run. Colours: Okabe and Ito (2008) up to eight classes, beyond that the discrete rainbow of Tol (2021,
SRON/EPS/TN/09-002); bands that have an order take viridis. All are safe for colour-blind readers. No communication.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lpnet.errors import LpnetError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK = "#22252b"
INK = "#2f3437"
FORWARD, ADJOINT = "#0072b2", "#d55e00"

_OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
_TOL_RAINBOW = (
    "#d1bbd7", "#ae76a3", "#882e72", "#1965b0", "#5289c7", "#7bafde", "#4eb265", "#90c987", "#cae0ab", "#f7f056",
    "#f6c141", "#f1932d", "#e8601c", "#dc050c", "#72190e", "#777777",
)  # fmt: skip
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e6e8ea",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
}


def require_matplotlib() -> None:
    """Fail now rather than at the end of a run. No communication.

    Raises:
        LpnetError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise LpnetError(
            f"pictures need matplotlib, which cannot be imported ({error}); install it (pip install matplotlib), or "
            "set --run.plots false"
        ) from error


def class_colours(classes: int, *, ordered: bool = False) -> list[str]:
    """One colour per class, the same in every picture. No communication.

    Args:
        classes: number of classes.
        ordered: whether classes follow each other, as bands of a height do.
    """
    require_matplotlib()
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    if not ordered and classes <= len(_TOL_RAINBOW):
        return list((_OKABE_ITO if classes <= len(_OKABE_ITO) else _TOL_RAINBOW)[:classes])
    ramp = colormaps["viridis"] if ordered else LinearSegmentedColormap.from_list("rainbow", _TOL_RAINBOW)
    return [to_hex(ramp(c / max(classes - 1, 1))) for c in range(classes)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl by increasing step; of two rows for one step the later counts. No communication.

    A last line that a killed run left half written is passed over.

    Raises:
        LpnetError: no such file, or a line within it is not a JSON object with a step.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LpnetError(f"{path} cannot be read ({error.strerror}); give the metrics.jsonl of a run folder") from error
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise LpnetError(
                f"{path}, line {number}: {line[:60]!r} is not a JSON object with the key step; "
                "the file was edited or is not a metrics.jsonl"
            ) from error
    return [rows[step] for step in sorted(rows)]


def curves(metrics: Path, out: Path, *, title: str = "") -> Path | None:
    """Objective and loss beside the accuracies, over the steps. No communication.

    Args:
        metrics: metrics.jsonl; accuracies in per cent.
        out: PNG file to write.
        title: what was trained.

    Returns:
        `out`, or None where there is nothing to draw.
    """
    rows = read_metrics(metrics)
    series = {key: _series(rows, key) for key in ("objective", "loss", "train_accuracy", "val_accuracy")}
    if not any(len(steps) for steps, _ in series.values()):
        return None

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharex=True)
        # The regularisation is often far below the width of a line, so the loss is dashed on top of the objective.
        for key, label, colour, style in (
            ("objective", "objective (loss + regularisation)", "#56b4e9", "-"),
            ("loss", "loss (cross-entropy)", "#0072b2", (0, (4, 2))),
        ):
            _line(left, series[key], label, colour, linestyle=style)
        values = np.concatenate([series["objective"][1], series["loss"][1]])
        if len(values) and values.min() > 0 and values.max() / values.min() > 20:
            left.set_yscale("log")
        finish(left, "Training loss", "step", "nats per sample")
        for key, label, colour, marker in (
            ("train_accuracy", "training", "#e69f00", "o"),
            ("val_accuracy", "validation", "#009e73", "s"),
        ):
            few = marker if len(series[key][0]) <= 40 else None
            _line(right, series[key], label, colour, marker=few, markersize=4)
            if len(series[key][0]):
                label += f", last {series[key][1][-1]:.1f} %"
                right.lines[-1].set_label(label)
        finish(right, "Accuracy", "step", "correct samples in %", legend="lower right")
        right.set_ylim(0, 102)
        if not right.lines:
            _empty(right, "no accuracy was measured")

    return save_figure(out, draw, size=(10.5, 4.0), title=title)


def residuals(metrics: Path, out: Path, *, title: str = "") -> Path | None:
    """Residual norm of the forward and the adjoint solve per iteration, over the steps. No communication.

    Dark is the residual after the last iteration; light ones are those before. A residual that is exactly zero has
    no place on a logarithmic axis: such points stand on its lower edge.

    Args:
        metrics: metrics.jsonl.
        out: PNG file to write.
        title: what was trained.

    Returns:
        `out`, or None where no step holds a residual (serial runs).
    """
    rows = read_metrics(metrics)
    if not any(r.get(key) for r in rows for key in ("forward_residuals", "adjoint_residuals")):
        return None

    def draw(figure: Figure) -> None:
        draw_residuals(figure, list(figure.subplots(1, 2, sharey=True)), rows)

    return save_figure(out, draw, size=(11.0, 4.2), title=title)


def draw_residuals(figure: Figure, panels: Sequence[Axes], rows: Sequence[Mapping[str, Any]]) -> None:
    """Residuals of the forward and the adjoint solve into two panels. No communication."""
    solves = {
        key: [(r["step"], r[key]) for r in rows if r.get(key)] for key in ("forward_residuals", "adjoint_residuals")
    }
    positive = [v for found in solves.values() for _, r in found for v in r if v is not None and 0 < v < math.inf]
    floor = 10.0 ** math.floor(math.log10(min(positive, default=1e-16)) - 0.3)
    for panel, (key, name, colour) in zip(
        panels, (("forward_residuals", "Forward", FORWARD), ("adjoint_residuals", "Adjoint", ADJOINT)), strict=True
    ):
        panel.set_yscale("log")
        _iterations(figure, panel, solves[key], colour, floor)
        finish(panel, f"{name} residual", "step", "", legend=None)
        panel.set_ylim(bottom=floor)
    panels[0].set_ylabel("residual norm √(Σ‖r‖² / batch)")


def _iterations(
    figure: Figure, panel: Axes, solves: Sequence[tuple[int, Sequence[float | None]]], colour: str, floor: float
) -> None:
    """One line per iteration, light to dark; a legend where there are few, a colour bar where there are many."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap

    if not solves:
        _empty(panel, "no such solve in this run")
        return
    count = max(len(r) for _, r in solves)
    ramp = LinearSegmentedColormap.from_list("ramp", ["#d9dde0", colour, DARK])
    shades = [ramp(0.15 + 0.65 * k / max(count - 1, 1)) for k in range(count)]
    steps = np.array([step for step, _ in solves])
    table = np.full((count, len(solves)), np.nan)
    for column, (_, norms) in enumerate(solves):
        table[: len(norms), column] = [math.nan if v is None else v for v in norms]
    few = count <= 7
    for k in range(count):
        label = "before the first iteration" if k == 0 else f"after iteration {k}"
        zero = table[k] == 0
        values = np.where(zero, floor, table[k])
        sparse = len(steps) <= 40 or not np.isfinite(values[:-1] + values[1:]).any()
        marker = "o" if sparse else None
        panel.plot(steps, values, color=shades[k], label=label, marker=marker, markersize=3, zorder=2 + k / 100)
        if zero.any():
            panel.plot(steps[zero], values[zero], "v", color=shades[k], markersize=5, clip_on=False)
    if few:
        panel.legend(loc="best")
    else:
        bounds = np.arange(count + 1) - 0.5
        bar = figure.colorbar(
            ScalarMappable(BoundaryNorm(bounds, count), ListedColormap(shades)), ax=panel, pad=0.02, fraction=0.05
        )
        bar.set_label("iterations done")
        bar.set_ticks(list(range(0, count, max(1, (count - 1) // 6))))
        bar.outline.set_visible(False)


def decision_regions(
    out: Path, *, axis: np.ndarray, predicted: np.ndarray, truth: np.ndarray, names: Sequence[str], title: str = ""
) -> Path:
    """Predicted class over a square beside the true class. No communication.

    Args:
        out: PNG file to write.
        axis: coordinates in x and in y, (points,).
        predicted: predicted class at [row y, column x], (points, points).
        truth: true class, (points, points).
        names: one per class.
        title: what was trained.
    """
    predicted, truth = np.asarray(predicted), np.asarray(truth)
    _same_shape(predicted, truth)
    colours = class_colours(len(names), ordered=True)
    wrong = predicted != truth

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        extent = (float(axis[0]), float(axis[-1]), float(axis[0]), float(axis[-1]))
        agreement = f"Predicted: {100 * (1 - wrong.mean()):.1f} % of the square is right"
        for panel, classes, heading in zip(panels, (predicted, truth), (agreement, "True classes"), strict=True):
            _paint(panel, classes, colours, extent=extent, origin="lower")
            # The true borders on both sides let the eye compare.
            for border in range(1, len(names)):
                panel.contour(
                    axis, axis, truth, levels=[border - 0.5], colors="white", linewidths=0.9, alpha=0.9,
                    linestyles="solid" if classes is truth else "dashed",
                )  # fmt: skip
            finish(panel, heading, "x", "", legend=None)
            panel.grid(False)
            panel.set_xticks(np.linspace(extent[0], extent[1], 7))
            panel.set_yticks(np.linspace(extent[2], extent[3], 7))
        panels[0].set_ylabel("y")
        _class_legend(figure, names, colours, extra=[("true border (dashed)", "white")])

    return save_figure(out, draw, size=(9.8, 5.5 + 0.35 * bool(title)), title=title, layout="compressed")


def class_map(out: Path, *, predicted: np.ndarray, truth: np.ndarray, names: Sequence[str], title: str = "") -> Path:
    """Predicted class of every pixel beside the ground truth; pixels without a class are dark. No communication.

    Args:
        out: PNG file to write.
        predicted: predicted class, (rows, columns); -1: none.
        truth: true class, (rows, columns); -1: unlabelled.
        names: one per class.
        title: what was trained.
    """
    predicted, truth = np.asarray(predicted), np.asarray(truth)
    _same_shape(predicted, truth)
    colours = class_colours(len(names))
    both = (predicted >= 0) & (truth >= 0)
    wrong = both & (predicted != truth)
    rows, columns = truth.shape

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        heading = f"Predicted: {int(wrong.sum()):,} of {int(both.sum()):,} pixels wrong"
        for panel, classes, text in zip(panels, (predicted, truth), (heading, "Ground truth"), strict=True):
            _paint(panel, classes, colours, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), origin="upper")
            finish(panel, text, "column in pixels", "", legend=None)
            panel.grid(False)
        panels[0].set_ylabel("row in pixels")
        counts = [int((truth == c).sum()) for c in range(len(names))]
        labels = [f"{name} ({count:,} px)" for name, count in zip(names, counts, strict=True)]
        _class_legend(figure, labels, colours, extra=[("unlabelled", DARK)])

    # One panel 4.8 inches wide, narrower where the scene is tall; the rest is titles, labels and legend.
    panel_height = min(max(4.8 * rows / columns, 1.5), 8.0)
    width = max(2 * min(4.8, panel_height * columns / rows) + 1.1, 7.5)
    height = panel_height + 0.95 + 0.35 * bool(title) + 0.2 * math.ceil((len(names) + 1) / 4)
    return save_figure(out, draw, size=(width, height), title=title, layout="compressed")


def _same_shape(predicted: np.ndarray, truth: np.ndarray) -> None:
    if predicted.shape != truth.shape or predicted.ndim != 2:
        raise ValueError(f"predicted has the shape {predicted.shape}, truth {truth.shape}; both must be the same plane")


def _paint(panel: Axes, classes: np.ndarray, colours: Sequence[str], *, extent: Any, origin: Any) -> None:
    """Classes as flat colours, one array cell per pixel; dark where the class is negative."""
    from matplotlib.colors import to_rgb

    table = np.array([to_rgb(DARK), *(to_rgb(c) for c in colours)])
    panel.spines[:].set_visible(False)
    panel.imshow(table[np.maximum(classes, -1) + 1], extent=extent, origin=origin, interpolation="nearest")


def _class_legend(
    figure: Figure, names: Sequence[str], colours: Sequence[str], *, extra: Sequence[tuple[str, str]]
) -> None:
    from matplotlib.patches import Patch

    entries = [*zip(names, colours, strict=True), *extra]
    handles = [Patch(facecolor=colour, edgecolor="#9aa0a6", linewidth=0.6, label=name) for name, colour in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4 if len(handles) > 6 else 6))


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where `key` was measured and is finite."""
    pairs = [(r["step"], float(r[key])) for r in rows if isinstance(r.get(key), int | float)]
    pairs = [(step, value) for step, value in pairs if math.isfinite(value)]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])


def _line(panel: Axes, series: tuple[np.ndarray, np.ndarray], label: str, colour: str, **style: Any) -> None:
    steps, values = series
    if len(steps) == 1:
        style["marker"] = style.get("marker") or "o"
    if len(steps):
        panel.plot(steps, values, color=colour, label=label, **style)


def _empty(panel: Axes, text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center", color="#80868b")


def finish(panel: Axes, title: str, xlabel: str, ylabel: str, *, legend: Any = "best") -> None:
    """Title, labels, grid and legend. No communication."""
    from matplotlib.ticker import MaxNLocator

    panel.set_title(title)
    panel.set_xlabel(xlabel)
    if ylabel:
        panel.set_ylabel(ylabel)
    if xlabel == "step":
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(True)
    if legend and panel.lines:
        panel.legend(loc=legend)


def save_figure(
    out: Path,
    draw: Callable[[Figure], None],
    *,
    size: tuple[float, float],
    title: str,
    layout: Literal["constrained", "compressed"] = "constrained",
) -> Path:
    """Draw on a canvas of its own: no display, no pyplot state, nothing of the caller's settings changed."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # From the defaults, so that a user's matplotlibrc does not change the pictures.
    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, "backend": "agg", **_STYLE}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, dpi=130, layout=layout)
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
        draw(figure)
        figure.savefig(out, format="png")
    return out
