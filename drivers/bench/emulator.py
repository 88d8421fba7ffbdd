"""Emulated against measured step times on 1 and 2 ranks, on a network calibrated by a ping-pong between two ranks.

    python drivers/bench/emulator.py --json emulator.json [--networks calibrated.yaml] [--data FOLDER] [--only WORD]

Multigrid and decoupled modules, dense and convolutional. FOLDER holds the idx files of MNIST, for the convolutional
cases. Runs alternate, measured and emulated, and each is its own process; the ratio is predicted / measured, median
with minimum and maximum. Needs two quiet cores: a busy machine slows the measured side only.

    python drivers/bench/emulator.py --calibrate loopback.yaml

writes the network alone, by the fastest of its trips: a file for --networks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

DENSE = ["--data.validation_samples", "100"]
CONV = ["--data.name", "mnist", "--data.validation_samples", "10"]
MULTIGRID = [
    *("--method", "mgrit", "--mgrit.levels", "2", "--mgrit.coarsening", "16"),
    *("--mgrit.forward_iterations", "2", "--mgrit.adjoint_iterations", "1"),
]
MODULES = ["--method", "fdg", "--fdg.modules", "2", "--fdg.cuts", "uniform", "--optim.name", "sgd"]
CASES = {
    "mgrit, dense": [
        *(*MULTIGRID, *DENSE, "--model.layers", "256", "--model.width", "8", "--data.train_samples", "1000"),
    ],
    "mgrit, dense, small batch": [
        *(*MULTIGRID, *DENSE, "--model.layers", "256", "--model.width", "8", "--data.train_samples", "100"),
    ],
    "mgrit, dense, wide": [
        *(*MULTIGRID, *DENSE, "--model.layers", "64", "--model.width", "128", "--data.train_samples", "500"),
    ],
    "mgrit, conv": [
        *(*MULTIGRID, *CONV, "--model.name", "conv", "--model.layers", "64", "--model.width", "4"),
        *("--model.opening", "replicate", "--data.train_samples", "64"),
    ],
    "fdg, dense": [
        *(*MODULES, *DENSE, "--model.layers", "64", "--model.width", "128", "--data.train_samples", "500"),
    ],
    "fdg, conv": [
        *(*MODULES, *CONV, "--model.name", "resnet_mnist", "--model.depth", "14", "--data.train_samples", "64"),
    ],
}
COMMON = ["--run.log_level", "WARNING", "--parallel.threads", "1"]
SIZES = (0, 1 << 20)  # bytes of the ping-pong
REPEAT = 400


def ping_pong(out: Path) -> None:
    """Latency and bandwidth between two ranks as a file for --networks, on rank 0. Run on two ranks."""
    import torch
    from mpi4py import MPI

    from lpnet.parallel.comm import Comm

    comm = Comm(MPI.COMM_WORLD)
    seconds, overheads, fastest = [], [], []
    for size in SIZES:
        data = torch.zeros(max(size, 1), dtype=torch.uint8)
        trips = []
        for _ in range(REPEAT):
            comm.barrier()
            began = time.perf_counter()
            for turn in (0, 1):
                if comm.rank == turn:
                    before = time.perf_counter()
                    request = comm.isend(data, 1 - comm.rank, turn)
                    overheads.append(time.perf_counter() - before)
                    request.Wait()
                else:
                    comm.irecv(data, 1 - comm.rank, turn).Wait()
            trips.append((time.perf_counter() - began) / 2)
        seconds.append(statistics.median(trips))
        fastest.append(min(trips))
    if comm.rank == 0:
        text = _network("calibrated", seconds, statistics.median(overheads[:REPEAT]))
        out.write_text(text + _network("loopback", fastest, min(overheads[:REPEAT])))
    comm.free()


def _network(name: str, seconds: Sequence[float], overhead: float) -> str:
    """A network from one-way trips of SIZES bytes."""
    latency = max(seconds[0] - overhead, 1e-7)  # a receive is posted while the message is sent
    bandwidth = (SIZES[1] - SIZES[0]) / max(seconds[1] - seconds[0], 1e-9)
    values = {"ranks_per_node": 1024, "send_overhead_s": overhead}
    for place in ("intra", "inter"):
        values |= {f"{place}_latency_s": latency, f"{place}_bandwidth": bandwidth}
    return f"{name}:\n" + "".join(f"  {key}: {value:.6g}\n" for key, value in values.items())


def step_seconds(words: Sequence[str], ranks: int, launched: bool) -> float:
    """Seconds per step of one `lpnet bench`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launch = ["mpirun", "-n", str(ranks)] if launched and ranks > 1 else []
        command = [*launch, sys.executable, "-m", "lpnet", "bench", *words, "--steps", "30", "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        found = json.loads(out.read_text())
        return max((found[0] if isinstance(found, list) else found)["step"])


def main() -> None:
    """Calibrate, then compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--runs", type=int, default=5, help="rounds that count")
    parser.add_argument("--networks", type=Path, default=Path("calibrated.yaml"), help="file of the calibrated network")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)  # the ping-pong, under mpirun
    parser.add_argument("--calibrate", type=Path, help="write the network to this file, and nothing more")
    parser.add_argument("--data", help="folder of MNIST; None: dense cases only")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()
    options.networks = options.calibrate or options.networks
    if options.part is not None:
        ping_pong(options.part)
        return
    script = ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py", __file__, "--part", str(options.networks)]
    subprocess.run(script, check=True, timeout=120)
    print(options.networks.read_text())
    if options.calibrate is not None:
        return
    rows = []
    print("| case | ranks | measured ms | predicted ms | predicted / measured (min - max) |\n|---|---|---|---|---|")
    for name, words in CASES.items():
        if options.only not in name or ("conv" in name and options.data is None):
            continue
        words = [*words, "--data.root", options.data] if "conv" in name else words
        for ranks in (1, 2):
            emulate = ["--emulate", str(ranks), "--network", "calibrated", "--networks", str(options.networks)]
            pairs = [
                (step_seconds([*COMMON, *words], ranks, True), step_seconds([*COMMON, *words, *emulate], ranks, False))
                for _ in range(options.runs)
            ]
            ratios = [predicted / measured for measured, predicted in pairs]
            measured, predicted = (statistics.median(side) for side in zip(*pairs, strict=True))
            rows.append({"case": name, "ranks": ranks, "measured": measured, "predicted": predicted, "ratios": ratios})
            print(
                f"| {name} | {ranks} | {measured * 1e3:.2f} | {predicted * 1e3:.2f} | {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} - {max(ratios):.3f}) |",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
