"""env.json: what a run ran on, so that its numbers can be understood later.

Versions, libraries, hosts, cores, threads, commit, command line and a few variables by name; never the whole
environment, which may hold secrets.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpnet import __version__
from lpnet.errors import SaveError

if TYPE_CHECKING:
    from lpnet.parallel.comm import Comm

log = logging.getLogger("lpnet.io.environment")
PACKAGES = ("torch", "numpy", "mpi4py", "h5py")
VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_TASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_MEM_PER_NODE",
    "SLURM_MEM_PER_CPU",
    "SLURM_MPI_TYPE",
    "SLURM_CPU_BIND",
    "SLURM_JOB_START_TIME",
    "SLURM_JOB_END_TIME",
    "SLURM_RESTART_COUNT",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_CLUSTER_NAME",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "OMPI_MCA_io",
    "OMPI_MCA_btl",
    "UCX_TLS",
    "HDF5_USE_FILE_LOCKING",
)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _mpi_library() -> str | None:
    """Name and version of the MPI library; None where this process has not loaded one."""
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        return mpi.Get_library_version().strip("\0\n ").splitlines()[0] if mpi is not None else None
    except Exception:
        return None


def _hdf5() -> dict[str, Any] | None:
    """Version of HDF5 and whether it writes in parallel; None without h5py."""
    try:
        import h5py
    except ImportError:
        return None
    return {"version": h5py.version.hdf5_version, "parallel": bool(h5py.get_config().mpi)}


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit of a checkout and whether its files differ; None where there is none, or no git."""

    def ask(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True, env=quiet, stdin=subprocess.DEVNULL
        )
        return done.stdout.strip()

    try:
        # an installed lpnet may lie inside somebody else's checkout
        if Path(ask("rev-parse", "--show-toplevel")).resolve() != folder.resolve():
            return None
        return {"commit": ask("rev-parse", "HEAD"), "modified": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def mask_text(cores: set[int] | frozenset[int]) -> str:
    """Core numbers as ranges, such as "0-3,8". No communication."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _this_rank() -> dict[str, Any]:
    """Where this process runs."""
    torch = sys.modules.get("torch")
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "affinity": mask_text(affinity),
        "threads": torch.get_num_threads() if torch is not None else None,
    }


def _this_machine() -> dict[str, Any]:
    """Versions and libraries, without the ranks."""
    versions = {"lpnet": __version__, "python": platform.python_version()}
    return {
        "versions": {**versions, **{name: _version(name) for name in PACKAGES}},
        "mpi_library": _mpi_library(),
        "hdf5": _hdf5(),
        "system": platform.platform(),
        "git": _git(Path(__file__).resolve().parents[2]),
    }


def collect(comm: Comm | None = None) -> dict[str, Any] | None:
    """What env.json holds, on rank 0; None elsewhere. Collective over comm."""
    mine = _this_rank()
    ranks = comm.gather_objects(mine) if comm is not None else [mine]
    if ranks is None:
        return None
    return {
        **_this_machine(),
        "emulated": comm.predicted if comm is not None else None,
        "command_line": shlex.join(sys.argv),
        "folder": str(Path.cwd()),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "ranks": [{"rank": rank, **place} for rank, place in enumerate(ranks)],
    }


def write(folder: str | Path, comm: Comm | None = None, *, name: str = "env.json") -> None:
    """Write FOLDER/env.json on rank 0. Collective over comm.

    Raises:
        SaveError: on every rank; the file cannot be written.
    """
    found = collect(comm)

    def save() -> None:
        if found is None:
            return
        path = Path(folder) / name
        try:
            path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            remedy = "make room, or give another run.out"
            raise SaveError(f"{path} cannot be written: {error.strerror}; {remedy}") from error

    if comm is None:
        save()
    else:
        comm.together(save)


def add(folder: str | Path, values: Mapping[str, Any], *, name: str = "env.json") -> None:
    """Add what is known only at the end of a run; a file that cannot be changed stays as it is. No communication."""
    path = Path(folder) / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({**found, **values}, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        log.warning("%s stays without the work of the run: %s", path, error)


def describe() -> str:
    """The same for this process alone, as lines for `lpnet info`; starts MPI to ask for its name. No communication."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        mpi = f"none: {(str(error).splitlines() or [''])[0]}"
    else:
        mpi = _mpi_library() or "unknown"
    found = _this_machine()
    lines = [f"{name:8} {version or 'not installed'}" for name, version in found["versions"].items()]
    hdf5 = found["hdf5"]
    lines.append(f"{'MPI':8} {mpi}")
    parallel = "parallel" if hdf5 and hdf5["parallel"] else "serial only: ranks write checkpoints one after another"
    lines.append(f"{'HDF5':8} {hdf5['version']}, {parallel}" if hdf5 else f"{'HDF5':8} none")
    git = found["git"]
    if git:
        lines.append(f"{'commit':8} {git['commit']}{', modified' if git['modified'] else ''}")
    lines.append(f"{'system':8} {found['system']}")
    lines.append(f"{'cores':8} {_this_rank()['affinity']} on {platform.node()}")
    return "\n".join(lines)
