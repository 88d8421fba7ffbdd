"""CIFAR-10 and CIFAR-100 in their "python version": pickled batches of 32 x 32 images in colour.

Krizhevsky, "Learning multiple layers of features from tiny images" (2009). The pickles are read as data only
(`plain_pickle`); images are standardised per channel by the training pixels in use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lpnet.config import DataConfig
from lpnet.data.pixels import channel_statistics, standardised
from lpnet.data.plain_pickle import read_dictionary
from lpnet.data.samples import Data, Samples, folder, missing, stratified_subset
from lpnet.errors import DataError

SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Layout:
    """Where a set keeps what.

    Args:
        name: how `fetch` and the configuration call it.
        folder: sub-folder that the archive unpacks to.
        train: files of training images.
        test: file of test images.
        meta: file of the class names.
        labels: key of the labels in a file of images.
        names: key of the class names.
        classes: how many classes.
    """

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    classes: int


CIFAR10 = Layout(
    "cifar10",
    "cifar-10-batches-py",
    tuple(f"data_batch_{k}" for k in range(1, 6)),
    "test_batch",
    "batches.meta",
    "labels",
    "label_names",
    10,
)
CIFAR100 = Layout("cifar100", "cifar-100-python", ("train",), "test", "meta", "fine_labels", "fine_label_names", 100)


def read10(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """CIFAR-10 as the configuration asks for it; see `read_cifar`. No communication."""
    return _configured(CIFAR10, config, seed, dtype)


def read100(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """CIFAR-100, 100 fine classes, as the configuration asks for it; see `read_cifar`. No communication."""
    return _configured(CIFAR100, config, seed, dtype)


def read_cifar(
    root: Path,
    layout: Layout,
    *,
    train_samples: int | None = None,
    validation_samples: int | None = None,
    held_out: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Data:
    """Images (samples, 3, 32, 32), scaled to [0, 1], then standardised per channel. No communication.

    Args:
        root: the folder of the batches, or the folder above it.
        layout: CIFAR10 or CIFAR100.
        train_samples: training samples, a subset that keeps the shares of the classes; None: all there are.
        validation_samples: the same for validation.
        held_out: validate on training images, `validation_samples` of them, that are not trained on, and leave the
            test images alone: for choosing settings.
        seed: seed of the run, decides the subsets.
        dtype: precision of the images.

    Returns:
        Training samples, and validation samples standardised by the same numbers.

    Raises:
        DataError: names the file, what was expected and what was found.
    """
    place = root if (root / layout.train[0]).is_file() else root / layout.folder
    names = _class_names(place / layout.meta, layout)
    parts = [_read_images(_existing(place / name, layout), layout) for name in layout.train]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if held_out:
        if validation_samples is None:
            raise DataError(
                f"data.validation_samples is null, but the validation samples of {layout.name} shall be held out of "
                f"its {len(labels):,} training images; say how many"
            )
        kept = _subset(labels, validation_samples, seed, "held_out", "data.validation_samples")
        chosen = images[kept], labels[kept]
        rest = np.setdiff1d(np.arange(len(labels)), kept)
        images, labels = images[rest], labels[rest]
    else:
        images_of_test, labels_of_test = _read_images(_existing(place / layout.test, layout), layout)
        kept = _subset(labels_of_test, validation_samples, seed, "validation", "data.validation_samples")
        chosen = images_of_test[kept], labels_of_test[kept]
    if train_samples is not None:
        kept = _subset(labels, train_samples, seed, "training", "data.train_samples")
        images, labels = images[kept], labels[kept]
    mean, deviation = channel_statistics(images)
    train, validation = (
        Samples(standardised(x, mean, deviation, dtype), torch.from_numpy(y)) for x, y in ((images, labels), chosen)
    )
    return Data(train, validation, layout.classes, math.prod(SHAPE), names)


def _configured(layout: Layout, config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    return read_cifar(
        folder(config),
        layout,
        train_samples=config.train_samples,
        validation_samples=config.validation_samples,
        held_out=config.held_out,
        seed=seed,
        dtype=dtype,
    )


def _subset(labels: np.ndarray, count: int | None, seed: int, part: str, key: str) -> np.ndarray:
    return stratified_subset(labels, count, seed=seed, stream=f"subset/{part}", key=key)


def _read_images(path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Images (samples, 3, 32, 32) uint8 and labels (samples,) int64 of one file."""
    record = read_dictionary(path)
    pixels, labels = (_entry(record, key, path) for key in ("data", layout.labels))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (math.prod(SHAPE),):
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(
            f"{path}: 'data' is {found}; expected an array uint8 (images, {math.prod(SHAPE)}), the python version of "
            f"{layout.name}; give the original file"
        )
    listed = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not isinstance(listed, list) or not all(type(label) is int for label in listed):
        raise DataError(f"{path}: '{layout.labels}' is not a list of whole numbers; give the original file")
    if len(listed) != len(pixels):
        raise DataError(f"{path} holds {len(pixels)} images, but {len(listed)} labels; fetch it again")
    wrong = [k for k, label in enumerate(listed) if not 0 <= label < layout.classes]
    if wrong:
        raise DataError(
            f"{path}: label {listed[wrong[0]]} of image {wrong[0]} is out of range 0..{layout.classes - 1} "
            f"({len(wrong)} of {len(listed)} are); give the files of {layout.name}"
        )
    return pixels.reshape(-1, *SHAPE), np.array(listed, dtype=np.int64)


def _class_names(path: Path, layout: Layout) -> tuple[str, ...]:
    """Names of the classes, in the order of the labels."""
    names = _entry(read_dictionary(_existing(path, layout)), layout.names, path)
    if not isinstance(names, list) or len(names) != layout.classes:
        raise DataError(f"{path}: '{layout.names}' is not a list of {layout.classes} names; give the original file")
    return tuple(name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names)


def _entry(record: dict[str, Any], key: str, path: Path) -> Any:
    if key not in record:
        there = ", ".join(sorted(record)[:8]) or "nothing"
        raise DataError(f"{path} has no entry '{key}'; it holds {there}. Give the original file")
    return record[key]


def _existing(path: Path, layout: Layout) -> Path:
    """The file, or an error that says how to get it."""
    if path.is_file():
        return path
    expected = f"a file of the python version of {layout.name} (fetch {layout.name} gets it)"
    raise missing(path, expected, "*")
