"""The CIFAR-10 table of Zhuang et al. 2021: backpropagation, decoupled without and with shrinking, median of seeds.

    python drivers/fdg_cifar.py --root FOLDER --out runs/table resnet20 resnet56         # full size, for a cluster
    python drivers/fdg_cifar.py --root FOLDER --mnist FOLDER --out runs/small --small    # two cores, see fdg_small.py

Every run is `lpnet train` on K ranks; finished runs are not run again. Prints a Markdown table of test errors.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import fdg_small

from lpnet.io.metrics import read

CONFIGS = Path(__file__).parent / "configs" / "fdg_cifar"
# published shrink factor per network and number of modules
BEST = {
    ("resnet20", 2): 0.2,
    ("resnet56", 2): 0.5,
    ("resnet56", 3): 0.5,
    ("resnet56", 4): 0.5,
    ("resnet110", 2): 0.5,
    ("resnet18", 2): 0.8,
    ("resnet1202", 2): 0.7,
    ("wrn28_10", 2): 0.7,
}


def variants(name: str, modules: int) -> dict[str, list[str]]:
    """Flags of every column."""
    cut = ["--fdg.modules", str(modules)]
    return {
        "BP": ["--fdg.modules", "1", "--fdg.schedule", "bp", "--fdg.shrink", "1"],
        "FDG 1": [*cut, "--fdg.shrink", "1"],
        f"FDG {BEST[name, modules]}": cut,
        "DDG": [*cut, "--fdg.shrink", "1", "--fdg.schedule", "ddg"],
        "FR": [*cut, "--fdg.shrink", "1", "--fdg.schedule", "fr"],
    }


def error_of(name: str, flags: list[str], out: Path, root: Path, ranks: int) -> float:
    """Test error in per cent of one run, run now where it is not there yet."""
    if not (out / "curves.png").exists():
        command = [sys.executable, "-m", "lpnet", "train", str(CONFIGS / f"{name}.yaml"), "--data.root", str(root)]
        command += ["--run.out", str(out), "--resume", "auto", *flags]
        launcher = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
        subprocess.run([*launcher, *command], check=True)
    scores = [row["val_accuracy"] for row in read(out / "metrics.jsonl") if row["val_accuracy"] is not None]
    return 100.0 - scores[-1]


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=[], help=", ".join(sorted({name for name, _ in BEST})))
    parser.add_argument("--root", type=Path, required=True, help="folder with the python version of CIFAR-10")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--modules", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="the study of fdg_small.py in place of the paper's table")
    parser.add_argument("--mnist", type=Path, help="folder with MNIST, for --small; left out without")
    parser.add_argument("--one-process", action="store_true", help="all modules on one rank, with the same bits")
    args = parser.parse_args()
    if args.small:
        fdg_small.main(
            [
                *("--out", str(args.out), "--cifar10", str(args.root)),
                *(("--mnist", str(args.mnist)) if args.mnist is not None else ()),
            ]
        )
        return
    lines = []
    for name in args.networks or ["resnet20"]:
        cells = []
        for column, flags in variants(name, args.modules).items():
            ranks = 1 if column == "BP" or args.one_process else args.modules
            out = args.out / f"{name}-{args.modules}-{column.replace(' ', '-')}"
            errors = [
                error_of(name, [*flags, "--seed", str(seed)], out.with_name(f"{out.name}-{seed}"), args.root, ranks)
                for seed in range(args.seeds)
            ]
            cells.append((column, statistics.median(errors), min(errors), max(errors)))
        lines += [f"| {name}, K={args.modules} | {c} | {m:.2f} | {low:.2f} - {high:.2f} |" for c, m, low, high in cells]
    print("| network | method | test error %, median | range |\n|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
