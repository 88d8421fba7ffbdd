"""Folders of images: listing, crops, decoding in any batch and with any number of threads, refusals."""

from __future__ import annotations

import io
import sys
import zipfile

import numpy as np
import pytest
import torch

from lpnet.data import BatchOrder
from lpnet.data.augment import counted_bits
from lpnet.data.image_folder import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    middle_box,
    open_folders,
    open_part,
    random_box,
)
from lpnet.data.prefetch import Prefetch
from lpnet.errors import DataError, UsageError

CLASSES = ("ant", "bee", "cat")


@pytest.fixture
def root(tmp_path):
    """Three classes, 5 training and 2 validation images each, of many sizes and kinds."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("val", 2)):
        for name in CLASSES:
            (tmp_path / part / name).mkdir(parents=True)
            for k in range(count):
                height, width = rng.integers(20, 60, 2)
                pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
                mode, end = (("RGB", "jpg"), ("RGB", "PNG"), ("L", "png"), ("RGBA", "png"), ("CMYK", "jpeg"))[k]
                image.fromarray(pixels).convert(mode).save(tmp_path / part / name / f"{k}.{end}")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    return tmp_path


def test_listing(root):
    train, validation = open_folders(root, size=16)
    assert (len(train), len(validation), train.class_names) == (15, 6, CLASSES)
    assert train.y.tolist() == [0] * 5 + [1] * 5 + [2] * 5 and train.y.dtype == torch.int64
    assert train.files[:2] == ("ant/0.jpg", "ant/1.PNG")


def test_decoding(root):
    train, validation = open_folders(root, size=16)
    taken = validation.take(torch.arange(6))
    assert taken.x.shape == (6, 3, 16, 16) and taken.y.tolist() == [0, 0, 1, 1, 2, 2]
    taken = train.take(torch.tensor([7, 0]), epoch=0)
    assert taken.x.shape == (2, 3, 16, 16) and taken.y.tolist() == [1, 0] and taken.x.is_contiguous()
    assert train.take(torch.arange(0), epoch=0).x.shape == (0, 3, 16, 16)
    assert open_part(root / "val", size=8, dtype=torch.float64).take(torch.arange(1)).x.dtype == torch.float64


def test_pixels_are_standardised_and_in_place(root):
    image = pytest.importorskip("PIL.Image")
    left_red = np.zeros((32, 32, 3), np.uint8)
    left_red[:, :16, 0] = 255
    image.fromarray(left_red).save(root / "val" / "ant" / "0.jpg", quality=100)
    x = open_part(root / "val", size=14).take(torch.tensor([0])).x[0]
    colours = x * torch.tensor(IMAGENET_DEVIATION).view(3, 1, 1) + torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
    assert (colours[0, :, :5] > 0.9).all() and (colours[0, :, 9:] < 0.1).all() and (colours[1:] < 0.1).all()
    mirrored = 0
    whole = open_part(root / "val", size=14)
    for epoch in range(40):
        window = whole.take(torch.tensor([0]), epoch=epoch).x[0, 0]
        mirrored += bool(window[:, -1].mean() > window[:, 0].mean() + 1)
    assert 8 < mirrored < 32  # crops of one half only show no difference


def test_independent_of_batches_and_threads(root):
    train, _ = open_folders(root, size=12, seed=4)
    whole = train.take(torch.arange(15), epoch=3)
    many, _ = open_folders(root, size=12, seed=4, workers=4)
    for batch in (1, 4, 15):
        order = BatchOrder(15, batch, 0)
        for step in range(order.batches):
            indices = order.at(step).indices
            for source in (train, many):
                taken = source.take(indices, epoch=3)
                assert torch.equal(taken.x, whole.x[indices]) and torch.equal(taken.y, whole.y[indices])
    assert not torch.equal(train.take(torch.arange(15), epoch=4).x, whole.x)
    other, _ = open_folders(root, size=12, seed=5)
    assert not torch.equal(other.take(torch.arange(15), epoch=3).x, whole.x)


def test_prefetched(root):
    train, _ = open_folders(root, size=12)
    order = BatchOrder(15, 4, 0)

    def make(step):
        batch = order.at(step)
        return train.take(batch.indices, epoch=batch.epoch)

    with Prefetch(make, last=8) as batches:
        for step, batch in enumerate(batches):
            assert torch.equal(batch.x, make(step).x) and torch.equal(batch.y, make(step).y)


def test_boxes_are_inside_and_of_the_right_size():
    for width, height in ((500, 375), (64, 64), (30, 400), (1, 1), (3, 1000)):
        for index in range(60):
            bits = counted_bits(0, "test", epoch=0, indices=np.array([index]), count=33)[0]
            left, top, right, bottom = random_box(width, height, bits)
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
            ratio = (right - left) / (bottom - top)
            if min(width, height) > 20:
                assert 0.65 < ratio < 1.5
                if max(width, height) < 4 * min(width, height) / 3:
                    assert (right - left) * (bottom - top) / (width * height) > 0.07
    assert middle_box(160, 80) == (45, 5, 115, 75)


def test_boxes_are_spread():
    bits = counted_bits(0, "test", epoch=0, indices=np.arange(2000), count=33)
    boxes = np.array([random_box(400, 300, row) for row in bits])
    shares = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 120_000
    rng, expected = np.random.default_rng(0), []
    while len(expected) < 2000:  # the same by rejection, from other random numbers
        share, ratio = rng.uniform(0.08, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, high = np.rint((120_000 * share * ratio) ** 0.5), np.rint((120_000 * share / ratio) ** 0.5)
        if wide <= 400 and high <= 300:
            expected.append(wide * high / 120_000)
    assert abs(shares.mean() - np.mean(expected)) < 0.03 and abs(shares.std() - np.std(expected)) < 0.02
    assert shares.min() > 0.079 and shares.max() <= 1
    centres = (boxes[:, 0] + boxes[:, 2]) / 2
    assert abs(centres.mean() - 200) < 5


def test_a_class_may_be_missing_in_validation_only(root):
    (root / "val" / "bee" / "0.jpg").unlink()
    (root / "val" / "bee" / "1.PNG").unlink()
    with pytest.raises(DataError, match=r"bee holds no images \(\.jpg, .*add some or remove the folder"):
        open_folders(root)
    (root / "val" / "bee").rmdir()
    assert open_folders(root)[1].y.tolist() == [0, 0, 2, 2]
    (root / "val" / "dog").mkdir()
    with pytest.raises(DataError, match=r"val holds 1 classes that the training part lacks, such as dog; .* 3 folder"):
        open_folders(root)


def test_missing_folders(tmp_path):
    with pytest.raises(DataError, match="train is not a folder; expected one folder per class"):
        open_folders(tmp_path)
    with pytest.raises(DataError, match="holds no folders; expected one per class"):
        open_part(tmp_path)
    with pytest.raises(UsageError, match="images of size 0 decoded by 1 threads: both numbers must be 1 or more"):
        open_part(tmp_path, size=0)


@pytest.mark.parametrize("content", [b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_damaged_images(root, content):
    (root / "train" / "bee" / "0.jpg").write_bytes(content)
    train, _ = open_folders(root, size=8)
    with pytest.raises(DataError, match=r"bee/0\.jpg \(sample 5\) cannot be decoded \(.+\); replace or remove it"):
        train.take(torch.arange(15), epoch=0)


def test_truncated_and_vanished_images(root):
    path = root / "train" / "bee" / "0.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    train, _ = open_folders(root, size=8)
    with pytest.raises(DataError, match=r"bee/0\.jpg \(sample 5\) cannot be decoded"):
        train.take(torch.tensor([5]))
    path.unlink()
    with pytest.raises(DataError, match=r"\(sample 5\) cannot be decoded \(.*No such file"):
        train.take(torch.tensor([4, 5]))


def test_without_pillow(root, monkeypatch):
    train, _ = open_folders(root, size=8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match="reading images needs the package pillow; install it"):
        train.take(torch.arange(2))


def test_real_images(tmp_path, data_root):
    """Three classes of CIFAR-10 (JPEG copy) as a folder of images."""
    pytest.importorskip("PIL")
    archive = data_root / "cifar10" / "cifar10-jpeg.zip"
    if not archive.is_file():
        pytest.skip(f"{archive} is not there")
    with zipfile.ZipFile(archive) as zipped:
        for split in ("train", "test"):
            for name in ("bird", "frog", "truck"):
                (tmp_path / split / name).mkdir(parents=True)
                for member in sorted(n for n in zipped.namelist() if n.startswith(f"{split}/{name}/"))[1:9]:
                    (tmp_path / member).write_bytes(zipped.read(member))
    train, validation = open_folders(tmp_path, size=28)
    assert validation.root.name == "test" and len(train) == len(validation) == 24
    x = validation.take(torch.arange(24)).x
    assert torch.corrcoef(torch.stack([x[..., 1:].flatten(), x[..., :-1].flatten()]))[0, 1] > 0.85
    assert x.abs().max() < 3 and train.take(torch.arange(24), epoch=0).x.shape == (24, 3, 28, 28)
    first = io.BytesIO((tmp_path / "test" / validation.files[0]).read_bytes())
    pixels = np.asarray(pytest.importorskip("PIL.Image").open(first).convert("RGB"), dtype=np.float32) / 255
    inner = (torch.from_numpy(pixels[2:30, 2:30]).permute(2, 0, 1) - torch.tensor(IMAGENET_MEAN).view(3, 1, 1)) / (
        torch.tensor(IMAGENET_DEVIATION).view(3, 1, 1)
    )
    torch.testing.assert_close(x[0], inner, atol=1e-5, rtol=0)  # 7/8 of 32 pixels are 28: nothing is scaled
