"""A study of delayed gradients that two cores can do: accuracy of every remedy against backpropagation.

    python drivers/fdg_small.py --mnist FOLDER --cifar10 FOLDER --out runs/fdg_small

MNIST and CIFAR-10, subsets, ResNet-8, K = 2, 3, 4, all modules in one process (bitwise what `mpirun -n K` gives). For
every method the learning rate and beta are chosen on images held out of the training data, by one run each at K = 2 and
K = 4 (K = 3 takes the setting of K = 4); on CIFAR-10 all methods take the rate that is chosen for backpropagation. The
setting is then trained with three other seeds and judged by test images. Subset, epochs and batch are those of
configs/fdg_small_*.yaml, the same for all. A run that is done is a file in OUT/cells and is not done again, so that the
study may be stopped at any moment. Writes OUT/table.md; --table makes it of what is there.

    python drivers/fdg_small.py --mnist FOLDER --out runs/fdg_small --staleness 50

does the runs of seed 0 again with the staleness of every 50th batch measured, and writes OUT/staleness.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cells import save

CONFIGS = Path(__file__).parent / "configs"
SETS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
MODULES = (2, 3, 4)
SEEDS = (0, 1, 2)
CHOICE_SEED = 100  # another subset, other weights
RATES = {"mnist": (0.1, 0.2), "cifar10": (0.05, 0.1)}
RATE_OF_BP = ("cifar10",)  # sets on which all methods share the rate of backpropagation
CHOSEN_AT = {1: 1, 2: 2, 3: 4, 4: 4}
BETAS = (0.8, 0.5)
HELD_OUT = {"mnist": 5000, "cifar10": 3000}
WHAT_IS_STALE = (
    "cosine of the gradient that lands with the one of backpropagation for the weights of that moment; distance that "
    "the weights have moved since the forward, over their norm. Means of every {every}th batch of seed 0."
)
# column of the table: flags, and whether beta is chosen
METHODS: dict[str, tuple[tuple[str, ...], bool]] = {
    "BP": (("--fdg.schedule", "bp"), False),
    "FDG, beta = 1": ((), False),
    "FDG, best beta": ((), True),
    "FDG, prediction": (("--fdg.prediction", "full"), False),
    "FDG, prediction + beta": (("--fdg.prediction", "full"), True),
    "DDG": (("--fdg.schedule", "ddg"), False),
    "FR": (("--fdg.schedule", "fr"), False),
}


@dataclass(frozen=True)
class Cell:
    """One run: a method with a setting on K modules."""

    data: str
    method: str
    modules: int
    rate: float
    beta: float
    seed: int
    held_out: bool

    @property
    def name(self) -> str:
        """Of its file."""
        words = self.method.replace("=", "").replace(",", "").replace("+", "").split()
        part = "choice" if self.held_out else "test"
        return f"{self.data}-{part}-{'_'.join(words)}-K{self.modules}-lr{self.rate}-beta{self.beta}-seed{self.seed}"

    def flags(self, root: Path) -> list[str]:
        """Of `lpnet train`."""
        words = ["--seed", self.seed, "--data.root", root, "--optim.lr", self.rate, "--fdg.shrink", self.beta]
        words += ["--fdg.modules", self.modules, *METHODS[self.method][0]]
        if self.held_out:
            words += ["--data.held_out", "true", "--data.validation_samples", HELD_OUT[self.data]]
        return [str(word) for word in words]


def train(cell: Cell, root: Path, out: Path, more: Sequence[str]) -> dict[str, Any]:
    """Do the run, in this process, and keep its metrics.

    Returns:
        The cell, its error in per cent, and its seconds.
    """
    from lpnet.configfile import parse
    from lpnet.errors import NumericsError
    from lpnet.io.metrics import read
    from lpnet.parallel.comm import Comm
    from lpnet.train.trainer import train as run

    folder = out / "runs" / cell.name
    shutil.rmtree(folder, ignore_errors=True)  # one that was interrupted
    config = str(CONFIGS / f"fdg_small_{cell.data}.yaml")
    how = ["--run.out", str(folder), "--run.plots", "false", "--run.log_level", "WARNING"]
    began, cpu = time.perf_counter(), time.process_time()
    diverged = False
    try:
        parsed = parse([config, *how, *cell.flags(root), *more])
        run(parsed.config, Comm(None))
        error = 100.0 - float(read(folder / "metrics.jsonl")[-1]["val_accuracy"])
    except NumericsError:
        error, diverged = 90.0, True
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    return {**asdict(cell), "error": error, "diverged": diverged, **seconds}


class Study:
    """The runs that are done and those to come.

    Args:
        out: folder.
        roots: folder of every set.
        more: further flags of every run.
    """

    def __init__(self, out: Path, roots: dict[str, Path], more: Sequence[str] = ()) -> None:
        self.out, self.roots, self.more = out, roots, list(more)
        self.cells = out / "cells"
        self.cells.mkdir(parents=True, exist_ok=True)

    def done(self, cell: Cell) -> dict[str, Any] | None:
        """What came of a run, if it is done."""
        path = self.cells / f"{cell.name}.json"
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def result(self, cell: Cell) -> dict[str, Any]:
        """What comes of a run, done now where it is not done."""
        found = self.done(cell)
        if found is None:
            found = train(cell, self.roots[cell.data], self.out, self.more)
            save(self.cells / f"{cell.name}.json", found)
            print(f"{cell.name}: {found['error']:.2f} %, {found['seconds']:.0f} s", flush=True)
        return found

    def choices(self, data: str, method: str, modules: int) -> Iterator[Cell]:
        """The settings to choose from; the rate of backpropagation is chosen first where all share it."""
        rates: Sequence[float] = RATES[data]
        if data in RATE_OF_BP and method != "BP":
            shared = self.chosen(data, "BP", 1, work=False)
            rates = rates if shared is None else (shared[0],)
        for rate in rates:
            for beta in BETAS if METHODS[method][1] else (1.0,):
                yield Cell(data, method, CHOSEN_AT[modules], rate, beta, CHOICE_SEED, True)

    def chosen(self, data: str, method: str, modules: int, *, work: bool = True) -> tuple[float, float] | None:
        """Rate and beta with the least held-out error, the first of equal ones; None where runs are missing."""
        cells = list(self.choices(data, method, modules))
        if len(cells) == 1:
            return cells[0].rate, cells[0].beta
        found = [self.result(cell) if work else self.done(cell) for cell in cells]
        errors = [result["error"] for result in found if result is not None]
        if len(errors) < len(cells):
            return None
        best = cells[errors.index(min(errors))]
        return best.rate, best.beta

    def run(self) -> None:
        """All runs that are not done: settings first, then seed by seed."""
        for data in self.roots:
            for method, modules in rows():
                self.chosen(data, method, modules)
            for seed in SEEDS:
                for method, modules in rows():
                    setting = self.chosen(data, method, modules)
                    assert setting is not None
                    self.result(Cell(data, method, modules, *setting, seed, False))
                self.write()

    def errors(self, data: str, method: str, modules: int) -> tuple[tuple[float, float] | None, list[float]]:
        """The chosen setting, and the test errors that are there."""
        setting = self.chosen(data, method, modules, work=False)
        if setting is None:
            return None, []
        found = [self.done(Cell(data, method, modules, *setting, seed, False)) for seed in SEEDS]
        return setting, [result["error"] for result in found if result is not None]

    def write(self) -> None:
        """The table of what is there, in Markdown."""
        text = "\n\n".join(self.table(data) for data in SETS if any(self.cells.glob(f"{data}-*.json")))
        (self.out / "table.md").write_text(text + "\n")

    def stale(self, every: int) -> None:
        """Runs of the chosen settings with staleness measured, and their table."""
        (self.out / "stale").mkdir(exist_ok=True)
        lines = []
        for data in self.roots:
            lines += [
                f"| {SETS[data]} | " + " | ".join(f"K = {modules}" for modules in MODULES) + " |",
                "|---" * (1 + len(MODULES)) + "|",
            ]
            for method in METHODS:
                found = [self._stale(data, method, modules, every) for modules in MODULES if method != "BP"]
                if found:
                    lines.append("| " + " | ".join([method, *found]) + " |")
            lines += ["", f"Modules 1 to K: {WHAT_IS_STALE.format(every=every)}", ""]
            (self.out / "staleness.md").write_text("\n".join(lines))

    def _stale(self, data: str, method: str, modules: int, every: int) -> str:
        """A cell of the table of `stale`."""
        from lpnet.io.metrics import read

        setting = self.chosen(data, method, modules, work=False)
        if setting is None:
            return "-"
        cell = Cell(data, method, modules, *setting, SEEDS[0], False)
        path = self.out / "stale" / f"{cell.name}.json"
        if not path.is_file():
            more = [*self.more, "--fdg.staleness_every", str(every)]
            train(cell, self.roots[data], self.out / "stale", more)
            rows = read(self.out / "stale" / "runs" / cell.name / "metrics.jsonl")
            rows = [row for row in rows if row.get("staleness_cosine")]
            path.write_text(json.dumps([[row["staleness_cosine"], row["staleness_drift"]] for row in rows]))
        rows = json.loads(path.read_text())
        cosine, drift = (
            " ".join(f"{statistics.mean(row[kind][k] for row in rows):.3f}" for k in range(modules)) for kind in (0, 1)
        )
        return f"{cosine}; {drift}"

    def table(self, data: str) -> str:
        """Median and range of the test errors, one line per method, one column per K; and how it was made."""
        _, base = self.errors(data, "BP", 1)
        lines = [
            "| " + " | ".join([SETS[data], *(f"K = {modules}" for modules in MODULES)]) + " |",
            "|---" * (1 + len(MODULES)) + "|",
        ]
        for method in METHODS:
            cells = []
            for modules in MODULES:
                setting, errors = self.errors(data, method, 1 if method == "BP" else modules)
                if setting is None or not errors:
                    cells.append("-")
                    continue
                beta = f", {setting[1]:g}" if METHODS[method][1] else ""
                cells.append(f"{_spread(errors)} ({setting[0]:g}{beta})")
            lines.append("| " + " | ".join([method, *cells]) + " |")
        if base:
            lines += ["", *self._verdicts(data, base)]
        return "\n".join([*lines, "", self._made(data)])

    def _verdicts(self, data: str, base: list[float]) -> Iterator[str]:
        """The best method of every K against backpropagation."""
        for modules in MODULES:
            found = {method: self.errors(data, method, modules)[1] for method in METHODS if method != "BP"}
            found = {method: errors for method, errors in found.items() if errors}
            if not found:
                continue
            best = min(found, key=lambda method: statistics.median(found[method]))
            middle, reference = statistics.median(found[best]), statistics.median(base)
            yield (
                f"K = {modules}: best {best}, {middle:.2f} %; backpropagation {_spread(base)}: "
                f"{middle - reference:+.2f} points, {'within' if middle <= max(base) else 'above'} its range."
            )

    def _made(self, data: str) -> str:
        results = [json.loads(path.read_text()) for path in sorted(self.cells.glob(f"{data}-*.json"))]
        hours = sum(result["cpu_seconds"] for result in results) / 3600
        diverged = sum(result["diverged"] for result in results)
        return (
            f"Test error %, median (least - largest) of {len(SEEDS)} seeds, in brackets the chosen learning rate and "
            f"beta. {len(results)} runs, {hours:.2f} core hours, {diverged} diverged (counted as 90 %)."
        )


def rows() -> Iterator[tuple[str, int]]:
    """Every method with every K; backpropagation knows none."""
    for method in METHODS:
        for modules in (1,) if method == "BP" else MODULES:
            yield method, modules


def _spread(errors: Sequence[float]) -> str:
    few = f", {len(errors)} of {len(SEEDS)} seeds" if len(errors) < len(SEEDS) else ""
    return f"{statistics.median(errors):.2f} ({min(errors):.2f} - {max(errors):.2f}{few})"


def main(words: Sequence[str] | None = None) -> None:
    """The study, or its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for data, name in SETS.items():
        parser.add_argument(f"--{data}", type=Path, help=f"folder of {name}; left out without")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--staleness", type=int, default=0, help="batches between two measurements")
    parser.add_argument("--table", action="store_true", help="only write the table of what is there")
    args, more = parser.parse_known_args(words)
    roots = {data: getattr(args, data) for data in SETS if getattr(args, data) is not None}
    study = Study(args.out, roots, more)
    if not args.table:
        import torch

        torch.set_num_threads(1)
        if args.staleness:
            study.stale(args.staleness)
            print((args.out / "staleness.md").read_text())
            return
        study.run()
    study.write()
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    sys.exit(main())
