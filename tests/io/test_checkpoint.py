"""Checkpoints among ranks: any number writes, any number reads, bit for bit; refusals on every rank."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from io_case import LAYERS, is_stacked, numbers, shards_of

from lpnet.errors import CheckpointError, LpnetError, SaveError
from lpnet.io import checkpoint, checkpoint_rows, checkpoint_write, publish
from lpnet.parallel.comm import Comm
from lpnet.parallel.partition import uniform
from lpnet.parallel.shard import Shard

ATTRIBUTES: dict[str, Any] = {"method": "mgrit", "seed": 3, "lr": 0.1, "flag": True, "config": "a: 1\nb: é\n"}


def save(folder: Path, comm: Comm, step: int, **options: Any) -> Path:
    parts = shards_of(numbers(step), comm.rank, comm.size)
    return checkpoint.save(folder, comm, step=step, shards=parts, attributes=ATTRIBUTES, **options)


def assert_right(path: Path, step: int, comm: Comm | None = None) -> None:
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    lo, hi = uniform(LAYERS, size).block(rank)
    with checkpoint.Checkpoint.open(path, comm) as file:
        assert file.step == step
        assert set(file.names()) == set(numbers(step))
        for name, tensor in numbers(step).items():
            found = file.read(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
            if is_stacked(name) and len(tensor) == LAYERS:
                assert torch.equal(file.read_rows(name, lo, hi), tensor[lo:hi]), name
                assert file.read_rows(name, lo, lo).shape == tensor[:0].shape


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_number_of_ranks_reads_it(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    path = save(shared_tmp_path, mine, 7)
    assert path == shared_tmp_path / "step-00000007.h5"
    with checkpoint.Checkpoint.open(path, mine) as file:
        assert file.attributes["writer"] == ("mpio" if h5py.get_config().mpi and mine.size > 1 else "serial")
        assert file.attributes["written_by_ranks"] == mine.size
        assert {name: file.attributes[name] for name in ATTRIBUTES} == ATTRIBUTES
    for readers in range(1, mine.size + 1):
        part = comm.Split(0 if mine.rank < readers else 1, mine.rank)
        if mine.rank < readers:
            assert_right(path, 7, Comm(part))
        comm.Barrier()
        part.Free()
    mine.free()


@pytest.mark.ranks(1, 2, 3)
def test_serial_writer_makes_the_same_file(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    path = save(shared_tmp_path, mine, 7, writer="serial")
    with checkpoint.Checkpoint.open(path, mine) as file:
        assert file.attributes["writer"] == "serial"
    assert_right(path, 7, mine)


@pytest.mark.ranks(2, 3)
def test_without_mpi_in_h5py_the_ranks_take_turns(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Comm(comm)
    monkeypatch.setattr(checkpoint_write, "_has_mpio", lambda comm: comm.rank == 0)  # one rank without is enough
    monkeypatch.setattr(checkpoint_write, "_said", set())
    with caplog.at_level(logging.INFO):
        save(shared_tmp_path, mine, 1)
        path = save(shared_tmp_path, mine, 2)
    with checkpoint.Checkpoint.open(path, mine) as file:
        assert file.attributes["writer"] == "serial"
    assert_right(path, 2, mine)
    assert caplog.text.count("one after another") == (mine.rank == 0)
    with pytest.raises(SaveError, match="writer mpio needs"):
        save(shared_tmp_path, mine, 3, writer="mpio")


@pytest.mark.ranks(2, 4)
def test_large_rows_go_in_several_writes(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Comm(comm)
    monkeypatch.setattr(checkpoint_rows, "BYTES_PER_WRITE", 200)  # a row and a bit
    assert_right(save(shared_tmp_path, mine, 7), 7, mine)


@pytest.mark.ranks(1, 3)
def test_load_into_the_tensors_of_this_rank(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    path = save(shared_tmp_path, mine, 7)
    # three ranks wrote; read it with blocks of another size
    lo, hi = [(0, 1), (1, 11), (11, 13)][mine.rank] if mine.size == 3 else (0, LAYERS)
    weight = torch.zeros(hi - lo, 5, 3, dtype=torch.float64)
    with checkpoint.Checkpoint.open(path, mine) as file:
        file.load_into("model", [Shard("stack.weight", weight, (lo, hi), LAYERS)])
        assert torch.equal(weight, numbers(7)["model/stack.weight"][lo:hi])
        with pytest.raises(CheckpointError, match="float64 in the file"):
            file.load_into("model", [Shard("stack.weight", weight.float(), (lo, hi), LAYERS)])
        with pytest.raises(CheckpointError, match="has no rows 0 to 14"):
            file.read_rows("model/stack.weight", 0, 14)
        with pytest.raises(CheckpointError, match="holds no model/other"):
            file.read("model/other")


@pytest.mark.ranks(1, 3)
def test_another_network_is_named_by_its_first_difference(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    path = save(shared_tmp_path, mine, 7)

    def compare(change: dict[str, torch.Tensor | None]) -> None:
        tensors = {name: tensor for name, tensor in numbers(7).items() if name.startswith("model/")}
        changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        shards = shards_of(changed, mine.rank, mine.size)["model"]
        expected = checkpoint.describe_shards("model", shards, mine)
        with checkpoint.Checkpoint.open(path, mine) as file:
            file.compare("model", expected)

    compare({})
    whole = "model/closing.weight"
    with pytest.raises(CheckpointError, match=r"closing.weight has shape \(2, 2\) in the file and \(9, 2\) in the"):
        compare({whole: torch.zeros(9, 2), "model/closing.mask": None})
    with pytest.raises(CheckpointError, match=r"stack.weight has shape \(13, 5, 3\) in the file and \(13, 5, 4\) in"):
        compare({"model/stack.weight": torch.zeros(LAYERS, 5, 4, dtype=torch.float64)})
    with pytest.raises(CheckpointError, match=r"model/extra has shape \(1,\) in the network and is not in the file"):
        compare({"model/extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"model/closing.mask has shape \(3,\) in the file and is not in the"):
        compare({"model/closing.mask": None})
    with pytest.raises(CheckpointError, match="closing.weight is float16 in the file and float32 in the network"):
        compare({whole: torch.zeros(2, 2)})


@pytest.mark.ranks(2, 3)
def test_contradictions_between_ranks(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    first = mine.rank == 0

    def refuse(match: str, *shards: Shard, step: int = 1) -> None:
        with pytest.raises(SaveError, match=match):
            checkpoint.save(shared_tmp_path, mine, step=step, shards={"model": shards}, attributes={})
        mine.barrier()
        assert not list(shared_tmp_path.iterdir())

    row = torch.zeros(1, 2)
    refuse("must be the same on all ranks", step=mine.rank)
    refuse("rows 1 to 1 are missing", Shard("w", row, (2 * mine.rank, 2 * mine.rank + 1), 9))
    refuse("row 0 is there twice", Shard("w", row, (0, 1), 9))
    refuse(f"end at row {mine.size} of 9", Shard("w", row, (mine.rank, mine.rank + 1), 9))
    refuse("w is on ranks 0 and 1", Shard("w", row))
    refuse("9 of", Shard("w", row, (mine.rank, mine.rank + 1), 8 if first else 9))
    refuse(
        r"9 rows of \(2,\) float32, rank 1 has 9 of \(2,\) float64",
        Shard("w", row if first else row.double(), (0, 1), 9),
    )
    refuse("cannot be rows", *[Shard("w", row, (0, 2), 2)] * (not first))
    refuse("cannot name a dataset", *[Shard("../w", row)] * first)
    refuse("no tensors of dtype complex64", *[Shard("w", row.cfloat())] * first)
    refuse("w is a dataset and cannot hold model/w/x", *[Shard("w", row), Shard("w/x", row)] * first)


def test_attributes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="attribute step is written by lpnet itself"):
        checkpoint.save(tmp_path, Comm(), step=1, shards={}, attributes={"step": 2})
    with pytest.raises(SaveError, match="attribute config is a dict"):
        checkpoint.save(tmp_path, Comm(), step=1, shards={}, attributes={"config": {}})  # type: ignore[dict-item]
    with pytest.raises(SaveError, match="keep is 0"):
        checkpoint.save(tmp_path, Comm(), step=1, shards={}, attributes={}, keep=0)
    assert not list(tmp_path.iterdir())


def test_keeps_the_newest_and_says_which_is_latest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-00000009.h5.partial").write_text("of a killed run")
    for step in (1, 2, 3, 4):
        save(tmp_path, Comm(), step, keep=3)
    files = {f"step-0000000{step}.h5{end}" for step in (2, 3, 4) for end in ("", ".sha256")} | {"latest"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert (tmp_path / "latest").read_text() == "step-00000004.h5\n"
    # gone on from step 2: the later ones step aside, and are not chosen by the next resume
    save(tmp_path, Comm(), 3, keep=2)
    assert "step-00000004.h5 is of a later step than 3" in caplog.text
    assert (tmp_path / "step-00000004.h5.superseded").exists()
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000003.h5"
    assert not (tmp_path / "step-00000004.h5").exists() and (tmp_path / "step-00000002.h5").exists()


def test_a_snapshot_is_written_later(tmp_path: Path) -> None:
    tensors = numbers(7)
    entries = checkpoint.prepare(shards_of(tensors, 0, 1), copy=True)
    for tensor in tensors.values():
        tensor.zero_()
    assert_right(checkpoint.write(tmp_path, Comm(), step=7, entries=entries, attributes={}), 7)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "missing") is None
    assert checkpoint.newest(tmp_path) is None


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("place", "number", "says"),
    [
        ("_allocate", errno.ENOSPC, "No space left on device; step-00000001.h5 is intact; free space in"),
        ("_allocate", errno.EDQUOT, "quota"),
        ("read_back", errno.EIO, "Input/output error; step-00000001.h5 is intact"),
        ("publish", errno.EROFS, "Read-only file system; step-00000001.h5 is intact; choose a folder"),
    ],
)
def test_what_the_file_system_refuses(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: int, says: str
) -> None:
    mine = Comm(comm)
    save(shared_tmp_path, mine, 1)
    before = {path.name: path.read_bytes() for path in shared_tmp_path.iterdir()}
    mine.barrier()

    def refuse(*_: Any) -> None:
        if place != "read_back" or mine.rank == mine.size - 1:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_write, place, refuse)
        with pytest.raises(SaveError, match=says):
            save(shared_tmp_path, mine, 2)
        mine.barrier()
    assert {path.name: path.read_bytes() for path in shared_tmp_path.iterdir()} == before
    mine.barrier()
    assert_right(save(shared_tmp_path, mine, 2), 2, mine)  # and on it goes


@pytest.mark.ranks(2)
def test_writes_that_mpi_loses_are_noticed(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Comm(comm)
    monkeypatch.setattr(checkpoint_rows, "_write_rows", lambda *_: None)
    with pytest.raises(SaveError, match="what is read back is not what was written; there was none before"):
        save(shared_tmp_path, mine, 1)
    mine.barrier()
    assert not list(shared_tmp_path.iterdir())


@pytest.mark.ranks(2)
def test_an_error_on_one_rank_before_writing(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    broken: Any = [object()] if mine.rank == 1 else []
    with pytest.raises(AttributeError if mine.rank == 1 else LpnetError, match="no attribute"):
        checkpoint.save(shared_tmp_path, mine, step=1, shards={"model": broken}, attributes={})


def test_replacing_a_step_is_safe_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, Comm(), 5)
    old = path.read_bytes()

    def stop(_: Path) -> None:
        raise OSError(errno.EIO, "stopped between sidecar and rename")

    with monkeypatch.context() as patch:
        patch.setattr(publish, "_sync_folder", stop)
        with pytest.raises(SaveError):
            checkpoint.save(tmp_path, Comm(), step=5, shards={}, attributes={})
    assert path.read_bytes() == old
    assert_right(path, 5)
    assert len((tmp_path / "step-00000005.h5.sha256").read_text().splitlines()) == 2
    save(tmp_path, Comm(), 5)
    assert len((tmp_path / "step-00000005.h5.sha256").read_text().splitlines()) == 1


def test_h5py_alone_reads_it(tmp_path: Path) -> None:
    path = save(tmp_path, Comm(), 7)
    with h5py.File(path, "r") as file:
        assert np.array_equal(file["model/stack.weight"][...], numbers(7)["model/stack.weight"].numpy())
        half = file["model/stack.half"]
        assert half.dtype == np.uint16 and half.attrs["dtype"] == "bfloat16"
        assert file.attrs["config"] == ATTRIBUTES["config"] and file.attrs["step"] == 7
    if tool := shutil.which("sha256sum"):
        subprocess.run([tool, "-c", f"{path.name}.sha256"], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed (hdf5-tools)")
def test_h5dump_reads_it(tmp_path: Path) -> None:
    path = save(tmp_path, Comm(), 7)
    text = subprocess.run(["h5dump", str(path)], check=True, capture_output=True, text=True).stdout
    assert 'DATASET "stack.weight"' in text and '"bfloat16"' in text


def test_table(tmp_path: Path) -> None:
    path = save(tmp_path, Comm(), 7)
    text = checkpoint.describe(path)
    assert "model/stack.weight" in text and "(13, 5, 3)" in text and "bfloat16" in text and "  b: é" in text
    assert text.endswith("the file matches its SHA-256")
    assert checkpoint.describe(path, verify=True).endswith("every row matches its checksum")
    program = (
        f"import sys; from lpnet.io.checkpoint import describe; describe({str(path)!r}); print('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )
