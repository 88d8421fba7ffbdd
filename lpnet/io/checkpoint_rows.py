"""The numbers of a checkpoint: every rank writes its rows into the file that rank 0 has built, and reads them back.

All ranks write at once through MPI-IO, each its own block: the blocks are contiguous, so collective transfers would
only shuffle them, and a rank that fails in the midst of one strands the others. So an error stays with its rank until
all have closed the file, and is told then. Some MPI-IO layers report no error at all (OMPIO of Open MPI 4.1 on a full
disk): only the rows read back tell.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lpnet.io import schema
from lpnet.io.manifest import Entry, Item
from lpnet.io.verify import open_file

if TYPE_CHECKING:
    from lpnet.parallel.comm import Comm

BYTES_PER_WRITE = 256 << 20  # of one rank in one write; MPI-IO counts bytes in 32 bits


def write_alone(path: Path, entries: Sequence[Entry]) -> None:
    """This rank's part through the serial driver, while no other rank has the file open."""
    if not entries:
        return
    with open_file(path, "r+") as file:
        for entry in entries:
            if entry.array is None or entry.array.size == 0:
                continue
            if entry.rows is None:
                file[entry.name][...] = entry.array
            else:
                file[entry.name][entry.rows[0] : entry.rows[1]] = entry.array


@contextmanager
def _abort_guard(comm: Comm, path: Path) -> Iterator[None]:
    """An exception in here ends the whole job: the other ranks are inside calls that this one will not join."""
    try:
        yield
    except BaseException:
        hint = f"{path}: failed during a parallel write; the checkpoint before is intact; job aborted"
        for line in [*traceback.format_exc().splitlines(), hint]:
            sys.stderr.write(f"[lpnet {comm.rank}/{comm.size} ERROR] {line}\n")
        sys.stderr.flush()
        comm.mpi.Abort(1)
        raise


def write_together(path: Path, comm: Comm, items: Mapping[str, Item], entries: Sequence[Entry]) -> None:
    """All ranks' parts through MPI-IO. Collective over comm: all ranks open and close the file together.

    Raises:
        OSError, RuntimeError: on this rank only; the file is closed, and the ranks can agree.
    """
    import h5py

    mine = {entry.name: entry for entry in entries}
    failed: Exception | None = None
    with _abort_guard(comm, path):
        # no `with`: its exit is collective and would wait for ranks that are not coming
        file = h5py.File(path, "r+", driver="mpio", comm=comm.mpi)
    try:
        for name, item in items.items():
            entry = mine.get(name)
            if entry is not None and entry.array is not None and item.dataset.nbytes:
                _write_rows(file[name].id, entry, entry.array)
    except Exception as error:
        failed = error
    with _abort_guard(comm, path):
        file.close()
    if failed is not None:
        raise failed


def _write_rows(dataset: Any, entry: Entry, array: np.ndarray) -> None:
    """This rank's part of one dataset, in pieces that MPI-IO can count. No communication."""
    from h5py import h5fd, h5p, h5s

    transfer = h5p.create(h5p.DATASET_XFER)
    transfer.set_dxpl_mpio(h5fd.MPIO_INDEPENDENT)
    if entry.rows is None:
        dataset.write(h5s.ALL, h5s.ALL, array, dxpl=transfer)
        return
    step = max(BYTES_PER_WRITE // max(array.nbytes // max(len(array), 1), 1), 1)
    for first in range(0, len(array), step):
        part = array[first : first + step]
        file_space = dataset.get_space()
        file_space.select_hyperslab((entry.rows[0] + first, *(0,) * (part.ndim - 1)), part.shape)
        dataset.write(h5s.create_simple(part.shape), file_space, part, dxpl=transfer)


def read_back(path: Path, entries: Sequence[Entry]) -> None:
    """Put this rank's writes on the disk and compare its rows with their checksums."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with open_file(path, "r") as file:
        for entry in entries:
            rows = slice(*entry.rows) if entry.rows is not None else ...
            array = np.asarray(file[entry.name][rows])
            if not np.array_equal(schema.row_checksums(array, stacked=entry.rows is not None), entry.checksums):
                raise RuntimeError(f"{entry.name}: what is read back is not what was written")
