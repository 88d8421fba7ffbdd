"""What started this process, and how it ends: launcher, threads per rank, malloc, one abort path.

Plain Python leaves the other ranks waiting for ever when one raises, so an error on any rank or thread is printed
with its rank and aborts the job. Importing this module starts nothing and needs neither torch nor MPI.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lpnet.errors import LpnetError, UsageError

log = logging.getLogger("lpnet.launch")

ABORT_PATIENCE_S = 0.5
"""Seconds the other ranks leave to rank 0 to report an error that all ranks met, and to abort the job."""

EXIT_PATIENCE_S = 2.0
"""The same before MPI has started: mpirun takes about a second to end the others after one has left."""

_MALLOC = {"M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1), "M_TOP_PAD": (-2, 256 << 20)}
"""Options of glibc's mallopt: number and value. 32 MiB is the largest mmap threshold it accepts."""


# launcher


@dataclass(frozen=True)
class Launcher:
    """What the environment says about this process before MPI starts.

    Args:
        name: Open MPI, MPICH, SLURM, PMIx, or none.
        rank: rank in the job.
        size: ranks of the job; 0 where the launcher does not say.
        local_rank: rank among those of this node.
        local_size: ranks on this node; 0 where the launcher does not say.
        variable: the environment variable that told.
    """

    name: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    variable: str = ""

    @property
    def several(self) -> bool:
        """Whether there are, or may be, other ranks."""
        return self.size != 1


_LAUNCHERS = (  # innermost first: mpirun inside a job of srun has the variables of both
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    # a batch script without srun has SLURM_PROCID and SLURM_NTASKS too, and is one process
    ("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("PMIx", "PMIX_RANK", "PMIX_SIZE"),
)
_LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
    "PMIX_LOCAL_RANK",
)
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMIX_LOCAL_SIZE")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _tasks_on_node(text: str, node: int) -> int:
    """Tasks of one node in SLURM's notation, such as 2(x3),1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * min(int(times or 1), node + 1)
    return counts[node] if node < len(counts) else 0


def detect(environ: Mapping[str, str] | None = None) -> Launcher:
    """The launcher of this process: the innermost one whose variables are set. No communication."""
    env = os.environ if environ is None else environ

    def first(names: Sequence[str]) -> int | None:
        return next((number for number in (_number(env.get(name)) for name in names) if number is not None), None)

    for name, rank_key, size_key in _LAUNCHERS:
        rank, size = _number(env.get(rank_key)), _number(env.get(size_key))
        if rank is None or (size is None and name != "PMIx"):
            continue
        local_size = first(_LOCAL_SIZE) or _tasks_on_node(
            env.get("SLURM_STEP_TASKS_PER_NODE", ""), first(["SLURM_NODEID"]) or 0
        )
        return Launcher(
            name, rank, size or 0, first(_LOCAL_RANK) or 0, local_size, rank_key if size is None else size_key
        )
    return Launcher()


def hint_rank() -> int:
    """The rank this process will have, before MPI starts; 0 without a launcher. No communication."""
    return detect().rank


def check_launcher(launcher: Launcher, comm_size: int, mpi_library: str) -> None:
    """Stop where N processes were started and each of them believes to be alone. No communication.

    Args:
        launcher: from `detect`.
        comm_size: size of the world communicator.
        mpi_library: name and version of the MPI library that mpi4py loaded.

    Raises:
        UsageError: the launcher says several ranks and MPI says one.
    """
    if launcher.size > 1 and comm_size == 1:
        library = mpi_library.strip().splitlines()[0].strip(" ,\0") if mpi_library.strip() else "an unknown MPI library"
        raise UsageError(
            f"{launcher.name} started {launcher.size} ranks ({launcher.variable}), but mpi4py loaded {library}, which "
            f"sees 1 rank; use the mpirun of that library, or install an mpi4py that loads the MPI of {launcher.name} "
            f"(SLURM: srun --mpi=list shows what it can start)"
        )


# threads and malloc


@dataclass(frozen=True)
class ThreadPlan:
    """Threads of every rank, and where the number comes from.

    Args:
        threads: threads per rank, the same on all ranks.
        source: parallel.threads, OMP_NUM_THREADS or affinity mask.
        cores: this rank's share of the cores it may run on.
        oversubscribed: whether a rank has more threads than cores.
    """

    threads: int
    source: str
    cores: float
    oversubscribed: bool


def _cores(cpus: Sequence[int], topology: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """The physical cores behind logical CPUs, each named by its first CPU; unknown ones count as cores."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
            cores.add(int(re.split("[,-]", siblings.strip())[0]))
        except (OSError, ValueError):
            cores.add(cpu)
    return tuple(sorted(cores))


def core_share(places: Sequence[tuple[str, tuple[int, ...]]], rank: int) -> float:
    """Cores per rank: a core that k ranks may run on counts 1/k for each of them. No communication.

    Args:
        places: host name and cores of every rank.
        rank: whose share.
    """
    host, cores = places[rank]
    return sum(1 / sum(other == host and core in theirs for other, theirs in places) for core in cores)


def plan_threads(comm: Any = None, threads: int | None = None, environ: Mapping[str, str] | None = None) -> ThreadPlan:
    """Threads per rank: `threads`, else OMP_NUM_THREADS, else the smallest share of cores. Collective over comm.

    All ranks get the same number, as the number of threads changes the last bits of a gradient.

    Args:
        comm: a `Comm`; None: one rank.
        threads: parallel.threads of the configuration.
        environ: in place of os.environ.
    """
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    wish = _number((os.environ if environ is None else environ).get("OMP_NUM_THREADS", "").split(",")[0].strip())
    mine = (os.uname().nodename, _cores(sorted(affinity)), wish)
    everyone = comm.all_gather_objects(mine) if comm is not None else [mine]
    places = [(host, cores) for host, cores, _ in everyone]
    shares = [core_share(places, rank) for rank in range(len(places))]
    wishes = [w for _, _, w in everyone if w]
    if threads:
        count, source = threads, "parallel.threads"
    elif wishes:
        count, source = min(wishes), "OMP_NUM_THREADS"
    else:
        count, source = max(1, int(min(shares) + 1e-9)), "affinity mask"
    share = shares[comm.rank if comm is not None else 0]
    return ThreadPlan(count, source, share, count > min(shares) + 1e-9)


def set_threads(plan: ThreadPlan, *, rank: int = 0, size: int = 1) -> None:
    """Give torch, BLAS and OpenMP the planned number of threads, and log it on rank 0. No communication."""
    import threadpoolctl
    import torch

    torch.set_num_threads(plan.threads)
    threadpoolctl.threadpool_limits(limits=plan.threads)
    if rank == 0:
        log.info(
            "%d thread(s) per rank (%s), %d rank(s), %.3g core(s) for this one",
            plan.threads,
            plan.source,
            size,
            plan.cores,
        )
        if plan.oversubscribed:
            log.warning(
                "%d thread(s) per rank on %.3g core(s) each: ranks wait for each other's cores; use fewer ranks or set "
                "OMP_NUM_THREADS=%d",
                plan.threads,
                plan.cores,
                max(1, int(plan.cores)),
            )


def raise_malloc_thresholds(*, rank: int = 0) -> bool:
    """Keep large freed blocks in the process, where glibc gives them back and faults them in again. No communication.

    Returns:
        Whether the C library took all three thresholds.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        accepted = False
    else:
        answers = [mallopt(ctypes.c_int(number), ctypes.c_int(value)) for number, value in _MALLOC.values()]
        accepted = all(answer == 1 for answer in answers)
    if rank == 0:
        values = ", ".join(f"{name} {value / (1 << 20):.0f} MiB" for name, (_, value) in _MALLOC.items())
        log.info("malloc thresholds %s: %s", "raised" if accepted else "NOT raised, the C library refuses", values)
    return accepted


# the end


def _text(error: BaseException) -> str:
    """The message of an error that is the user's, the traceback of one that is ours."""
    return str(error) if isinstance(error, LpnetError) else "".join(traceback.format_exception(error)).rstrip("\n")


def describe_error(error: BaseException, *, rank: int, size: int) -> str:
    """An error as it is printed, the rank before every line. No communication."""
    return "".join(f"[lpnet {rank}/{size} ERROR] {line}\n" for line in _text(error).splitlines() or [""])


def keep_error(error: BaseException) -> None:
    """Write an error to log.txt, where a run folder has one; the terminal has it anyway. No communication."""
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, _text(error), (), None)
    for handler in logging.getLogger("lpnet").handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def fail(error: BaseException, *, rank: int, size: int, abort: Callable[[int], Any] | None = None) -> int:
    """Print an error and end the job; without `abort`, return the exit code this process should end with.

    An error that all ranks meet is printed once: rank 0 prints at once, the others wait before they print and end, by
    when rank 0 has ended the job. An error of one rank only is printed by that rank, and nobody waits for ever.
    Tracebacks are printed at once. No communication.

    Args:
        error: what was raised.
        rank: this rank.
        size: ranks of the job; 0: unknown.
        abort: MPI's Abort, where MPI has been started with several ranks.
    """
    code = error.exit_code if isinstance(error, LpnetError) else 1
    ours = not isinstance(error, LpnetError)
    if size != 1 and rank > 0 and not ours:
        time.sleep(EXIT_PATIENCE_S if abort is None else ABORT_PATIENCE_S)
    try:
        sys.stdout.flush()
        sys.stderr.write(describe_error(error, rank=rank, size=size))
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads; the exit code tells
    keep_error(error)
    if size != 1 and ours:
        time.sleep(0.2 if rank == 0 else ABORT_PATIENCE_S)  # ranks that fail at the same time get their reports out
    if abort is not None:
        logging.shutdown()
        abort(code)
    return code


def install_abort_hook(abort: Callable[[int], Any], *, rank: int, size: int) -> None:
    """Let an uncaught exception on any thread print its rank and end the job; nothing on one rank. No communication.

    Args:
        abort: MPI's Abort, which takes the exit code.
        rank: this rank.
        size: ranks of the job.
    """
    if size == 1:
        return

    def of_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(error.with_traceback(trace), rank=rank, size=size, abort=abort)

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, SystemExit):
            error = arguments.exc_value or arguments.exc_type()
            fail(error.with_traceback(arguments.exc_traceback), rank=rank, size=size, abort=abort)

    sys.excepthook = of_main
    threading.excepthook = of_thread
