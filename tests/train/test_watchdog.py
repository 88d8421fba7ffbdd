"""A step that takes too long: every rank says where it stands and the job ends with exit code 1."""

from __future__ import annotations

import pytest

CONFIG = """
method: mgrit
model: {layers: 9, width: 5, activation: tanh}
data: {name: peaks, train_samples: 60, validation_samples: 20}
mgrit: {levels: 2, coarsening: 2}
optim: {name: lbfgs, lr: 0.1}
run: {steps: 1000, eval_every: 0, checkpoint_every: 0, plots: false, stall_s: 2}
"""
STUCK = """
import ctypes, sys, time
from mpi4py import MPI
import lpnet.cli
from lpnet.mgrit.solver import Solver
from lpnet.train import watchdog
watchdog.GRACE_S = 0.5
where, calls, solve = sys.argv.pop(1), [], Solver.solve
def get_stuck_here():
    if where == "C":
        ctypes.PyDLL(None).sleep(1000)  # keeps Python's lock
    while True:
        time.sleep(0.1)
def slow(self, *arguments, **more):
    calls.append(1)
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1 and len(calls) == 8:
        get_stuck_here()
    return solve(self, *arguments, **more)
Solver.solve = slow
sys.exit(lpnet.cli.main())
"""


@pytest.mark.parametrize(("where", "ranks"), [("python", 2), ("C", 2)])
def test_stacks_and_last_messages_of_all_ranks(mpirun, tmp_path, where, ranks):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "stuck.py").write_text(STUCK)
    words = ["train", tmp_path / "config.yaml", "--run.out", tmp_path / "run"]
    done = mpirun(ranks, "python", tmp_path / "stuck.py", where, *words)
    assert done.returncode == 1, (done.returncode, done.stderr)
    reporting = [0, 1] if ranks and where == "python" else [0]
    for rank in reporting:
        head = f"[lpnet {rank}/{ranks or 1} ERROR] "
        assert f"{head}step " in done.stderr and "s, and run.stall_s is 2: the job ends" in done.stderr
        if ranks:
            assert f"{head}messages between 2 ranks: last sent " in done.stderr
            assert "last receive" in done.stderr and "last collective" in done.stderr
        assert f"{head}stack of MainThread:" in done.stderr
    if where == "C":
        assert "Timeout (0:00:0" in done.stderr  # of faulthandler
    assert "get_stuck_here" in done.stderr
    assert "stack of MainThread:" in (tmp_path / "run" / "log.txt").read_text()

