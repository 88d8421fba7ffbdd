"""What a checkpoint file looks like: names, attributes, dtypes, checksums. Pure data, no communication.

    step-00000010.h5            root attributes: schema_version, step, writer, config, ... , contents_sha256
    |- model/stack.weight       (layers, ...): one row per layer; attributes dtype, stacked, checksum_at
    |- model/closing.bias       a whole tensor
    |- optim/NAME/SLOT          state of the optimiser
    |- mgrit/state/0            kept states, one row per point
    `- checksums                uint64: of every row of a stacked dataset, of every whole one
    step-00000010.h5.sha256     sidecar, as sha256sum writes it: of the whole file
    latest                      name of the newest file, for people and scripts

A checksum belongs to a row, so that a rank computes those of its rows without a message and they do not
depend on the number of ranks. `contents_sha256` covers what the row checksums do not: attributes, names, shapes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCHEMA_VERSION = 1
FORMAT = "lpnet checkpoint"
CHECKSUMS = "checksums"
PARTIAL = ".partial"  # a file being written; what a killed run leaves behind
SUPERSEDED = ".superseded"  # a file of a later step than the run went on from

Attribute = str | int | float | bool

# attributes that `save` writes itself
RESERVED = frozenset(
    {
        "format",
        "schema_version",
        "lpnet_version",
        "torch_version",
        "created",
        "step",
        "written_by_ranks",
        "writer",
        "contents_sha256",
    }
)

# torch dtype -> what HDF5 stores; the attribute `dtype` keeps the first
STORED = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "bool": "|u1",
}


@dataclass(frozen=True)
class Dataset:
    """One dataset of a checkpoint.

    Args:
        shape: global shape; the first axis counts layers where stacked.
        dtype: name of the torch dtype.
        stacked: whether the first axis is shared among the ranks.
        checksum_at: index of its first checksum.
    """

    shape: tuple[int, ...]
    dtype: str
    stacked: bool
    checksum_at: int = 0

    @property
    def checksums(self) -> int:
        """How many checksums it has."""
        return self.shape[0] if self.stacked else 1

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(STORED[self.dtype]).itemsize


def file_name(step: int) -> str:
    """The name of the checkpoint of a step. No communication."""
    return f"step-{step:08d}.h5"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None where the name is another file's. No communication."""
    found = re.fullmatch(r"step-(\d{8,})\.h5", name)
    return int(found.group(1)) if found else None


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first; empty where there is no folder. No communication."""
    try:
        names = [path for path in folder.iterdir() if step_of(path.name) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(names, key=lambda path: step_of(path.name) or 0, reverse=True)


def sidecar_of(path: Path) -> Path:
    """Where the digest of a checkpoint is kept. No communication."""
    return path.with_name(path.name + ".sha256")


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file, as hexadecimal digits. No communication."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def row_checksums(array: np.ndarray, *, stacked: bool) -> np.ndarray:
    """64-bit BLAKE2b of every row of a stacked array, or of a whole one: uint64 (rows,) or (1,). No communication."""
    rows = array.shape[0] if stacked else 1
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    size = len(flat) // max(rows, 1)
    digests = [hashlib.blake2b(flat[row * size : (row + 1) * size], digest_size=8).digest() for row in range(rows)]
    return np.frombuffer(b"".join(digests), dtype="<u8")


def contents_sha256(attributes: Mapping[str, Attribute], datasets: Mapping[str, Dataset], checksums: np.ndarray) -> str:
    """Digest of attributes, names, shapes, dtypes and checksums, as hexadecimal digits. No communication."""
    table = {name: [list(item.shape), item.dtype, item.stacked, item.checksum_at] for name, item in datasets.items()}
    kept = {name: value for name, value in attributes.items() if name != "contents_sha256"}
    text = json.dumps([kept, table], sort_keys=True)
    return hashlib.sha256(text.encode() + np.ascontiguousarray(checksums, dtype="<u8").tobytes()).hexdigest()
