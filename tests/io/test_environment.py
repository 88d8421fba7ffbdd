"""env.json: what is in it, what never is, and that nothing about it stops a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lpnet
from lpnet.io import environment
from lpnet.parallel.comm import Comm


@pytest.mark.ranks(1, 3)
def test_every_rank_has_its_place(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    environment.write(shared_tmp_path, mine)
    mine.barrier()
    found = json.loads((shared_tmp_path / "env.json").read_text())
    assert [place["rank"] for place in found["ranks"]] == list(range(mine.size))
    assert len({place["pid"] for place in found["ranks"]}) == mine.size
    assert all(place["host"] and place["affinity"] for place in found["ranks"])
    assert found["ranks"][mine.rank]["threads"] == torch.get_num_threads()
    if "mpi4py.MPI" in sys.modules:
        assert found["mpi_library"]
    assert (environment.collect(mine) is None) == (mine.rank > 0)


def test_versions_and_chosen_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JWT", "a secret")
    monkeypatch.setenv("MY_TOKEN", "a secret")
    monkeypatch.setattr(sys, "argv", ["lpnet", "train", "a b.yaml"])
    found = environment.collect()
    assert found is not None
    assert found["versions"]["lpnet"] == lpnet.__version__
    assert set(found["versions"]) == {"lpnet", "python", "torch", "numpy", "mpi4py", "h5py"}
    assert found["variables"]["SLURM_JOB_ID"] == "42"
    assert found["command_line"] == "lpnet train 'a b.yaml'"
    assert isinstance(found["hdf5"]["parallel"], bool)
    assert "secret" not in json.dumps(found)


def test_commit(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    if subprocess.run([*git, "init", "-q"], capture_output=True).returncode != 0:
        pytest.skip("no git")
    assert environment._git(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True, capture_output=True)
    found = environment._git(tmp_path)
    assert found is not None and len(found["commit"]) == 40 and not found["modified"]
    (tmp_path / "file").write_text("2")
    found = environment._git(tmp_path)
    assert found is not None and found["modified"]
    inside = tmp_path / "installed"
    inside.mkdir()
    assert environment._git(inside) is None  # somebody else's checkout


def test_nothing_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert environment._git(tmp_path) is None
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    found = environment.collect()
    assert found is not None and found["versions"]["no-such-package"] is None


def test_masks() -> None:
    assert environment.mask_text({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11"
    assert environment.mask_text(set()) == ""
    assert environment.mask_text(os.sched_getaffinity(0))


def test_lines_for_info() -> None:
    text = environment.describe()
    for word in ("lpnet ", "torch ", "MPI ", "HDF5 ", "cores "):
        assert word in text
