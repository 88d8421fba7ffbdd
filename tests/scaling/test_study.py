"""Scaling studies: cells and their reasons, resuming, tables, pictures, divergence; emulated and measured."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lpnet.cli import main
from lpnet.scaling import study as studies
from lpnet.scaling.cells import Cell, read_study
from lpnet.scaling.rows import COLUMNS

STUDY = """\
name: small
steps: 2
gradient_error: true
equal_loss: 4
base:
  model: {layers: 16, width: 4}
  data: {train_samples: 40, validation_samples: 20}
  mgrit: {forward_iterations: 2, adjoint_iterations: 1}
grid:
- {ranks: [2, 4, 32], levels: 2, coarsening: 4}
- {method: [pipeline, fdg], ranks: 2}
- {replicas: 2, ranks: [4, 5], levels: 2, coarsening: 4}
- {method: data, ranks: [4, 64]}
- {method: pipeline, replicas: 2, ranks: 4, microbatches: 3}
- {method: fdg, modules: 2, replicas: 2, ranks: 4, shrink: 0.7}
"""
SHORT = STUDY[: STUDY.index("- {method: [pipeline")] + "- {method: pipeline, ranks: 2, microbatches: 2}\n"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "study.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_study(study: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main(["study", str(study), "--out", str(out)]) == 0
    rows = table(out)
    assert tuple(rows[0]) == COLUMNS
    assert [(row["method"], row["ranks"], row["replicas"], row["modules"], row["status"]) for row in rows] == [
        ("serial", "1", "1", "1", "done"), ("mgrit", "2", "1", "1", "done"), ("mgrit", "4", "1", "1", "done"),
        ("mgrit", "32", "1", "1", "skipped"), ("pipeline", "2", "1", "1", "done"), ("fdg", "2", "1", "2", "done"),
        ("mgrit", "4", "2", "1", "done"), ("mgrit", "5", "2", "1", "skipped"), ("data", "4", "4", "1", "done"),
        ("data", "64", "64", "1", "skipped"), ("pipeline", "4", "2", "1", "done"), ("fdg", "4", "2", "2", "done"),
    ]  # fmt: skip
    reasons = {row["ranks"]: row["reason"] for row in rows if row["status"] == "skipped"}
    assert reasons["32"].startswith("16 layers cannot be shared by 32 ranks; use ")
    assert reasons["5"].startswith("2 replicas x 1 modules do not fit 5 ranks; the nearest grid is ")
    assert reasons["64"] == "64 replicas cannot share a batch of 40 samples"
    skipped = [row for row in rows if row["status"] == "skipped"]
    assert all(row["seconds_per_step"] == row["speedup"] == row["loss"] == "" for row in skipped)
    exact = [row for row in rows if row["method"] in ("data", "pipeline") and row["status"] == "done"]
    assert all(float(row["loss"]) == pytest.approx(float(rows[0]["loss"]), rel=1e-4) for row in exact)
    assert all(row["steps_ratio"] == "1.0" and row["speedup_to_loss"] == row["speedup"] for row in exact)
    assert float(rows[10]["bound"]) == 2 * 2 * 3 / 4 and float(rows[8]["bound"]) == 4
    assert float(rows[0]["speedup"]) == 1 and float(rows[0]["bound"]) == 1
    for row in rows[1:3]:
        assert row["times"] == "predicted" and 0 < float(row["communication"]) < 1
        assert float(row["speedup"]) == pytest.approx(
            float(rows[0]["seconds_per_step"]) / float(row["seconds_per_step"]))
        assert float(row["efficiency"]) == pytest.approx(float(row["speedup"]) / int(row["ranks"]))
        assert float(row["gradient_error"]) < 0.1 and float(row["cosine"]) > 0.99
        assert 0.5 < float(row["steps_ratio"]) < 2
        assert float(row["speedup_to_loss"]) == pytest.approx(float(row["speedup"]) / float(row["steps_ratio"]))
    assert rows[1]["loss"] == rows[2]["loss"]  # the same numbers on any number of ranks
    content = json.loads((out / "study.json").read_text())
    assert content["network"]["name"] == "infiniband" and len(content["rows"][1]["residuals"]) == 3
    text = (out / "study.md").read_text()
    assert "| layers | method | 0 | 1 | 2 |" in text and "| 16 | mgrit levels 2, coarsening 4 | " in text
    assert "predicted by emulation on infiniband: 32 ranks per node" in text and text in capsys.readouterr().out + "\n"
    pictures = ("speedup", "efficiency", "spans", "critical_path", "residuals")
    assert all((out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in pictures)


def test_an_interrupted_study_goes_on(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study.write_text(SHORT)
    out, ran = tmp_path / "out", []
    real = studies.bench

    def counted(config: Any, request: Any, *, steps: int) -> Any:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(request.ranks)
        return real(config, request, steps=steps)

    monkeypatch.setattr(studies, "bench", counted)
    with pytest.raises(KeyboardInterrupt):
        studies.run_study(read_study(str(study)), out)
    assert ran == [(1,), (2,)] and not (out / "study.csv").exists()
    ran.clear()
    studies.run_study(read_study(str(study)), out)
    assert ran == [(4,), (2,)]
    ran.clear()
    studies.run_study(read_study(str(study)), out)
    assert ran == []
    study.write_text(SHORT.replace("steps: 2", "steps: 3"))  # another study: everything anew
    with pytest.raises(KeyboardInterrupt):
        studies.run_study(read_study(str(study)), out)
    assert ran == [(1,), (2,)]


def test_serial_training_is_timed_beside_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, times = tmp_path / "study.yaml", iter((4.0, 1.0, 2.0, 4.0))
    path.write_text(SHORT.replace("steps: 2", "steps: 2\nserial_each: true").replace("[2, 4, 32]", "2"))
    real = studies.bench

    def bench(config: Any, request: Any, *, steps: int) -> Any:
        found = real(config, request, steps=steps)
        return found if config.method != "serial" else [replace(found[0], step=[next(times, 8.0)])]

    monkeypatch.setattr(studies, "bench", bench)
    assert main(["study", str(path), "--out", str(tmp_path / "out")]) == 0
    rows = table(tmp_path / "out")
    assert [float(row["serial_seconds"]) for row in rows] == [4.0, 1.5, 6.0]
    assert [float(row["speedup"]) * float(row["seconds_per_step"]) for row in rows] == pytest.approx([4.0, 1.5, 6.0])


def test_divergence_is_marked_and_not_drawn(study: Path, tmp_path: Path) -> None:
    study.write_text(SHORT.replace("grid:", "  optim: {name: sgd, lr: 1e6}\ngrid:"))
    rows = studies.run_study(read_study(str(study)), tmp_path / "out")
    assert [row.status for row in rows] == ["diverged"] * 3 + ["skipped", "diverged"]
    assert all(row.speedup is None and row.reason for row in rows)
    assert not (tmp_path / "out" / "speedup.png").exists()


def test_weak_scaling(study: Path, tmp_path: Path) -> None:
    text = SHORT[: SHORT.index("grid:")].replace("steps: 2", "steps: 2\nscaling: weak")
    study.write_text(text + "grid: {ranks: [2, 4, 8], layers_per_rank: 4, levels: 2, coarsening: 4}\n")
    rows = studies.run_study(read_study(str(study)), tmp_path / "out")
    assert [(row.method, row.layers, row.ranks) for row in rows] == [
        ("serial", 8, 1), ("serial", 16, 1), ("serial", 32, 1), ("mgrit", 8, 2), ("mgrit", 16, 4), ("mgrit", 32, 8)]
    weak = rows[3:]
    assert weak[0].efficiency == 1
    assert weak[2].seconds_per_step and weak[0].seconds_per_step
    assert weak[2].efficiency == weak[0].seconds_per_step / weak[2].seconds_per_step


def test_measured_cells_are_launched(study: Path, tmp_path: Path, mpirun: Any) -> None:
    study.write_text(SHORT.replace("gradient_error: true\nequal_loss: 4\n", "").replace("[2, 4, 32]", "[2, 32]"))
    flags = ["--run", "measured", "--launch", "mpirun -n {ranks}"]
    done = mpirun(0, "lpnet", "study", study, "--out", tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    rows = table(tmp_path / "out")
    assert [row["status"] for row in rows] == ["done", "done", "skipped", "done"]
    assert {row["times"] for row in rows if row["status"] == "done"} == {"measured"}
    emulated = studies.run_study(replace(read_study(str(study)), run="emulated"), tmp_path / "emulated")
    done = [row.loss for row in emulated if row.loss is not None]
    assert [float(row["loss"]) for row in rows if row["loss"]] == done


@pytest.mark.parametrize(("old", "new", "message"), [
    ("steps: 2", "stepps: 2", "unknown key 'stepps'; did you mean steps?"),
    ("steps: 2", "steps: 0", "steps is 0; expected a whole number greater than 0"),
    ("steps: 2", "network: infinband", "did you mean infiniband?"),
    ("steps: 2", "scaling: hard", "scaling is 'hard'; expected strong or weak"),
    ("levels: 2", "level: 2", "grid: unknown key 'level'; did you mean levels?"),
    ("ranks: [2, 4, 32]", "ranks: two", "ranks is 'two'"),
    ("[pipeline, fdg]", "magic", "no method 'magic'; known: serial, mgrit, pipeline, data, fdg"),
    ("equal_loss: 4", "equal_loss: many", "equal_loss is 'many'; expected a number of training steps"),
    ("microbatches: 3", "microbatches: 0", "microbatches is 0"),
    ("width: 4", "widht: 4", "widht"),
])
def test_bad_studies(study: Path, tmp_path: Path, capsys: Any, old: str, new: str, message: str) -> None:
    study.write_text(STUDY.replace(old, new))
    assert main(["study", str(study), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_the_drivers_can_be_read() -> None:
    drivers = sorted(Path("drivers").glob("scaling_*.yaml"))
    assert len(drivers) >= 5
    for path in drivers:
        found = read_study(str(path), data_root=None)
        assert found.cells[0].method == "serial"
        for cell in found.cells:
            assert isinstance(cell, Cell) and cell.config(found.base).model.layers == cell.layers
