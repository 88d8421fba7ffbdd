"""Emulated against measured step times on 1 and 2 ranks, on a network calibrated by a ping-pong between two ranks.

    python drivers/bench/emulator.py --json emulator.json [--networks calibrated.yaml]

Runs alternate, measured and emulated, and each is its own process; the ratio is predicted / measured, median with
minimum and maximum. Needs two quiet cores: a busy machine slows the measured side only.
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

CASES = {
    "dense": ["--model.layers", "256", "--model.width", "8", "--data.train_samples", "1000"],
    "dense, small batch": ["--model.layers", "256", "--model.width", "8", "--data.train_samples", "100"],
    "dense, wide": ["--model.layers", "64", "--model.width", "128", "--data.train_samples", "500"],
}
COMMON = [
    *("--method", "mgrit", "--mgrit.levels", "2", "--mgrit.coarsening", "16"),
    *("--mgrit.forward_iterations", "2", "--mgrit.adjoint_iterations", "1"),
    *("--data.validation_samples", "100", "--run.log_level", "WARNING", "--parallel.threads", "1"),
]
SIZES = (0, 1 << 20)  # bytes of the ping-pong
REPEAT = 400


def ping_pong(out: Path) -> None:
    """Latency and bandwidth between two ranks as a file for --networks, on rank 0. Run on two ranks."""
    import torch
    from mpi4py import MPI

    from lpnet.parallel.comm import Comm

    comm = Comm(MPI.COMM_WORLD)
    seconds, overheads = [], []
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
    if comm.rank == 0:
        overhead = statistics.median(overheads[:REPEAT])
        latency = max(seconds[0] - 2 * overhead, 1e-7)
        bandwidth = SIZES[1] / max(seconds[1] - seconds[0], 1e-9)
        values = {"ranks_per_node": 1024, "send_overhead_s": overhead}
        for place in ("intra", "inter"):
            values |= {f"{place}_latency_s": latency, f"{place}_bandwidth": bandwidth}
        out.write_text("calibrated:\n" + "".join(f"  {key}: {value:.6g}\n" for key, value in values.items()))
    comm.free()


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
    options = parser.parse_args()
    if options.part is not None:
        ping_pong(options.part)
        return
    script = ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py", __file__, "--part", str(options.networks)]
    subprocess.run(script, check=True, timeout=120)
    print(options.networks.read_text())
    rows = []
    print("| case | ranks | measured ms | predicted ms | predicted / measured (min - max) |\n|---|---|---|---|---|")
    for name, words in CASES.items():
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
