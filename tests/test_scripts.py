"""The scripts and the files of the repository: cheap checks that need no MPI and no network."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {".git", ".hypothesis", ".venv", "runs", "build", "dist", "__pycache__"}


def tracked_files() -> list[Path]:
    """What git tracks; without git everything that is not generated."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    files = (file for file in ROOT.rglob("*") if file.is_file())
    return [
        file
        for file in files
        if not any(part in GENERATED or part.endswith(("_cache", ".egg-info")) for part in file.relative_to(ROOT).parts)
    ]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def text_of(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError:  # a picture
        return ""


SCRIPTS = [file for file in tracked_files() if re.match(r"#!.*\bbash\b|# shellcheck shell=bash", text_of(file)[:200])]


def test_all_scripts_are_found() -> None:
    mine = {".ci/run", "drivers/quickstart.sh", "jobscripts/mpi_env.sh", "jobscripts/setup_env.sh", "tests/run.sh"}
    mine |= {f"jobscripts/{name}" for name in ("site.env", "job.sh", "train.sbatch", "strong_scaling.sbatch")}
    assert mine <= {name_of(file) for file in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_shell_syntax(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_shellcheck() -> None:
    program = shutil.which("shellcheck") or pytest.skip("shellcheck is not installed")
    names = [name_of(file) for file in SCRIPTS]
    done = subprocess.run([program, "-x", *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# set-up


def test_second_setup_call_is_fast() -> None:
    if (ROOT / ".venv").is_symlink() or not (ROOT / ".venv" / ".lpnet-stamp").exists():
        pytest.skip("these tests do not run in an environment that setup_env.sh made")
    if (ROOT / ".venv").is_symlink():
        pytest.skip("the environment is that of another checkout, and would be made anew for this one")
    began = os.times()
    done = subprocess.run(["bash", "jobscripts/setup_env.sh"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    if "nothing to do" not in done.stdout:
        pytest.skip(f"the set-up files have changed since the last set-up: {done.stdout}")
    assert done.returncode == 0
    ended = os.times()
    used = ended.children_user + ended.children_system - began.children_user - began.children_system
    assert used < 2  # seconds of processor time: the clock on the wall depends on what else runs
    assert re.search(r"set-up took \d+ s", done.stdout)


def bare_bin(tmp_path: Path, *extra: str) -> Path:
    """A folder with the tools every machine has, for a PATH without Python, compiler and MPI."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "cat", "cut", "dirname", "env", "grep", "head", "paste", "sed", "sha256sum", "tr", *extra):
        (folder / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool}"))
    identity = folder / "id"  # not root: apt is out of the question
    identity.write_text("#!/bin/sh\necho 1000\n")
    identity.chmod(0o755)
    return folder


def copy_of_setup(tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    (copy / "jobscripts").mkdir(parents=True)
    for name in ("jobscripts/setup_env.sh", "jobscripts/constraints.txt", "setup.cfg"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def test_setup_names_everything_that_is_missing(tmp_path: Path) -> None:
    folder, copy = bare_bin(tmp_path), copy_of_setup(tmp_path)
    done = subprocess.run(
        [folder / "bash", copy / "jobscripts" / "setup_env.sh"],
        env={"PATH": str(folder), "HOME": str(tmp_path), "HDF5_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    for word in ("a Python >= 3.11", "LPNET_PYTHON", "mpicc", "mpirun or srun", "HDF5 in HDF5_DIR", "LPNET_HDF5"):
        assert word in done.stderr
    assert "line " not in done.stderr  # no complaint of bash itself
    assert not (copy / ".venv").exists()


def test_setup_says_when_python_is_too_old(tmp_path: Path) -> None:
    folder, copy = bare_bin(tmp_path), copy_of_setup(tmp_path)
    python = folder / "python3"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && { echo Python 3.9.2; exit 0; }\nexit 1\n')
    python.chmod(0o755)
    done = subprocess.run(
        [folder / "bash", copy / "jobscripts" / "setup_env.sh"],
        env={"PATH": str(folder), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "a Python >= 3.11 (python3 is Python 3.9.2)" in done.stderr


def test_mpi_environment_for_root_and_few_cores(tmp_path: Path) -> None:
    for name, output in (("id", 0), ("nproc", 2)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {output}\n")
        (tmp_path / name).chmod(0o755)
    script = f'. "{ROOT}/jobscripts/mpi_env.sh"; env'
    path = f"{tmp_path}:{os.environ['PATH']}"
    text = subprocess.run(["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True).stdout
    lines = set(text.splitlines())
    assert {
        "OMP_NUM_THREADS=1",
        "OMPI_ALLOW_RUN_AS_ROOT=1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        "OMPI_MCA_rmaps_base_oversubscribe=1",
        "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
    } <= lines


# metadata


def pins() -> dict[str, str]:
    lines = (ROOT / "jobscripts" / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_everything_in_setup_cfg_is_pinned() -> None:
    parser = setup_cfg()
    lists = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
    names = [canonicalize_name(Requirement(line).name) for text in lists for line in text.split()]
    assert len(names) > 10
    assert sorted(set(names) - set(pins())) == []
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {canonicalize_name(Requirement(line).name) for line in build} <= set(pins())


@pytest.mark.parametrize("name", ["torch", "h5py", "mpi4py", "numpy", "jsonargparse"])
def test_installed_versions_are_the_pinned_ones(name: str) -> None:
    from importlib.metadata import version

    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("these tests do not run in an environment that setup_env.sh made")
    assert version(name).split("+")[0] == pins()[name]


def test_one_version_number() -> None:
    version = setup_cfg()["metadata"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(r'__version__ = "(.*)"', (ROOT / "lpnet" / "__init__.py").read_text()).group(1) == version  # type: ignore[union-attr]


# what no tracked file may hold

HOSTS = {"doi.org", "arxiv.org", "www.apache.org", "keepachangelog.com", "semver.org", "ui.perfetto.dev", "localhost"}
DATA_SETS = {  # where the public data sets are, and what the tests of downloads ask this machine for
    "lpnet/data/fetch.py": {"storage.googleapis.com", "www.cs.toronto.edu"},
    "tests/data/test_fetch.py": {"127.0.0.1", "bad", "."},
}


def test_no_absolute_paths_and_no_hosts() -> None:
    path = re.compile(r"(?<![\w.}*)~])/(?:work|root|home|Users|scratch)/[\w.-]+")
    url = re.compile(r"https?://([\w.-]+)")
    found = {}
    for file in tracked_files():
        text = text_of(file)
        if bad := {*path.findall(text), *(set(url.findall(text)) - HOSTS - DATA_SETS.get(name_of(file), set()))}:
            found[name_of(file)] = bad
    assert found == {}


def test_no_file_is_long() -> None:
    lengths = {name_of(file): len(text_of(file).splitlines()) for file in tracked_files() if file.suffix == ".py"}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
