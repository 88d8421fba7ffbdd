"""Launcher detection, threads per rank, and the one abort path."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lpnet.errors import ConfigError, LpnetError, UsageError
from lpnet.io.log import close, setup
from lpnet.parallel import launch
from lpnet.parallel.launch import Launcher, ThreadPlan, core_share, describe_error, detect

ROOT = Path(__file__).resolve().parents[2]
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


# launcher


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launcher("none", 0, 1, 0, 1, "")),
        (OPEN_MPI, Launcher("Open MPI", 3, 8, 1, 2, "OMPI_COMM_WORLD_SIZE")),
        (MPICH, Launcher("MPICH", 3, 8, 1, 2, "PMI_SIZE")),
        (SLURM, Launcher("SLURM", 5, 7, 1, 2, "SLURM_STEP_NUM_TASKS")),
        # mpirun inside a job of srun: the inner one counts
        ({**SLURM, **OPEN_MPI}, Launcher("Open MPI", 3, 8, 1, 2, "OMPI_COMM_WORLD_SIZE")),
        ({**SLURM, **MPICH}, Launcher("MPICH", 3, 8, 1, 2, "PMI_SIZE")),
        # a batch script is one process, whatever the job has been given
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, Launcher()),
        ({"PMIX_RANK": "2"}, Launcher("PMIx", 2, 0, 0, 0, "PMIX_RANK")),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": ""}, Launcher()),
    ],
)
def test_launchers_are_told_from_their_variables(env: dict[str, str], expected: Launcher) -> None:
    assert detect(env) == expected


def test_tasks_of_a_node_in_slurms_notation() -> None:
    assert [launch._tasks_on_node("2(x3),1", node) for node in range(5)] == [2, 2, 2, 1, 0]
    assert launch._tasks_on_node("16(x99999999)", 3) == 16
    assert launch._tasks_on_node("", 0) == 0


def test_ranks_that_each_believe_to_be_alone_are_an_error_with_both_libraries_and_a_remedy() -> None:
    with pytest.raises(UsageError, match=r"MPICH started 8 ranks \(PMI_SIZE\).*Open MPI v4.1.4.*use the mpirun"):
        launch.check_launcher(detect(MPICH), 1, "Open MPI v4.1.4, package: Debian\nmore\0")
    launch.check_launcher(detect(MPICH), 8, "MPICH 4")
    launch.check_launcher(Launcher(), 1, "MPICH 4")


# threads


def test_a_core_of_k_ranks_is_a_kth_for_each() -> None:
    two_hosts = [("a", (0, 1, 2, 3))] * 3 + [("b", (0, 1, 2, 3))]
    assert [core_share(two_hosts, rank) for rank in range(4)] == pytest.approx([4 / 3, 4 / 3, 4 / 3, 4])
    assert [core_share([("a", (0,)), ("a", (1,))], rank) for rank in (0, 1)] == [1, 1]
    assert core_share([("a", (0, 1)), ("a", (1,))], 0) == 1.5


class Ranks:
    """A communicator of copies of this rank."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather_objects(self, value: object) -> list[object]:
        return [value] * self.size


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7}, raising=False)
    monkeypatch.setattr(launch, "_cores", lambda cpus: tuple(cpus))


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("ranks", "threads", "env", "expected"),
    [
        (1, None, {}, ThreadPlan(4, "affinity mask", 4, False)),
        (2, None, {}, ThreadPlan(2, "affinity mask", 2, False)),
        (3, None, {}, ThreadPlan(1, "affinity mask", 4 / 3, False)),
        (8, None, {}, ThreadPlan(1, "affinity mask", 0.5, True)),
        (2, None, {"OMP_NUM_THREADS": "1"}, ThreadPlan(1, "OMP_NUM_THREADS", 2, False)),
        (2, None, {"OMP_NUM_THREADS": "4,2"}, ThreadPlan(4, "OMP_NUM_THREADS", 2, True)),
        (2, None, {"OMP_NUM_THREADS": "many"}, ThreadPlan(2, "affinity mask", 2, False)),
        (2, 3, {"OMP_NUM_THREADS": "1"}, ThreadPlan(3, "parallel.threads", 2, True)),
    ],
)
def test_threads_per_rank(ranks: int, threads: int | None, env: dict[str, str], expected: ThreadPlan) -> None:
    plan = launch.plan_threads(Ranks(ranks), threads, env)
    assert plan.cores == pytest.approx(expected.cores)
    assert replace(plan, cores=expected.cores) == expected


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,4", 4: "0,4", 1: "1-2", 2: "1-2"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert launch._cores([0, 1, 2, 4, 9], tmp_path) == (0, 1, 9)


def test_threads_are_set_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        with caplog.at_level("INFO", "lpnet"):
            launch.set_threads(ThreadPlan(2, "parallel.threads", 0.5, True), rank=0, size=4)
            launch.set_threads(ThreadPlan(2, "parallel.threads", 0.5, True), rank=1, size=4)
        assert torch.get_num_threads() == 2
        assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
        assert "2 thread(s) per rank (parallel.threads), 4 rank(s)" in caplog.text
        assert "OMP_NUM_THREADS=1" in caplog.text
    finally:
        launch.set_threads(ThreadPlan(before, "test", before, False), rank=1)


def test_malloc_thresholds_are_taken_by_glibc() -> None:
    script = "from lpnet.parallel.launch import raise_malloc_thresholds as r; print(r())"  # not in this process
    glibc = hasattr(ctypes.CDLL(None), "mallopt")
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(glibc)


# the end


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_errors_carry_the_rank() -> None:
    assert describe_error(ConfigError("mgrit.levels is 0"), rank=1, size=4) == "[lpnet 1/4 ERROR] mgrit.levels is 0\n"
    lines = describe_error(raised(RuntimeError("a bug")), rank=1, size=4).splitlines()
    assert all(line.startswith("[lpnet 1/4 ERROR] ") for line in lines)
    assert "Traceback" in lines[0] and lines[-1].endswith("RuntimeError: a bug")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ABORT_PATIENCE_S", 0.2)
    monkeypatch.setattr(launch, "EXIT_PATIENCE_S", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("error", "code"), [(LpnetError("x"), 1), (UsageError("x"), 2), (RuntimeError("x"), 1)])
def test_the_exit_code_is_that_of_the_error(error: Exception, code: int) -> None:
    codes: list[int] = []
    assert launch.fail(error, rank=0, size=1) == code
    launch.fail(error, rank=1, size=2, abort=codes.append)
    assert codes == [code]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("rank", "size", "waits"), [(0, 1, False), (0, 2, False), (1, 2, True), (1, 0, True)])
def test_the_other_ranks_leave_the_message_to_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int, size: int, waits: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    launch.fail(UsageError("the same on all ranks"), rank=rank, size=size)
    assert bool(slept) == waits
    assert capsys.readouterr().err == f"[lpnet {rank}/{size} ERROR] the same on all ranks\n"


def test_an_error_is_kept_in_the_log_of_the_run(tmp_path: Path) -> None:
    setup(1, 4, folder=tmp_path)
    try:
        launch.fail(UsageError("the disk is full"), rank=0, size=1)
        launch.keep_error(raised(RuntimeError("a bug")))
    finally:
        close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0].endswith("[lpnet 1/4 ERROR] the disk is full")
    assert lines[-1].endswith("[lpnet 1/4 ERROR] RuntimeError: a bug")


@pytest.fixture
def hooks() -> Iterator[None]:
    before = sys.excepthook, threading.excepthook
    yield
    sys.excepthook, threading.excepthook = before


@pytest.mark.usefixtures("hooks", "impatient")
def test_the_hook_catches_threads_and_is_not_there_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.excepthook, threading.excepthook
    codes: list[int] = []
    launch.install_abort_hook(codes.append, rank=0, size=1)
    assert (sys.excepthook, threading.excepthook) == before
    launch.install_abort_hook(codes.append, rank=2, size=3)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    quiet = threading.Thread(target=sys.exit)
    quiet.start()
    quiet.join()
    error = raised(LpnetError("no room"))
    sys.excepthook(type(error), error, error.__traceback__)
    assert codes == [1, 1]
    text = capsys.readouterr().err
    assert "[lpnet 2/3 ERROR] ZeroDivisionError: division by zero\n" in text
    assert text.endswith("[lpnet 2/3 ERROR] no room\n")


def test_importing_it_needs_neither_torch_nor_mpi() -> None:
    script = "import sys, lpnet.parallel.launch; print([m for m in ('torch', 'mpi4py', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


# whole jobs

COMMAND = """
import sys, threading, time
from lpnet import cli
from lpnet.config import ParallelConfig
from lpnet.errors import UsageError

def command(arguments, job):
    comm = job.start(ParallelConfig())
    case, odd = arguments[0], comm.rank == 1
    if case == "all usage" or case == "one usage" and odd:
        raise UsageError("cannot be done")
    if case == "one bug" and odd:
        raise RuntimeError("a bug")
    if case == "one thread" and odd:
        threading.Thread(target=lambda: 1 / 0).start()
    if case == "stopped":
        return 75
    comm.barrier()
    if "one" in case:
        time.sleep(60) if case == "one thread" else comm.barrier()
    return 0

cli._COMMANDS["train"] = command
sys.exit(cli.main(["train", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("all usage", 2, "[lpnet 0/2 ERROR] cannot be done"),
        ("one usage", 2, "[lpnet 1/2 ERROR] cannot be done"),
        ("one bug", 1, "[lpnet 1/2 ERROR] RuntimeError: a bug"),
        ("one thread", 1, "[lpnet 1/2 ERROR] ZeroDivisionError: division by zero"),
        ("stopped", 75, ""),
    ],
)
def test_a_job_ends_with_the_exit_code_and_each_message_once(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, case: str, code: int, message: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(COMMAND)
    done = mpirun(2, "python", script, case, timeout=240, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if "[lpnet " in line and " ERROR]" in line]
    assert sum(line.endswith(message) for line in lines) == (1 if message else 0), done.stderr
    assert len({line.split()[1] for line in lines}) == (1 if message else 0)
