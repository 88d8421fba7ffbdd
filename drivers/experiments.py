"""Does accuracy survive inexact gradients? Serial, exact layer-parallel and one-shot training of the same networks.

    python drivers/experiments.py --out drivers/results/inexact [--cases peaks-32,mnist-64] [--seeds 3]
        [--data FOLDER]

FOLDER (or LPNET_DATA) holds mnist/, cifar-10-batches-py/, salinas_a/ and indian_pines/; cases without their data are
left out. Every cell (case, method, seed) is one JSON file, so that an interrupted study goes on; at the end all cells
there are make README.md and its pictures. A training that stops by itself is a cell too: it has the step and the cause.
One rank and one thread; the work is that of 16 ranks, by counting.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cells import column, rounded, save, spread

from lpnet.config import MGRIT, Config, DataConfig, ModelConfig, OptimConfig
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import load
from lpnet.errors import NumericsError
from lpnet.io.plot_monitors import series
from lpnet.io.plots import class_colours, finish, save_figure
from lpnet.mgrit.hierarchy import cut, direction
from lpnet.mgrit.network import build_network
from lpnet.mgrit.programs import parts, solve_critical_path
from lpnet.nn.models import DTYPES
from lpnet.parallel.partition import uniform
from lpnet.train.evaluation import score
from lpnet.train.strategies import StepReport, make_strategy

RANKS = 16
ONE_SHOT = MGRIT(coarsening=4, forward_iterations=2, adjoint_iterations=1, check_every=10)
METHODS = {
    "serial": MGRIT(levels=1),
    "gradient": MGRIT(coarsening=4, check_every=0),
    "one-shot fixed": ONE_SHOT,
    "one-shot adaptive": replace(ONE_SHOT, control="adaptive"),
    "cold fixed": replace(ONE_SHOT, adjoint_iterations=2, initial_guess="coarse"),
    "cold adaptive": replace(ONE_SHOT, adjoint_iterations=2, initial_guess="coarse", control="adaptive"),
}
OF_A_COPY = "the results in drivers/results are of CIFAR-10 (JPEG copy)"
WARM = ["serial", "gradient", "one-shot fixed", "one-shot adaptive"]


@dataclass(frozen=True)
class Case:
    """A network, its data and how long it is trained.

    Args:
        config: everything but seed and multigrid.
        steps: optimisation steps.
        methods: of METHODS.
        folder: of the data below FOLDER; None: generated.
        note: what the page says of the data.
    """

    config: Config
    steps: int
    methods: list[str]
    folder: str | None = None
    note: str = ""


def peaks(layers: int, optimiser: str = "adam", steps: int = 300, methods: list[str] | None = None) -> Case:
    """The Peaks network."""
    config = Config(
        method="mgrit",
        model=ModelConfig(layers=layers, width=8, final_time=5.0, activation="smooth_relu"),
        data=DataConfig(train_samples=500, validation_samples=500),
        optim=OptimConfig(name=optimiser, lr=1.0 if optimiser == "lbfgs" else 0.01),
    )
    return Case(config, steps, methods or list(METHODS))


def hyperspectral(layers: int, steps: int, folder: str, **data: Any) -> Case:
    """A dense network on spectra."""
    config = Config(
        method="mgrit",
        model=ModelConfig(layers=layers, width=32, final_time=1.0, opening="dense"),
        data=DataConfig(root=".", batch_size=200, **data),
        optim=OptimConfig(lr=0.002),
    )
    return Case(config, steps, WARM, folder=folder)


def mnist(layers: int, steps: int, samples: int, batch_size: int) -> Case:
    """A stack of convolutions on images copied to four channels."""
    config = Config(
        method="mgrit",
        model=ModelConfig(
            name="conv", layers=layers, width=4, final_time=1.0, opening="replicate", init_scale=1.0
        ),
        data=DataConfig(
            name="mnist", root=".", train_samples=samples, validation_samples=1000, batch_size=batch_size
        ),
        optim=OptimConfig(lr=0.003),
    )  # fmt: skip
    return Case(config, steps, WARM, folder="mnist")


def ode_resnet(layers: int, steps: int, samples: int) -> Case:
    """Three stacks of layers on the images of CIFAR-10, as in configs/cifar_mgrit.yaml with half the channels."""
    config = Config(
        method="mgrit",
        model=ModelConfig(name="ode_resnet", layers=layers, width=8, final_time=4.0, norm="none"),
        data=DataConfig(name="cifar10", root=".", train_samples=samples, validation_samples=1000, batch_size=50),
        optim=OptimConfig(lr=0.005),
    )
    return Case(config, steps, WARM, folder="cifar-10-batches-py", note=OF_A_COPY)


CASES = {
    "peaks-32": peaks(32),
    "peaks-32-lbfgs": peaks(32, "lbfgs", 100, WARM),
    "peaks-128": peaks(128, steps=200, methods=WARM),
    "peaks-1024": peaks(1024, steps=60, methods=["serial", "one-shot fixed", "one-shot adaptive"]),
    "mnist-64": mnist(64, 90, 1500, 100),
    "mnist-128": mnist(128, 45, 750, 50),
    "cifar10-ode-resnet": ode_resnet(24, 160, 400),
    "salinas-a": hyperspectral(
        32, 120, "salinas_a", name="hyperspectral", cube="SalinasA_corrected.mat", ground_truth="SalinasA_gt.mat"
    ),
    "indian-pines-spectra": hyperspectral(
        32, 150, "indian_pines", name="spectra", cube="train_spectra_695x200.mat", ground_truth="train_labels_695.mat"
    ),
}


def path(net: Any, report: StepReport, lr: float) -> float:
    """Layer evaluations of a step on the longest chain over RANKS ranks, or as many as layers; comparisons included."""
    layers = net.stack.num_layers
    partition = uniform(layers, min(RANKS, layers))
    lbfgs = 0.0 < report.step_size < lr
    trials = 1 + round(math.log2(lr / report.step_size)) if lbfgs else 1
    if report.watched is None or report.watched.rung.levels == 1:
        total = layers * (trials + 1.0)
    else:
        total = 0.0
        for adjoint, solve, times in ((False, report.forward, trials), (True, report.adjoint, 1)):
            levels, settings = direction(net.hierarchy, net.mgrit, adjoint)
            levels = cut(levels, report.watched.rung.levels)
            cold = settings.initial_guess == "coarse" or solve is None or solve.converged is not None
            names = parts(solve.iterations if solve else 0, coarse_start=cold, levels=len(levels.levels))
            total += times * solve_critical_path(levels, settings, partition, names)
    return total + (2.0 * layers if report.compared else 0.0)


def run(case: Case, method: str, seed: int, root: Path) -> dict[str, Any]:
    """Train one cell."""
    gc.collect()  # the network of the cell before holds itself in cycles, and its states may be gigabytes
    config = replace(case.config, seed=seed, mgrit=METHODS[method])
    if case.folder is not None:
        config = replace(config, data=replace(config.data, root=str(root / case.folder)))
    data = load(config.data, seed, DTYPES[config.model.dtype])
    warm = config.mgrit.levels > 1 and config.mgrit.initial_guess == "kept"
    order = BatchOrder(len(data.train), config.data.batch_size, seed, "fixed" if warm else "reshuffled")
    net = build_network(config, data)
    strategy = make_strategy(net, config.optim, order.batches)
    losses, cosines, rejected, work, stopped, began = [], [], 0, 0.0, "", time.perf_counter()
    for step in range(case.steps):
        batch = order.at(step)
        samples = data.train if order.full else data.train.take(batch.indices)
        try:
            report = strategy.step(samples, batch.id)
        except NumericsError as error:
            stopped = str(error)
            break
        if report.finished is not None:
            stopped = report.finished
            break
        losses.append(report.loss)
        work += path(net, report, config.optim.lr)
        if report.watched is not None:
            rejected += report.watched.rejected is not None and report.watched.rung.levels > 1
            if report.watched.cosine is not None:
                cosines.append((step, report.watched.cosine))
    seconds = time.perf_counter() - began
    scores = score(net, data)
    assert scores is not None
    return {
        "loss": scores.train_loss,
        "train_accuracy": scores.train_accuracy,
        "val_accuracy": scores.val_accuracy,
        "steps": len(losses),
        "stopped": stopped,
        "work": work,
        "cosines": cosines,
        "rejected": rejected,
        "losses": losses,
        "seconds": seconds,
    }


def cells(out: Path, cases: list[str]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(case, method, what its seeds found) of all that is there."""
    for case in cases:
        for method in CASES[case].methods:
            found = sorted(out.glob(f"cells/{case}--{method.replace(' ', '-')}--*.json"))
            if found:
                yield case, method, [json.loads(file.read_text()) for file in found]


def page(out: Path) -> str:
    """All cells as Markdown, with pictures."""
    lines = [
        "# Accuracy of inexact training",
        "",
        f"Made by `python drivers/experiments.py --out {out.as_posix() if not out.is_absolute() else out.name}`. "
        "Medians over the seeds, in brackets their range. *Work*: layer evaluations on the longest chain of "
        f"{RANKS} ranks, comparisons with exact gradients included, by counting; *cosine*: the lowest of the gradients "
        "that were applied and compared. Accuracies by exact propagation, of a run that stopped as it was then.",
    ]
    for case in CASES:
        rows = [(method, found) for name, method, found in cells(out, [case]) if name == case]
        if not rows:
            continue
        config = CASES[case].config
        facts = [f"{config.model.layers} layers", config.optim.name]
        facts += [f"{config.data.train_samples or 'all'} training samples", *filter(None, [CASES[case].note])]
        lines += [
            "",
            f"## {case}",
            "",
            f"{', '.join(facts)}, `python drivers/experiments.py --out DIR --cases {case}`",
            "",
            "| method | seeds | steps | loss | validation accuracy | work | lowest cosine | thrown away |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for method, found in rows:
            lowest = [c for cell in found for _, c in cell["cosines"]]
            lines.append(
                f"| {method} | {len(found)} | {steps(found)} | {spread(column(found, 'loss'), '.4f')} | "
                f"{spread(column(found, 'val_accuracy'), '.1f')} % | {statistics.median(column(found, 'work')):,.0f} | "
                f"{f'{min(lowest):.3f}' if lowest else '-'} | {sum(c['rejected'] for c in found)} |"
            )
        lines += ["", *stops(rows), f"![loss and cosine]({picture(out, case, rows).name})"]
    missing = [case for case in CASES if not any(cells(out, [case]))]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def steps(found: list[dict[str, Any]]) -> str:
    """How many there were, and whether the training stopped there."""
    stopped = [bool(cell.get("stopped")) for cell in found]
    if not any(stopped):
        return str(found[0]["steps"])
    if all(stopped):
        return "stopped at " + ", ".join(str(cell["steps"]) for cell in found)
    return ", ".join(f"{'stopped at ' * stop}{cell['steps']}" for stop, cell in zip(stopped, found, strict=True))


def stops(rows: list[tuple[str, list[dict[str, Any]]]]) -> Iterator[str]:
    """Why trainings stopped, in a paragraph each; the remedy that follows the cause is left out."""
    for method, found in rows:
        causes = [cell["stopped"].partition(";")[0] for cell in found if cell.get("stopped")]
        if causes:
            yield f"{method} stopped: {'. '.join(causes)}."
            yield ""


def picture(out: Path, case: str, rows: list[tuple[str, list[dict[str, Any]]]]) -> Path:
    """Losses and cosines of the first seed."""

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for colour, (method, found) in zip(class_colours(len(rows)), rows, strict=False):
            left.plot(found[0]["losses"], color=colour, label=method, linewidth=1.2)
            steps, cosines = series([{"step": s, "c": c} for s, c in found[0]["cosines"]], "c")
            if len(steps):
                right.plot(steps, cosines, ".", color=colour, label=method)
        left.set_yscale("log")
        finish(left, "Training loss", "step", "nats per sample")
        finish(right, "Cosine of the applied gradient", "step", "")

    return save_figure(out / f"{case}.png", draw, size=(9.0, 3.2), title=case)


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LPNET_DATA", "data")))
    options = parser.parse_args()
    torch.set_num_threads(1)
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for case in options.cases.split(","):
            for method in CASES[case].methods:
                target = options.out / "cells" / f"{case}--{method.replace(' ', '-')}--{seed}.json"
                if target.exists():
                    continue
                try:
                    found = run(CASES[case], method, seed, options.data)
                except Exception as error:
                    print(f"{case}, {method}, seed {seed}: {error}", flush=True)
                    continue
                save(target, rounded(found))
                print(
                    f"{case}, {method}, seed {seed}: loss {found['loss']:.4f}, {found['val_accuracy']:.1f} %, "
                    f"{found['seconds']:.1f} s",
                    flush=True,
                )
    (options.out / "README.md").write_text(page(options.out))


if __name__ == "__main__":
    main()
