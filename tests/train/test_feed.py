"""Samples on their way to the steps: folders of images, augmentation, the thread that runs ahead, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lpnet.config import Config, DataConfig
from lpnet.data import BatchOrder, load
from lpnet.errors import ConfigError, DataError
from lpnet.io.metrics import read
from lpnet.train.feed import Feed

CONFIG = """
method: fdg
model: {name: resnet_cifar, depth: 8}
data: {name: image_folder, root: ROOT, crop: 16, batch_size: 4, augment: crop_flip, train_samples: 10}
fdg: {modules: 2, cuts: uniform}
optim: {name: sgd, lr: 0.05, momentum: 0.9}
run: {steps: 5, eval_every: 2, checkpoint_every: 0}
"""


def images(root: Path) -> None:
    """Three classes, four training images and two validation images each."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for name in ("ant", "bee", "cat"):
            (root / part / name).mkdir(parents=True)
            for k in range(count):
                pixels = rng.integers(0, 256, (20 + k, 24, 3), dtype=np.uint8)
                image.fromarray(pixels).save(root / part / name / f"{k}.png")


@pytest.fixture
def config(shared_tmp_path, comm) -> Path:
    path = shared_tmp_path / "config.yaml"
    pytest.importorskip("PIL.Image")
    if comm.rank == 0:
        images(shared_tmp_path / "data")
        path.write_text(CONFIG.replace("ROOT", str(shared_tmp_path / "data")))
    comm.barrier()
    return path


def rows_of(folder: Path) -> list[dict]:
    timed = ("seconds", "wait_seconds", "modules")
    return [{key: value for key, value in row.items() if key not in timed} for row in read(folder / "metrics.jsonl")]


@pytest.mark.ranks(2)
def test_a_folder_of_images_on_two_ranks_and_on_one(comm, config, shared_tmp_path, run_train):
    """With the thread and without, on two ranks and on one: the same losses and accuracies."""
    alone, together, inline = (shared_tmp_path / name for name in ("alone", "together", "inline"))
    single = comm.Split(comm.rank)
    if comm.rank == 0:
        assert run_train(None, config, alone, "--data.workers", 2) == 0
        assert run_train(None, config, inline, "--data.prefetch", 0) == 0
    single.Free()
    comm.barrier()
    assert run_train(comm, config, together) == 0
    if comm.rank == 0:
        rows = rows_of(alone)
        assert rows == rows_of(inline)
        kept = ("loss", "train_accuracy", "val_accuracy", "batch")
        assert [[row.get(key) for key in kept] for row in rows] == [
            [row.get(key) for key in kept] for row in rows_of(together)
        ]
        assert rows[-1]["val_accuracy"] is not None and rows[-2]["loss"] is not None


@pytest.mark.ranks(2)
def test_an_image_that_cannot_be_decoded_ends_all_ranks(comm, config, shared_tmp_path, run_train):
    if comm.rank == 0:
        for path in (shared_tmp_path / "data" / "train").glob("*/*.png"):
            path.write_bytes(path.read_bytes()[:60])
    comm.barrier()
    with pytest.raises(DataError, match=r"\.png \(sample \d+\) cannot be decoded"):
        run_train(comm, config, shared_tmp_path / "out", "--fdg.cuts", "[2]")


def mnist_like(root: Path) -> DataConfig:
    from data.test_mnist import write

    write(root)
    return DataConfig(name="mnist", root=str(root), batch_size=16, augment="crop_flip")


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_do_not_depend_on_the_thread(tmp_path, monkeypatch, ahead):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    config = mnist_like(tmp_path)
    data = load(config, 0, torch.float32)
    order = BatchOrder(len(data.train), 16, 0)
    plain = Feed(data, order, DataConfig(**{**vars(config), "prefetch": 0}), 0, first=0, last=7)
    with Feed(data, order, DataConfig(**{**vars(config), "prefetch": ahead}), 0, first=2, last=7) as feed:
        assert feed.ahead == ahead
        for step in range(2, 7):  # over the end of the first epoch
            (one, id_one), (two, id_two) = feed.next(step), plain.make(step)
            assert torch.equal(one.x, two.x) and torch.equal(one.y, two.y) and id_one == id_two
    blind = Feed(data, order, config, 0, first=0, last=7, reads=False)
    assert blind.ahead == 0 and blind.next(3)[0].x.numel() == 0
    assert torch.equal(blind.next(3)[0].y, plain.make(3)[0].y)


def test_threads_run_ahead_where_samples_are_made():
    assert DataConfig(name="mnist", root=".", augment="crop_flip").ahead == 2
    assert DataConfig(name="mnist", root=".").ahead == 0
    assert DataConfig(name="image_folder", root=".", batch_size=2).ahead == 2
    assert DataConfig(name="image_folder", root=".", batch_size=2, prefetch=0).ahead == 0


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"name": "mnist", "root": ".", "crop": 32}, "data.crop and data.workers are for image_folder, not for mnist"),
        ({"name": "mnist", "root": ".", "prefetch": -1}, "data.prefetch is -1; it must not be negative"),
        ({"name": "image_folder", "root": "."}, "decoded batch by batch; set data.batch_size"),
        ({"name": "image_folder", "batch_size": 2}, "data.name image_folder reads files; give --data.root FOLDER"),
        ({"name": "peaks", "augment": "crop_flip"}, "data.augment crop_flip is for images, not for peaks"),
        ({"name": "image_folder", "root": ".", "batch_size": 2, "held_out": True}, "data.held_out is for mnist"),
    ],
)
def test_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**keys)


def test_layers_cannot_train_on_folders():
    from lpnet.train.build import check

    config = Config(method="mgrit", data=DataConfig(name="image_folder", root=".", batch_size=2))
    with pytest.raises(ConfigError, match="is for networks of units, which dense with method mgrit is not"):
        check(config, 1)
