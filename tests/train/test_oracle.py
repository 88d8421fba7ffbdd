"""The published optimisation history of Peaks, and the same problem on generated data against plain numpy loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference_peaks as reference
import yaml

from lpnet.io.metrics import read

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "drivers" / "configs" / "peaks_oracle.yaml"


def close(row: dict, expected: reference.Row, tolerance: float) -> None:
    """Objective, loss and gradient norm within a relative tolerance; steps and accuracies as they are."""
    assert row["step_size"] == expected.step_size
    for key in ("objective", "loss", "grad_norm"):
        difference = abs(row[key] / getattr(expected, key) - 1)
        assert difference <= tolerance, f"row {row['step']}: {key} is off by {difference:.1e}, allowed {tolerance:.0e}"
    for key in ("train_accuracy", "val_accuracy"):
        assert row[key] == pytest.approx(getattr(expected, key), abs=1e-9)


def check_oracle(metrics: Path, oracle: Path) -> None:
    rows = {row["step"]: row for row in read(metrics)}
    compared = 0
    for expected in reference.read_expected(oracle / "peaks" / "expected.csv"):
        if expected.step not in rows or rows[expected.step]["objective"] is None:
            continue
        row = rows[expected.step]
        compared += 1
        if expected.step <= 8:
            close(row, expected, 1e-10)
        elif expected.step <= 12:
            close(row, expected, 1e-6)
        else:
            assert row["step_size"] == expected.step_size
            assert row["objective"] == pytest.approx(expected.objective, rel=1e-4)
    assert compared >= 13


def test_numpy_reference_reproduces_the_published_rows(oracle_root):
    root = oracle_root / "peaks"
    problem = reference.PeaksProblem(reference.read_samples(root, "training"), 5.0, 1e-7, 1e-7, 1e-7)
    start = dict(np.load(root / "initial_parameters.npz"))
    rows = {row.step: row for row in reference.train(problem, start, reference.read_samples(root, "validation"), 21)}
    for expected in reference.read_expected(root / "expected.csv"):
        close(vars(rows[expected.step]), expected, 1e-10)


def test_serial_through_the_command_line(mpirun, oracle_root, tmp_path):
    out = tmp_path / "run"
    done = mpirun(
        0, "lpnet", "train", CONFIG, "--data.root", oracle_root / "peaks", "--method", "serial", "--run.out", out,
        "--run.plots", "false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_oracle(out / "metrics.jsonl", oracle_root)
    rows = read(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(27))
    assert [row["step_size"] for row in rows[17:22]][2:] == [0.5, 0.5, 0.5]
    keys = [
        "step",
        "objective",
        "loss",
        "grad_norm",
        "step_size",
        "train_accuracy",
        "val_accuracy",
        "forward_residuals",
    ]
    assert list(rows[0]) == [*keys, "adjoint_residuals", "seconds"]


@pytest.mark.ranks(1, 2, 3, 4)
def test_converged_mgrit(comm, oracle_root, shared_tmp_path, run_train):
    steps = 22 if comm.size == 4 else 13
    flags = ["--data.root", oracle_root / "peaks", "--run.steps", steps]
    assert run_train(comm, CONFIG, shared_tmp_path / "run", *flags) == 0
    if comm.rank == 0:
        check_oracle(shared_tmp_path / "run" / "metrics.jsonl", oracle_root)
        for row in read(shared_tmp_path / "run" / "metrics.jsonl")[:steps]:
            assert row["forward_residuals"][-1] <= 1e-13
            assert row["adjoint_residuals"][-1] <= 1e-14


# generated data


LAYERS, WIDTH, GAMMA = 12, 6, 1e-5


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> tuple[Path, list[reference.Row]]:
    """A folder of the files that lpnet reads, and the history of the plain loops."""
    root = tmp_path_factory.mktemp("peaks")
    train, validation = reference.generate_samples(300, 1), reference.generate_samples(100, 2)
    for name, samples in (("training", train), ("validation", validation)):
        np.savetxt(root / f"features_{name}.dat", samples.x, fmt="%.17e")
        np.savetxt(root / f"labels_{name}.dat", np.eye(5)[samples.y])
    start = reference.random_parameters(LAYERS, WIDTH, 5, 0.1, 3)
    np.savez(root / "initial_parameters.npz", **start)
    problem = reference.PeaksProblem(train, 5.0, GAMMA, GAMMA, GAMMA)
    config = yaml.safe_load(CONFIG.read_text())
    config["model"] |= {"layers": LAYERS, "width": WIDTH}
    config["optim"] |= {"tikhonov": GAMMA, "classifier_tikhonov": GAMMA, "ddt": GAMMA}
    config["run"]["steps"] = 15
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root, reference.train(problem, start, validation, 14)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_generated_data_against_plain_loops(comm, levels, generated, shared_tmp_path, run_train):
    root, expected = generated
    root = Path(comm.bcast(str(root)))
    flags = ["--data.root", root, "--mgrit.levels", levels, "--mgrit.coarsening", 3 if levels == 2 else 2]
    assert run_train(comm, root / "config.yaml", shared_tmp_path / "run", *flags) == 0
    if comm.rank == 0:
        rows = read(shared_tmp_path / "run" / "metrics.jsonl")
        assert len(rows) == 16 and any(row.step_size < 1 for row in expected)
        for row, wanted in zip(rows, expected, strict=False):
            close(row, wanted, 1e-10 if wanted.step <= 8 else 1e-6)


def test_generated_data_serially(generated, tmp_path, run_train):
    root, expected = generated
    flags = ["--data.root", root, "--method", "serial"]
    assert run_train(None, root / "config.yaml", tmp_path / "run", *flags) == 0
    for row, wanted in zip(read(tmp_path / "run" / "metrics.jsonl"), expected, strict=False):
        close(row, wanted, 1e-10 if wanted.step <= 8 else 1e-6)
