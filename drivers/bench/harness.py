"""One harness for all benchmarks: alternating runs, paired ratios, equal settings on both sides, JSON and a table.

Runs alternate A B A B, so that a drift of the machine's speed meets both sides; the ratio is taken pair by pair
(lpnet's time / the baseline's) and the median is quoted with minimum and maximum. A benchmark on several ranks starts
its own mpirun; the baseline then runs on rank 0 while the other ranks sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

HERE = Path(__file__).parent


@dataclass
class Row:
    """One line of the table: lpnet against one baseline."""

    id: str
    baseline: str
    ratio_median: float
    ratio_min: float
    ratio_max: float
    seconds_lpnet: float
    seconds_baseline: float
    gradient_error: float | None = None
    cosine: float | None = None
    runs: int = 0
    threads: int = 1
    ranks: int = 1
    target: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""


def versions() -> dict[str, str]:
    """What was measured with."""
    return {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": numpy.__version__}


def alternate(
    sides: dict[str, Callable[[], object]],
    *,
    runs: int,
    between: Callable[[], object] | None = None,
    comm: Any = None,
    warm: int = 2,
) -> dict[str, list[float]]:
    """Wall-clock seconds of every side, run in turn.

    Args:
        sides: what is timed; with several ranks every rank calls all of them, and one that is None on a rank sleeps.
        runs: rounds.
        between: done before every call, not timed.
        comm: ranks that start each side together.
        warm: rounds that do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(runs + warm):
        for name, side in sides.items():
            if between is not None:
                between()
            meet(comm)
            began = time.perf_counter()
            side()
            elapsed = time.perf_counter() - began
            if round_ >= warm:
                seconds[name].append(elapsed)
    return seconds


def meet(comm: Any) -> None:
    """Wait for all ranks without burning a core."""
    if comm is None or comm.size == 1:
        return
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


def row(name: str, baseline: str, lpnet: Sequence[float], other: Sequence[float], **more: Any) -> Row:
    """A row from paired seconds."""
    ratios = [a / b for a, b in zip(lpnet, other, strict=True)]
    return Row(
        name,
        baseline,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(lpnet),
        statistics.median(other),
        runs=len(ratios),
        threads=torch.get_num_threads(),
        versions=versions(),
        **more,
    )


def compare(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], comm: Any = None) -> tuple[float, float]:
    """Relative error and cosine of an inexact gradient with the exact one, over all ranks."""
    sums = numpy.zeros(4)
    for name, a in found.items():
        b = exact[name]
        a, b = a.double(), b.double()
        sums += [float(((a - b) ** 2).sum()), float((b * b).sum()), float((a * a).sum()), float((a * b).sum())]
    if comm is not None:
        from mpi4py import MPI

        comm.Allreduce(MPI.IN_PLACE, sums)
    return float((sums[0] / sums[1]) ** 0.5), float(sums[3] / (sums[1] * sums[2]) ** 0.5)


def on_ranks(script: str, ranks: int, arguments: Sequence[str]) -> list[Row]:
    """Run a part of a benchmark under mpirun and read its rows."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = HERE / f".{Path(script).stem}.{ranks}.{os.getpid()}.json"
    command = [
        "mpirun",
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "mpi4py",
        script,
        "--part",
        str(ranks),
        "--json",
        str(result),
        *arguments,
    ]
    try:
        subprocess.run(command, check=True, env=environment, timeout=900)
        return [Row(**entry) for entry in json.loads(result.read_text())]
    finally:
        result.unlink(missing_ok=True)


def reached(row: Row) -> bool:
    """Whether a row's target is met: speed-ups (ids that begin with fdg) from above, other ratios from below."""
    if row.target is None:
        return True
    return row.ratio_median >= row.target if row.id.startswith("fdg") else row.ratio_median <= row.target


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| id | baseline | ranks | lpnet ms | baseline ms | ratio (min - max) | target | gradient error | cosine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        error = "" if r.gradient_error is None else f"{r.gradient_error:.1e}"
        cosine = "" if r.cosine is None else f"{r.cosine:.4f}"
        target = "" if r.target is None else f"{r.target:g}" + ("" if reached(r) else " missed")
        lines.append(
            f"| {r.id} | {r.baseline} | {r.ranks} | {r.seconds_lpnet * 1e3:.2f} | {r.seconds_baseline * 1e3:.2f} | "
            f"{r.ratio_median:.3f} ({r.ratio_min:.3f} - {r.ratio_max:.3f}) | {target} | {error} | {cosine} |"
        )
    return "\n".join(lines)


def arguments(description: str) -> argparse.Namespace:
    """The flags that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--runs", type=int, default=15, help="rounds that count")
    parser.add_argument("--threads", type=int, default=1, help="threads per rank, on both sides")
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)  # ranks of a part under mpirun
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    return found


def finish(rows: Sequence[Row], json_path: Path | None, quiet: bool = False) -> None:
    """Write the JSON and print the table."""
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    if not quiet:
        print(table(rows))
