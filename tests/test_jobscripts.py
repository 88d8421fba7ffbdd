"""The job scripts without SLURM: stand-ins for its commands and for mpirun; tests/slurm has the real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# no shell script: bash cannot trap what it was started to ignore
MPIRUN = f"""#!{sys.executable} -S
import os, signal, sys, time
asked = []
def note(number, frame):
    print("mpirun was asked to stop", flush=True)
    asked.append(number)
signal.signal(signal.SIGUSR1, note)
if os.path.exists("deaf"):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    open("running", "w").close()
    while os.path.exists("deaf"):
        time.sleep(0.01)
    signal.signal(signal.SIGUSR1, note)
print("mpirun", *sys.argv[1:])
print("end", os.environ.get("SLURM_JOB_END_TIME"), flush=True)
open("running", "w").close()
while os.path.exists("wait") and not asked:
    time.sleep(0.01)
if asked or os.path.exists("progress"):
    os.makedirs("out/checkpoints", exist_ok=True)
    with open("out/checkpoints/latest", "w") as file:
        print(time.time(), file=file)
sys.exit(int(open("code").read()))
"""


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """job(script, *words, code=, **variables): the process of a job script in a folder with stand-ins."""
    stubs = {
        "mpirun": MPIRUN,
        "scontrol": '#!/bin/sh\necho "$*" >>scontrol-was-called\n',
        "squeue": "#!/bin/sh\necho 2030-01-01T00:00:00\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(script: str, *words: str, code: int = 0, **variables: str) -> subprocess.Popen[str]:
        (tmp_path / "code").write_text(str(code))
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "LPNET_ROOT": str(ROOT),
            "LPNET_COMMAND": sys.executable,
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "3",
            "SLURM_CPUS_PER_TASK": "2",
            "TZ": "UTC",
            **variables,
        }
        command = ["bash", str(ROOT / "jobscripts" / script), *words]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def asked(folder: Path) -> str:
    """What scontrol was asked for."""
    file = folder / "scontrol-was-called"
    return file.read_text().strip() if file.exists() else ""


def ends(process: subprocess.Popen[str], code: int) -> str:
    text, _ = process.communicate(timeout=60)
    assert process.returncode == code, text
    return text


TRAIN = ("train.sbatch", "cfg.yaml", "--run.out", "out")


def test_a_run_that_ends(job: Any, tmp_path: Path) -> None:
    text = ends(job(*TRAIN, "--seed", "3"), 0)
    flags = "--map-by slot:PE=2 --bind-to core"
    assert f"mpirun -n 3 {flags} {sys.executable} train cfg.yaml --run.out out --seed 3 --resume auto\n" in text
    assert f"end {1893456000}" in text  # from squeue
    assert asked(tmp_path) == ""
    for answer in ("", "N/A", "Unknown"):  # an end that SLURM does not know is none
        (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\necho {answer}\n")
        assert "end None" in ends(job(*TRAIN), 0)


def test_a_folder_of_its_own(job: Any) -> None:
    assert "train cfg.yaml --run.out runs/lpnet-7 --resume auto" in ends(job("train.sbatch", "cfg.yaml"), 0)
    assert "train cfg.yaml --run.out=x --resume auto" in ends(job("train.sbatch", "cfg.yaml", "--run.out=x"), 0)


@pytest.mark.parametrize("code", [1, 2, 137])
def test_a_failure_does_not_come_back(job: Any, tmp_path: Path, code: int) -> None:
    (tmp_path / "progress").touch()
    ends(job(*TRAIN, code=code), code)
    assert asked(tmp_path) == ""


def test_75_comes_back_unless_it_makes_no_progress(job: Any, tmp_path: Path) -> None:
    (tmp_path / "progress").touch()
    for _ in range(4):
        ends(job(*TRAIN, code=75), 75)
    assert asked(tmp_path) == "\n".join(["requeue 7"] * 4)
    (tmp_path / "progress").unlink()
    for _ in range(2):
        ends(job(*TRAIN, code=75), 75)
    assert "three starts without progress: not requeued" in ends(job(*TRAIN, code=75), 75)
    assert asked(tmp_path) == "\n".join(["requeue 7"] * 6)


def test_a_signal_that_came_before_anybody_listened(job: Any, tmp_path: Path) -> None:
    for _ in range(2):
        assert "before it listened: taken for a stop" in ends(job(*TRAIN, code=128 + signal.SIGUSR1), 75)
    assert asked(tmp_path) == "requeue 7\nrequeue 7"
    assert "three starts without progress" in ends(job(*TRAIN, code=128 + signal.SIGUSR1), 75)


def test_hold_and_no_requeue(job: Any, tmp_path: Path) -> None:
    (tmp_path / "progress").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "STOPPED").write_text("hold\n")
    assert "scontrol release 7 goes on" in ends(job(*TRAIN, code=75), 75)
    assert asked(tmp_path) == "requeuehold 7"
    ends(job(*TRAIN, code=75, LPNET_REQUEUE="no"), 75)
    assert asked(tmp_path) == "requeuehold 7"


@pytest.mark.parametrize(
    ("script", "number", "comes_back"),
    [
        ("train.sbatch", signal.SIGUSR1, True),
        ("train.sbatch", signal.SIGTERM, False),
        ("preemptible.sbatch", signal.SIGTERM, True),
    ],
)
def test_signals_are_handed_on(job: Any, tmp_path: Path, script: str, number: int, comes_back: bool) -> None:
    (tmp_path / "wait").touch()
    process = job(script, *TRAIN[1:], code=75)
    began = time.monotonic()
    while not (tmp_path / "running").exists():
        assert time.monotonic() - began < 60
        time.sleep(0.01)
    process.send_signal(number)
    text = ends(process, 75)
    assert "mpirun was asked to stop" in text and "exit code 75" in text
    assert asked(tmp_path) == ("requeue 7" if comes_back else "")


def test_a_signal_that_nobody_heard_comes_again(job: Any, tmp_path: Path) -> None:
    for name in ("wait", "deaf"):
        (tmp_path / name).touch()
    process = job(*TRAIN, code=75)
    began = time.monotonic()
    while not (tmp_path / "running").exists():
        assert time.monotonic() - began < 60
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    while "received SIGUSR1" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.2)
    (tmp_path / "deaf").unlink()
    text = ends(process, 75)
    assert "mpirun was asked to stop" in text and asked(tmp_path) == "requeue 7"


def test_srun(job: Any, tmp_path: Path) -> None:
    (tmp_path / "bin" / "mpirun").rename(tmp_path / "bin" / "srun")
    text = ends(job("train_srun.sbatch", *TRAIN[1:]), 0)
    assert "mpirun --ntasks=3 --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=cores --cpus-per-task=2" in text


def test_study_takes_one_line(job: Any, tmp_path: Path) -> None:
    (tmp_path / "flags.txt").write_text("--seed 1\n--seed 2 --optim.lr 0.1\n")
    words = ("study.sbatch", "cfg.yaml", "flags.txt", "out")
    text = ends(job(*words, SLURM_ARRAY_TASK_ID="1"), 0)
    assert "train cfg.yaml --seed 2 --optim.lr 0.1 --run.out out/1 --resume auto" in text
    assert "flags.txt has no line 3 for task 2" in ends(job(*words, SLURM_ARRAY_TASK_ID="2"), 2)


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_scaling_launches_its_cells(job: Any, tmp_path: Path, kind: str) -> None:
    lpnet = tmp_path / "lpnet"
    (tmp_path / "bin" / "mpirun").rename(lpnet)
    (tmp_path / "progress").touch()
    text = ends(
        job(f"{kind}_scaling.sbatch", "s.yaml", "out", "--data.root", "d", code=75, LPNET_COMMAND=str(lpnet)), 75
    )
    launch = "mpirun -n {ranks} --map-by slot:PE=2 --bind-to core"
    assert f"mpirun study s.yaml --out out --run measured --launch {launch} --data.root d\n" in text
    assert asked(tmp_path) == "requeue 7"
    text = ends(job(f"{kind}_scaling.sbatch", LPNET_COMMAND=str(lpnet), LPNET_LAUNCHER="srun"), 0)
    assert (
        f"study {ROOT}/drivers/scaling_peaks{'_weak' if kind == 'weak' else ''}.yaml --out runs/scaling_peaks" in text
    )
    assert "--launch srun --exact --ntasks={ranks} --mpi=pmix --kill-on-bad-exit=1" in text


def test_usage(job: Any) -> None:
    assert "usage: sbatch" in ends(job("study.sbatch", "cfg.yaml"), 2)
    assert "there is no nowhere" in ends(job(*TRAIN, LPNET_COMMAND="nowhere"), 2)
