"""metrics.jsonl: rows appended whole, rows of a resumed run replaced, NaN made visible."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lpnet.errors import LpnetError
from lpnet.io import metrics


def steps(path: Path) -> list[int]:
    return [row["step"] for row in metrics.read(path)]


def test_rows_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsWriter(path) as writer:
        writer.write({"step": 0, "loss": 0.1 + 0.2, "val_accuracy": None, "seconds": {"forward": 1e-3}})
        assert metrics.read(path)[0]["loss"] == 0.1 + 0.2  # every bit
        writer.write({"step": 1, "loss": np.float64(2.5), "forward_residuals": np.array([1.0, 1e-300])})
        writer.write({"step": 2, "loss": torch.tensor(2.5), "forward_residuals": (1.0, 2)})
    rows = metrics.read(path)
    assert rows[0] == {"step": 0, "loss": 0.1 + 0.2, "val_accuracy": None, "seconds": {"forward": 1e-3}}
    assert rows[1] == {"step": 1, "loss": 2.5, "forward_residuals": [1.0, 1e-300]}
    assert rows[2] == {"step": 2, "loss": 2.5, "forward_residuals": [1.0, 2]}


def test_what_is_not_finite_is_null_and_flagged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsWriter(path) as writer:
        writer.write({"step": 0, "loss": math.nan, "grad_norm": np.inf, "forward_residuals": [1.0, math.inf]})
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    expected = {"step": 0, "loss": None, "grad_norm": None, "forward_residuals": [1.0, None]}
    assert metrics.read(path) == [{**expected, "not_finite": ["loss", "grad_norm", "forward_residuals"]}]


def test_a_resumed_run_replaces_the_rows_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsWriter(path) as writer:
        for step in range(8):
            writer.write({"step": step, "loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # killed here
    assert steps(path) == list(range(8))
    with metrics.MetricsWriter(path, resume_at=5) as writer:
        assert steps(path) == [0, 1, 2, 3, 4]
        writer.write({"step": 5, "loss": 2.0})
    assert [row["loss"] for row in metrics.read(path)] == [1.0] * 5 + [2.0]
    with metrics.MetricsWriter(tmp_path / "new.jsonl", resume_at=5) as writer:
        writer.write({"step": 5})
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with metrics.MetricsWriter(tmp_path / "metrics.jsonl", rank=1) as writer:
        writer.write({"step": 0})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_costs_rows_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        """A file that takes ten bytes of the second row."""

        def __init__(self, file: Any) -> None:
            self.file, self.calls = file, 0

        def fileno(self) -> int:
            return int(self.file.fileno())

        def close(self) -> None:
            self.file.close()

        def write(self, line: bytes) -> int:
            self.calls += 1
            if self.calls in (2, 3):
                self.file.write(line[:10])
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.file.write(line))

    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsWriter(path) as writer:
        writer._file = Full(writer._file)  # type: ignore[assignment]
        for step in range(5):
            writer.write({"step": step})
    assert steps(path) == [0, 3, 4]
    assert caplog.text.count("rows are being lost") == 1


def test_reader_refuses_what_is_no_metrics_file(tmp_path: Path) -> None:
    with pytest.raises(LpnetError, match="cannot be read: No such file"):
        metrics.read(tmp_path / "metrics.jsonl")
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"step": 0}) + "\nnonsense\n" + json.dumps({"step": 1}) + "\n")
    with pytest.raises(LpnetError, match="line 2: 'nonsense' is not a JSON object with a step"):
        metrics.read(path)
    path.write_text("[1]\n")
    with pytest.raises(LpnetError, match="line 1"):
        metrics.read(path)
