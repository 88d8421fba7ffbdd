"""idx files, gzip or not: what is read, and every refusal."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch

from lpnet.config import DataConfig
from lpnet.data import Data, load
from lpnet.errors import DataError

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(values) -> bytes:
    values = np.asarray(values, dtype=np.uint8)
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write(folder, *, zipped=False):
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 40), ("t10k", 20)):
        for kind, values in (
            ("images-idx3", rng.integers(0, 256, (count, 28, 28))),
            ("labels-idx1", np.arange(count) % 10),
        ):
            content = idx(values)
            path = folder / f"{prefix}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def read(folder, dtype=torch.float32, **options) -> Data:
    return load(DataConfig(name="mnist", root=str(folder), **options), 0, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_files(tmp_path, dtype):
    data = read(write(tmp_path), dtype)
    assert data.train.x.shape == (40, 1, 28, 28) and data.validation.x.shape == (20, 1, 28, 28)
    assert data.train.x.dtype == dtype and data.train.y.dtype == torch.int64
    assert (data.classes, data.features, data.class_names) == (10, 784, tuple("0123456789"))
    assert data.train.y.tolist() == [k % 10 for k in range(40)]
    images = np.random.default_rng(0).integers(0, 256, (40, 28, 28)) / 255
    expected = (images - images.mean()) / images.std()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    np.testing.assert_allclose(data.train.x[:, 0].double(), expected, atol=tolerance)


def test_gzip_or_not_and_other_names(tmp_path):
    plain, zipped = tmp_path / "plain", tmp_path / "zipped"
    plain.mkdir()
    zipped.mkdir()
    first = read(write(plain))
    assert torch.equal(first.train.x, read(write(zipped, zipped=True)).train.x)
    for path in list(zipped.iterdir()):  # gzip content under a plain name, and the name with a dot
        path.rename(zipped / path.name.replace("-idx", ".idx").removesuffix(".gz"))
    assert torch.equal(first.train.x, read(zipped).train.x)


def test_limits_are_stratified(tmp_path):
    data = read(write(tmp_path), train_samples=20, validation_samples=10)
    assert data.train.y.bincount().tolist() == [2] * 10 and data.validation.y.bincount().tolist() == [1] * 10
    assert data.train.x.mean().abs() < 1e-5  # standardised by the samples in use
    with pytest.raises(DataError, match="data.validation_samples is 21, but there are 20 samples"):
        read(tmp_path, validation_samples=21)
    with pytest.raises(DataError, match="data.train_samples is 9, fewer than the 10 classes"):
        read(tmp_path, train_samples=9)


def test_held_out_samples(tmp_path):
    """Validation on training images that are not trained on; the test files are not even read."""
    whole = read(write(tmp_path)).train
    for name in NAMES[2:]:
        (tmp_path / name).unlink()
    data = read(tmp_path, train_samples=20, validation_samples=10, held_out=True)
    assert (len(data.train), len(data.validation)) == (20, 10)

    def keys(x):  # the order of the pixels survives standardisation
        return {tuple(image.flatten().argsort(stable=True).tolist()) for image in x}

    train, held_out = keys(data.train.x), keys(data.validation.x)
    assert not train & held_out and train | held_out <= keys(whole.x) and len(train | held_out) == 30
    with pytest.raises(DataError, match="held out of its 40 training images; say how many"):
        read(tmp_path, held_out=True)


IMAGES = idx(np.zeros((40, 28, 28)))
LABELS = idx(np.zeros(40))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (0, IMAGES[:-1], "is truncated: its header says 40 x 28 x 28 = 31,360 values, 31,359 are there; fetch"),
        (0, IMAGES + b"12", "is too long: its header says 40 x 28 x 28 = 31,360 values, 31,362 are there"),
        (0, IMAGES[:10], "is truncated: its header needs 16 bytes, 10 are there"),
        (0, b"", "begins with nothing; expected 00 00 08 03, an idx file of .* with 3 axes; give the original"),
        (0, LABELS, "begins with 00 00 08 01; expected 00 00 08 03"),
        (1, IMAGES, "begins with 00 00 08 03; expected 00 00 08 01, an idx file of unsigned bytes with 1 axis;"),
        (1, b"\x00\x00\x0d\x01" + LABELS[4:], "begins with 00 00 0d 01; expected 00 00 08 01"),
        (1, idx(np.zeros(39)), "train-images-idx3-ubyte holds 40 images, train-labels-idx1-ubyte holds 39 labels"),
        (1, idx([0] * 37 + [11, 3, 12]), "label 11 of image 37 is out of range 0..9 \\(2 of 40 are\\)"),
        (2, idx(np.zeros((20, 14, 14))), r"sample has the shape \(1, 28, 28\), a validation sample \(1, 14, 14\)"),
        (0, idx(np.zeros((0, 28, 28))), "holds 0 images, "),
        (0, gzip.compress(IMAGES)[:40] , "truncated: its header .* are there; fetch it again"),
        (0, gzip.compress(IMAGES)[:20] + b"junk" * 20, "is a damaged gzip file \\(.*\\); fetch it again"),
    ],
)  # fmt: skip
def test_malformed_files(tmp_path, file, content, message):
    write(tmp_path)
    (tmp_path / NAMES[file]).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path)
    assert "mnist" in str(caught.value) or NAMES[file] in str(caught.value)


def test_a_truncated_gzip_file_is_counted(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 28, 28))
    whole = gzip.compress(idx(noise))
    write(tmp_path)
    (tmp_path / NAMES[0]).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError, match=r"is truncated: its header says 40 x 28 x 28 = 31,360 values, 1\d,\d\d\d are there"
    ):
        read(tmp_path)


def test_no_pixels(tmp_path):
    write(tmp_path)
    (tmp_path / NAMES[0]).write_bytes(idx(np.zeros((40, 0, 28))))
    with pytest.raises(DataError, match=r"holds no pixels: its shape is \(40, 0, 28\)"):
        read(tmp_path)


def test_a_missing_file(tmp_path):
    (write(tmp_path) / NAMES[3]).unlink()
    message = rf"{NAMES[3]} does not exist; expected an idx file with 1 axis, also as {NAMES[3]}.gz\. .* {NAMES[2]}"
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_mnist(data_root):
    data = read(data_root / "mnist", train_samples=2000)
    assert data.train.x.shape == (2000, 1, 28, 28) and data.validation.x.shape == (10000, 1, 28, 28)
    assert data.validation.y[:5].tolist() == [7, 2, 1, 0, 4]
    assert data.validation.y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(data.train.y.bincount().float() / 2000 - 0.1).max() < 0.02
    assert data.train.x.mean().abs() < 1e-5 and (data.train.x.std() - 1).abs() < 1e-3
