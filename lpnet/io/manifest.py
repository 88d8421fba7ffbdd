"""Who writes which rows of which dataset: what every rank holds, merged into one plan for all.

A rank describes its part as entries (arrays, rows, checksums) without a message; rank 0 merges the headers,
refuses gaps, overlaps and contradictions with numbers, and every rank gets the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from lpnet.errors import SaveError
from lpnet.io.schema import CHECKSUMS, STORED, Dataset, row_checksums

if TYPE_CHECKING:
    import torch

    from lpnet.parallel.comm import Comm
    from lpnet.parallel.shard import Shard


@dataclass(frozen=True)
class Entry:
    """What one rank contributes to one dataset.

    Args:
        name: path in the file, such as "model/stack.weight".
        array: the local rows, or the whole tensor; None in a header, which travels.
        shape: shape of the local part.
        dtype: name of the torch dtype.
        rows: global rows [lo, hi); None for a whole tensor.
        layers: rows of all ranks together; None for a whole tensor.
        checksums: one per local row, or one.
    """

    name: str
    array: np.ndarray | None
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[int, int] | None
    layers: int | None
    checksums: np.ndarray

    def header(self) -> Entry:
        """The entry without its array."""
        return replace(self, array=None)


@dataclass(frozen=True)
class Item:
    """One dataset of the file and the ranks that write it.

    Args:
        dataset: its global description.
        owners: (rank, lo, hi) of every block in row order; (rank, 0, 1) for a whole tensor.
    """

    dataset: Dataset
    owners: tuple[tuple[int, int, int], ...]


def as_array(tensor: torch.Tensor, *, copy: bool = False) -> np.ndarray:
    """A tensor as HDF5 stores it, bfloat16 as uint16, in shared memory where that can be. No communication."""
    import torch

    dense = tensor.detach().cpu().contiguous()
    if dense.dtype == torch.bfloat16:
        array = dense.view(torch.int16).numpy().view(np.uint16)
    elif dense.dtype == torch.bool:
        array = dense.view(torch.uint8).numpy()
    else:
        array = dense.numpy()
    return array.copy() if copy else array


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """The inverse of `as_array`. No communication."""
    import torch

    tensor = torch.from_numpy(array.view(np.int16) if dtype == "bfloat16" else array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor.bool() if dtype == "bool" else tensor


def dtype_name(tensor: torch.Tensor) -> str:
    """float32, bfloat16, ...

    Raises:
        SaveError: a dtype that a checkpoint does not hold.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in STORED:
        raise SaveError(f"a checkpoint holds no tensors of dtype {name}; it holds {', '.join(STORED)}")
    return name


def _check_name(name: str) -> None:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or parts[0] == CHECKSUMS or "\0" in name:
        raise SaveError(f"{name!r} cannot name a dataset of a checkpoint")


def _entry(name: str, parts: Sequence[Shard], copy: bool) -> Entry:
    """One rank's part of one dataset; several parts are blocks of rows that follow each other."""
    _check_name(name)
    first = parts[0]
    if first.rows is None or first.layers is None:
        if len(parts) > 1:
            raise SaveError(f"{name} is a whole tensor and given {len(parts)} times")
        array = as_array(first.tensor, copy=copy)
        checksums = row_checksums(array, stacked=False)
        return Entry(name, array, array.shape, dtype_name(first.tensor), None, None, checksums)
    blocks = []
    for part in parts:
        if part.rows is None or part.rows[1] - part.rows[0] != part.tensor.shape[0]:
            raise SaveError(f"{name}: a tensor of shape {tuple(part.tensor.shape)} cannot be rows {part.rows}")
        blocks.append((part.rows, part.tensor))
    blocks.sort(key=lambda block: block[0])
    for (before, _), (after, _) in pairwise(blocks):
        if before[1] != after[0]:
            raise SaveError(f"{name}: rows {before} and {after} of one rank do not follow each other")
    arrays = [as_array(tensor, copy=copy) for _, tensor in blocks]
    array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    rows = (blocks[0][0][0], blocks[-1][0][1])
    checksums = row_checksums(array, stacked=True)
    return Entry(name, array, array.shape, dtype_name(first.tensor), rows, first.layers, checksums)


def prepare(shards: Mapping[str, Sequence[Shard]], *, copy: bool = False) -> list[Entry]:
    """Arrays and checksums of what this rank holds. No communication.

    Args:
        shards: section (model, optim, mgrit) -> its shards; a stacked name may come in several blocks of rows.
        copy: take a snapshot, so that training may go on before it is written; otherwise CPU memory is shared.

    Raises:
        SaveError: rows that do not fit a tensor, an unknown dtype, a name that cannot be a path.
    """
    entries = []
    for section, members in shards.items():
        groups: dict[str, list[Shard]] = {}
        for shard in members:
            groups.setdefault(f"{section}/{shard.name}", []).append(shard)
        entries += [_entry(name, parts, copy) for name, parts in groups.items()]
    return entries


def _merge_one(name: str, parts: list[tuple[int, Entry]]) -> tuple[Dataset, tuple[tuple[int, int, int], ...]]:
    """The global description of one dataset and its owners, from the headers of all ranks that hold it."""
    first_rank, first = parts[0]
    for rank, entry in parts[1:]:
        if first.rows is None or entry.rows is None:
            raise SaveError(f"{name} is on ranks {first_rank} and {rank}; a whole tensor is on one rank only")
        mine = (entry.layers, entry.shape[1:], entry.dtype)
        if mine != (first.layers, first.shape[1:], first.dtype):
            raise SaveError(
                f"{name}: rank {first_rank} has {first.layers} rows of {first.shape[1:]} {first.dtype}, "
                f"rank {rank} has {entry.layers} of {entry.shape[1:]} {entry.dtype}"
            )
    if first.rows is None or first.layers is None:
        return Dataset(first.shape, first.dtype, stacked=False), ((first_rank, 0, 1),)
    blocks = sorted((entry.rows[0], entry.rows[1], rank) for rank, entry in parts if entry.rows is not None)
    blocks = [block for block in blocks if block[0] < block[1]]
    at = 0
    for lo, hi, rank in blocks:
        if lo != at:
            what = f"rows {at} to {lo - 1} are missing" if lo > at else f"row {lo} is there twice"
            raise SaveError(f"{name}: {what} at the block of rank {rank}; the blocks must tile {first.layers} rows")
        at = hi
    if at != first.layers:
        raise SaveError(f"{name}: the blocks end at row {at} of {first.layers}")
    owners = tuple((rank, lo, hi) for lo, hi, rank in blocks)
    return Dataset((first.layers, *first.shape[1:]), first.dtype, stacked=True), owners


def merge(headers: Sequence[Sequence[Entry]]) -> tuple[dict[str, Item], np.ndarray]:
    """One plan from the headers of all ranks, in rank order: name -> item, and all checksums. No communication.

    Raises:
        SaveError: a gap, an overlap, or ranks that contradict each other.
    """
    found: dict[str, list[tuple[int, Entry]]] = {}
    for rank, entries in enumerate(headers):
        for entry in entries:
            found.setdefault(entry.name, []).append((rank, entry))
    for name in found:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in found:
                raise SaveError(f"{'/'.join(parts[:depth])} is a dataset and cannot hold {name}")
    items: dict[str, Item] = {}
    checksums: list[np.ndarray] = []
    at = 0
    for name in sorted(found):
        dataset, owners = _merge_one(name, found[name])
        by_rank = {rank: entry.checksums for rank, entry in found[name]}
        checksums += [by_rank[rank] for rank, _, _ in owners]
        items[name] = Item(replace(dataset, checksum_at=at), owners)
        at += dataset.checksums
    return items, np.concatenate([np.empty(0, "<u8"), *checksums])


def describe_shards(section: str, shards: Sequence[Shard], comm: Comm) -> dict[str, Dataset]:
    """Global names, shapes and dtypes of all ranks' shards, for `Checkpoint.compare`. Collective over comm."""
    mine: dict[str, Dataset] = {}
    for shard in shards:
        shape = tuple(shard.tensor.shape)
        if shard.layers is not None:
            shape = (shard.layers, *shape[1:])
        mine[f"{section}/{shard.name}"] = Dataset(shape, dtype_name(shard.tensor), shard.layers is not None)
    return {name: dataset for part in comm.all_gather_objects(mine) for name, dataset in part.items()}
