"""How long `lpnet plan` and `lpnet show` take as whole processes. Ten seconds.

python drivers/bench/start.py --json start.json
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import HERE, Row, arguments, finish, versions

TARGET = 0.5


def main() -> None:
    """Two rows: median seconds of ten processes each, against half a second."""
    args = arguments(__doc__.splitlines()[0])
    lpnet = [sys.executable, "-m", "lpnet"]
    config = str(HERE.parent / "configs" / "peaks_mgrit.yaml")
    with tempfile.TemporaryDirectory() as folder:
        run = [*lpnet, "train", config, "--run.out", f"{folder}/run", "--run.steps", "1", "--run.plots", "false"]
        subprocess.run(run, check=True, capture_output=True)
        checkpoint = str(next(Path(folder, "run", "checkpoints").glob("*.h5")))
        commands = {"plan": [*lpnet, "plan", config, "--ranks", "128"], "show": [*lpnet, "show", checkpoint]}
        rows = []
        for name, command in commands.items():
            seconds = []
            for _ in range(10):
                began = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                seconds.append(time.perf_counter() - began)
            ratios = [s / TARGET for s in seconds]
            rows.append(
                Row(
                    "start",
                    f"{name}: {TARGET} s",
                    statistics.median(ratios),
                    min(ratios),
                    max(ratios),
                    statistics.median(seconds),
                    TARGET,
                    runs=len(seconds),
                    target=1.0,
                    versions=versions(),
                )
            )
    finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
