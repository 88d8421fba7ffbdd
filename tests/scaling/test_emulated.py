"""`--emulate` of train and bench: the run folders of real ranks bit for bit, predicted times, virtual traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpnet.cli import main
from lpnet.configfile import parse
from lpnet.errors import UsageError
from lpnet.parallel.comm import Comm
from lpnet.parallel.emulator import Faults, RankDiedError, emulate
from lpnet.train.trainer import train


def contents(folder: Path, step: int) -> dict[str, np.ndarray]:
    """All datasets of a checkpoint."""
    import h5py

    found: dict[str, np.ndarray] = {}
    with h5py.File(folder / "checkpoints" / f"step-{step:08d}.h5") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if hasattr(item, "shape") else None)
    return found


def losses(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without the times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = ("seconds", "wait_seconds", "modules")
    return [{key: value for key, value in row.items() if key not in times} for row in rows]


def same_runs(one: Path, two: Path, step: int) -> None:
    assert losses(one) == losses(two)
    mine, other = contents(one, step), contents(two, step)
    assert mine.keys() == other.keys()
    assert all(np.array_equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("optimiser", ["adam", "lbfgs"])
def test_train_equals_mpirun_bit_for_bit(small: Path, tmp_path: Path, mpirun: Any, optimiser: str) -> None:
    flags = ["--optim.name", optimiser]
    assert main(["train", str(small), *flags, "--emulate", "1,2,3", "--run.out", str(tmp_path / "virtual")]) == 0
    for ranks in (1, 2, 3):
        real = tmp_path / f"real-{ranks}"
        done = mpirun(ranks if ranks > 1 else 0, "lpnet", "train", small, *flags, "--run.out", real)
        assert done.returncode == 0, done.stderr
        same_runs(tmp_path / "virtual" / f"ranks-{ranks}", real, 4)


GRIDS = {
    "fdg": (2, ["--method", "fdg", "--fdg.modules", "2", "--fdg.cuts", "uniform"]),
    "replicas x pipeline": (4, ["--parallel.replicas", "2", "--mgrit.levels", "1", "--mgrit.microbatches", "3"]),
    "replicas x multigrid": (4, ["--parallel.replicas", "2", "--mgrit.forward_iterations", "2"]),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids_of_ranks_equal_mpirun_bit_for_bit(small: Path, tmp_path: Path, mpirun: Any, name: str) -> None:
    ranks, flags = GRIDS[name]
    assert main(["train", str(small), *flags, "--emulate", str(ranks), "--run.out", str(tmp_path / "virtual")]) == 0
    done = mpirun(ranks, "lpnet", "train", small, *flags, "--run.out", tmp_path / "real", timeout=90)
    assert done.returncode == 0, done.stderr
    same_runs(tmp_path / "virtual", tmp_path / "real", 4)


def test_resume_on_another_number_of_ranks_after_a_death(small: Path, tmp_path: Path) -> None:
    def run(out: Path, ranks: int, *flags: str, faults: Faults | None = None) -> None:
        config = parse([str(small), "--run.out", str(out), *flags]).config
        emulate(lambda comm: train(config, comm), ranks=ranks, faults=faults)

    run(tmp_path / "whole", 2)
    with pytest.raises(RankDiedError, match="rank 1 of 2 died at step 3"):
        run(tmp_path / "dead", 2, faults=Faults(kill=(1, 3)))
    assert [path.name for path in (tmp_path / "dead" / "checkpoints").glob("*.h5")] == ["step-00000002.h5"]
    run(tmp_path / "dead", 3, "--run.resume", "auto")
    mine, other = contents(tmp_path / "dead", 4), contents(tmp_path / "whole", 4)
    assert all(np.array_equal(mine[name], other[name]) for name in mine if name.startswith(("model", "optim")))


def test_trace_in_virtual_time(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", str(small), "--emulate", "4", "--run.out", str(out), "--run.trace", "true"]) == 0
    seconds = float(capsys.readouterr().out.split()[0])
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert events[0]["args"]["name"].startswith("lpnet, predicted for 4 emulated rank(s) on infiniband")
    assert json.loads((out / "env.json").read_text())["emulated"].startswith("predicted for 4 emulated rank(s)")
    rows = [row for row in events if row["ph"] == "X"]
    assert {row["tid"] for row in rows} == {0, 1, 2, 3}
    assert {"f_relax level 0", "step"} <= {row["name"] for row in rows}
    ends = [row["ts"] + row["dur"] for row in rows]
    assert 0 < max(ends) <= seconds * 1e6
    steps = {rank: [row["ts"] for row in rows if row["name"] == "step" and row["tid"] == rank] for rank in range(4)}
    assert all(len(found) == 4 and found == sorted(found) for found in steps.values())


def test_bench(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "numbers.json"
    words = ["bench", str(small), "--emulate", "1,16", "--steps", "3", "--network", "ethernet", "--json", str(target)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "predicted for 1 emulated rank(s) on ethernet" in text
    assert "predicted for 16 emulated rank(s) on ethernet" in text
    one, many = json.loads(target.read_text())
    assert (one["ranks"], many["ranks"], len(many["step"])) == (1, 16, 16)
    assert many["step"][3] > 50e-6  # messages of 25 us


def test_faults_by_flag(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow pair takes longer and changes nothing; a rank dies at its step; bench knows the same words."""

    def run(name: str, *flags: str) -> tuple[int, float]:
        code = main(["train", str(small), "--emulate", "2", *flags, "--run.out", str(tmp_path / name)])
        out = capsys.readouterr()
        assert code == 0 or "rank 1 of 2 died at step 3" in out.err
        return code, float(out.out.split()[0]) if code == 0 else 0.0

    _, plain = run("plain")
    _, late = run("late", "--faults", "delay=0-1:0.5,delay=1-0:0.25,jitter=0.01,reorder,seed=3")
    assert late > plain + 0.5
    same_runs(tmp_path / "plain", tmp_path / "late", 4)
    assert run("dead", "--faults", "kill=1@3")[0] == 1
    assert main(["bench", str(small), "--emulate", "2", "--steps", "3", "--faults", "kill=1@3"]) == 1


@pytest.mark.parametrize(("words", "message"), [
    ("delay=0-2:1", "there is no rank 2 of 2"),
    ("delay=0-1:-1", "they must not be negative"),
    ("delay=0-1", "expected delay=SOURCE-DEST:SECONDS"),
    ("jitter=nan", "must not be negative"),
    ("kill=1", "expected delay="),
    ("reorder=yes", "not one of them"),
    ("explode", "'explode' (not one of them)"),
    ("seed=x", "'x' is no whole number"),
])
def test_faults_of_another_form(small: Path, capsys: Any, words: str, message: str) -> None:
    assert main(["bench", str(small), "--emulate", "4,2", "--faults", words]) == 2
    error = capsys.readouterr().err
    assert "--faults has" in error and message in error


@pytest.mark.parametrize(("flags", "message"), [
    (["--emulate", "0"], "--emulate is '0'; expected rank counts such as 1,16,256"),
    (["--emulate", "two"], "--emulate is 'two'"),
    (["--emulate", "4", "--network", "infinband"], "did you mean infiniband?; known: loopback, infiniband"),
    (["--network", "ethernet"], "--network needs --emulate"),
    (["--faults", "reorder"], "--faults needs --emulate"),
    (["--emulate", "17"], "17 ranks"),
    (["--emulate", "2", "--method", "serial"], "method serial runs on one rank, and there are 2"),
    (["--emulate", "2,3"], "needs --run.out"),
])
def test_bad_input(small: Path, tmp_path: Path, capsys: Any, flags: list[str], message: str) -> None:
    out = [] if "2,3" in flags else ["--run.out", str(tmp_path / "run")]
    assert main(["train", str(small), *flags, *out]) == 2
    assert message in capsys.readouterr().err


def test_not_under_mpirun() -> None:
    from lpnet.scaling.emulated import requested

    with pytest.raises(UsageError, match="there are 4 ranks; start it without mpirun"):
        requested({"emulate": "2"}, started_ranks=4)


def test_comm_of_one_real_rank_has_real_time() -> None:
    comm = Comm()
    assert comm.meter is None and comm.now() < comm.now() + 1 and comm.shared(lambda: 3) == 3
