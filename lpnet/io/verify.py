"""Is a file a checkpoint, whole and unchanged? Asked before HDF5 opens it, which may crash on a damaged one.

Signature and sidecar first. Without a sidecar, or against it, a child process looks inside and says what is
wrong: a crash of the HDF5 library then is its crash and not the job's. No communication.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lpnet.errors import CheckpointError
from lpnet.io import schema
from lpnet.io.schema import CHECKSUMS, Attribute, Dataset

log = logging.getLogger("lpnet.io.checkpoint")
SIGNATURE = b"\x89HDF\r\n\x1a\n"
FINE = "no fault found"
BYTES_PER_READ = 64 << 20
PATIENCE_S = 15.0  # with a process that looks at a damaged file: HDF5 may go round in circles


@dataclass(frozen=True)
class Contents:
    """Everything in a checkpoint but the numbers."""

    attributes: dict[str, Attribute]
    datasets: dict[str, Dataset]


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type. No communication."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def open_file(path: Path, mode: str) -> Any:
    """An h5py file through the serial driver; no lock, for finished files never change. No communication."""
    import h5py

    try:
        return h5py.File(path, mode, locking=False)
    except (TypeError, ValueError):  # an HDF5 without that switch
        return h5py.File(path, mode)


def check_file(path: Path, *, checksums: bool = True) -> Contents:
    """Check a checkpoint: signature, sidecar, schema, contents, and every row. No communication.

    Args:
        path: the file.
        checksums: read every row and compare its checksum too.

    Raises:
        CheckpointError: what is wrong with it, in one line.
    """
    check_signature(path)
    verdict = check_sidecar(path)
    if verdict is None:
        return look_inside(path, checksums=checksums)
    finding = _look_from_afar(path)
    if verdict:
        raise CheckpointError(f"{path}: {verdict}" if finding == FINE else f"{path}: {verdict}; {finding}")
    if finding != FINE:
        raise CheckpointError(f"{path}: {finding}")
    log.warning("%s has no sidecar %s; its checksums were verified instead", path, schema.sidecar_of(path).name)
    return look_inside(path, checksums=checksums)


def check_signature(path: Path) -> None:
    """Raise CheckpointError where there is no file that begins as HDF5 does. No communication."""
    try:
        with path.open("rb") as file:
            head = file.read(len(SIGNATURE))
    except FileNotFoundError:
        known = [found.name for found in schema.checkpoints_in(path.parent)]
        raise CheckpointError(f"{path}: no such checkpoint; its folder holds {', '.join(known) or 'none'}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise CheckpointError(f"{path}: damaged: the file is empty")
    if head != SIGNATURE:
        raise CheckpointError(f"{path}: not an HDF5 file: it begins with {head!r}")


def check_sidecar(path: Path) -> str | None:
    """None: the file is as its sidecar says; "": there is no sidecar; else what is wrong. No communication."""
    sidecar = schema.sidecar_of(path)
    try:
        lines = sidecar.read_text(encoding="utf-8", errors="replace").splitlines()
        digest = schema.file_sha256(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    accepted = [line.split()[0] for line in lines if line.split()]
    if digest in accepted:
        return None
    says = accepted[0][:12] if accepted else "nothing"
    return f"damaged or changed: its SHA-256 is {digest[:12]}... and {sidecar.name} says {says}..."


def look_inside(path: Path, *, checksums: bool = True) -> Contents:
    """Open the file and check schema, contents and rows; for files that HDF5 will survive. No communication.

    Raises:
        CheckpointError: what is wrong with it, in one line.
    """
    try:
        with open_file(path, "r") as file:
            return _look(path, file, checksums)
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises almost anything on a damaged file
        raise CheckpointError(f"{path}: damaged: {first_line(error)}") from error


def _look(path: Path, file: Any, checksums: bool) -> Contents:
    import h5py

    if "schema_version" not in file.attrs:
        raise CheckpointError(f"{path}: an HDF5 file, but no checkpoint of lpnet: it has no attribute schema_version")
    version = int(file.attrs["schema_version"])
    if version > schema.SCHEMA_VERSION:
        known = f"this lpnet reads up to {schema.SCHEMA_VERSION}"
        raise CheckpointError(f"{path}: schema version {version} is newer than {known}; use a newer lpnet")
    attributes: dict[str, Attribute] = {}
    for name, value in file.attrs.items():
        attributes[name] = value.item() if isinstance(value, np.generic) else str(value)
    datasets: dict[str, Dataset] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name != CHECKSUMS:
            kind, stacked, at = (item.attrs[key] for key in ("dtype", "stacked", "checksum_at"))
            datasets[name] = Dataset(tuple(item.shape), str(kind), bool(stacked), int(at))

    file.visititems(visit)  # goes through no link
    if not isinstance(file.get(CHECKSUMS, getlink=True), h5py.HardLink):
        raise CheckpointError(f"{path}: damaged: it has no {CHECKSUMS} of its own")
    for name in [*datasets, CHECKSUMS]:
        if not _is_plain(file[name]):
            raise CheckpointError(f"{path}: refused: {name} lies outside of the file, or in pieces")
    expected = np.asarray(file[CHECKSUMS][...], dtype="<u8")
    if schema.contents_sha256(attributes, datasets, expected) != attributes.get("contents_sha256"):
        raise CheckpointError(f"{path}: damaged: attributes, names or shapes are not those that were written")
    for name, dataset in datasets.items():
        if file[name].dtype != np.dtype(schema.STORED.get(dataset.dtype, "V1")):
            raise CheckpointError(f"{path}: damaged: {name} holds {file[name].dtype} in place of {dataset.dtype}")
        if checksums:
            _check_rows(path, file[name], name, dataset, expected)
    return Contents(attributes, datasets)


def _is_plain(stored: Any) -> bool:
    """Whether the numbers are all in the file, as lpnet writes them: no other file is read, no small one unpacks."""
    outside = stored.external is not None or stored.is_virtual or stored.chunks is not None
    return not outside and stored.id.get_storage_size() in (0, stored.size * stored.dtype.itemsize)


def _check_rows(path: Path, stored: Any, name: str, dataset: Dataset, expected: np.ndarray) -> None:
    at = dataset.checksum_at
    if not dataset.stacked:
        if schema.row_checksums(np.asarray(stored[...]), stacked=False)[0] != expected[at]:
            raise CheckpointError(f"{path}: damaged: {name} differs from its checksum")
        return
    rows = dataset.shape[0]
    step = max(BYTES_PER_READ // max(dataset.nbytes // max(rows, 1), 1), 1)
    for lo in range(0, rows, step):
        hi = min(lo + step, rows)
        wrong = schema.row_checksums(np.asarray(stored[lo:hi]), stacked=True) != expected[at + lo : at + hi]
        if wrong.any():
            raise CheckpointError(f"{path}: damaged: {name} row {lo + int(wrong.argmax())} differs from its checksum")


def _look_from_afar(path: Path) -> str:
    """What `look_inside` says in a process of its own: `FINE`, or what is wrong."""
    root = str(Path(__file__).resolve().parents[2])
    launcher = ("OMPI_", "PMI_", "PMIX_", "SLURM_")  # the child is no rank of this job
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    environment["MPI4PY_RC_INITIALIZE"] = "0"
    command = [sys.executable, "-c", "from lpnet.io import verify; verify.main()", str(path)]
    limit = PATIENCE_S + path.stat().st_size / 20e6
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"HDF5 did not finish reading it within {limit:.0f} s"
    if done.returncode < 0:
        return f"HDF5 crashes on it (signal {-done.returncode})"
    text = done.stdout.strip()
    return text.removeprefix(f"{path}: ") if done.returncode == 0 and text else "it could not be looked into"


def main() -> None:
    """Print what is wrong with the file named on the command line; for `_look_from_afar`. No communication."""
    try:
        look_inside(Path(sys.argv[1]))
        print(FINE)
    except CheckpointError as error:
        print(error)
