"""Nested iteration in depth against direct training, at equal work.

    python drivers/nested_depth.py --out drivers/results/nested [--seeds 3]

Peaks, 256 layers in the end, the same Adam. `direct` trains them from the start; `nested` trains 16, 64 and 256 layers
one after another, each for a third of the work, and interpolates parameters and Adam's slots in between (what
`train.stages` does; Cyr, Günther, Schroder 2019, arXiv 1912.08974). Work is what 16 ranks have to wait for: layer
evaluations, forward and back, on the longest chain, by counting, comparisons with exact gradients included. Exact
propagation gains nothing from ranks: there the chain is all evaluations of all layers.

A cell (gradients, training, seed) is a JSON file, so that an interrupted study goes on. One rank and one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cells import column, rounded, save, spread
from experiments import METHODS, RANKS, path, peaks

from lpnet.config import Config
from lpnet.data.samples import load
from lpnet.io.plots import class_colours, finish, save_figure
from lpnet.mgrit.network import build_network
from lpnet.nn.models import DTYPES
from lpnet.train.evaluation import score
from lpnet.train.stages import at_layers, refined
from lpnet.train.strategies import StepReport, make_strategy

GRADIENTS = {"exact": "serial", "one-shot": "one-shot adaptive"}
POINTS = 200  # of a curve in a cell


@dataclass(frozen=True)
class Settings:
    """What all cells of a study share.

    Args:
        stages: layers of nested training; direct training has the last of them.
        steps: exact steps of direct training; their work is that of every cell.
        samples: for training, and as many for validation.
    """

    stages: tuple[int, ...]
    steps: int
    samples: int

    @property
    def budget(self) -> int:
        """Layer evaluations on the longest chain."""
        return 2 * self.stages[-1] * self.steps

    def config(self, gradients: str, seed: int) -> Config:
        """Of a cell with the layers of the last stage."""
        config = peaks(self.stages[-1]).config
        data = replace(config.data, train_samples=self.samples, validation_samples=self.samples)
        return replace(config, seed=seed, data=data, mgrit=METHODS[GRADIENTS[gradients]])


def evaluations(report: StepReport, layers: int) -> int:
    """All layer evaluations of a step made on one rank, forward and back, comparisons included."""
    if report.watched is None or report.watched.rung.levels == 1:
        return 2 * layers + report.compared
    return sum(sum(solve.evaluations) for solve in (report.forward, report.adjoint) if solve) + report.compared


def run(settings: Settings, gradients: str, training: str, seed: int) -> dict[str, Any]:
    """Train one cell: every stage until its share of the work is done."""
    config = settings.config(gradients, seed)
    stages = settings.stages if training == "nested" else settings.stages[-1:]
    data = load(config.data, seed, DTYPES[config.model.dtype])
    net = build_network(at_layers(config, stages[0]), data)
    strategy = make_strategy(net, config.optim)
    work, everything = 0.0, 0
    steps, curve = [], []
    for stage, layers in enumerate(stages, 1):
        if stage > 1:
            net, strategy = refined(net, strategy, config, layers, 1)
        steps.append(0)
        while work < settings.budget * stage / len(stages):
            report = strategy.step(data.train, 0)
            curve.append((work, report.loss, layers))
            work += path(net, report, config.optim.lr)
            everything += evaluations(report, layers)
            steps[-1] += 1
    scores = score(net, data)
    assert scores is not None
    return {
        "settings": asdict(settings),
        "loss": scores.train_loss,
        "train_accuracy": scores.train_accuracy,
        "val_accuracy": scores.val_accuracy,
        "steps": steps,
        "work": work,
        "evaluations": everything,
        "curve": thinned([*curve, (work, scores.train_loss, stages[-1])]),
    }


def thinned(curve: Sequence[Any]) -> list[Any]:
    """At most POINTS points, equally far apart in work, and the ends of every stage."""
    apart, kept = curve[-1][0] / POINTS, [curve[0]]
    for before, point, after in zip(curve, curve[1:], [*curve[2:], None], strict=False):
        ends = after is None or after[2] != point[2] or before[2] != point[2]
        if ends or point[0] >= kept[-1][0] + apart:
            kept.append(point)
    return kept


def cells(out: Path) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(gradients, training, what its seeds found) of all that is there."""
    for gradients in GRADIENTS:
        for training in ("direct", "nested"):
            found = sorted(out.glob(f"cells/{gradients}--{training}--*.json"))
            if found:
                yield gradients, training, [json.loads(file.read_text()) for file in found]


def reached(cell: dict[str, Any], loss: float) -> float | None:
    """Work until a network of all layers is first at or below a loss; None: it never is."""
    layers = cell["settings"]["stages"][-1]
    return next((work for work, found, at in cell["curve"] if at == layers and found <= loss), None)


def page(out: Path, settings: Settings) -> str:
    """All cells as Markdown; draws the picture."""
    rows = list(cells(out))
    stages, budget = settings.stages, settings.budget
    lines = [
        "# Nested iteration in depth, at equal work",
        "",
        f"Made by `python drivers/nested_depth.py --out {out.as_posix() if not out.is_absolute() else out.name}`. "
        f"Peaks, {settings.samples} samples for training and as many others for validation, full batches, Adam. "
        f"Direct: {stages[-1]} layers; nested: {', '.join(map(str, stages))} layers, equal work each. Every run has "
        f"the work of {settings.steps} exact steps of {stages[-1]} layers, up to one step: {budget:,} layer "
        f"evaluations, forward and back, on the longest chain of {RANKS} ranks, by counting; for exact gradients the "
        "chain is all evaluations of all layers. *All evaluations*: of all ranks together. *Work to direct's loss*: "
        "until a network of all layers is first at or below the last loss of direct training with the same seed and "
        "gradients, as a share of all work, seed by seed. One-shot: two iterations forward, one back, adaptive, "
        "comparisons with exact gradients included. Medians over the seeds, in brackets their range; loss and accuracy "
        "by exact propagation.",
        "",
        "| gradients | training | seeds | steps | loss | validation accuracy | all evaluations | "
        "work to direct's loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    direct = {gradients: found for gradients, training, found in rows if training == "direct"}
    for gradients, training, found in rows:
        steps = ", ".join(f"{statistics.median(s):g}" for s in zip(*(cell["steps"] for cell in found), strict=True))
        lines.append(
            f"| {gradients} | {training} | {len(found)} | {steps} | {spread(column(found, 'loss'), '.4f')} | "
            f"{spread(column(found, 'val_accuracy'), '.1f')} % | "
            f"{statistics.median(column(found, 'evaluations')):,.0f} | "
            f"{shares(found, direct.get(gradients, [])) if training == 'nested' else '1'} |"
        )
    lines += ["", f"![loss over work]({picture(out, rows).name})"]
    return "\n".join(lines) + "\n"


def shares(found: list[dict[str, Any]], direct: list[dict[str, Any]]) -> str:
    """Work to the last loss of direct training, as a share of direct training's, seed by seed."""
    words = []
    for cell, base in zip(found, direct, strict=False):
        value = reached(cell, base["loss"])
        words.append("never" if value is None else f"{value / base['work']:.2f}")
    return ", ".join(words) or "-"


def picture(out: Path, rows: Sequence[tuple[str, str, list[dict[str, Any]]]]) -> Path:
    """Loss over work, a line per seed; refinements are where the loss of nested training jumps."""

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(GRADIENTS), sharey=True)
        for panel, gradients in zip(panels, GRADIENTS, strict=True):
            shown = [(training, found) for name, training, found in rows if name == gradients]
            for colour, (training, found) in zip(class_colours(2), shown, strict=False):
                for seed, cell in enumerate(found):
                    work, losses, _ = zip(*cell["curve"], strict=True)
                    label = training if seed == 0 else None
                    panel.plot(work, losses, color=colour, label=label, linewidth=1.1, alpha=0.85)
            panel.set_yscale("log")
            finish(panel, f"{gradients.capitalize()} gradients", f"layer evaluations on {RANKS} ranks", "")
        panels[0].set_ylabel("training loss, nats per sample")

    return save_figure(out / "nested_depth.png", draw, size=(9.0, 3.4), title="Peaks: nested iteration in depth")


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stages", default="16,64,256", help="layers; direct training has the last number")
    parser.add_argument("--steps", type=int, default=150, help="exact steps of direct training, whose work all get")
    parser.add_argument("--samples", type=int, default=500)
    options = parser.parse_args(words)
    settings = Settings(tuple(int(n) for n in options.stages.split(",")), options.steps, options.samples)
    torch.set_num_threads(1)
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    for gradients in GRADIENTS:
        for seed in range(options.seeds):
            for training in ("direct", "nested"):
                target = options.out / "cells" / f"{gradients}--{training}--{seed}.json"
                if target.exists():
                    if json.loads(target.read_text())["settings"] != json.loads(json.dumps(asdict(settings))):
                        parser.error(f"{target} was made with other settings; give another --out, or remove it")
                    continue
                found = run(settings, gradients, training, seed)
                save(target, rounded(found))
                print(f"{target.stem}: loss {found['loss']:.4f}, steps {found['steps']}", flush=True)
    (options.out / "README.md").write_text(page(options.out, settings))


if __name__ == "__main__":
    main()
