"""Fetches public data sets: checked by size and SHA-256, resumed where a transfer broke off, unpacked with care.

A file is written under a temporary name (.part), continued by an HTTP range request (RFC 9110, section 14), and takes
its own name only when its digest is right. No communication between ranks: call it on one rank only.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lpnet.data.archive import unpack
from lpnet.errors import LpnetError, UsageError


@dataclass(frozen=True)
class Published:
    """A file as its authors published it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Args:
        base_url: address of the folder of the files.
        files: what is fetched.
        folder: sub-folder that the only file, a .tar.gz archive, unpacks to; None: files that stay as they are.
    """

    base_url: str
    files: tuple[Published, ...]
    folder: str | None = None


SOURCES = {
    "mnist": Source(
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        (
            Published(
                "train-images-idx3-ubyte.gz",
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            Published(
                "train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
            ),
            Published(
                "t10k-images-idx3-ubyte.gz",
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            Published(
                "t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
            ),
        ),
    ),
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/",
        (
            Published(
                "cifar-10-python.tar.gz",
                170498071,
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            ),
        ),
        "cifar-10-batches-py",
    ),
    "cifar100": Source(
        "https://www.cs.toronto.edu/~kriz/",
        (
            Published(
                "cifar-100-python.tar.gz",
                169001437,
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ),
        ),
        "cifar-100-python",
    ),
}
_ATTEMPTS = 5
_BLOCK = 1 << 18

Progress = Callable[[str, int, int], None]


class FetchError(LpnetError):
    """A data set could not be fetched; what has arrived is kept and continued by the next try."""


def fetch(
    name: str,
    root: Path | str,
    base_url: str | None = None,
    *,
    progress: Progress | None = None,
    timeout_s: float = 30.0,
    pause_s: float = 1.0,
) -> Path:
    """Get the files of a public data set; what is there and right is not fetched again.

    No communication between ranks, and not for several ranks at once: call it on one.

    Args:
        name: mnist, cifar10 or cifar100.
        root: folder to put them in, made if missing: data.root of a run.
        base_url: address of a folder with the same files, a mirror for example; None: the published one.
        progress: called with (file, bytes there, bytes in all).
        timeout_s: how long to wait for an answer.
        pause_s: how long to wait before a broken transfer is continued.

    Returns:
        `root`.

    Raises:
        UsageError: an unknown data set, or an address that is not http or https.
        FetchError: no network, an answer that is not the published file, or a full disk.
        DataError: an archive that cannot be unpacked.
    """
    if name not in SOURCES:
        raise UsageError(f"there is no data set {name!r} to fetch; known are {', '.join(SOURCES)}")
    source, root = SOURCES[name], Path(root).expanduser()
    base = source.base_url if base_url is None else base_url
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"the address {base} does not begin with http:// or https://")
    if source.folder is not None and (root / source.folder).is_dir():
        return root  # it takes its name only when complete
    with _folder(root):
        for file in source.files:
            url = f"{base.rstrip('/')}/{file.name}"
            _obtain(file, url, root / file.name, progress, timeout_s, pause_s)
        if source.folder is not None:
            unpack(root / source.files[0].name, source.folder)
    return root


@contextmanager
def _folder(root: Path) -> Iterator[None]:
    """The folder, made and locked against a second fetch where the file system has locks."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise FetchError(f"cannot use the folder {root} ({error}); give another folder") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchError(f"another process is fetching into {root}; wait for it or give another folder") from None
        except OSError:
            pass  # no locks here; digests still decide what is kept
        yield
    finally:
        os.close(handle)


def _obtain(file: Published, url: str, path: Path, progress: Progress | None, timeout_s: float, pause_s: float) -> None:
    """One file under its own name, whole and right."""
    if path.exists():
        _expect(file, path)
        return
    part = path.with_name(f"{path.name}.part")
    if _length(part) > file.size:
        part.unlink()
    trouble = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(pause_s)
        start = _length(part)
        try:
            if start < file.size:
                _transfer(file, url, part, start, progress, timeout_s)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no address at all
            trouble = _reason(error)
            if _worth_a_retry(error, _length(part) > start):
                continue
            break
        if _length(part) < file.size:
            trouble = "the answer ends early"
            continue
        found = _digest(part)
        if found == file.sha256:
            os.replace(part, path)
            return
        part.unlink()
        trouble = f"it is not the published {file.name}: its SHA-256 is {found}, expected {file.sha256}"
        if start == 0:
            break  # else what was there before may be wrong: again, from the start
    kept = f" {_length(part):,} of {file.size:,} bytes are kept in {part.name}." if _length(part) else ""
    raise FetchError(
        f"cannot fetch {url}: {trouble}.{kept} Run the command again to go on, or give another address; without a "
        f"network, copy {file.name} from another machine to {path} and run it again: it checks the file"
    )


def _transfer(file: Published, url: str, part: Path, start: int, progress: Progress | None, timeout_s: float) -> None:
    """Append to the partial file what it lacks, or begin anew where the server sends all."""
    headers = {"User-Agent": "lpnet", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s) as answer:
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        there = start if goes_on else 0
        with _opened(part, "ab" if goes_on else "wb") as write:
            while block := answer.read(_BLOCK):
                there += len(block)
                if there > file.size:
                    part.unlink()
                    raise FetchError(
                        f"{url} sends more than the {file.size:,} bytes of the published {file.name}; removed it; "
                        "give another address"
                    )
                write(block)
                if progress is not None:
                    progress(file.name, there, file.size)


@contextmanager
def _opened(part: Path, mode: str) -> Iterator[Callable[[bytes], object]]:
    """Write to the partial file; trouble with the disk is told apart from trouble with the network."""

    def write(block: bytes) -> None:
        try:
            out.write(block)
            out.flush()  # so that closing has nothing left to fail with
        except OSError as error:
            raise _unwritable(part, error) from error

    try:
        out = open(part, mode)  # noqa: SIM115
    except OSError as error:
        raise _unwritable(part, error) from error
    with out:
        yield write


def _unwritable(part: Path, error: OSError) -> FetchError:
    return FetchError(f"cannot write {part} ({error}); make room or give another folder")


def _worth_a_retry(error: Exception, advanced: bool) -> bool:
    """A server in trouble may recover, a transfer that has advanced can go on; no network stays no network."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in (408, 429)
    return advanced


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _expect(file: Published, path: Path) -> None:
    """Refuse a file of that name that is another; never overwrite it."""
    size = _length(path)
    if size != file.size or _digest(path) != file.sha256:
        raise FetchError(
            f"{path} ({size:,} bytes) is not the published file ({file.size:,} bytes, SHA-256 {file.sha256}); move it "
            "away to fetch that one"
        )


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
