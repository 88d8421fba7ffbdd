"""The example scripts, small, as whole programs on two ranks: they run and their loss falls."""

from __future__ import annotations

import re

import pytest


@pytest.mark.parametrize("script, options", [
    ("transformer_characters.py", ["--layers", "6", "--steps", "12"]),
    ("long_gru.py", ["--length", "60", "--steps", "8"]),
])
def test_it_runs_and_its_loss_falls(mpirun, script, options):
    done = mpirun(2, "python", f"drivers/{script}", *options)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) >= 2 and losses[-1] < losses[0], done.stdout
