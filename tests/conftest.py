"""Tests under MPI: one `mpirun -n 4 python -m pytest -m ranks`, a sub-communicator per test.

`@pytest.mark.ranks(1, 2, 3, 4)` runs a test once per number of ranks; its fixture `comm` is split off
COMM_WORLD and the ranks left over skip the test. A failing rank prints its report and aborts the job, so
that the others cannot wait for it for ever. Tests without the marker run without mpirun; those that need
whole processes start them through the fixture `mpirun`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; more threads than cores crawl

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")  # set by mpirun and srun
IDLE = "idle: the test uses fewer ranks"

# the same examples on all ranks and every day
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("fixed")


def world() -> Any:
    """COMM_WORLD; MPI starts on the first call."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


LAUNCHED = any(name in os.environ for name in LAUNCHER_VARIABLES)
RANK, SIZE = (world().rank, world().size) if LAUNCHED else (0, 1)
STARTED = time.monotonic()
OUTCOMES: Counter[str] = Counter()
CAPTURE: list[Any] = []  # pytest's capture manager


def line_up(word: Any) -> None:
    """Wait for all ranks, asleep rather than spinning, and check that all say the same. Collective over COMM_WORLD."""
    request = world().Ibarrier()
    while not request.Test():
        time.sleep(0.001)
    words = world().allgather(word)
    if any(other != words[0] for other in words):
        abort(f"the ranks do not run the same test: {words}\n")


def abort(text: str) -> None:
    """Print to the terminal, past pytest's capture, and end the job on all ranks."""
    with CAPTURE[0].global_and_fixture_disabled():
        os.write(2, text.encode())
        time.sleep(0.5)  # ranks that fail at the same place get their report out as well
        world().Abort(1)


# pytest hooks


@pytest.hookimpl(trylast=True)  # after the reporter has been made
def pytest_configure(config: pytest.Config) -> None:
    CAPTURE.append(config.pluginmanager.getplugin("capturemanager"))
    if RANK > 0:
        config.pluginmanager.unregister(name="terminalreporter")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    if not marker.args or "comm" not in metafunc.fixturenames:
        name = metafunc.definition.nodeid
        raise pytest.UsageError(f"{name}: write @pytest.mark.ranks(1, 2, ...) and take the fixture `comm`")
    metafunc.parametrize("comm", marker.args, ids=[f"n{ranks}" for ranks in marker.args], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SIZE > 1:  # every rank would run its own copy of a serial test
        serial = [item for item in items if item.get_closest_marker("ranks") is None]
        config.hook.pytest_deselected(items=serial)
        items[:] = [item for item in items if item.get_closest_marker("ranks") is not None]


def pytest_collection_finish(session: pytest.Session) -> None:
    if SIZE > 1:
        line_up((len(session.items), session.testsfailed))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if SIZE == 1:
        return
    if report.failed:
        OUTCOMES["failed"] += 1
        sections = "".join(f"\n--- {title} ---\n{content}" for title, content in report.sections)
        counts = ", ".join(f"{OUTCOMES[word]} {word}" for word in ("failed", "passed", "skipped") if OUTCOMES[word])
        name = report.nodeid.split("::", 1)[-1]
        seconds = time.monotonic() - STARTED
        head = f"[rank {RANK}/{SIZE}] {name} ({report.nodeid}, {report.when})"
        last = f"=== {counts} in {seconds:.2f}s: stopped here by rank {RANK} ==="
        abort(f"\n{head}\n{report.longreprtext}{sections}\n{last}\n")
    elif report.skipped and IDLE not in report.longreprtext:
        OUTCOMES["skipped"] += 1
    elif report.skipped or report.when == "call":
        OUTCOMES["passed"] += 1


def pytest_internalerror(excrepr: Any) -> None:
    if SIZE > 1:
        abort(f"[rank {RANK}/{SIZE}] pytest failed\n{excrepr}\n")


# fixtures


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An mpi4py communicator of as many ranks as the marker says; the ranks left over skip the test."""
    from mpi4py import MPI

    ranks: int = request.param
    if ranks > SIZE:
        pytest.skip(f"needs {ranks} ranks and has {SIZE}: mpirun -n {ranks} python -m pytest -m ranks")
    line_up(request.node.nodeid)
    part = world().Split(0 if ranks > RANK else MPI.UNDEFINED, RANK)
    if part == MPI.COMM_NULL:
        pytest.skip(IDLE)
    yield part
    part.Free()


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest, comm: Any) -> Path:
    """A temporary folder, the same on all ranks of `comm`. Collective over comm."""
    mine = str(request.getfixturevalue("tmp_path")) if comm.rank == 0 else None
    return Path(comm.bcast(mine))


def _folder_of(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    if not Path(value).is_dir():
        pytest.skip(f"{variable} is {value}, which is no folder")
    return Path(value).resolve()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the public data sets, from LPNET_DATA; skips without."""
    return _folder_of("LPNET_DATA")


@pytest.fixture(scope="session")
def oracle_root() -> Path:
    """Folder of the oracles, from LPNET_ORACLES; skips without."""
    return _folder_of("LPNET_ORACLES")


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run whole processes: `mpirun(2, "lpnet", "train", cfg, timeout=240, env={...}, cwd=...)`.

    "python" as the first word is this interpreter, "lpnet" this interpreter's lpnet; 0 ranks runs it without mpirun.
    Returns the finished process, with stdout and stderr as text and `seconds`; one that overruns fails the test.
    """

    def run(
        ranks: int, *argv: str | Path, timeout: float = 240, env: dict[str, str] | None = None, cwd: str | Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in argv]
        words[:1] = {"python": [sys.executable], "lpnet": [sys.executable, "-m", "lpnet"]}.get(words[0], words[:1])
        if ranks:
            words = ["mpirun", "-n", str(ranks), *words]
        mpi_env = str(ROOT / "jobscripts" / "mpi_env.sh")
        script = ["bash", "-c", '. "$0"; exec timeout -k 10 "$@"', mpi_env, str(timeout)]
        # a launcher around these tests must not take the new processes for its own ranks
        launcher = ("OMPI_COMM_", "OMPI_MCA_orte_", "PMIX_", "PMI_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
        inherited.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # who waits leaves the core to whom it waits for
        began = time.monotonic()
        done = subprocess.run(
            [*script, *words],
            cwd=cwd,
            env={**inherited, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        done.seconds = time.monotonic() - began  # type: ignore[attr-defined]
        if done.returncode in (124, 137):
            tail = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            pytest.fail(f"did not end within {timeout} s: {' '.join(words)}\n{tail}")
        return done

    return run
