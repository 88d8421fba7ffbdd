"""A finished file gets its name, and old ones go: rank 0's part of saving a checkpoint. No communication.

The file exists from its rename on. A kill at any moment leaves the checkpoint before, or this one, whole.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from lpnet.io import schema
from lpnet.io.schema import PARTIAL, SUPERSEDED

log = logging.getLogger("lpnet.io.checkpoint")


def _write_text(path: Path, text: str) -> None:
    """Replace a small file, whole or not at all."""
    unnamed = path.with_name(path.name + PARTIAL)
    with unnamed.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unnamed, path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(partial: Path, final: Path) -> None:
    """Rank 0: the file gets its name. The sidecar comes first, and accepts the file that is replaced until it is."""
    sidecar = schema.sidecar_of(final)
    line = f"{schema.file_sha256(partial)}  {final.name}\n"
    older = sidecar.read_text(encoding="utf-8") if final.exists() and sidecar.exists() else ""
    _write_text(sidecar, line + older)
    _sync_folder(final.parent)
    os.replace(partial, final)
    try:
        if older:
            _write_text(sidecar, line)
        _write_text(final.parent / "latest", final.name + "\n")
        _sync_folder(final.parent)
    except OSError as error:  # the checkpoint itself is there and valid
        log.warning("%s is written; what follows failed: %s", final, error)


def tidy(folder: Path, step: int, keep: int) -> None:
    """Rank 0: remove old checkpoints; one of a later step, damaged or of a run gone on from before it, steps aside.

    What has stepped aside goes once the run has come as far again, and all but the `keep` newest of it.
    """
    try:
        files = schema.checkpoints_in(folder)
        later = [path for path in files if (schema.step_of(path.name) or 0) > step]
        for path in later:
            log.warning("%s is of a later step than %d, just saved: renamed to %s", path, step, path.name + SUPERSEDED)
            os.replace(path, path.with_name(path.name + SUPERSEDED))
            with suppress(FileNotFoundError):
                schema.sidecar_of(path).unlink()
        for path in [path for path in files if path not in later][keep:]:
            path.unlink()
            with suppress(FileNotFoundError):
                schema.sidecar_of(path).unlink()
        aside = {path: schema.step_of(path.name.removesuffix(SUPERSEDED)) for path in folder.glob(f"*{SUPERSEDED}")}
        newest_first = sorted(
            ((at, path) for path, at in aside.items() if at is not None), key=lambda pair: pair[0], reverse=True
        )
        for number, (at, path) in enumerate(newest_first):
            if number >= keep or at <= step:
                path.unlink()
    except OSError as error:
        log.warning("old checkpoints in %s could not be removed: %s", folder, error)
