"""A page about a real run in headless Chromium: no console error, and its pictures are drawn. Run by run.sh."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lpnet.cli import main

RUN = """
seed: 0
method: mgrit
model: {layers: 16, width: 4, activation: smooth_relu}
data: {name: peaks, train_samples: 100, validation_samples: 50}
mgrit: {coarsening: 4, forward_iterations: 2, adjoint_iterations: 2, initial_guess: coarse, check_every: 2}
optim: {name: adam, lr: 0.05}
run: {steps: 12, eval_every: 4, checkpoint_every: 0, trace: true}
"""
WIDTH, HEIGHT = 1200, 4200


def browse(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in Chromium with an empty profile."""
    command = [
        os.environ["LPNET_BROWSER"], "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--enable-logging=stderr", "--v=0", "--virtual-time-budget=4000", f"--window-size={WIDTH},{HEIGHT}",
        "--hide-scrollbars", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one run and a page of two, from real runs."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "run.yaml").write_text(RUN)
    for control in ("fixed", "adaptive"):
        words = [str(folder / "run.yaml"), "--run.out", str(folder / "runs" / control), "--mgrit.control", control]
        assert main(["train", *words]) == 0
    assert main(["report", str(folder / "runs" / "adaptive"), "--out", str(folder / "one.html")]) == 0
    assert main(["report", str(folder / "runs"), "--out", str(folder / "two.html")]) == 0
    return folder


def test_a_console_error_would_be_seen(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<!DOCTYPE html><html><body><script>console.error('planted');</script></body></html>")
    assert errors(browse(page, tmp_path / "profile", "--dump-dom")) != []


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_page_opens_without_a_console_error(pages, tmp_path, name):
    done = browse(pages / f"{name}.html", tmp_path / "profile", "--dump-dom")
    assert done.returncode == 0, done.stderr[-2000:]
    assert errors(done) == []
    assert "verdict" in done.stdout and done.stdout.count("data:image/png;base64,") >= 3


@pytest.mark.parametrize("name, most", [("one", 3), ("two", 7)])
def test_the_screenshot_shows_the_plots(pages, tmp_path, name, most):
    """Every picture is as large as its file says, and the screenshot holds the colours of the curves."""
    shot = tmp_path / "shot.png"
    done = browse(pages / f"{name}.html", tmp_path / "profile", f"--screenshot={shot}")
    assert done.returncode == 0 and shot.exists(), done.stderr[-2000:]
    pixels = np.asarray(imread(shot))[..., :3]
    assert pixels.shape[:2] == (HEIGHT, WIDTH)
    for colour in ("#0072b2", "#d55e00", "#009e73"):  # forward, adjoint; applied gradients
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(pixels - wanted).max(-1) < 0.02).sum() > 60, f"no curve in {colour}"
    text = (pages / f"{name}.html").read_text()
    assert len(re.findall(r"<img ", text)) >= most


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines of the browser's console that report an error or a failed load."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Failed to load" in line]
