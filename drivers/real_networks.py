"""Layer-parallel one-shot training against serial training on real data: equal steps, three seeds, table and pictures.

    python drivers/real_networks.py mnist salinas_a --data FOLDER --out runs/real       # emulated ranks, one process
    ... --mpirun    real ranks (the same bits)      ... --steps 0    a table and pictures of what is there already

FOLDER holds the data sets in folders of their names. A cell is one `lpnet train`; finished cells are not run again, and
an interrupted one goes on from its checkpoint. Leaves per data set OUT/NAME.json, NAME.md, NAME.png, and the class map
of the first layer-parallel run where the data are a scene.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from lpnet.io.metrics import read

CONFIGS = Path(__file__).parent / "configs"
FILES = {"mnist": "mnist_64.yaml", "salinas_a": "salinas_a_64.yaml"}
LABELS = {"serial": "serial", "mgrit": "layer-parallel, one-shot"}


def cell(name: str, method: str, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluated rows of one run, run now where it is not finished yet."""
    out = args.out / f"{name}-{method}-{seed}"
    done = out / "curves.png"
    if not done.exists() and args.steps != 0:
        words = ["train", str(CONFIGS / FILES[name]), "--data.root", str(args.data / name), "--run.out", str(out)]
        words += ["--method", method, "--seed", str(seed), "--resume", "auto"]
        words += ["--run.steps", str(args.steps)] if args.steps else []
        launcher = []
        if method == "mgrit" and args.mpirun:
            launcher = ["mpirun", "-n", str(args.ranks)]
        elif method == "mgrit":
            words += ["--emulate", str(args.ranks)]
        subprocess.run([*launcher, sys.executable, "-m", "lpnet", *words], check=True)
    rows = read(out / "metrics.jsonl") if done.exists() else []
    return [row for row in rows if row["val_accuracy"] is not None]


def verdict(serial: list[float], parallel: list[float]) -> str:
    """Whether the layer-parallel accuracies lie in the range of the serial ones."""
    low, high = min(serial), max(serial)
    inside = [low <= value <= high for value in parallel]
    if all(inside):
        return "all seeds within the serial range"
    middle = statistics.median(parallel)
    where = "within" if low <= middle <= high else "above" if middle > high else "below"
    return f"{sum(inside)} of {len(inside)} seeds within the serial range, the median {where} it"


def table(name: str, found: dict[str, list[list[dict[str, Any]]]], ranks: int) -> str:
    """Markdown."""
    lines = [f"| {name} | ranks | steps | validation accuracy %, by seed | median | range |", "|---" * 6 + "|"]
    finals = {}
    for method, runs in found.items():
        last = [run[-1]["val_accuracy"] for run in runs]
        finals[method] = last
        seeds = ", ".join(f"{value:.2f}" for value in last)
        spread = f"{min(last):.2f} - {max(last):.2f}"
        count, steps = (1 if method == "serial" else ranks), runs[0][-1]["step"]
        lines.append(f"| {LABELS[method]} | {count} | {steps} | {seeds} | {statistics.median(last):.2f} | {spread} |")
    return "\n".join([*lines, "", f"{verdict(finals['serial'], finals['mgrit'])}.", ""])


def picture(name: str, found: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Validation accuracy over steps, every seed a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2), dpi=90)
    for method, colour, style in (("serial", "C0", "-"), ("mgrit", "C1", "--")):
        for k, run in enumerate(found[method]):
            label = LABELS[method] if k == 0 else None
            values = [row["val_accuracy"] for row in run]
            axes.plot([row["step"] for row in run], values, style, color=colour, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="validation accuracy %", title=f"{name}, N=64")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Cells, then table and pictures per data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(FILES))
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets' folders")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of the file's; 0: run nothing, show what is there")
    parser.add_argument("--mpirun", action="store_true", help="real ranks in place of emulated ones")
    args = parser.parse_args()
    for name in args.names:
        found = {method: [cell(name, method, seed, args) for seed in range(args.seeds)] for method in LABELS}
        found = {method: [run for run in runs if run] for method, runs in found.items()}
        if not all(found.values()):
            print(f"{name}: no finished cells of every method yet")
            continue
        text = table(name, found, args.ranks)
        (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (args.out / f"{name}.md").write_text(text, encoding="utf-8")
        picture(name, found, args.out / f"{name}.png")
        scene = args.out / f"{name}-mgrit-0" / "class_map.png"
        if scene.exists():
            shutil.copyfile(scene, args.out / f"{name}_class_map.png")
        print(text)


if __name__ == "__main__":
    main()
