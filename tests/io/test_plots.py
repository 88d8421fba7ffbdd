"""Pictures: drawn from files and arrays alone, with the right colours in the right places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lpnet.errors import LpnetError
from lpnet.io import plots

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


def row(step, **values):
    keys = ("objective", "loss", "grad_norm", "step_size", "train_accuracy", "val_accuracy", "forward_residuals")
    return {"step": step, **dict.fromkeys((*keys, "adjoint_residuals", "seconds")), **values}


def write(folder, rows):
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def picture(path):
    """Pixels of a PNG, (height, width, 3), 0..255."""
    from matplotlib.image import imread

    return np.rint(imread(path)[..., :3] * 255).astype(int)


def pixels_of(image, colour) -> int:
    from matplotlib.colors import to_rgb

    return int((np.abs(image - np.rint(np.array(to_rgb(colour)) * 255)).max(-1) <= 1).sum())


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, to look into."""
    from matplotlib.figure import Figure

    figures = []
    original = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), original(self, *a, **k))[1])
    return figures


def labels(panel):
    return [line.get_label() for line in panel.lines if not line.get_label().startswith("_")]


def test_curves(tmp_path, drawn):
    rows = [row(k, objective=2 / (k + 1), loss=1.9 / (k + 1)) for k in range(30)]
    for k in (0, 10, 20):
        rows[k].update(train_accuracy=20 + 2 * k, val_accuracy=19.0 + 2 * k)
    out = plots.curves(write(tmp_path, rows), tmp_path / "curves.png", title="Peaks")
    assert out == tmp_path / "curves.png" and picture(out).shape[1] > 1000
    left, right = drawn[0].axes
    assert labels(left) == ["objective (loss + regularisation)", "loss (cross-entropy)"]
    assert labels(right) == ["training, last 60.0 %", "validation, last 59.0 %"]
    assert right.lines[1].get_xydata().tolist() == [[0, 19], [10, 39], [20, 59]]
    assert (left.get_title("left"), right.get_title("left")) == ("Training loss", "Accuracy")
    assert left.get_yscale() == "log" and left.get_xlabel() == "step" and right.get_ylabel() == "correct samples in %"


def test_curves_of_little(tmp_path, drawn):
    """One step, a loss that is not a number, no accuracy."""
    rows = [row(0, objective=1.5, loss=1.5), row(1, objective=float("nan"), loss=None)]
    assert plots.curves(write(tmp_path, rows), tmp_path / "curves.png")
    left, right = drawn[0].axes
    assert left.lines[0].get_xydata().tolist() == [[0, 1.5]] and left.lines[0].get_marker() == "o"
    assert right.texts[0].get_text() == "no accuracy was measured"
    assert plots.curves(write(tmp_path, [row(0)]), tmp_path / "none.png") is None
    assert plots.curves(write(tmp_path, []), tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()


def test_residuals(tmp_path, drawn):
    rows = [row(k, forward_residuals=[1e-1, 1e-3, 1e-6], adjoint_residuals=[1e-2, 1e-4]) for k in range(5)]
    rows[3]["forward_residuals"] = [1e-1, 0.0]  # converged sooner, exactly
    rows[4]["adjoint_residuals"] = None
    assert plots.residuals(write(tmp_path, rows), tmp_path / "residuals.png")
    forward, adjoint = drawn[0].axes
    assert labels(forward) == ["before the first iteration", "after iteration 1", "after iteration 2"]
    assert forward.get_yscale() == adjoint.get_yscale() == "log"
    after = dict(
        zip(labels(forward), [line for line in forward.lines if not line.get_label().startswith("_")], strict=True)
    )
    low, high = forward.get_ylim()
    assert 1e-8 < low < 1e-6 and high > 1e-1
    assert after["after iteration 1"].get_ydata()[3] == pytest.approx(low)  # zero stands on the lower edge
    assert np.isnan(after["after iteration 2"].get_ydata()[3])
    assert adjoint.lines[0].get_xdata().tolist() == [0, 1, 2, 3]


def test_residuals_of_many_iterations_take_a_colour_bar(tmp_path, drawn):
    rows = [row(k, forward_residuals=[10.0**-i for i in range(15)]) for k in range(50)]
    assert plots.residuals(write(tmp_path, rows), tmp_path / "residuals.png")
    forward, adjoint, bar = drawn[0].axes
    assert len(forward.lines) == 15 and forward.get_legend() is None and bar.get_ylabel() == "iterations done"
    assert adjoint.texts[0].get_text() == "no such solve in this run"


@pytest.mark.parametrize("value", [0.0, None, float("nan"), float("inf")])
def test_residuals_without_a_positive_number(tmp_path, value):
    assert plots.residuals(write(tmp_path, [row(0, forward_residuals=[value, value])]), tmp_path / "residuals.png")


def test_a_serial_run_has_no_residuals(tmp_path):
    assert plots.residuals(write(tmp_path, [row(0, loss=1.0)]), tmp_path / "residuals.png") is None


def test_decision_regions(tmp_path, drawn):
    axis = np.linspace(-3, 3, 64)
    truth = (axis[None, :] > 0).astype(int) + 2 * (axis[:, None] > 1)  # rows are y
    predicted = truth.copy()
    predicted[:16] = 3
    names = ("low", "middle", "high", "top")
    out = plots.decision_regions(
        tmp_path / "r.png", axis=axis, predicted=predicted, truth=truth, names=names, title="T"
    )
    left, right = drawn[0].axes
    assert left.get_title("left") == "Predicted: 75.0 % of the square is right"
    assert right.get_title("left") == "True classes"
    assert [t.get_text() for t in drawn[0].legends[0].get_texts()][:4] == list(names)
    # y points up: the wrong quarter lies at the bottom of the left panel
    image, top = picture(out), plots.class_colours(4, ordered=True)[3]
    half = image[:, : image.shape[1] // 2]
    assert pixels_of(half[half.shape[0] // 2 :], top) > 10000


def test_class_map(tmp_path, drawn):
    truth = np.full((40, 30), -1)
    truth[:10], truth[20:] = 0, 1
    predicted = truth.copy()
    predicted[:5, :10] = 1
    out = plots.class_map(tmp_path / "m.png", predicted=predicted, truth=truth, names=("corn", "wheat"))
    left, right = drawn[0].axes
    assert left.get_title("left") == "Predicted: 50 of 900 pixels wrong"
    assert right.get_title("left") == "Ground truth"
    texts = [t.get_text() for t in drawn[0].legends[0].get_texts()]
    assert texts == ["corn (300 px)", "wheat (600 px)", "unlabelled"]
    image = picture(out)
    dark, corn, wheat = (pixels_of(image, c) for c in (plots.DARK, *plots.class_colours(2)))
    assert corn / dark == pytest.approx(550 / 600, rel=0.05) and wheat / dark == pytest.approx(1250 / 600, rel=0.05)
    # row 0 is at the top
    middle = image.shape[0] // 2
    assert pixels_of(image[:middle], plots.class_colours(2)[0]) > 0.95 * corn


@pytest.mark.parametrize("shape", [(512, 217), (10, 300)])
def test_class_maps_of_long_scenes(tmp_path, shape):
    truth = np.zeros(shape, dtype=int)
    out = plots.class_map(tmp_path / "m.png", predicted=truth, truth=truth, names=("one", "two"), title="long")
    height, width = picture(out).shape[:2]
    assert max(height, width) < 1700


def test_shapes_that_differ_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"predicted has the shape \(2, 3\), truth \(3, 2\); both must be the same plane"
    ):
        plots.class_map(tmp_path / "m.png", predicted=np.zeros((2, 3)), truth=np.zeros((3, 2)), names=("a", "b"))


@pytest.mark.parametrize("classes", [1, 2, 5, 8, 9, 16, 30])
@pytest.mark.parametrize("ordered", [True, False])
def test_colours_are_distinct(classes, ordered):
    colours = plots.class_colours(classes, ordered=ordered)
    assert len(set(colours)) == classes
    assert plots.DARK not in colours


def test_reading_metrics(tmp_path):
    path = write(tmp_path, [row(0, loss=3.0), row(1, loss=2.0), row(1, loss=1.0)])
    path.write_text(path.read_text() + '{"step": 2, "lo')  # killed while writing
    assert [(r["step"], r["loss"]) for r in plots.read_metrics(path)] == [(0, 3.0), (1, 1.0)]
    path.write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(
        LpnetError, match="metrics.jsonl, line 2: 'nonsense' is not a JSON object with the key step; the file"
    ):
        plots.read_metrics(path)
    with pytest.raises(LpnetError, match="gone.jsonl cannot be read .*; give the metrics.jsonl of a run folder"):
        plots.read_metrics(tmp_path / "gone.jsonl")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r"pictures need matplotlib, which cannot be imported .*; install it .*, or set --run.plots false"
    with pytest.raises(LpnetError, match=message):
        plots.require_matplotlib()
    with pytest.raises(LpnetError, match=message):
        plots.curves(write(tmp_path, [row(0, loss=1.0)]), tmp_path / "curves.png")


def test_nothing_of_the_user_s_matplotlib_is_touched(tmp_path):
    """Imported when drawing, no display, no pyplot, settings as they were."""
    write(tmp_path, [row(0, loss=1.0)])
    code = (
        "import pathlib, sys\n"
        "from lpnet.io import plots\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "import matplotlib\n"
        "matplotlib.rcParams['font.size'] = 17\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "assert plots.curves(folder / 'metrics.jsonl', folder / 'curves.png')\n"
        "assert matplotlib.rcParams['font.size'] == 17 and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True, timeout=240, cwd=ROOT)
