"""The job scripts in a real SLURM, started by tests/slurm/run.sh: jobs that end early come back and finish the same.

All jobs are submitted at once; each test waits for its own. `holds.py` is lpnet that waits in a step until it has been
asked to stop, the first time that the job runs: a job can neither be done before, however fast the machine, nor need it
have come that far, however slow. What a resumed run must equal is an uninterrupted one under mpirun, without SLURM.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lpnet.io.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(os.environ.get("LPNET_SLURM_JOBS", ROOT / "runs"))
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED")
PATIENCE_S = 270.0  # of a busy machine
STEPS = 40
CONFIG = f"""
seed: 3
method: mgrit
model: {{layers: 9, width: 5, activation: tanh, opening: dense}}
data: {{name: peaks, train_samples: 100, validation_samples: 50}}
mgrit: {{levels: 2, coarsening: 2, relative_tolerance: 1e-9}}
optim: {{name: lbfgs, lr: 0.02, memory: 5, tikhonov: 1e-3, ddt: 1e-3}}
run: {{steps: {STEPS}, eval_every: 10, checkpoint_every: 20, plots: false, stop_margin_s: 1}}
"""
STUDY = """
name: test
scaling: {kind}
steps: 2
base:
  model: {{width: 5}}
  data: {{name: peaks, train_samples: 100, validation_samples: 50}}
  optim: {{name: lbfgs, lr: 0.02}}
grid: {{ranks: [1, 2], {size}, levels: 2, coarsening: 2}}
"""
HELD = 12
HOLDS = f"""#!{ROOT}/.venv/bin/python
import os, sys, time
from lpnet.parallel import signals
signals.install()
from lpnet import cli
from lpnet.train import trainer
class Holds(trainer.Stopping):
    def __init__(self, folder, *, rank=0, **more):
        super().__init__(folder, rank=rank, **more)
        self.holds = rank == 0 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
        self.steps_begun = 0
    def begin_step(self):
        self.steps_begun += 1
        while self.holds and self.steps_begun == {HELD} + 1 and not self.requested():
            time.sleep(0.05)
        return super().begin_step()
trainer.Stopping = Holds
sys.exit(cli.main())
"""


@dataclass
class Job:
    """A job that was submitted, and the folder it trains in."""

    number: int
    out: Path

    def show(self) -> dict[str, str]:
        command = ["scontrol", "-o", "show", "job", str(self.number)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0]))

    def wait(self, *states: str) -> dict[str, str]:
        """Wait until it is in one of these states."""
        began = time.monotonic()
        while True:
            found = self.show()
            if found["JobState"] in states:
                return found
            if time.monotonic() - began > PATIENCE_S or found["JobState"] in ENDED:
                pytest.fail(f"job {self.number} is {found['JobState']} ({found.get('Reason')}):\n{self.text()}")
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        """Wait until it has made a number of steps."""
        metrics = self.out / "metrics.jsonl"
        self._until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > step)

    def wait_for(self, words: str) -> None:
        """Wait until its output has these words."""
        self._until(lambda: words in self.text())

    def _until(self, what: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not what():
            state = self.show()["JobState"]
            if time.monotonic() - began > PATIENCE_S or state in ENDED:
                pytest.fail(f"job {self.number} is {state}, and has not come that far:\n{self.text()}")
            time.sleep(0.1)

    def text(self) -> str:
        output = JOBS / f"{self.number}.out"
        return output.read_text() if output.exists() else "no output"


def submit(script: str, *words: Any, out: Path, flags: tuple[str, ...] = (), **variables: Any) -> Job:
    command = ["sbatch", "--parsable", "--ntasks=2", f"--output={JOBS}/%j.out", *flags]
    command += [str(ROOT / "jobscripts" / script), *map(str, words)]
    environment = {**os.environ, "LPNET_COMMAND": str(JOBS / "holds.py"), **variables}
    done = subprocess.run(command, env=environment, cwd=JOBS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Job(int(done.stdout.split(";")[0]), out)


@pytest.fixture(scope="module")
def uninterrupted(mpirun: Callable[..., Any]) -> Path:
    """The run that no job may differ from."""
    (JOBS / "config.yaml").write_text(CONFIG)
    out = JOBS / "whole"
    done = mpirun(2, "lpnet", "train", JOBS / "config.yaml", "--run.out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def jobs(uninterrupted: Path) -> dict[str, Job]:
    """All jobs, submitted at once and told to stop."""
    (JOBS / "broken.yaml").write_text("method: nonsense\n")
    (JOBS / "flags.txt").write_text("--seed 3\n--seed 4 --optim.lr 0.03\n")
    for kind, size in (("strong", "layers: 8"), ("weak", "layers_per_rank: 4")):
        (JOBS / f"{kind}.yaml").write_text(STUDY.format(kind=kind, size=size))
    (JOBS / "holds.py").write_text(HOLDS)
    (JOBS / "holds.py").chmod(0o755)

    def train(name: str, *words: Any, script: str = "train.sbatch", **more: Any) -> Job:
        out = JOBS / name
        return submit(script, "config.yaml", "--run.out", out, *words, out=out, **more)

    fast = {"LPNET_COMMAND": str(ROOT / ".venv" / "bin" / "lpnet")}
    shared: dict[str, Any] = {"flags": ("--exclusive=user", "--nodes=1", "--ntasks-per-node=2"), **fast}
    study = ("config.yaml", "flags.txt", JOBS / "study")
    found = {
        "limit": train("limit", flags=("--time=2", "--signal=B:USR1@10")),  # which SLURM sends up to 60 s before
        "end": train("end", "--run.stop_margin_s", 60, flags=("--time=2", "--signal=B:CONT@1")),
        "usr1": train("usr1"),
        "stop": train("stop"),
        "hold": train("hold"),
        "term": train("term"),
        "early": train("early"),
        "preempted": train("preempted", script="preemptible.sbatch"),
        "srun": train("srun", script="train_srun.sbatch"),
        "broken": submit("train.sbatch", "broken.yaml", out=JOBS / "broken"),
        "study": submit("study.sbatch", *study, out=JOBS / "study/0", flags=("--array=0-1",), **fast),
        "strong": submit("strong_scaling.sbatch", "strong.yaml", JOBS / "strong", out=JOBS / "strong", **shared),
        "weak": submit("weak_scaling.sbatch", "weak.yaml", JOBS / "weak", out=JOBS / "weak", **shared),
    }
    found["early"].wait_for("mpirun -n 2")
    subprocess.run(["scancel", "-b", "--signal=USR1", str(found["early"].number)], check=True)
    for name, flags in {
        "usr1": ("-b", "--signal=USR1"),
        "srun": ("--signal=USR1",),
        "term": ("-b", "--signal=TERM"),
        "preempted": ("-b", "--signal=TERM"),
    }.items():
        found[name].wait_for_step(HELD - 1)
        subprocess.run(["scancel", *flags, str(found[name].number)], check=True)
    for name, text in {"stop": "", "hold": "hold\n"}.items():
        found[name].wait_for_step(HELD - 1)
        (found[name].out / "STOP").write_text(text)
    return found


def assert_finished(job: Job, uninterrupted: Path) -> None:
    """The job has come back and its parameters are those of the uninterrupted run."""
    found = job.wait("COMPLETED")
    assert found["ExitCode"] == "0:0"
    assert int(found["Restarts"]) >= 1 and job.text().count(": mpirun -n 2 ") + job.text().count(": srun ") >= 2
    name = f"checkpoints/step-{STEPS:08d}.h5"
    assert (job.out / name).exists(), job.text()
    with Checkpoint.open(job.out / name) as mine, Checkpoint.open(uninterrupted / name) as whole:
        assert sorted(mine.names()) == sorted(whole.names())
        assert not [name for name in mine.names() if not torch.equal(mine.read(name), whole.read(name))]
    steps_seen = [json.loads(line)["step"] for line in (job.out / "metrics.jsonl").read_text().splitlines()]
    assert steps_seen == list(range(STEPS + 1))


def test_signal_of_a_user_to_the_script(jobs: dict[str, Job], uninterrupted: Path) -> None:
    job = jobs["usr1"]
    assert_finished(job, uninterrupted)
    assert "received SIGUSR1, asks lpnet to stop" in job.text()
    assert "will stop with a checkpoint: SIGUSR1" in job.text() and f"scontrol requeue {job.number}" in job.text()


def test_signal_before_the_first_step(jobs: dict[str, Job], uninterrupted: Path) -> None:
    job = jobs["early"]
    assert_finished(job, uninterrupted)
    assert "received SIGUSR1, asks lpnet to stop" in job.text()


def test_signal_of_a_user_to_the_ranks_under_srun(jobs: dict[str, Job], uninterrupted: Path) -> None:
    job = jobs["srun"]
    assert_finished(job, uninterrupted)
    assert "will stop with a checkpoint: SIGUSR1" in job.text()


def test_stop_file(jobs: dict[str, Job], uninterrupted: Path) -> None:
    job = jobs["stop"]
    assert_finished(job, uninterrupted)
    assert f"will stop with a checkpoint: found {job.out}/STOP" in job.text()
    assert not list(job.out.glob("STOP*"))


def test_stop_file_that_holds(jobs: dict[str, Job], uninterrupted: Path) -> None:
    job = jobs["hold"]
    found = job.wait("PENDING")
    while found["Reason"] != "job_requeued_in_held_state" and not found["Reason"].startswith("JobHeld"):
        time.sleep(0.2)
        found = job.wait("PENDING")
    subprocess.run(["scontrol", "release", str(job.number)], check=True)
    assert_finished(job, uninterrupted)


def test_a_terminated_job_has_saved_and_does_not_come_back(jobs: dict[str, Job]) -> None:
    job = jobs["term"]
    began = time.monotonic()
    while job.show()["JobState"] == "RUNNING" and time.monotonic() - began < 30:
        time.sleep(0.2)
    assert job.show()["ExitCode"] == "75:0" and "cancelled: not requeued" in job.text(), job.text()
    newest = (job.out / "checkpoints" / "latest").read_text().strip()
    assert int(newest[5:13]) >= 12


def test_preempted_comes_back(jobs: dict[str, Job], uninterrupted: Path) -> None:
    job = jobs["preempted"]
    assert_finished(job, uninterrupted)  # saves beside the training are tests/train/test_saver.py's: here time decides


def test_a_mistake_does_not_come_back(jobs: dict[str, Job]) -> None:
    job = jobs["broken"]
    began = time.monotonic()
    while job.show()["JobState"] in ("PENDING", "RUNNING", "COMPLETING") and time.monotonic() - began < 60:
        time.sleep(0.2)
    assert job.show()["ExitCode"] == "2:0" and job.show()["Restarts"] == "0"
    assert "broken.yaml:1: method is 'nonsense'; expected one of" in job.text()


def test_study(jobs: dict[str, Job], uninterrupted: Path) -> None:
    jobs["study"].wait("COMPLETED")
    other = Job(jobs["study"].number, JOBS / "study/1")
    began = time.monotonic()
    last = f"checkpoints/step-{STEPS:08d}.h5"
    while not (other.out / last).exists() and time.monotonic() - began < PATIENCE_S:
        time.sleep(0.2)
    with Checkpoint.open(JOBS / "study/0" / last) as zero, Checkpoint.open(other.out / last) as one:
        with Checkpoint.open(uninterrupted / last) as whole:
            assert torch.equal(zero.read("model/stack.weight"), whole.read("model/stack.weight"))
        assert not torch.equal(zero.read("model/stack.weight"), one.read("model/stack.weight"))


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_scaling(jobs: dict[str, Job], kind: str) -> None:
    job = jobs[kind]
    job.wait("COMPLETED")
    with (job.out / "study.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["ranks"], row["status"]) for row in rows] == [
        ("serial", "1", "done"),
        *([("serial", "1", "done")] if kind == "weak" else []),
        ("mgrit", "1", "done"),
        ("mgrit", "2", "done"),
    ], job.text()


def test_environment_of_a_job(jobs: dict[str, Job], uninterrupted: Path) -> None:
    found = json.loads((jobs["usr1"].out / "env.json").read_text())
    assert found["variables"]["SLURM_JOB_ID"] == str(jobs["usr1"].number)
    assert found["variables"]["SLURM_RESTART_COUNT"] == "1"
    assert found["variables"]["SLURM_JOB_END_TIME"].isdecimal()


# the two that wait for a limit come last


def test_end_of_the_time_without_a_signal(jobs: dict[str, Job], uninterrupted: Path) -> None:
    job = jobs["end"]
    assert_finished(job, uninterrupted)
    assert "are left of the job's time, and" in job.text() and "received SIG" not in job.text()


def test_signal_before_the_limit(jobs: dict[str, Job], uninterrupted: Path) -> None:
    job = jobs["limit"]
    assert_finished(job, uninterrupted)
    assert "received SIGUSR1, asks lpnet to stop" in job.text()
