"""The example scripts, small, as whole programs on two ranks: they run and their loss falls."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

DRIVERS = Path(__file__).resolve().parents[1] / "drivers"


@pytest.mark.parametrize("script, options", [
    ("transformer_characters.py", ["--layers", "6", "--steps", "12"]),
    ("long_gru.py", ["--length", "60", "--steps", "8"]),
])
def test_it_runs_and_its_loss_falls(mpirun, script, options):
    done = mpirun(2, "python", f"drivers/{script}", *options)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) >= 2 and losses[-1] < losses[0], done.stdout


@pytest.fixture
def driver(monkeypatch):
    """Loads a driver, which may import others."""
    monkeypatch.syspath_prepend(str(DRIVERS))

    def loaded(name):
        spec = importlib.util.spec_from_file_location(name, DRIVERS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # its dataclass looks itself up
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture
def small(driver, monkeypatch):
    """drivers/fdg_small.py with fewer rows."""
    module = driver("fdg_small")
    monkeypatch.setattr(module, "MODULES", (2, 3))
    methods = {name: module.METHODS[name] for name in ("BP", "FDG, beta = 1", "FDG, best beta")}
    monkeypatch.setattr(module, "METHODS", methods)
    return module


def test_the_small_study_chooses_on_held_out_samples_and_goes_on_where_it_was(small, tmp_path, monkeypatch):
    done = []

    def train(cell, root, out, more):
        if len(done) == stop:
            raise KeyboardInterrupt
        done.append(cell)
        error = {0.1: 4.0, 0.2: 3.0}[cell.rate] + cell.beta + cell.seed / 10
        return {**vars(cell), "error": error, "diverged": False, "seconds": 2.0, "cpu_seconds": 1.0}

    monkeypatch.setattr(small, "train", train)
    study = small.Study(tmp_path, {"mnist": tmp_path})
    stop = 9
    with pytest.raises(KeyboardInterrupt):
        study.run()
    stop = -1
    study.run()
    choices = [cell for cell in done if cell.held_out]
    assert len(done) == len(set(done)) == len(choices) + 3 * 5
    assert {(cell.modules, cell.seed) for cell in choices if cell.method != "BP"} == {(2, 100), (4, 100)}
    assert {cell.rate for cell in done if not cell.held_out} == {0.2}
    assert {cell.beta for cell in done if cell.method == "FDG, best beta" and not cell.held_out} == {0.5}
    text = (tmp_path / "table.md").read_text()
    assert "| FDG, best beta | 3.60 (3.50 - 3.70) (0.2, 0.5) | 3.60 (3.50 - 3.70) (0.2, 0.5) |" in text
    assert "K = 2: best FDG, best beta, 3.60 %; backpropagation 4.10 (4.00 - 4.20): -0.50 points, within its" in text
    assert f"{len(done)} runs, 0.01 core hours, 0 diverged" in text
    for path in (tmp_path / "cells").glob("*test*seed1.json"):
        path.unlink()
    study.write()
    assert "2 of 3 seeds" in (tmp_path / "table.md").read_text()


def test_the_small_study_measures_staleness(small, tmp_path, monkeypatch):
    def train(cell, root, out, more):
        assert more == ["--fdg.staleness_every", "4"] and cell.seed == 0 and not cell.held_out
        folder = out / "runs" / cell.name
        folder.mkdir(parents=True)
        rows = [{"step": 0}, {"step": 1, "staleness_cosine": [0.5] * cell.modules, "staleness_drift": [0.25, 0.0, 0.0]}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(small, "train", train)
    monkeypatch.setattr(small.Study, "chosen", lambda self, *cell, work: (0.1, 1.0))
    study = small.Study(tmp_path, {"mnist": tmp_path})
    for _ in range(2):  # the second time from the files
        study.stale(4)
        text = (tmp_path / "staleness.md").read_text()
        assert "| FDG, beta = 1 | 0.500 0.500; 0.250 0.000 | 0.500 0.500 0.500; 0.250 0.000 0.000 |" in text
        assert "BP" not in text and "every 4th batch" in text


def test_one_run_of_the_small_study(small, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from data.test_mnist import write

    write(tmp_path)
    monkeypatch.setattr(small, "HELD_OUT", {"mnist": 10})
    more = ["--data.train_samples", "20", "--data.batch_size", "8", "--run.steps", "4", "--optim.decay_epochs", "[]"]
    study = small.Study(tmp_path / "out", {"mnist": tmp_path}, more)
    cell = small.Cell("mnist", "FDG, best beta", 3, 0.1, 0.5, 0, True)
    found = study.result(cell)
    assert 0 <= found["error"] <= 100 and not found["diverged"]
    assert json.loads((tmp_path / "out" / "cells" / f"{cell.name}.json").read_text()) == found
    assert (tmp_path / "out" / "runs" / cell.name / "metrics.jsonl").exists()


def test_nested_and_direct_training_do_equal_work(driver, tmp_path):
    nested = driver("nested_depth")
    words = ["--out", str(tmp_path), "--seeds", "1", "--stages", "4,8,16", "--steps", "6", "--samples", "20"]
    nested.main(words)
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "cells").iterdir()}
    assert len(found) == 4
    assert all(192 <= cell["work"] < 192 + 200 for cell in found.values())  # a step of 16 layers takes 32 and more
    exact = found["exact--nested--0"]
    assert exact["steps"] == [8, 4, 2] and exact["work"] == exact["evaluations"] == 192
    assert found["exact--direct--0"]["steps"] == [6]
    assert [layers for _, _, layers in exact["curve"]] == [4] * 8 + [8] * 4 + [16] * 3
    assert exact["curve"][-1][:2] == [192, exact["loss"]]
    assert (tmp_path / "README.md").read_text().count("| nested | 1 |") == 2
    assert (tmp_path / "nested_depth.png").exists()
    for path in (tmp_path / "cells").glob("exact*"):
        path.unlink()
    nested.main(words)  # what is there stays, what is missing comes again
    assert {path.stem: json.loads(path.read_text()) for path in (tmp_path / "cells").iterdir()} == found
    with pytest.raises(SystemExit):
        nested.main([*words, "--steps", "7"])


def test_an_experiment_that_stops_is_a_row_with_its_cause(driver, tmp_path, monkeypatch):
    experiments = driver("experiments")

    def run(case, method, seed, root):
        stopped = "" if seed == 0 else "step 3: multigrid diverges: cosine -0.1; set mgrit.control adaptive"
        return {
            "loss": 0.5, "train_accuracy": 90.0, "val_accuracy": 80.0, "steps": 3 if stopped else 9, "work": 64.0,
            "stopped": stopped, "cosines": [[0, 0.9]], "rejected": 0, "losses": [1.0, 0.7], "seconds": 1.0,
        }  # fmt: skip

    monkeypatch.setattr(experiments, "run", run)
    monkeypatch.setattr(experiments, "CASES", {"peaks-32": experiments.peaks(32, methods=["cold fixed"])})
    monkeypatch.setattr(sys, "argv", ["experiments.py", "--out", str(tmp_path), "--cases", "peaks-32", "--seeds", "2"])
    experiments.main()
    text = (tmp_path / "README.md").read_text()
    assert "| cold fixed | 2 | 9, stopped at 3 | 0.5000 [0.5000, 0.5000] |" in text
    assert "cold fixed stopped: step 3: multigrid diverges: cosine -0.1." in text


def test_a_cell_of_the_experiments_that_diverges(driver, tmp_path):
    experiments = driver("experiments")
    config = experiments.peaks(16, steps=2).config
    bad = experiments.replace(config, optim=experiments.OptimConfig(name="sgd", lr=1e30))
    found = experiments.run(experiments.Case(bad, 8, []), "serial", 0, tmp_path)
    assert found["steps"] < 8 and found["stopped"].startswith(f"step {found['steps']}: ")


def test_staleness_of_every_module_with_and_without_shrinking(driver, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from data.test_cifar import write10

    write10(tmp_path / "data")
    staleness = driver("fdg_staleness")
    monkeypatch.setattr(staleness, "SHRINK", {2: 0.8, 3: 0.5})
    words = ["--root", str(tmp_path / "data"), "--out", str(tmp_path), "--seeds", "1", "--every", "2"]
    more = ["--data.train_samples", "60", "--data.validation_samples", "10", "--data.batch_size", "8"]
    more += ["--run.steps", "12", "--optim.decay_epochs", "[]"]
    staleness.main([*words, *more])
    cells = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "fdg_staleness").iterdir()}
    assert set(cells) == {"K2-beta1-0", "K2-beta0.8-0", "K3-beta1-0", "K3-beta0.5-0"}
    for name, cell in cells.items():
        assert len(cell["cosine"]) == len(cell["drift"]) == len(cell["batches"]) >= 2, name
        assert all(row[-1] == 0 for row in cell["drift"])  # the last module's gradients are not delayed
        assert all(-1 <= value <= 1.001 for row in cell["cosine"] for value in row)
    text = (tmp_path / "fdg_staleness.md").read_text()
    assert "| 3 | 1 | 4 | " in text and (tmp_path / "fdg_staleness.png").exists()
    staleness.main([*words, *more])
    assert (tmp_path / "fdg_staleness.md").read_text() == text
