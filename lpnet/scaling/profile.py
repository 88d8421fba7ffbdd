"""Where the time of a training step goes: seconds by span, level and rank, and the share of each.

The spans are those of the trace (lpnet.io.trace): f_relax, c_relax, residual, coarse, message and wait of both solves,
per level; gradient, reduction, optimiser; what is left is `other`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lpnet.config import Config
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import Samples, load
from lpnet.io import trace
from lpnet.nn.models import DTYPES
from lpnet.parallel.comm import Comm
from lpnet.train.build import build
from lpnet.train.decoupled import DecoupledNet
from lpnet.train.strategies import StepReport

SHOWN = 8  # ranks in a table
SETTLE = 1  # steps after the warm-up whose costs are known when the clocks of emulated ranks start
WARM = 2  # steps that are not counted: first use of memory, cold starts


@dataclass(frozen=True)
class Profile:
    """Mean seconds per training step.

    Args:
        ranks: number of ranks.
        steps: steps measured.
        step: whole step, per rank.
        spans: by name ("f_relax level 0", ...), per rank.
        predicted: what the times were predicted for, where the ranks were emulated.
        losses: before the first and before the last training step.
        residuals: forward residuals of the last step.
        critical_path: layer evaluations on the longest chain of one step's two solves; None for one level on one rank.
    """

    ranks: int
    steps: int
    step: list[float]
    spans: dict[str, list[float]]
    predicted: str | None = None
    losses: tuple[float, float] = (math.nan, math.nan)
    residuals: tuple[float, ...] = ()
    critical_path: int | None = None

    @property
    def seconds(self) -> float:
        """Of one step on the slowest rank."""
        return max(self.step)

    @property
    def communication(self) -> float:
        """Share of the step that goes into messages, waiting and reductions; mean over the ranks."""
        talk = [name for name in self.spans if name.split()[0] in ("wait", "message", "reduction")]
        return sum(sum(self.spans[name]) for name in talk) / max(sum(self.step), 1e-12)

    def table(self) -> str:
        """Milliseconds and share of the step, per span and rank; of many ranks the first, the middle and the last."""
        shown = range(self.ranks) if self.ranks <= SHOWN else (0, self.ranks // 2, self.ranks - 1)
        width = max(len(name) for name in [*self.spans, "whole step"])
        lines = [
            f"milliseconds per training step over {self.steps} steps, and the share of the step",
            *([self.predicted] if self.predicted is not None else []),
            f"{'':{width}} " + " ".join(f"{f'rank {rank}':>16}" for rank in shown),
        ]
        for name, seconds in sorted(self.spans.items(), key=lambda item: -sum(item[1])):
            cells = [
                f"{seconds[rank] * 1e3:9.3f} {100 * seconds[rank] / max(self.step[rank], 1e-12):5.1f}%"
                for rank in shown
            ]
            lines.append(f"{name:{width}} " + " ".join(f"{cell:>16}" for cell in cells))
        whole = " ".join(f"{self.step[rank] * 1e3:9.3f} {100.0:5.1f}%" for rank in shown)
        lines.append(f"{'whole step':{width}} {whole}")
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write the numbers as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_profile(content: dict[str, Any]) -> Profile:
    """A profile from its JSON. No communication."""
    return Profile(**{**content, "losses": tuple(content["losses"]), "residuals": tuple(content["residuals"])})


def save_all(path: Path, profiles: Sequence[Profile]) -> None:
    """Write the numbers of several profiles as JSON. No communication."""
    path.write_text(json.dumps([asdict(found) for found in profiles], indent=1) + "\n")


def profile(config: Config, comm: Comm, *, steps: int = 20) -> Profile:
    """Train a few steps and time their spans; nothing is written. Collective over comm.

    Args:
        config: the run.
        comm: ranks.
        steps: steps measured.
    """
    data = comm.shared(lambda: load(config.data, config.seed, DTYPES[config.model.dtype]))
    order = BatchOrder(len(data.train), config.data.batch_size, config.seed, "fixed")
    net, strategy, _ = build(config, data, order, comm)
    fill = 2 * net.inner.modules if isinstance(net, DecoupledNet) else 0  # ticks until all modules have work

    reports: list[StepReport] = []

    def step(index: int) -> None:
        batch = order.at(index)
        samples = Samples(data.train.x, data.train.y) if order.full else data.train.take(batch.indices)
        with trace.span("step"):
            reports[1:] = [strategy.step(samples, batch.id)]

    numbers = itertools.count()

    def run(count: int, *, timed: bool) -> dict[str, float]:
        """Mean seconds of some steps, of their spans too where those are timed."""
        trace.stop()
        comm.barrier()
        if timed:
            trace.start(comm, events=False)
        began = comm.now()
        for _ in range(count):
            number = next(numbers)
            comm.at_step(number)
            step(number)
        mean = {name: total.seconds / count for name, total in trace.totals().items()} if timed else {}
        return {**mean, "step": (comm.now() - began) / count}

    try:
        run(max(WARM, fill, order.batches + 1 if order.batches <= 20 else WARM), timed=False)
        run(1, timed=True)  # programs with spans are bound when they are first used
        comm.restart_clocks()
        run(SETTLE, timed=False)
        whole = run(steps, timed=False)["step"]
        found = run(max(steps // 2, 1), timed=True)
    finally:
        trace.stop()
    # spans cost time themselves: they tell the shares, the steps without them the whole
    scale = whole / found.pop("step")
    found = {name: seconds * scale for name, seconds in found.items()}
    found["other"] = whole - sum(found.values())
    everyone = comm.all_gather_objects((whole, found))
    names = sorted({name for _, spans in everyone for name in spans})
    return Profile(
        comm.size,
        steps,
        [w for w, _ in everyone],
        {name: [spans.get(name, 0.0) for _, spans in everyone] for name in names},
        losses=(_known(reports[0].loss), _known(reports[-1].loss)),
        residuals=reports[-1].forward.residuals if reports[-1].forward is not None else (),
        critical_path=_path(reports[-1]),
    )


def _path(report: StepReport) -> int | None:
    solves = [solve for solve in (report.forward, report.adjoint) if solve is not None]
    return sum(solve.critical_path for solve in solves) if solves else None


def _known(loss: float | None) -> float:
    return math.nan if loss is None else loss
