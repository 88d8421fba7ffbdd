"""The numbers of a checkpoint: every rank writes its rows into the file that rank 0 has built, and reads them back.

Inside MPI-IO an exception on one rank cannot be told to the others, which wait for it in a collective write; it
aborts the job with its traceback. The reverse happens too: Open MPI 4.1 reports nothing when the disk is full, so
that only the rows read back tell.
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

BYTES_PER_WRITE = 256 << 20  # of one rank in one collective write; MPI-IO counts bytes in 32 bits


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
    """All ranks' parts through MPI-IO. Collective over comm; nothing is allocated or converted in here."""
    import h5py

    mine = {entry.name: entry for entry in entries}
    with _abort_guard(comm, path):
        # no `with`: its exit is collective and would wait for ranks that are not coming
        file = h5py.File(path, "r+", driver="mpio", comm=comm.mpi)
        for name, item in items.items():
            if item.dataset.nbytes == 0:
                continue
            if item.dataset.stacked:
                _write_rows(file[name].id, item, mine.get(name))
            elif item.owners[0][0] == comm.rank:
                file[name][...] = mine[name].array
        file.close()


def _write_rows(dataset: Any, item: Item, entry: Entry | None) -> None:
    """One stacked dataset. Collective: equally many calls on every rank, an empty selection where nothing is left."""
    from h5py import h5fd, h5p, h5s

    row_bytes = max(item.dataset.nbytes // item.dataset.shape[0], 1)
    step = max(BYTES_PER_WRITE // row_bytes, 1)
    calls = max(-(-(hi - lo) // step) for _, lo, hi in item.owners)
    transfer = h5p.create(h5p.DATASET_XFER)
    transfer.set_dxpl_mpio(h5fd.MPIO_COLLECTIVE)
    empty = np.empty(0, dtype=schema.STORED[item.dataset.dtype])
    lo, hi = entry.rows if entry is not None and entry.rows is not None else (0, 0)
    array = entry.array if entry is not None and entry.array is not None else empty
    for call in range(calls):
        first, last = min(call * step, hi - lo), min((call + 1) * step, hi - lo)
        file_space = dataset.get_space()
        if first == last:
            memory_space = h5s.create_simple((1,))
            memory_space.select_none()
            file_space.select_none()
            part = empty
        else:
            part = array[first:last]
            memory_space = h5s.create_simple(part.shape)
            file_space.select_hyperslab((lo + first, *(0,) * (part.ndim - 1)), part.shape)
        dataset.write(memory_space, file_space, part, dxpl=transfer)


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
