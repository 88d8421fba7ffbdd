"""Training curves against predicted time: serial, multigrid one-shot and decoupled modules, to equal loss.

    python drivers/time_to_solution.py --out runs/time_to_solution [--ranks 16] [--modules 4] [--steps 30]

Peaks on emulated ranks. The loss to be reached is that of serial training after --steps steps; the others go on to it,
for three times as many. Writes curves.json, table.md and curves.png. A method that does not reach it, or diverges, says
so in the table.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from lpnet import emulate
from lpnet.configfile import from_yaml
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import load
from lpnet.errors import NumericsError
from lpnet.io.plots import class_colours, finish, save_figure
from lpnet.nn.models import DTYPES
from lpnet.parallel.comm import Comm
from lpnet.train.build import build, check, keeps_states

CONFIG = """
method: {method}
model: {{layers: {layers}, width: 8, final_time: 5.0}}
data: {{name: peaks, train_samples: {samples}, validation_samples: 500}}
mgrit: {{levels: {levels}, coarsening: {coarsening}, forward_iterations: 2, adjoint_iterations: 1}}
fdg: {{cuts: uniform}}
optim: {{name: adam, lr: 0.01}}
parallel: {{modules: {modules}}}
"""


@dataclass(frozen=True)
class Curve:
    """Losses before every step and the predicted time at which they were known."""

    name: str
    ranks: int
    seconds: list[float]
    losses: list[float | None]
    failure: str = ""

    def reach(self, loss: float) -> int | None:
        """Index of the first loss at or below; None: it is not reached."""
        return next((i for i, found in enumerate(self.losses) if found is not None and found <= loss), None)


def curve(name: str, text: str, ranks: int, network: str, most: int, until: float) -> Curve:
    """Train on emulated ranks until a loss is reached, or for so many steps.

    Decoupled modules hear of a loss one after another, and must make equally many steps: they make all of them.
    """
    config = from_yaml(text, name)

    def program(comm: Comm) -> tuple[list[float], list[float | None]]:
        check(config, comm.size)
        data = comm.shared(lambda: load(config.data, config.seed, DTYPES[config.model.dtype]))
        members = "fixed" if keeps_states(config) else "reshuffled"
        order = BatchOrder(len(data.train), None, config.seed, members)  # type: ignore[arg-type]
        _, strategy, _ = build(config, data, order, comm)
        began = comm.now()
        seconds: list[float] = []
        losses: list[float | None] = []
        while len(losses) < most and (not losses or losses[-1] is None or losses[-1] > until):
            losses.append(strategy.step(data.train, 0).loss)
            seconds.append(comm.now() - began)
        strategy.finish()
        return seconds, losses

    try:
        found = emulate(program, ranks=ranks, network=network)
    except NumericsError as error:
        return Curve(name, ranks, [], [], str(error))
    return Curve(name, ranks, *found.results[0])


def main() -> None:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/time_to_solution"))
    parser.add_argument("--ranks", type=int, default=16, help="of multigrid")
    parser.add_argument("--modules", type=int, default=4, help="of decoupled training, one rank each")
    parser.add_argument("--layers", type=int, default=256)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--network", default="infiniband")
    options = parser.parse_args()

    def text(method: str, modules: str = "null", levels: int = 3) -> str:
        return CONFIG.format(
            method=method,
            layers=options.layers,
            samples=options.samples,
            modules=modules,
            levels=levels,
            coarsening="[4, 4]" if levels == 3 else 4,
        )

    network, most = options.network, 3 * options.steps
    serial = curve("serial", text("serial"), 1, network, options.steps + 1, -math.inf)
    wanted = serial.losses[-1]
    assert wanted is not None
    curves = [
        serial,
        curve("mgrit one-shot", text("mgrit"), options.ranks, network, most, wanted),
        curve("fdg", text("fdg", str(options.modules), levels=1), options.modules, network, most, -math.inf),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "curves.json").write_text(json.dumps([vars(found) for found in curves], indent=1) + "\n")
    lines = [
        f"Peaks, {options.layers} layers, {options.samples} samples, Adam; times predicted by emulation on {network}",
        f"time to the loss of serial training after {options.steps} steps, {wanted:.4f}",
        "",
        "| method | ranks | steps | predicted seconds | times as fast as serial |\n|---|---|---|---|---|",
    ]
    for found in curves:
        index = found.reach(wanted)
        if index is None:
            why = found.failure or f"not reached in {len(found.losses)} steps"
            lines.append(f"| {found.name} | {found.ranks} | | | {why} |")
            continue
        ratio = serial.seconds[-1] / found.seconds[index]
        lines.append(f"| {found.name} | {found.ranks} | {index} | {found.seconds[index]:.4f} | {ratio:.2f} |")
    (options.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))

    def paint(figure) -> None:  # type: ignore[no-untyped-def]
        panel = figure.subplots()
        for colour, found in zip(class_colours(len(curves)), curves, strict=True):
            known = [(s, y) for s, y in zip(found.seconds, found.losses, strict=True) if y is not None]
            if known:
                panel.semilogx(
                    *zip(*known, strict=True), "o-", color=colour, label=f"{found.name}, {found.ranks} ranks"
                )
        panel.axhline(wanted, ls="--", color="#80868b")
        finish(panel, "Training loss against time (predicted)", "seconds", "loss")

    save_figure(options.out / "curves.png", paint, size=(7.5, 4.6), title=f"Peaks, {options.layers} layers")


if __name__ == "__main__":
    main()
