"""Saving a checkpoint in two phases: rank 0 builds the file, then all ranks write their rows.

    all     prepare arrays and checksums, agree                          no file yet
    rank 0  NAME.partial: groups, datasets, attributes, space allocated  serial HDF5
    all     every rank its rows                                          MPI-IO, or rank by rank
    all     fsync; read the own rows back and compare their checksums
    rank 0  sidecar, rename, `latest`, remove old files                  the file exists from the rename on

Any line may fail on any rank: the ranks agree after each, and all raise the same error (see `checkpoint_rows` for what
MPI-IO needs). `stages` hands out the work between two messages, so that a save can be made in parts between the steps
of a training, each part on a thread of its own.
"""

from __future__ import annotations

import ctypes
import datetime
import errno
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from lpnet import __version__
from lpnet.errors import SaveError
from lpnet.io import schema
from lpnet.io.checkpoint_read import on_root
from lpnet.io.checkpoint_rows import read_back, write_alone, write_together
from lpnet.io.manifest import Entry, Item, merge, prepare
from lpnet.io.publish import publish, tidy
from lpnet.io.schema import CHECKSUMS, PARTIAL, Attribute, Dataset
from lpnet.io.verify import first_line, open_file

if TYPE_CHECKING:
    from lpnet.parallel.comm import Comm
    from lpnet.parallel.shard import Shard

log = logging.getLogger("lpnet.io.checkpoint")
T = TypeVar("T")
Writer = Literal["auto", "mpio", "serial"]


@dataclass(frozen=True)
class _Plan:
    """What all ranks do: the same on every rank."""

    step: int
    partial: Path
    final: Path
    items: dict[str, Item]
    mpio: bool


def save(
    folder: str | Path,
    comm: Comm,
    *,
    step: int,
    shards: Mapping[str, Sequence[Shard]],
    attributes: Mapping[str, Attribute],
    keep: int = 2,
    writer: Writer = "auto",
) -> Path:
    """Write step-STEP.h5 into `folder`, whole or not at all, and keep the newest `keep` files. Collective over comm.

    Args:
        folder: made where it is missing; the same on all ranks, on a file system they share.
        step: optimisation steps done; the same on all ranks.
        shards: section (model, optim, mgrit) -> what this rank holds; the blocks of a stacked name tile its rows, a
            whole tensor is on one rank.
        attributes: root attributes (method, epoch, seed, config, ...); those of rank 0 are written.
        keep: newest checkpoints kept.
        writer: mpio: all ranks write at once; serial: one after another; auto: mpio with several ranks where h5py
            has MPI.

    Returns:
        The path of the file.

    Raises:
        SaveError: on every rank; the checkpoint before is intact and no temporary file is left.
    """
    entries = comm.together(lambda: prepare(shards))
    return write(folder, comm, step=step, entries=entries, attributes=attributes, keep=keep, writer=writer)


def write(
    folder: str | Path,
    comm: Comm,
    *,
    step: int,
    entries: Sequence[Entry],
    attributes: Mapping[str, Attribute],
    keep: int = 2,
    writer: Writer = "auto",
) -> Path:
    """`save` of entries prepared before, of a snapshot say. Collective over comm; arguments and errors as `save`."""
    parts = stages(folder, comm, step=step, entries=entries, attributes=attributes, keep=keep, writer=writer)
    outcome: Outcome | None = None
    while True:
        try:
            outcome = attempt(parts.send(outcome) if outcome is not None else next(parts))
        except StopIteration as finished:
            path: Path = finished.value
            return path


Work = Callable[[], object]
Outcome = tuple[object, Exception | None]


def attempt(work: Work) -> Outcome:
    """Run work that `stages` has handed out: its value, or the error it met. No communication."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def stages(
    folder: str | Path,
    comm: Comm,
    *,
    step: int,
    entries: Sequence[Entry],
    attributes: Mapping[str, Attribute],
    keep: int = 2,
    writer: Writer = "auto",
) -> Generator[Work, Outcome, Path]:
    """`write` in parts: yields work without messages, takes its outcome (see `attempt`), returns the path in the end.

    Collective over comm whenever it is gone on with; equally many parts on every rank. Arguments and errors as `save`.
    """
    folder = Path(folder)
    if keep < 1:
        raise SaveError(f"keep is {keep}; at least one checkpoint is kept")
    final = folder / schema.file_name(step)
    headers = comm.gather_objects((step, _has_mpio(comm), [entry.header() for entry in entries]))
    root = comm.rank == 0
    try:
        plan, checksums = on_root(comm, lambda: _plan(final, comm, headers or [], writer))
        yield from _alone(comm, plan, lambda: _build(plan, comm, checksums, attributes), root)
        if plan.mpio:
            comm.together(lambda: _saving(plan, lambda: write_together(plan.partial, comm, plan.items, entries)))
        else:
            for turn in range(comm.size):
                yield from _alone(comm, plan, lambda: write_alone(plan.partial, entries), turn == comm.rank)
        yield from _alone(comm, plan, lambda: read_back(plan.partial, entries))
        yield from _alone(comm, plan, lambda: _finish(plan, folder, keep), root)
    except Exception:
        if root:
            with suppress(OSError):
                final.with_name(final.name + PARTIAL).unlink()
        raise
    return final


def _finish(plan: _Plan, folder: Path, keep: int) -> None:
    """Rank 0: the file gets its name, and old ones go."""
    publish(plan.partial, plan.final)
    tidy(folder, plan.step, keep)


def _alone(comm: Comm, plan: _Plan, work: Work, mine: bool = True) -> Generator[Work, Outcome, None]:
    """Hand out work, on some ranks only, and agree on its outcome. Collective over comm."""
    _, error = yield partial(_saving, plan, work) if mine else lambda: None
    comm.agree(error)


def _has_mpio(comm: Comm) -> bool:
    import h5py

    return bool(h5py.get_config().mpi) and comm.size > 1 and comm.mpi is not None


def _plan(final: Path, comm: Comm, headers: Sequence[Any], writer: Writer) -> tuple[_Plan, np.ndarray]:
    """Rank 0: merge what the ranks hold and choose the writer."""
    step = headers[0][0]
    for rank, (other, _, _) in enumerate(headers):
        if other != step:
            raise SaveError(f"rank {rank} saves step {other} and rank 0 step {step}; it must be the same on all ranks")
    able = all(mpio for _, mpio, _ in headers)
    if writer == "mpio" and not able:
        raise SaveError("writer mpio needs several ranks under MPI and an h5py built with MPI; use writer serial")
    if writer == "auto" and not able and comm.size > 1:
        _once("emulated ranks, or h5py without MPI: the ranks write checkpoints one after another")
    items, checksums = merge([entries for _, _, entries in headers])
    return _Plan(step, final.with_name(final.name + PARTIAL), final, items, able and writer != "serial"), checksums


_said: set[str] = set()


def _once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.info(message)


def _saving(plan: _Plan, work: Callable[[], T]) -> T:
    """Run `work`; what the file system or HDF5 refuses becomes a SaveError with cause and remedy."""
    try:
        return work()
    except (OSError, RuntimeError) as error:
        number = getattr(error, "errno", None)
        text = os.strerror(number) if number else first_line(error)
        folder = plan.final.parent
        remedy = {
            errno.ENOSPC: f"free space in {folder} or lower run.keep",
            errno.EDQUOT: f"free some of your quota for {folder} or lower run.keep",
            errno.EACCES: "choose a folder you may write to with run.out",
            errno.EROFS: "choose a folder you may write to with run.out",
        }.get(number or 0, "look at the file system, and at HDF5 and MPI-IO under troubleshooting in the README")
        before = [path.name for path in schema.checkpoints_in(folder)]
        intact = f"{before[0]} is intact" if before else "there was none before"
        raise SaveError(f"{plan.final}: checkpoint not written: {text}; {intact}; {remedy}") from error


def _build(plan: _Plan, comm: Comm, checksums: np.ndarray, attributes: Mapping[str, Attribute]) -> None:
    """Rank 0: the file with everything but the numbers, and room for them."""
    taken = sorted(set(attributes) & schema.RESERVED)
    if taken:
        raise SaveError(f"the attribute {taken[0]} is written by lpnet itself")
    for name, value in attributes.items():
        if not isinstance(value, str | int | float):
            raise SaveError(f"the attribute {name} is a {type(value).__name__}; it must be str, int, float or bool")
    written: dict[str, Attribute] = {
        **attributes,
        "format": schema.FORMAT,
        "schema_version": schema.SCHEMA_VERSION,
        "lpnet_version": __version__,
        "torch_version": metadata.version("torch"),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": plan.step,
        "written_by_ranks": comm.size,
        "writer": "mpio" if plan.mpio else "serial",
    }
    datasets = {name: item.dataset for name, item in plan.items.items()}
    written["contents_sha256"] = schema.contents_sha256(written, datasets, checksums)
    plan.final.parent.mkdir(parents=True, exist_ok=True)
    for stale in plan.final.parent.glob(f"*{PARTIAL}"):  # of a run that was killed
        stale.unlink()
    with open_file(plan.partial, "w") as file:
        for name, value in written.items():
            file.attrs[name] = value
        for name, dataset in datasets.items():
            made = _make_dataset(file, name, dataset)
            made.attrs["dtype"] = dataset.dtype
            made.attrs["stacked"] = int(dataset.stacked)
            made.attrs["checksum_at"] = dataset.checksum_at
        file.create_dataset(CHECKSUMS, data=checksums)
    _allocate(plan.partial)


def _make_dataset(file: Any, name: str, dataset: Dataset) -> Any:
    """A dataset whose place in the file is taken now: one rank alone cannot take it later, it would hang in close."""
    from h5py import Dataset as Made
    from h5py import h5d, h5p, h5s, h5t

    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    link = h5p.create(h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    # not create_dataset: it drops the layout of a scalar
    space = h5s.create_simple(dataset.shape) if dataset.shape else h5s.create(h5s.SCALAR)
    kind = h5t.py_create(np.dtype(schema.STORED[dataset.dtype]))
    return Made(h5d.create(file.id, name.encode(), kind, space, layout, link))


def _allocate(path: Path) -> None:
    """Take the space of the whole file now, where running out of it is an error that rank 0 can tell the others."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)  # the other ranks open it next, perhaps on other machines
        # not os.posix_fallocate: where the file system cannot, that writes into every block
        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if call is not None:
            call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            if call(descriptor, 0, 0, size) == 0:
                return
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise OSError(number, os.strerror(number))
        free = os.statvfs(path)
        if size - os.fstat(descriptor).st_blocks * 512 > free.f_bavail * free.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
