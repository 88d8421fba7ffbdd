"""Damaged and foreign checkpoints: one line that names file and cause, or numbers that are right bit for bit.

LPNET_DAMAGED_FILES makes the campaign longer than its 20 files.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from io_case import numbers, shards_of

from lpnet.errors import CheckpointError
from lpnet.io import checkpoint, schema, verify
from lpnet.parallel.comm import Comm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        parts = shards_of(numbers(step), 0, 1)
        checkpoint.save(tmp_path, Comm(), step=step, shards=parts, attributes={"config": "a: 1\n" * 20})
    return tmp_path


def newer(folder: Path) -> Path:
    return folder / "step-00000002.h5"


def seal(path: Path) -> None:
    """A sidecar for the file as it is now."""
    schema.sidecar_of(path).write_text(f"{schema.file_sha256(path)}  {path.name}\n")


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.Checkpoint.open(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text
    return text


def edit(path: Path, change: Callable[[Any], None]) -> None:
    with h5py.File(path, "r+") as file:
        change(file)


def test_not_a_checkpoint(folder: Path) -> None:
    path = newer(folder)
    path.write_text("hello, this is text\n")
    assert "not an HDF5 file" in refusal(path)
    path.write_bytes(b"")
    assert "the file is empty" in refusal(path)
    path.unlink()
    assert "no such checkpoint; its folder holds step-00000001.h5" in refusal(path)
    assert "cannot be read" in refusal(folder)  # a folder
    with h5py.File(path, "w") as file:
        file["x"] = 1
    seal(path)
    assert "no checkpoint of lpnet" in refusal(path)


@pytest.mark.parametrize("sealed", [True, False, None])
def test_newer_schema(folder: Path, sealed: bool | None) -> None:
    path = newer(folder)
    edit(path, lambda file: file.attrs.modify("schema_version", 99))
    if sealed:
        seal(path)
    elif sealed is None:
        schema.sidecar_of(path).unlink()
    assert "schema version 99 is newer than this lpnet reads up to 1; use a newer lpnet" in refusal(path)


def test_edited_and_sealed_again(folder: Path) -> None:
    path = newer(folder)
    kept = path.read_bytes()

    def attempt(change: Callable[[Any], None]) -> str:
        path.write_bytes(kept)
        edit(path, change)
        seal(path)
        return refusal(path)

    def shape(file: Any) -> None:
        attributes = dict(file["model/stack.bias"].attrs)
        del file["model/stack.bias"]
        made = file.create_dataset("model/stack.bias", data=np.zeros((13, 2), "f4"))
        made.attrs.update(attributes)

    def value(file: Any) -> None:
        file["model/stack.weight"][5, 0, 0] = 7.0

    assert "attributes, names or shapes" in attempt(lambda file: file.__delitem__("model/stack.bias"))
    assert "attributes, names or shapes" in attempt(shape)
    assert "attributes, names or shapes" in attempt(lambda file: file.attrs.modify("step", 3))
    assert "model/stack.weight row 5 differs from its checksum" in attempt(value)
    assert "model/opening.weight differs" in attempt(
        lambda file: file["model/opening.weight"].write_direct(np.zeros((3, 4), "f4"))
    )
    assert "damaged" in attempt(lambda file: file.__delitem__("checksums"))


def test_a_truncated_newest_is_passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.truncate(newer(folder), 5000)
    with caplog.at_level(logging.WARNING), checkpoint.open_newest(folder) as file:  # type: ignore[union-attr]
        assert file.step == 1
        assert torch.equal(file.read("model/stack.weight"), numbers(1)["model/stack.weight"])
    assert "skipped" in caplog.text and "step-00000002.h5: damaged or changed" in caplog.text
    assert "truncated" in caplog.text
    os.truncate(folder / "step-00000001.h5", 5000)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is valid"):
        checkpoint.newest(folder)


@pytest.mark.ranks(3)
def test_every_rank_hears_the_verdict(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    for step in (1, 2):
        parts = shards_of(numbers(step), mine.rank, mine.size)
        checkpoint.save(shared_tmp_path, mine, step=step, shards=parts, attributes={})
    if mine.rank == 0:
        with newer(shared_tmp_path).open("r+b") as file:
            file.seek(9000)
            file.write(b"\xff" * 16)
    mine.barrier()
    with pytest.raises(CheckpointError, match="damaged or changed"):
        checkpoint.Checkpoint.open(newer(shared_tmp_path), mine)
    assert checkpoint.newest(shared_tmp_path, mine) == shared_tmp_path / "step-00000001.h5"


def test_a_sidecar_is_missing_or_wrong(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = newer(folder)
    schema.sidecar_of(path).write_text("")
    assert "says nothing" in refusal(path)
    schema.sidecar_of(path).unlink()
    with checkpoint.Checkpoint.open(path) as file:
        assert torch.equal(file.read("model/stack.weight"), numbers(2)["model/stack.weight"])
    assert "has no sidecar" in caplog.text


def test_a_crash_of_hdf5_is_the_childs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = newer(folder)
    schema.sidecar_of(path).unlink()
    fake = folder / "python"
    fake.write_text("#!/bin/sh\nkill -SEGV $$\n")
    fake.chmod(0o755)
    monkeypatch.setattr(verify.sys, "executable", str(fake))
    assert "HDF5 crashes on it (signal 11)" in refusal(path)


def test_hdf5_that_never_ends_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = newer(folder)
    schema.sidecar_of(path).unlink()
    fake = folder / "python"
    fake.write_text("#!/bin/sh\nexec sleep 100\n")
    fake.chmod(0o755)
    monkeypatch.setattr(verify.sys, "executable", str(fake))
    monkeypatch.setattr(verify, "PATIENCE_S", 0.3)
    assert "HDF5 did not finish reading it within 0 s" in refusal(path)


def test_numbers_that_change_after_the_verdict(folder: Path) -> None:
    path = newer(folder)
    file = checkpoint.Checkpoint.open(path)
    edit(path, lambda inside: inside["model/opening.weight"].write_direct(np.zeros((3, 4), "f4")))
    with pytest.raises(CheckpointError, match="differs from its checksum"):
        file.read("model/opening.weight")


def damage(path: Path, kind: str, g: np.random.Generator) -> None:
    """Spoil a file at random."""
    content = bytearray(path.read_bytes())
    if kind == "truncate":
        del content[int(g.integers(len(content))) :]
    elif kind == "flip":  # few, so that some fall on unused bytes
        for at in g.integers(len(content), size=int(g.integers(1, 4))):
            content[at] ^= 1 << int(g.integers(8))
    elif kind == "header":
        content[int(g.integers(2048))] ^= 0xFF
    elif kind == "zero":
        at = int(g.integers(len(content)))
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)


@pytest.mark.parametrize("sidecar", [True, False])
def test_campaign(folder: Path, sidecar: bool) -> None:
    cases = int(os.environ.get("LPNET_DAMAGED_FILES", "20")) // 2
    intact = newer(folder).read_bytes()
    outcomes = {"refused": 0, "right": 0}
    for case in range(cases):
        g = np.random.default_rng([case, sidecar])
        trial = folder / f"trial-{case}"
        shutil.copytree(folder, trial, ignore=shutil.ignore_patterns("trial-*"))
        path = newer(trial)
        damage(path, ("truncate", "flip", "header", "zero", "flip")[case % 5], g)
        if not sidecar:
            schema.sidecar_of(path).unlink()
        try:
            with checkpoint.Checkpoint.open(path) as file:
                assert not sidecar or path.read_bytes() == intact
                assert file.step == 2 and file.attributes["config"] == "a: 1\n" * 20
                for name, tensor in numbers(2).items():
                    assert torch.equal(file.read(name), tensor), name
            outcomes["right"] += 1
        except CheckpointError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            outcomes["refused"] += 1
            assert checkpoint.newest(trial) == trial / "step-00000001.h5"
    assert sum(outcomes.values()) == cases
    print(f"sidecar {sidecar}: {outcomes}")
