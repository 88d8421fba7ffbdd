"""A small configuration for emulated runs."""

from __future__ import annotations

from pathlib import Path

import pytest

SMALL = """\
method: mgrit
model: {layers: 16, width: 4, dtype: float64}
data: {name: peaks, train_samples: 40, validation_samples: 20}
mgrit: {levels: 2, coarsening: 4, forward_iterations: 2, adjoint_iterations: 1}
optim: {name: adam, lr: 0.01}
run: {steps: 4, eval_every: 2, checkpoint_every: 2, plots: false, log_level: WARNING}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Sixteen layers on forty samples."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path
