"""What checkpoints cost: training with one save per interval against training without. Three minutes on two ranks.

    python drivers/bench/saving.py --json saving.json

One-shot MGRIT of 64 layers of width 256 with Adam: a checkpoint of 54 MB (parameters, two moments each, kept states);
an interval of 60 steps takes some seconds. Rows saving-off, saving-thread and saving-step: seconds of an interval with
one save, all of it included, over the seconds of the same steps without.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Row, alternate, arguments, finish, on_ranks, row

from lpnet.config import MGRIT, Config, DataConfig, ModelConfig, OptimConfig
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import load
from lpnet.nn.models import DTYPES
from lpnet.parallel.comm import Comm
from lpnet.train.build import build
from lpnet.train.saver import Saver
from lpnet.train.saving import contents

STEPS = 60  # per interval
TARGET = 1.05
CONFIG = Config(
    method="mgrit",
    model=ModelConfig(layers=64, width=256, init_scale=0.1),
    data=DataConfig(train_samples=200, validation_samples=50),
    mgrit=MGRIT(coarsening=8, forward_iterations=2, adjoint_iterations=1, batching="on", check_every=0),
    optim=OptimConfig(name="adam", lr=1e-4),
)


def intervals(mpi: Any, runs: int, folder: Path) -> tuple[dict[str, list[float]], int, float]:
    """Seconds of the intervals by side, bytes of a checkpoint, and steps per interval. Collective over mpi."""
    comm = Comm(mpi)
    data = load(CONFIG.data, CONFIG.seed, DTYPES[CONFIG.model.dtype])
    order = BatchOrder(len(data.train), None, CONFIG.seed, "fixed")
    net, strategy, _ = build(CONFIG, data, order, comm)
    savers = {
        mode: Saver(folder / mode, comm, keep=1, mode=mode)  # type: ignore[arg-type]
        for mode in ("off", "thread", "step")
    }
    saved = [0]

    def interval(saver: Saver | None) -> None:
        for step in range(STEPS):
            if saver is not None:
                saver.poll()
                if step == 0:
                    saved[0] += 1
                    saver.save(saved[0], *contents(net, strategy))
            strategy.step(data.train, 0)
        if saver is not None:
            saver.finish()

    def side(saver: Saver | None) -> Callable[[], None]:
        return lambda: interval(saver)

    sides = {"none": side(None), **{mode: side(saver) for mode, saver in savers.items()}}
    seconds = alternate(sides, runs=runs, comm=mpi, warm=1)
    # one rank looks, before any rank goes on to remove the folder
    size = comm.broadcast_object(max(f.stat().st_size for f in folder.rglob("*.h5")) if comm.rank == 0 else 0)
    for saver in savers.values():
        saver.close()
    comm.free()
    return seconds, size, max(saver.longest for saver in savers.values())


def rows(mpi: Any, runs: int) -> list[Row]:
    """The rows of one number of ranks. Collective over mpi."""
    ranks, rank = (mpi.size, mpi.rank) if mpi is not None else (1, 0)
    path = tempfile.mkdtemp(dir=Path.cwd(), prefix=".saving-") if rank == 0 else ""
    folder = Path(mpi.bcast(path) if mpi is not None else path)
    try:
        seconds, size, longest = intervals(mpi, runs, folder)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    plain = statistics.median(seconds["none"])
    note = f"{size / 1e6:.0f} MB every {STEPS} steps of {plain / STEPS:.2f} s; the longest save took {longest:.2f} s"
    return [
        row(
            f"saving-{mode}-{ranks}",
            f"no checkpoint in {plain:.1f} s",
            seconds[mode],
            seconds["none"],
            ranks=ranks,
            target=None if mode == "off" else TARGET,
            note=note,
        )
        for mode in ("off", "thread", "step")
    ]


def main() -> None:
    """All rows, or with --part the rows of one mpirun."""
    args = arguments(__doc__.splitlines()[0])
    runs = min(args.runs, 4)
    if args.part:
        from mpi4py import MPI

        found = rows(MPI.COMM_WORLD, runs)
        if MPI.COMM_WORLD.rank == 0:
            finish(found, args.json, quiet=True)
        return
    found = on_ranks(str(Path(__file__).resolve()), 2, ["--runs", str(runs)])
    finish(found, args.json)
    print(f"\n{found[0].note}")


if __name__ == "__main__":
    sys.exit(main())
