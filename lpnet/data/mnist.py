"""MNIST and its look-alikes: four idx files, gzip or not.

Format: LeCun, Cortes, Burges, "The MNIST database of handwritten digits" (1998): two zero bytes, a type byte, the
number of axes, their lengths as big-endian 32-bit numbers, then the values.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from lpnet.config import DataConfig
from lpnet.data.samples import Data, Samples, folder, missing, stratified_subset
from lpnet.errors import DataError

CLASSES = 10
_UNSIGNED_BYTES = 8


def read(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """Images (samples, 1, height, width), scaled to [0, 1], then standardised by the training pixels.

    With data.held_out the validation samples are training images that are not trained on. No communication.

    Raises:
        DataError: names the file, what was expected and what was found.
    """
    root = folder(config)
    images, labels = _read_part(root, "train")
    if config.held_out:
        if config.validation_samples is None:
            raise DataError(
                "data.validation_samples is null, but the validation samples of mnist shall be held out of its "
                f"{len(labels):,} training images; say how many"
            )
        kept = _subset(labels, config.validation_samples, seed, "held_out")
        validating = images[kept], labels[kept]
        rest = np.setdiff1d(np.arange(len(labels)), kept)
        images, labels = images[rest], labels[rest]
    else:
        all_images, all_labels = _read_part(root, "t10k")
        kept = _subset(all_labels, config.validation_samples, seed, "validation")
        validating = all_images[kept], all_labels[kept]
    kept = _subset(labels, config.train_samples, seed, "training")
    parts = [(images[kept], labels[kept]), validating]
    mean, deviation = _mean_and_deviation(parts[0][0])
    train, validation = (
        Samples(_standardised(images, mean, deviation, dtype), torch.from_numpy(labels.astype(np.int64)))
        for images, labels in parts
    )
    names = tuple(str(c) for c in range(CLASSES))
    return Data(train, validation, CLASSES, math.prod(train.x.shape[1:]), names)


def read_idx(path: Path, *, axes: int) -> np.ndarray:
    """The unsigned bytes of an idx file, gzip or not (told by its content). No communication.

    Args:
        path: the file.
        axes: number of axes it must have: 3 for images, 1 for labels.

    Raises:
        DataError: wrong magic number, truncated, or longer than its header says.
    """
    content = _bytes(path)
    head = 4 + 4 * axes
    magic = content[:4]
    if magic != bytes([0, 0, _UNSIGNED_BYTES, axes]):
        raise DataError(
            f"{path} begins with {magic.hex(' ') or 'nothing'}; expected 00 00 08 {axes:02x}, an idx file of unsigned "
            f"bytes with {_count(axes)}; give the original file"
        )
    if len(content) < head:
        raise DataError(f"{path} is truncated: its header needs {head} bytes, {len(content)} are there; fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(content, dtype=">u4", count=axes, offset=4))
    expected, found = math.prod(shape), len(content) - head
    if found != expected:
        what = "is truncated" if found < expected else "is too long"
        raise DataError(
            f"{path} {what}: its header says {' x '.join(map(str, shape))} = {expected:,} values, {found:,} are there; "
            "fetch it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)


def _read_part(root: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (samples, height, width) and labels (samples,) of one part, bytes."""
    images_path, labels_path = _find(root, f"{prefix}-images", 3), _find(root, f"{prefix}-labels", 1)
    images, labels = read_idx(images_path, axes=3), read_idx(labels_path, axes=1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path.name} holds {len(images)} images, {labels_path.name} holds {len(labels)} labels; "
            "the two files must belong together"
        )
    if not images.size:
        raise DataError(f"{images_path} holds no pixels: its shape is {images.shape}; give the original file")
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        raise DataError(
            f"{labels_path}: label {labels[wrong[0]]} of image {wrong[0]} is out of range 0..{CLASSES - 1} "
            f"({len(wrong)} of {len(labels)} are); give the files of a set with {CLASSES} classes"
        )
    return images, labels


def _subset(labels: np.ndarray, count: int | None, seed: int, part: str) -> np.ndarray:
    key = "data.train_samples" if part == "training" else "data.validation_samples"
    return stratified_subset(labels, count, seed=seed, stream=f"subset/{part}", key=key)


def _bytes(path: Path) -> bytes:
    """Content of a file, unpacked if it is gzip; what a truncated gzip file still gives, so that it can be counted."""
    raw = path.read_bytes()
    if not raw.startswith(b"\x1f\x8b"):
        return raw
    try:
        return gzip.decompress(raw)
    except EOFError:
        return zlib.decompressobj(wbits=31).decompress(raw)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} ({len(raw):,} bytes) is a damaged gzip file ({error}); fetch it again") from error


def _find(root: Path, stem: str, axes: int) -> Path:
    """The file under any of its usual names."""
    names = [f"{stem}{sign}idx{axes}-ubyte{end}" for sign in "-." for end in ("", ".gz")]
    for name in names:
        if (root / name).is_file():
            return root / name
    raise missing(root / names[0], f"an idx file with {_count(axes)}, also as {names[1]}", "*ubyte*")


def _count(axes: int) -> str:
    return "1 axis" if axes == 1 else f"{axes} axes"


def _mean_and_deviation(images: np.ndarray) -> tuple[float, float]:
    """Of all pixels in [0, 1], exact and without a float copy: from the counts of the 256 values."""
    counts = np.bincount(images.ravel(), minlength=256)
    values = np.arange(256) / 255
    mean = float(counts @ values / images.size)
    deviation = math.sqrt(float(counts @ (values - mean) ** 2 / images.size))
    return mean, deviation or 1.0


def _standardised(images: np.ndarray, mean: float, deviation: float, dtype: torch.dtype) -> torch.Tensor:
    """(samples, 1, height, width), looked up in a table of the 256 possible values: no float64 copy of the images."""
    table = ((np.arange(256) / 255 - mean) / deviation).astype(np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(table[images]).to(dtype).unsqueeze(1)
