"""Reading a checkpoint: rank 0 verifies the file and all ranks hear the verdict, then each reads its own rows.

Any number of ranks reads what any number has written. Imports no torch until a tensor is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lpnet.errors import CheckpointError
from lpnet.io import schema
from lpnet.io.schema import CHECKSUMS, Attribute, Dataset
from lpnet.io.verify import Contents, check_file, first_line, open_file

if TYPE_CHECKING:
    import torch

    from lpnet.parallel.comm import Comm
    from lpnet.parallel.shard import Shard

log = logging.getLogger("lpnet.io.checkpoint")
T = TypeVar("T")


def on_root(comm: Comm | None, work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, on every rank; or its error on every rank. Collective over comm."""
    if comm is None:
        return work()
    value = comm.together(lambda: work() if comm.rank == 0 else None)
    result: T = comm.broadcast_object(value)
    return result


class Checkpoint:
    """A verified checkpoint file. Make one with `Checkpoint.open` or `open_newest`; close it, or use `with`.

    Args:
        path: the file.
        contents: what `check_file` found in it.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        self.path = path
        self.attributes: dict[str, Attribute] = contents.attributes
        self.datasets: dict[str, Dataset] = contents.datasets
        self._file: Any = None

    @classmethod
    def open(cls, path: str | Path, comm: Comm | None = None) -> Checkpoint:
        """Verify a file on rank 0 and open it everywhere. Collective over comm.

        Raises:
            CheckpointError: on every rank; missing, damaged, no checkpoint, or of a newer schema.
        """
        path = Path(path)
        return cls(path, on_root(comm, lambda: check_file(path)))

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step}, datasets={len(self.datasets)})"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a later read opens it again. No communication."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def step(self) -> int:
        """Optimisation steps done when it was saved."""
        return int(self.attributes["step"])

    def names(self, section: str = "") -> list[str]:
        """Paths of the datasets, of one section (model, optim, mgrit) or of all. No communication."""
        return [name for name in self.datasets if not section or name.startswith(f"{section}/")]

    def read(self, name: str) -> torch.Tensor:
        """A whole dataset in memory of its own. No communication.

        Raises:
            CheckpointError: no such dataset, or numbers that differ from their checksum, on this rank.
        """
        dataset = self._dataset(name)
        return self._read(name, dataset, 0, dataset.shape[0] if dataset.stacked else 1)

    def read_rows(self, name: str, lo: int, hi: int) -> torch.Tensor:
        """Rows lo <= i < hi of a stacked dataset, (hi - lo, ...). No communication.

        Raises:
            CheckpointError: no such rows, or numbers that differ from their checksum, on this rank.
        """
        dataset = self._dataset(name)
        if not dataset.stacked or not 0 <= lo <= hi <= dataset.shape[0]:
            raise CheckpointError(f"{self.path}: {name} of shape {dataset.shape} has no rows {lo} to {hi}")
        return self._read(name, dataset, lo, hi)

    def _dataset(self, name: str) -> Dataset:
        if name not in self.datasets:
            raise CheckpointError(f"{self.path}: holds no {name}")
        return self.datasets[name]

    def _read(self, name: str, dataset: Dataset, lo: int, hi: int) -> torch.Tensor:
        from lpnet.io.manifest import as_tensor

        try:
            if self._file is None:
                self._file = open_file(self.path, "r")
            array = np.asarray(self._file[name][lo:hi] if dataset.stacked else self._file[name][...])
            expected = self._file[CHECKSUMS][dataset.checksum_at + lo : dataset.checksum_at + hi]
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {first_line(error)}") from error
        # rank 0 has verified the file; this rank may be on another machine that sees another one
        if not np.array_equal(schema.row_checksums(array, stacked=dataset.stacked), expected):
            raise CheckpointError(f"{self.path}: {name} differs from its checksum in rows {lo} to {hi}")
        return as_tensor(array, dataset.dtype)

    def compare(self, section: str, expected: Mapping[str, Dataset]) -> None:
        """Check that a section holds exactly the tensors of a network. No communication.

        Args:
            section: model, optim, ...
            expected: path -> global description, from `describe_shards`, in the network's order.

        Raises:
            CheckpointError: names the first difference, with both shapes.
        """
        other = f"{self.path} is of another network"
        for name, wanted in expected.items():
            found = self.datasets.get(name)
            if found is None:
                raise CheckpointError(f"{other}: {name} has shape {wanted.shape} in the network and is not in the file")
            if found.shape != wanted.shape:
                sizes = f"shape {found.shape} in the file and {wanted.shape} in the network"
                raise CheckpointError(f"{other}: {name} has {sizes}")
            if (found.dtype, found.stacked) != (wanted.dtype, wanted.stacked):
                kinds = [f"{item.dtype}{' by layers' if item.stacked else ''}" for item in (found, wanted)]
                raise CheckpointError(f"{other}: {name} is {kinds[0]} in the file and {kinds[1]} in the network")
        for name in self.names(section):
            if name not in expected:
                shape = self.datasets[name].shape
                raise CheckpointError(f"{other}: {name} has shape {shape} in the file and is not in the network")

    def load_into(self, section: str, shards: Sequence[Shard]) -> None:
        """Fill the tensors of this rank from a section, after `compare`. No communication.

        Raises:
            CheckpointError: a name, shape or number that does not fit, on this rank; wrap in `comm.together`.
        """
        import torch

        for shard in shards:
            name = f"{section}/{shard.name}"
            value = self.read(name) if shard.rows is None else self.read_rows(name, *shard.rows)
            mine = shard.tensor
            if value.shape != mine.shape or value.dtype != mine.dtype:
                held = f"{tuple(value.shape)} {value.dtype} in the file, {tuple(mine.shape)} {mine.dtype} here"
                raise CheckpointError(f"{self.path}: {name}: {held}")
            with torch.no_grad():
                mine.copy_(value)


def open_newest(folder: str | Path, comm: Comm | None = None) -> Checkpoint | None:
    """The newest valid checkpoint of a folder, None where it holds none. Collective over comm.

    Every damaged one that is passed over makes a warning.

    Raises:
        CheckpointError: on every rank; there are files and all are damaged.
    """

    def choose() -> tuple[Path, Contents] | None:
        files = schema.checkpoints_in(Path(folder))
        for path in files:
            try:
                return path, check_file(path)
            except CheckpointError as error:
                log.warning("checkpoint skipped: %s", error)
        if files:
            count = f"none of the {len(files)} checkpoints is valid"
            raise CheckpointError(f"{folder}: {count}; start anew in another run.out")
        return None

    found = on_root(comm, choose)
    return None if found is None else Checkpoint(*found)


def newest(folder: str | Path, comm: Comm | None = None) -> Path | None:
    """The path of what `open_newest` would open. Collective over comm; errors as there."""
    found = open_newest(folder, comm)
    return None if found is None else found.path


def _size(count: float) -> str:
    power = 0
    while count >= 1024 and power < 4:
        count, power = count / 1024, power + 1
    return f"{count:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{count:.0f} B"


def describe(path: str | Path, *, verify: bool = False) -> str:
    """The table of a checkpoint: attributes, datasets with shape, dtype and size. No communication.

    Args:
        path: the file.
        verify: compare every row with its checksum as well as the file with its sidecar.

    Raises:
        CheckpointError: missing, damaged, no checkpoint, or of a newer schema.
    """
    path = Path(path)
    contents = check_file(path, checksums=verify)
    lines = [f"{path}   {_size(path.stat().st_size)}", ""]
    long = {name: value for name, value in contents.attributes.items() if "\n" in str(value)}
    width = max(len(name) for name in [*contents.attributes, *contents.datasets, "dataset"])
    lines += [f"{name:{width}}  {value}" for name, value in sorted(contents.attributes.items()) if name not in long]
    lines += ["", f"{'dataset':{width}}  {'shape':20}  {'dtype':9}  {'size':>10}"]
    for name, item in contents.datasets.items():
        lines.append(f"{name:{width}}  {item.shape!s:20}  {item.dtype:9}  {_size(item.nbytes):>10}")
    total = sum(item.nbytes for item in contents.datasets.values())
    lines.append(f"{len(contents.datasets)} datasets, {_size(total)}")
    for name, value in sorted(long.items()):
        lines += ["", f"{name}:", *(f"  {line}" for line in str(value).splitlines())]
    checked = "the file matches its SHA-256" if schema.sidecar_of(path).exists() else "no sidecar; checksums match"
    lines += ["", f"{checked}; every row matches its checksum" if verify else checked]
    return "\n".join(lines)
