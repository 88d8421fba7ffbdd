"""How stale delayed gradients are on CIFAR-10, module by module, with and without shrinking.

    python drivers/fdg_staleness.py --root FOLDER --out drivers/results [--seeds 3] [--every 15]

ResNet-8 in K = 2, 3, 4 modules, trained as in configs/fdg_small_cifar10.yaml, all modules in one process (bit for bit
what `mpirun -n K` gives); beta as fdg_small.py chose it on held-out images. Of every 15th batch the gradient that lands
is compared with the one that backpropagation would have at that moment (`fdg.staleness_every`), and the weights with
those of the forward. Every run is a file in OUT/fdg_staleness and is not done again. Writes OUT/fdg_staleness.md and a
picture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fdg_small
from cells import save, spread

from lpnet.io.metrics import read
from lpnet.io.plots import class_colours, finish, save_figure

RATE = 0.05
SHRINK = {2: 0.8, 3: 0.5, 4: 0.5}  # drivers/results/fdg_small.md
MEASURED = ("cosine", "drift")
FULL_RATE = 189  # batches of three epochs; then the learning rate falls, and staleness with it


def run(modules: int, beta: float, seed: int, root: Path, every: int, more: Sequence[str]) -> dict[str, Any]:
    """Train once; what was measured: (batches, modules) for each of MEASURED, and the batches' numbers."""
    method = "FDG, beta = 1" if beta == 1 else "FDG, best beta"
    cell = fdg_small.Cell("cifar10", method, modules, RATE, beta, seed, False)
    out = Path(tempfile.mkdtemp(prefix="fdg_staleness-"))
    try:
        found = fdg_small.train(cell, root, out, [*more, "--fdg.staleness_every", str(every)])
        rows = read(out / "runs" / cell.name / "metrics.jsonl")
    finally:
        shutil.rmtree(out, ignore_errors=True)
    rows = [row for row in rows if row.get("staleness_cosine")]
    measured = {name: [row[f"staleness_{name}"] for row in rows] for name in MEASURED}
    return {**found, "batches": [row["staleness_batch"] for row in rows], **measured}


class Study:
    """The runs that are done and those to come.

    Args:
        out: folder.
        every: batches between two measurements.
        seeds: how many.
    """

    def __init__(self, out: Path, every: int, seeds: int) -> None:
        self.out, self.every, self.seeds = out, every, seeds
        self.cells = out / "fdg_staleness"
        self.cells.mkdir(parents=True, exist_ok=True)

    def run(self, root: Path, more: Sequence[str]) -> None:
        """All runs that are not done."""
        for seed in range(self.seeds):
            for modules, shrink in SHRINK.items():
                for beta in (1.0, shrink):
                    target = self.cells / f"K{modules}-beta{beta:g}-{seed}.json"
                    if target.exists():
                        continue
                    found = run(modules, beta, seed, root, self.every, more)
                    save(target, found)
                    print(f"{target.stem}: {found['error']:.2f} %, {found['seconds']:.0f} s", flush=True)

    def found(self, modules: int, beta: float) -> list[dict[str, Any]]:
        """The runs of a setting, by seed."""
        return [json.loads(path.read_text()) for path in sorted(self.cells.glob(f"K{modules}-beta{beta:g}-*.json"))]

    def page(self) -> str:
        """The table in Markdown; draws the picture."""
        some = self.found(2, 1.0)[0]
        lines = [
            "# How stale delayed gradients are",
            "",
            "Made by `python drivers/fdg_staleness.py --root FOLDER --out drivers/results` on CIFAR-10 (JPEG copy): "
            "ResNet-8, uniform cuts, batch 32, SGD with momentum 0.9, learning rate 0.05, a tenth of it after epochs 3 "
            f"and 4 of 5 (`drivers/configs/fdg_small_cifar10.yaml`). Every {self.every}th batch, "
            f"{len(some['batches'])} in a run. *Cosine*: of the gradient that lands with the one of backpropagation "
            "for the weights of that moment; *drift*: distance that the module's weights have moved since the forward "
            f"of that batch, over their norm. Means over the first {FULL_RATE} batches, which have the full learning "
            "rate (the picture shows all); medians over the seeds, in brackets their range. A module's delay is "
            "2 (K - k) batches; beta = 1 shrinks nothing.",
            "",
            "| K | module | delay | cosine, beta = 1 | cosine, shrunk | drift, beta = 1 | drift, shrunk | beta |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for modules, shrink in SHRINK.items():
            runs = [self.found(modules, beta) for beta in (1.0, shrink)]
            if not all(runs):
                continue
            for k in range(modules):
                values = [spread([mean(cell, name, k) for cell in cells], ".3f") for name in MEASURED for cells in runs]
                lines.append(f"| {modules} | {k + 1} | {2 * (modules - k - 1)} | {' | '.join(values)} | {shrink:g} |")
        lines += ["", f"![cosine and drift over the batches]({self.picture().name})", "", self.seeds_line()]
        return "\n".join(lines) + "\n"

    def seeds_line(self) -> str:
        """Seeds, and test errors of the runs."""
        words = []
        for modules, shrink in SHRINK.items():
            for beta in (1.0, shrink):
                errors = [cell["error"] for cell in self.found(modules, beta)]
                if errors:
                    words.append(f"K = {modules}, beta = {beta:g}: {statistics.median(errors):.1f}")
        seeds = len(self.found(max(SHRINK), SHRINK[max(SHRINK)]))
        return f"{seeds} seed{'s' * (seeds != 1)}. Test errors at the end, median %: {'; '.join(words)}."

    def picture(self) -> Path:
        """Cosine and drift of the first seed over the batches; dashed: shrunk."""

        def draw(figure: Any) -> None:
            panels = figure.subplots(2, len(SHRINK), sharex=True, sharey="row")
            for column, (modules, shrink) in enumerate(SHRINK.items()):
                for beta, style in ((1.0, "-"), (shrink, "--")):
                    for cell in self.found(modules, beta)[:1]:
                        for name, panel in zip(MEASURED, panels[:, column], strict=True):
                            for k, colour in enumerate(class_colours(max(SHRINK))[:modules]):
                                label = f"module {k + 1}" if beta == 1 else None
                                values = [row[k] for row in cell[name]]
                                panel.plot(cell["batches"], values, style, color=colour, label=label, linewidth=1.2)
                finish(panels[0, column], f"K = {modules}, dashed: beta = {shrink:g}", "", "", legend=None)
                finish(panels[1, column], "", "batch", "")
            panels[0, 0].set_ylabel("cosine with the fresh gradient")
            panels[1, 0].set_ylabel("drift of the weights")

        title = "CIFAR-10 (JPEG copy): staleness of delayed gradients"
        return save_figure(self.out / "fdg_staleness.png", draw, size=(10.5, 5.6), title=title)


def mean(cell: dict[str, Any], name: str, module: int) -> float:
    """Over the batches with the full learning rate."""
    pairs = zip(cell["batches"], cell[name], strict=True)
    return statistics.mean(row[module] for batch, row in pairs if batch < FULL_RATE)


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, then write the page; further flags are those of `lpnet train`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with the python version of CIFAR-10")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=15, help="batches between two measurements")
    options, more = parser.parse_known_args(words)
    import torch

    torch.set_num_threads(1)
    study = Study(options.out, options.every, options.seeds)
    study.run(options.root, more)
    (options.out / "fdg_staleness.md").write_text(study.page())


if __name__ == "__main__":
    main()
