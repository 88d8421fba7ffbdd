"""Damaged and foreign checkpoints in a run folder: `lpnet train --resume auto` and `lpnet show --verify`, in processes.

Each case gives a line that names file and cause, or falls back to the checkpoint before, or loads numbers that are
right: the run that goes on must end up as the uninterrupted one did, bit for bit. LPNET_DAMAGED_FILES makes the
campaign longer than its 20 files; pytest -s prints the table.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from forked import Forked
from run_case import differences

from lpnet.io import schema

CASES = int(os.environ.get("LPNET_DAMAGED_FILES", "20"))
AT_ONCE = 20  # in one test, whose time is limited
CONFIG = """
seed: 3
method: mgrit
model: {layers: 8, width: 6, activation: tanh, opening: dense}
data: {name: peaks, train_samples: 40, validation_samples: 20, batch_size: 20}
mgrit: {levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1}
optim: {name: adam, lr: 0.01}
run: {steps: 4, eval_every: 0, checkpoint_every: 2, plots: false}
"""
NEWEST, OLDER, LAST = (f"checkpoints/step-{step:08d}.h5" for step in (4, 2, 6))
Rng = np.random.Generator


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked() as server:
        yield server


@pytest.fixture(scope="module")
def folders(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of 4 steps, an uninterrupted one of 6, and one of another network."""
    root = tmp_path_factory.mktemp("damage")
    (root / "config.yaml").write_text(CONFIG)
    for name, flags in {
        "run": [],
        "whole": ["--run.steps", "6"],
        "other": ["--model.width", "7"],
    }.items():
        done = forked(["train", root / "config.yaml", "--run.out", root / name, *flags])
        assert done.code == 0, done.err
    return {"config": root / "config.yaml", **{name: root / name for name in ("run", "whole", "other")}}


def seal(path: Path) -> None:
    """A sidecar for the file as it is now."""
    schema.sidecar_of(path).write_text(f"{schema.file_sha256(path)}  {path.name}\n")


def edit(change: Callable[[Any, Rng], None]) -> Callable[[Path, Rng], None]:
    """Change a file with h5py, and give it a sidecar that agrees."""

    def work(path: Path, rng: Rng) -> None:
        with h5py.File(path, "r+") as file:
            change(file, rng)
        seal(path)

    return work


def data_of(path: Path) -> list[tuple[int, int]]:
    """Where the numbers lie: (offset, bytes) of every dataset."""
    places = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.id.get_offset() is not None:
            places.append((item.id.get_offset(), item.id.get_storage_size()))

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return places


def flip(path: Path, places: list[tuple[int, int]], rng: Rng) -> None:
    """Flip bits in one of these places."""
    content = bytearray(path.read_bytes())
    offset, size = places[int(rng.integers(len(places)))]
    for at in rng.integers(size, size=int(rng.integers(1, 4))):
        content[offset + int(at)] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def metadata(path: Path, rng: Rng) -> None:
    """Flip bits outside of the numbers."""
    used = sorted(data_of(path))
    places, at = [], 0
    for offset, size in [*used, (path.stat().st_size, 0)]:
        if offset > at:
            places.append((at, offset - at))
        at = offset + size
    flip(path, places, rng)


def zeros(path: Path, rng: Rng) -> None:
    content = bytearray(path.read_bytes())
    at = int(rng.integers(len(content) - 512))
    content[at : at + 512] = bytes(512)
    path.write_bytes(content)


def some_dataset(file: Any, rng: Rng) -> str:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names[int(rng.integers(len(names)))]


def reshaped(file: Any, rng: Rng) -> None:
    name = some_dataset(file, rng)
    values, attributes = file[name][...], dict(file[name].attrs)
    del file[name]
    made = file.create_dataset(name, data=np.concatenate([np.atleast_1d(values)] * 2))
    made.attrs.update(attributes)


def changed(file: Any, rng: Rng) -> None:
    name = some_dataset(file, rng)
    values = np.array(file[name][...])
    values.reshape(-1).view(np.uint8)[int(rng.integers(values.nbytes))] ^= 1
    file[name][...] = values


def elsewhere(file: Any, rng: Rng) -> None:
    """The numbers of a dataset lie in another file of the machine."""
    name = "model/stack.weight"
    item, attributes = file[name], dict(file[name].attrs)
    shape, kind = item.shape, item.dtype
    del file[name]
    file.create_dataset(name, shape, kind, external=[("/proc/version", 0, h5py.h5f.UNLIMITED)]).attrs.update(attributes)


def packed(file: Any, rng: Rng) -> None:
    """A small file that unpacks to gigabytes."""
    del file["checksums"]
    file.create_dataset("checksums", (1 << 34,), "<u8", chunks=(1 << 16,), compression="gzip")


def linked(file: Any, rng: Rng) -> None:
    del file["checksums"]
    file["checksums"] = h5py.ExternalLink("step-00000002.h5", "/checksums")


KINDS: dict[str, Callable[[Path, Rng], None]] = {
    "truncated": lambda path, rng: os.truncate(path, int(rng.integers(path.stat().st_size))),
    "bits in data": lambda path, rng: flip(path, data_of(path), rng),
    "bits in metadata": metadata,
    "bits anywhere": lambda path, rng: flip(path, [(0, path.stat().st_size)], rng),
    "512 zeros": zeros,
    "zero length": lambda path, rng: os.truncate(path, 0),
    "a text file": lambda path, rng: (path.write_text("hello, this is text\n"), seal(path))[0],  # type: ignore[dict-item]
    "wrong shape": edit(reshaped),
    "missing dataset": edit(lambda file, rng: file.__delitem__(some_dataset(file, rng))),
    "a number changed": edit(changed),
    "another schema": edit(lambda file, rng: file.attrs.modify("schema_version", int(rng.choice([0, 2, 99])))),
    "attribute changed": edit(lambda file, rng: file.attrs.modify("step", 6)),
    "numbers elsewhere": edit(elsewhere),
    "packed bomb": edit(packed),
    "link elsewhere": edit(linked),
    "another network": lambda path, rng: None,
}


def damage(path: Path, kind: str, rng: Rng, other: Path) -> None:
    """Spoil one file, and in a third of the cases its sidecar."""
    if kind == "another network":
        shutil.copy(other / NEWEST, path)
        shutil.copy(schema.sidecar_of(other / NEWEST), schema.sidecar_of(path))
        return
    KINDS[kind](path, rng)
    what = rng.integers(3)
    if what == 0:
        schema.sidecar_of(path).unlink()
    elif what == 1 and kind.startswith("bits"):
        seal(path)  # as if it had been written like that


@pytest.fixture(scope="module")
def table() -> Iterator[Counter[tuple[str, str]]]:
    counts: Counter[tuple[str, str]] = Counter()
    yield counts
    columns = ("one-line error", "fell back", "right numbers")
    print(f"\n{'damage':20}" + "".join(f"{column:>16}" for column in columns))
    for kind in KINDS:
        print(f"{kind:20}" + "".join(f"{counts[kind, column]:16d}" for column in columns))
    print(f"{'all ' + str(counts.total()):20}" + "".join(f"{sum(counts[k, c] for k in KINDS):16d}" for c in columns))


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_campaign(
    first: int, forked: Forked, folders: dict[str, Path], tmp_path: Path, table: Counter[tuple[str, str]]
) -> None:
    for case in range(first, min(first + AT_ONCE, CASES)):
        rng = np.random.default_rng(case)
        kind = list(KINDS)[case % len(KINDS)]
        run = tmp_path / f"run-{case}"
        shutil.copytree(folders["run"], run)
        newest = run / NEWEST
        damage(newest, kind, rng, folders["other"])
        both = kind != "another network" and rng.integers(6) == 0
        if both:
            damage(run / OLDER, kind, rng, folders["other"])
        what = f"case {case}, {kind}{', both files' if both else ''}"
        shown = forked(["show", "--verify", newest], timeout=150)  # HDF5 that goes round in circles is ended after 15 s
        assert shown.code in (0, 2) and not shown.traceback, f"{what}: {shown}"
        assert shown.code == 0 or (len(shown.errors) == 1 and str(newest) in shown.errors[0]), f"{what}: {shown}"
        words = ["train", folders["config"], "--run.out", run, "--resume", "auto", "--run.steps", "6"]
        done = forked(words, timeout=150)
        assert not done.traceback and done.code in (0, 2), f"{what}: {done}"
        if done.code == 0:
            assert differences(run / LAST, folders["whole"] / LAST) == [], f"{what}: other numbers\n{done.err}"
            skipped = [line for line in done.err.splitlines() if "checkpoint skipped" in line]
            assert all(str(run / "checkpoints") in line for line in skipped)
            outcome = "fell back" if skipped else "right numbers"
        else:
            assert len(done.errors) == 1 and str(run) in done.errors[0], f"{what}: {done}"
            outcome = "one-line error"
        assert (outcome == "right numbers") <= (shown.code == 0), f"{what}: {shown} {done}"
        table[kind, outcome] += 1
        shutil.rmtree(run)
