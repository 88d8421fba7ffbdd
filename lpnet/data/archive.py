"""Unpacks a .tar.gz archive whose files all lie in one folder, and refuses one that would write anywhere else.

The rules are those of the "data" filter of Python's tarfile (PEP 706), and stricter: no links at all. No communication.
"""

from __future__ import annotations

import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from lpnet.errors import DataError

_MOST_UNPACKED = 20  # times the size of the archive


def unpack(archive: Path, folder: str) -> None:
    """Unpack a .tar.gz whose files all lie in `folder`, next to it; the folder appears only when complete.

    Files and folders only, none outside of `folder`, with the rights that the user's umask gives. No communication.

    Raises:
        DataError: a damaged archive; a link, a device, a path that leaves the folder, or far more bytes than
            the archive's size suggests; names the member. Nothing is left behind.
    """
    room = archive.parent / f".{folder}.unpacking"
    shutil.rmtree(room, ignore_errors=True)
    try:
        room.mkdir()
        left = _MOST_UNPACKED * archive.stat().st_size
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or path.parts[:1] != (folder,):
                    raise DataError(f"{archive}: its member {member.name!r} lies outside of {folder}; not unpacked")
                if not (member.isreg() or member.isdir()):
                    raise DataError(f"{archive}: its member {member.name!r} is a link or device; not unpacked")
                left -= member.size
                if left < 0:
                    raise DataError(
                        f"{archive} ({archive.stat().st_size:,} bytes) unpacks to more than {_MOST_UNPACKED} times its "
                        f"size, at {member.name!r}; not unpacked"
                    )
                _write_member(tar, member, room.joinpath(*path.parts))
        if not (room / folder).is_dir():
            raise DataError(f"{archive} holds no folder {folder}; not unpacked")
        (room / folder).rename(archive.parent / folder)
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
        raise DataError(f"{archive} cannot be unpacked in {archive.parent} ({error})") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """One file or folder; an existing file is an error, so that no member can replace another."""
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    if content is None:
        raise DataError(f"{member.name!r} has no content")
    with content, open(path, "xb") as out:
        shutil.copyfileobj(content, out, 1 << 18)
