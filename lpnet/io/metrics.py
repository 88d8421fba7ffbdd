"""metrics.jsonl: one JSON object per optimisation step, appended by rank 0 and readable at any moment.

A number that is not finite is null in the file, and its key is listed under `not_finite`: JSON has no NaN.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lpnet.errors import LpnetError, SaveError

log = logging.getLogger("lpnet.io.metrics")
NOT_FINITE = "not_finite"


def _plain(value: Any) -> tuple[Any, bool]:
    """A value as JSON has it, numpy and torch scalars included, and whether all of it is finite."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None, False
    if isinstance(value, list | tuple):
        pairs = [_plain(item) for item in value]
        return [item for item, _ in pairs], all(finite for _, finite in pairs)
    if isinstance(value, Mapping):
        found = {str(key): _plain(item) for key, item in value.items()}
        return {key: item for key, (item, _) in found.items()}, all(finite for _, finite in found.values())
    return value, True


def to_json(row: Mapping[str, Any]) -> str:
    """One line of the file, without its end. No communication."""
    plain, bad = {}, []
    for key, value in row.items():
        plain[key], finite = _plain(value)
        if not finite:
            bad.append(key)
    if bad:
        plain[NOT_FINITE] = bad
    return json.dumps(plain, allow_nan=False)


def _rows_before(path: Path, step: int) -> bytes:
    """The lines of a file whose step is smaller; a line that was cut off, or is none of ours, goes too."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and int(json.loads(line)["step"]) < step:
                kept.append(line)
        except (ValueError, TypeError, KeyError):
            log.warning("%s: dropped a line that is no row: %r", path, line[:60])
    return b"".join(kept)


class MetricsWriter:
    """Appends rows to a file; on ranks other than 0 it does nothing. No communication.

    Args:
        path: the file; its folder exists.
        rank: this rank.
        resume_at: the step a resumed run goes on from, whose row comes again: rows from there on are removed.

    Raises:
        SaveError: the file cannot be written.
    """

    def __init__(self, path: str | Path, *, rank: int = 0, resume_at: int | None = None) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None
        self._lost = 0
        if rank != 0:
            return
        try:
            if resume_at is not None and self.path.exists():
                partial = self.path.with_name(self.path.name + ".partial")
                partial.write_bytes(_rows_before(self.path, resume_at))
                os.replace(partial, self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise SaveError(
                f"{self.path} cannot be written: {error.strerror}; make room, or give another run.out"
            ) from error

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row, on the disk's way when this returns; a full disk costs a warning, not the run."""
        if self._file is None:
            return
        end = os.fstat(self._file.fileno()).st_size
        line = (to_json(row) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError("the disk took half a line")
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)  # no half line in the midst of the file
            self._lost += 1
            if self._lost == 1:
                log.warning("%s: rows are being lost: %s", self.path, error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in file order; a last line that was cut off is passed over. No communication.

    Raises:
        LpnetError: no such file, or a line within it that is no row.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise LpnetError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last end of line was cut off, or is empty
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise LpnetError(f"{path}, line {number}: {line[:60]!r} is not a JSON object with a step") from error
        rows.append(row)
    return rows
