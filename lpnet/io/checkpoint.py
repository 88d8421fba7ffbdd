"""Checkpoints: one HDF5 file per step, written by all ranks and read by any number of them.

    save(folder, comm, step=, shards=, attributes=, keep=)     collective; whole or not at all
    open_newest(folder, comm) / Checkpoint.open(path, comm)    collective; rank 0 verifies, each rank reads its rows
    describe(path)                                             the table that `lpnet show` prints

The file is described in `schema`, the way it is written in `checkpoint_write`, the checks in `verify`. Nothing
here knows a network: what is saved is a list of `lpnet.parallel.shard.Shard` per section.
"""

from __future__ import annotations

from lpnet.io.checkpoint_read import Checkpoint, describe, newest, open_newest
from lpnet.io.checkpoint_write import save, write
from lpnet.io.manifest import describe_shards, prepare
from lpnet.io.schema import Attribute, Dataset

__all__ = [
    "Attribute",
    "Checkpoint",
    "Dataset",
    "describe",
    "describe_shards",
    "newest",
    "open_newest",
    "prepare",
    "save",
    "write",
]
