"""Fetching from a server on this machine: digests, resumed transfers, trouble of every kind, harmful archives."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import http.server
import io
import os
import socket
import stat
import tarfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from lpnet.data import fetch as module
from lpnet.data.archive import unpack
from lpnet.data.fetch import SOURCES, FetchError, Published, Source, fetch
from lpnet.errors import DataError, LpnetError, UsageError

CONTENT = np.random.default_rng(0).bytes(700_000)
SMALL = b"labels" * 50


@dataclass
class Server:
    """What it serves, how it misbehaves, and what it was asked for."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)  # bytes after which the next answers break off
    statuses: list[int] = field(default_factory=list)  # of the next answers
    requests: list[tuple[str, str | None]] = field(default_factory=list)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, state, *arguments):
        self.state = state
        super().__init__(*arguments)

    def do_GET(self):
        state, name, asked = self.state, self.path.rsplit("/", 1)[-1], self.headers.get("Range")
        state.requests.append((name, asked))
        status = state.statuses.pop(0) if state.statuses else 200
        content = state.files.get(name)
        if content is None:
            status = 404
        if status >= 300:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = 0
        if asked and state.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if state.break_after:
            self.wfile.write(body[: state.break_after.pop(0)])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    state = Server(files={"images.gz": CONTENT, "labels.gz": SMALL})
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, state))
    listener.daemon_threads = True
    state.url = f"http://127.0.0.1:{listener.server_address[1]}/set/"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    publish(monkeypatch, "mnist", state.url, {"images.gz": CONTENT, "labels.gz": SMALL})
    yield state
    listener.shutdown()
    listener.server_close()
    thread.join()


def publish(monkeypatch, name, url, files, folder=None):
    published = tuple(Published(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in files.items())
    monkeypatch.setitem(SOURCES, name, Source(url, published, folder))


def get(root, name="mnist", **options):
    return fetch(name, root, **{"pause_s": 0.01, "timeout_s": 5, **options})


def listing(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_files_arrive_whole_and_once(server, tmp_path):
    seen = []
    root = tmp_path / "new" / "folder"
    assert get(root, progress=lambda *words: seen.append(words)) == root
    assert (root / "images.gz").read_bytes() == CONTENT and (root / "labels.gz").read_bytes() == SMALL
    assert listing(root) == ["images.gz", "labels.gz"]
    assert seen[-1] == ("labels.gz", 300, 300) and ("images.gz", 700_000, 700_000) in seen
    assert server.requests == [("images.gz", None), ("labels.gz", None)]
    get(str(root))  # nothing to do
    assert len(server.requests) == 2
    (root / "labels.gz").unlink()
    get(root)  # only what is missing
    assert server.requests[2:] == [("labels.gz", None)]


def test_a_mirror(server, tmp_path, monkeypatch):
    publish(monkeypatch, "mnist", "http://127.0.0.1:9/unreachable/", {"labels.gz": SMALL})
    get(tmp_path, base_url=server.url.rstrip("/"))
    assert (tmp_path / "labels.gz").read_bytes() == SMALL


def test_a_broken_transfer_goes_on_where_it_stopped(server, tmp_path):
    server.break_after = [300_000, 100_000]
    get(tmp_path)
    assert (tmp_path / "images.gz").read_bytes() == CONTENT
    asked = [where for name, where in server.requests if name == "images.gz"]
    assert asked[0] is None and len(asked) == 3
    starts = [int(where.removeprefix("bytes=").removesuffix("-")) for where in asked[1:]]
    assert 0 < starts[0] <= 300_000 and starts[0] < starts[1] <= starts[0] + 100_000


def test_a_part_of_yesterday_is_continued(server, tmp_path):
    (tmp_path / "images.gz.part").write_bytes(CONTENT[:650_000])
    get(tmp_path)
    assert (tmp_path / "images.gz").read_bytes() == CONTENT
    assert server.requests[0] == ("images.gz", "bytes=650000-")
    assert "images.gz.part" not in listing(tmp_path)


def test_a_whole_part_is_only_checked(server, tmp_path):
    (tmp_path / "images.gz.part").write_bytes(CONTENT)
    get(tmp_path)
    assert (tmp_path / "images.gz").read_bytes() == CONTENT
    assert server.requests == [("labels.gz", None)]


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
    server.ranges = False
    (tmp_path / "images.gz.part").write_bytes(b"x" * 1000)
    get(tmp_path)
    assert (tmp_path / "images.gz").read_bytes() == CONTENT


@pytest.mark.parametrize("length", [1000, len(CONTENT), len(CONTENT) + 1])
def test_a_wrong_part_is_thrown_away(server, tmp_path, length):
    (tmp_path / "images.gz.part").write_bytes(b"x" * length)
    get(tmp_path)
    assert (tmp_path / "images.gz").read_bytes() == CONTENT
    assert server.requests[-2] == ("images.gz", None)


def test_another_file_under_that_address(server, tmp_path):
    server.files["images.gz"] = b"y" + CONTENT[1:]
    with pytest.raises(FetchError, match=r"not the published images\.gz: its SHA-256 is \w{64}, expected \w{64}"):
        get(tmp_path)
    assert listing(tmp_path) == []  # nothing wrong is left


def test_more_bytes_than_published(server, tmp_path):
    server.files["images.gz"] = CONTENT + b"more"
    with pytest.raises(FetchError, match=r"sends more than the 700,000 bytes of the published images\.gz"):
        get(tmp_path)
    assert listing(tmp_path) == []


def test_fewer_bytes_than_published(server, tmp_path):
    server.files["images.gz"] = CONTENT[:-7]
    with pytest.raises(FetchError, match=r"699,993 of 700,000 bytes are kept in images\.gz\.part"):
        get(tmp_path)


def test_a_file_of_the_user_is_never_overwritten(server, tmp_path):
    (tmp_path / "images.gz").write_bytes(b"mine")
    with pytest.raises(FetchError, match=r"images\.gz \(4 bytes\) is not the published file \(700,000 .* move it away"):
        get(tmp_path)
    assert (tmp_path / "images.gz").read_bytes() == b"mine" and server.requests == []


def test_a_server_in_trouble_is_asked_again(server, tmp_path):
    server.statuses = [503, 429, 500]
    get(tmp_path)
    assert (tmp_path / "images.gz").read_bytes() == CONTENT and len(server.requests) == 5
    (tmp_path / "images.gz").unlink()
    server.statuses = [503] * 10
    with pytest.raises(FetchError, match="the server answers 503 Service Unavailable"):
        get(tmp_path)
    assert len(server.requests) == 10  # five times, then it is given up


def test_a_missing_file_is_asked_for_once(server, tmp_path):
    del server.files["images.gz"]
    with pytest.raises(FetchError, match=r"cannot fetch http://.*/images\.gz: the server answers 404 Not Found\."):
        get(tmp_path)
    assert len(server.requests) == 1


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_offline(server, tmp_path):
    (tmp_path / "images.gz.part").write_bytes(CONTENT[:1000])
    with pytest.raises(FetchError, match="cannot fetch .*Connection refused") as caught:
        get(tmp_path, base_url=f"http://127.0.0.1:{closed_port()}/")
    text = str(caught.value)
    assert "1,000 of 700,000 bytes are kept in images.gz.part. Run the command again" in text
    assert f"without a network, copy images.gz from another machine to {tmp_path / 'images.gz'}" in text
    assert caught.value.exit_code == 1 and isinstance(caught.value, LpnetError)
    for name, content in server.files.items():  # that remedy works
        (tmp_path / name).write_bytes(content)
    get(tmp_path, base_url=f"http://127.0.0.1:{closed_port()}/")


def test_a_silent_server(tmp_path, server):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(FetchError, match="timed out"):
            get(tmp_path, base_url=f"http://127.0.0.1:{mute.getsockname()[1]}/", timeout_s=0.2)


@pytest.mark.parametrize("url", ["http://[bad/", "http://127.0.0.1:notaport/", "http://bad host/"])
def test_no_address_at_all(server, tmp_path, url):
    with pytest.raises(FetchError, match="cannot fetch http://"):
        get(tmp_path, base_url=url)


def test_unknown_names_and_schemes(tmp_path):
    with pytest.raises(UsageError, match="no data set 'svhn' to fetch; known are mnist, cifar10, cifar100"):
        fetch("svhn", tmp_path)
    for url in ("file:///etc/", "ftp://host/", "host/"):
        with pytest.raises(UsageError, match="does not begin with http:// or https://"):
            fetch("mnist", tmp_path, url)


def test_a_redirection_to_a_local_file_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", redirect)
    with pytest.raises(FetchError, match="cannot fetch"):
        get(tmp_path)


def redirect(self):
    self.send_response(302)
    self.send_header("Location", "file:///etc/hostname")
    self.send_header("Content-Length", "0")
    self.end_headers()


def test_a_full_disk(server, tmp_path):
    (tmp_path / "images.gz.part").symlink_to("/dev/full")
    with pytest.raises(FetchError, match=r"cannot write .*images\.gz\.part \(.*No space left on device\); make room"):
        get(tmp_path)


def test_a_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="cannot use the folder .*; give another folder"):
        get(tmp_path / "file" / "folder")


def test_two_at_once(server, tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(FetchError, match="another process is fetching into"):
            get(tmp_path)
    finally:
        os.close(handle)
    get(tmp_path)


def archive_of(*members, gzip=True) -> bytes:
    """Members are (name, content) or tar infos."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz" if gzip else "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size, info.mode = len(member[1]), 0o6777
                tar.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


def special(name, kind, target="") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


GOOD = archive_of(special("set", tarfile.DIRTYPE), ("set/a", b"one"), ("./set/deep/b", b"two"))


def test_an_archive_is_unpacked_and_its_rights_are_those_of_the_user(server, tmp_path, monkeypatch):
    publish(monkeypatch, "cifar10", server.url, {"set.tar.gz": GOOD}, "set")
    server.files["set.tar.gz"] = GOOD
    before = os.umask(0o027)
    try:
        get(tmp_path, "cifar10")
    finally:
        os.umask(before)
    assert (tmp_path / "set" / "a").read_bytes() == b"one" and (tmp_path / "set" / "deep" / "b").read_bytes() == b"two"
    assert stat.S_IMODE((tmp_path / "set" / "a").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "set").stat().st_mode) == 0o750
    assert listing(tmp_path) == ["set", "set.tar.gz"]
    (tmp_path / "set.tar.gz").unlink()
    get(tmp_path, "cifar10")  # neither fetched nor unpacked again
    assert len(server.requests) == 1


OUTSIDE = "lies outside of set; not unpacked"


HARMFUL = [
    (archive_of(("../evil", b"x")), OUTSIDE),
    (archive_of(("set/a", b"x"), ("set/../../evil", b"x")), OUTSIDE),
    (archive_of(("set/../evil", b"x")), OUTSIDE),
    (archive_of(("/tmp/lpnet-evil", b"x")), OUTSIDE),
    (archive_of(("evil", b"x")), OUTSIDE),
    (archive_of(("settle/evil", b"x")), OUTSIDE),
    (
        archive_of(special("set/link", tarfile.SYMTYPE, "/tmp"), ("set/link/lpnet-evil", b"x")),
        "is a link or device",
    ),
    (archive_of(special("set", tarfile.SYMTYPE, "..")), "is a link or device"),
    (archive_of(special("set/hard", tarfile.LNKTYPE, "../evil")), "is a link or device"),
    (archive_of(special("set/pipe", tarfile.FIFOTYPE)), "is a link or device"),
    (archive_of(special("set/disk", tarfile.CHRTYPE)), "is a link or device"),
    (archive_of(("set/a", b"x"), ("set/a", b"y")), "cannot be unpacked in .*File exists"),
    (archive_of(("set/a", bytes(10_000_000))), r"unpacks to more than 20 times its size, at 'set/a'"),
    (archive_of(("set", b"a file")), "holds no folder set"),
    (archive_of(), "holds no folder set"),
    (GOOD[:40], "cannot be unpacked"),
    (b"no archive", "cannot be unpacked"),
    (archive_of(("set/a", b"one"), gzip=False), "cannot be unpacked"),
]


@pytest.mark.parametrize(("content", "message"), HARMFUL, ids=range(len(HARMFUL)))
def test_harmful_and_damaged_archives(tmp_path, content, message):
    room = tmp_path / "inner" / "root"
    room.mkdir(parents=True)
    (room / "set.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        unpack(room / "set.tar.gz", "set")
    assert listing(room) == ["set.tar.gz"] and listing(tmp_path) == ["inner"] and listing(room.parent) == ["root"]
    assert not Path("/tmp/lpnet-evil").exists()


def test_what_an_interrupted_unpacking_left_is_cleared(tmp_path):
    (tmp_path / ".set.unpacking" / "set").mkdir(parents=True)
    (tmp_path / ".set.unpacking" / "set" / "a").write_bytes(b"old")
    (tmp_path / "set.tar.gz").write_bytes(GOOD)
    unpack(tmp_path / "set.tar.gz", "set")
    assert (tmp_path / "set" / "a").read_bytes() == b"one" and listing(tmp_path) == ["set", "set.tar.gz"]


def test_the_table_of_sources():
    assert list(module.SOURCES) == ["mnist", "cifar10", "cifar100"]
    for source in module.SOURCES.values():
        assert source.base_url.startswith("https://") and source.base_url.endswith("/")
        assert (source.folder is not None) == (len(source.files) == 1)
        for file in source.files:
            assert len(file.sha256) == 64 and int(file.sha256, 16) and file.size > 1000
            assert file.name.endswith(".gz") and "/" not in file.name
