"""The command line: exit codes, one-line messages, and no torch or MPI where none is needed."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lpnet
from lpnet import cli
from lpnet.errors import DataError
from lpnet.parallel import launch

ROOT = Path(__file__).resolve().parents[1]
PEAKS = str(ROOT / "drivers" / "configs" / "peaks_mgrit.yaml")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, whatever started these tests."""
    monkeypatch.setattr(launch, "detect", launch.Launcher)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


Run = Callable[..., tuple[int, str, str]]


# help


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_names_every_command(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert all(f"\n  {name} " in out for name in ("train", "eval", "plan", "show", "export", "info"))


@pytest.mark.parametrize("command", ["train", "eval", "plan", "show", "export", "info"])
def test_every_command_has_help(run: Run, command: str) -> None:
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: lpnet {command} ")
    assert ("--mgrit.levels" in out) == (command in ("train", "plan"))


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"lpnet {lpnet.__version__}\n", "")
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] in (lpnet.__version__, "attr: lpnet.__version__")


# mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "known: train, eval, bench, study, tune, plan, show, export, report, data, info; see lpnet --help"),
        (["trian"], "trian is not a command; did you mean train?"),
        (["xyzzy"], "xyzzy is not a command; known: train,"),
        (["train", PEAKS, "--mgrit.levls", "3"], "--mgrit.levls is not a known key; did you mean --mgrit.levels?"),
        (["train", "nothing.yaml"], "nothing.yaml: cannot read the configuration: No such file or directory"),
        (["train", PEAKS, "--ranks", "3"], "--ranks is not a known key"),
        (["plan", PEAKS, "--rank", "3"], "--rank is not a known key; did you mean --ranks?"),
        (["plan", PEAKS, "--ranks", "none"], "--ranks is 'none'; expected a whole number greater than 0"),
        (["plan", PEAKS, "--ranks", "0"], "--ranks is '0'; expected a whole number greater than 0"),
        (["plan", PEAKS, "--ranks", "1000"], "128 layers cannot be shared by 1000 ranks; use at most 128 ranks"),
        (["show"], "lpnet show: the following arguments are required: CKPT; see lpnet show --help"),
        (["show", "nothing.h5"], "nothing.h5"),
        (["show", PEAKS], PEAKS),
        (["export", "x.h5"], "lpnet export: the following arguments are required: OUT.pt; see lpnet export --help"),
        (["info", "x"], "lpnet info: unrecognized arguments: x; see lpnet info --help"),
        (["eval", "x", "--data.rot", "y"], "lpnet eval: unrecognized arguments: --data.rot y; see lpnet eval --help"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("[lpnet 0/1 ERROR] ") and message in err
    assert err.count("\n") == 1


def fake(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    def command(arguments: Any, job: Any) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return int(outcome)

    monkeypatch.setitem(cli._COMMANDS, "train", command)


def test_exit_codes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome, code in (
        (0, 0),
        (75, 75),
        (DataError("labels.dat, line 3"), 2),
        (KeyboardInterrupt(), 1),
        (SystemExit(0), 0),
    ):
        fake(monkeypatch, outcome)
        assert run("train")[0] == code


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["train"])


def test_the_other_ranks_are_silent_where_one_rank_does_the_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "detect", lambda: launch.Launcher("Open MPI", 1, 2, 1, 2, "OMPI_COMM_WORLD_SIZE"))
    for arguments in (
        ["plan", PEAKS],
        ["info"],
        ["show", "nothing.h5"],
        ["train", "--help"],
        ["--help"],
        ["trian"],
        [],
    ):
        assert run(*arguments) == (0, "", "")


# what it does


def test_plan_prints_the_tables(run: Run) -> None:
    code, out, err = run("plan", PEAKS, "--ranks", "128", "--mgrit.coarsening", "4")
    assert (code, err) == (0, "")
    for word in ("128 layers on 128 ranks", "C-points", "owner", "messages per iteration", "critical path", "memory"):
        assert word in out


def test_an_unused_section_warns(run: Run) -> None:
    code, _, err = run("plan", PEAKS, "--method", "serial")
    assert code == 0
    assert err.startswith(
        "[lpnet 0/1 WARNING] mgrit is set (mgrit.levels, mgrit.coarsening, mgrit.relaxation, ...) but method serial"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", PEAKS, "--ranks", "128"],
        ["show", "nothing.h5"],
        ["train", "--help"],
        ["train", "--seed", "x"],
        ["--version"],
    ],
)
def test_neither_torch_nor_mpi_is_needed(arguments: list[str]) -> None:
    script = (
        "import sys; from lpnet.cli import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'mpi4py.MPI', 'matplotlib', 'scipy') if m in sys.modules])"
    )
    env = {name: value for name, value in os.environ.items() if "MPI_" not in name and "PMI" not in name}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_importing_lpnet_starts_nothing_and_knows_its_names() -> None:
    script = (
        "import sys, threading, signal as s, lpnet; "
        "assert lpnet.MGRIT(levels=3).levels == 3 and set(lpnet.__all__) <= set(dir(lpnet)); "
        "assert [s.getsignal(n) for n in (s.SIGTERM, s.SIGUSR1)] == [s.SIG_DFL] * 2; "
        "assert threading.active_count() == 1 and sys.excepthook is sys.__excepthook__; "
        "print([m for m in ('torch', 'mpi4py', 'numpy', 'jsonargparse') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
    with pytest.raises(AttributeError, match="module 'lpnet' has no attribute 'xyzzy'"):
        lpnet.xyzzy  # noqa: B018


def test_every_public_name_is_there() -> None:
    missing = []
    for name in lpnet.__all__:
        try:
            getattr(lpnet, name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing


# on several ranks


def test_a_closed_pipe_is_no_failure() -> None:
    script = f"{sys.executable} -m lpnet train --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0", done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", PEAKS, "--mgrit.levls", "2"], "--mgrit.levls is not a known key; did you mean --mgrit.levels?"),
        (["trian"], "trian is not a command; did you mean train?"),
    ],
)
def test_two_ranks_say_it_once(mpirun: Callable[..., Any], arguments: list[str], message: str) -> None:
    done = mpirun(2, "lpnet", *arguments)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "lpnet " in line] == [f"[lpnet 0/2 ERROR] {message}"]


def test_info_under_mpirun_is_printed_once_and_starts_no_mpi(mpirun: Callable[..., Any]) -> None:
    done = mpirun(2, "lpnet", "info")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("lpnet ") for line in lines) == 1
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in ("python", "torch", "MPI", "HDF5"))


def test_ranks_that_do_not_find_each_other_stop(mpirun: Callable[..., Any]) -> None:
    # what a launcher of another MPI library looks like to this process
    env = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    done = mpirun(0, "lpnet", "train", PEAKS, env=env)
    assert done.returncode == 2
    assert "[lpnet 0/2 ERROR] MPICH started 2 ranks (PMI_SIZE), but mpi4py loaded " in done.stderr
    assert "which sees 1 rank; use the mpirun of that library" in done.stderr
