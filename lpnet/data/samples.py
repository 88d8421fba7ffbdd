"""Training and validation samples of one run, read and checked before any message is sent.

Every rank loads the same files with the same seed and so holds the same samples (Data order, design of
Zhuang et al. 2020: no broadcast). A mistake in a file is therefore seen by all ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lpnet.config import DataConfig
from lpnet.errors import DataError
from lpnet.seeding import numpy_generator_for

if TYPE_CHECKING:
    from lpnet.data.hyperspectral import Scene
    from lpnet.data.peaks import Square


class Source(Protocol):
    """Samples in memory, or in files that are decoded when a batch of them is taken. No communication."""

    @property
    def x(self) -> torch.Tensor:
        """All inputs, (samples, ...); files are decoded for it, all of them at once."""

    @property
    def y(self) -> torch.Tensor:
        """All classes, (samples,), int64."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""

    def __len__(self) -> int:
        """Number of samples."""

    def take(self, indices: torch.Tensor, *, epoch: int | None = None) -> Samples:
        """The samples at `indices`, in that order."""

    def parts(self, size: int) -> Iterator[Samples]:
        """All samples in order, at most `size` at a time."""


@dataclass(frozen=True)
class Samples:
    """Inputs and their classes.

    Args:
        x: inputs, (samples, features), or (samples, channels, height, width) for images.
        y: classes, (samples,), int64, counted from 0.
    """

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.x.shape[1:])

    def take(self, indices: torch.Tensor, *, epoch: int | None = None) -> Samples:
        """The samples at `indices`, in that order (a copy), the same in every epoch. No communication."""
        return Samples(self.x[indices], self.y[indices])

    def parts(self, size: int) -> Iterator[Samples]:
        """All samples in order, at most `size` at a time (no copies). No communication."""
        for x, y in zip(self.x.split(size), self.y.split(size), strict=True):
            yield Samples(x, y)


def without_inputs(y: torch.Tensor) -> Samples:
    """Labels alone, for a rank that reads no inputs. No communication."""
    return Samples(torch.empty((len(y), 0)), y)


@dataclass(frozen=True)
class Data:
    """What a run trains on and is judged by, and what its pictures need.

    Args:
        train: training samples.
        validation: validation samples; none of them is a training sample, unless the files say so.
        scored: training samples that the training accuracy is of; None: all of them.
        classes: number of classes.
        features: numbers per sample, all axes together.
        class_names: one name per class, for legends.
        square: Peaks in the plane: the grid that decision regions are drawn on.
        scene: hyperspectral scene: where every sample lies, for the class map.
    """

    train: Source
    validation: Source
    classes: int
    features: int
    class_names: tuple[str, ...]
    square: Square | None = None
    scene: Scene | None = None
    scored: Source | None = None


def load(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """The samples that `config` names; equal on every rank. No communication.

    Args:
        config: section `data` of a run.
        seed: seed of the run: decides draws, splits and subsets.
        dtype: precision of the inputs.

    Raises:
        DataError: a file is missing, malformed or out of range; names the file and the line, variable or sample.
    """
    # Imported here so that a run on Peaks loads no scipy, and because the readers import this module.
    from lpnet.data import cifar, hyperspectral, image_folder, mnist, peaks

    readers = {
        "peaks": peaks.generate,
        "peaks_files": peaks.read,
        "hyperspectral": hyperspectral.read,
        "spectra": hyperspectral.read_spectra,
        "mnist": mnist.read,
        "cifar10": cifar.read10,
        "cifar100": cifar.read100,
        "image_folder": image_folder.read,
    }
    data = readers[config.name](config, seed, dtype)
    if not isinstance(data.train, Samples) or not isinstance(data.validation, Samples):
        return data  # checked image by image when they are decoded
    check(data.train, data.classes, f"data.name {config.name}, training samples")
    check(data.validation, data.classes, f"data.name {config.name}, validation samples")
    if data.train.shape != data.validation.shape:
        raise DataError(
            f"data.name {config.name}: a training sample has the shape {data.train.shape}, a validation "
            f"sample {data.validation.shape}; both must come from the same kind of files"
        )
    return data


def check(samples: Samples, classes: int, source: str) -> None:
    """Refuse what no network can train on. No communication.

    Args:
        samples: what a reader made.
        classes: labels must lie in 0..classes-1.
        source: where the samples come from, for the message.

    Raises:
        DataError: no samples, unequal counts, a label out of range, or a number that is not finite.
    """
    x, y = samples.x, samples.y
    if len(x) != len(y):
        raise DataError(f"{source}: {len(x)} inputs but {len(y)} labels; give one label per input")
    if len(y) == 0:
        raise DataError(f"{source}: there are none; give at least one")
    wrong = (y < 0) | (y >= classes)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"{source}: the label of sample {first} is {int(y[first])}, out of range 0..{classes - 1} "
            f"({int(wrong.sum())} of {len(y)} labels are); correct the labels"
        )
    rows = ~torch.isfinite(x).flatten(1).all(1)
    if rows.any():
        first = int(rows.nonzero()[0])
        raise DataError(
            f"{source}: sample {first} holds a number that is not finite in {x.dtype} ({int(rows.sum())} of {len(x)} "
            "samples do); remove or replace it"
        )


def folder(config: DataConfig) -> Path:
    """data.root as an existing folder. No communication.

    Raises:
        DataError: there is no such folder.
    """
    root = Path(config.root or ".").expanduser()
    if not root.is_dir():
        raise DataError(f"data.root {root} is not a folder; data.name {config.name} reads its files from there")
    return root


def missing(path: Path, expected: str, pattern: str) -> DataError:
    """The error for a file that is not there, listing what is. No communication.

    Args:
        path: the file.
        expected: what it should hold, in words.
        pattern: the kind of file to list, such as `*.mat`.
    """
    there = sorted(p.name for p in path.parent.glob(pattern))
    listing = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "") if there else "none"
    return DataError(
        f"{path} does not exist; expected {expected}. Files {pattern} in that folder: {listing}. "
        "Set --data.root to the folder that holds the file, or correct its name"
    )


def stratified_subset(labels: np.ndarray, count: int | None, *, seed: int, stream: str, key: str) -> np.ndarray:
    """Indices of `count` samples that keep the shares of the classes, at least one per class. No communication.

    Shares are rounded by largest remainder, so that they add up to `count` exactly. Subsets of one seed are
    nested per class: a larger one contains a smaller one's samples of every class whose share grew.

    Args:
        labels: class of every sample, (samples,).
        count: how many; None: all.
        seed: seed of the run.
        stream: name of the random stream.
        key: configuration key that asked for `count`, for the message.

    Returns:
        Increasing indices, (count,), int64.

    Raises:
        DataError: more than there are, or fewer than there are classes.
    """
    if count is None:
        return np.arange(len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    if count > len(labels):
        raise DataError(f"{key} is {count}, but there are {len(labels)} samples; use at most {len(labels)}, or null")
    if count < len(classes):
        raise DataError(
            f"{key} is {count}, fewer than the {len(classes)} classes; a stratified subset needs one sample per "
            f"class, so use at least {len(classes)}"
        )
    shares = _shares(sizes, count)
    parts = []
    for c, share in zip(classes, shares, strict=True):
        members = np.flatnonzero(labels == c)
        order = numpy_generator_for(seed, stream, layer=int(c)).permutation(len(members))
        parts.append(members[order[:share]])
    return np.sort(np.concatenate(parts))


def _shares(sizes: np.ndarray, count: int) -> np.ndarray:
    """One per class, the rest in proportion to what is left, by largest remainder; integers throughout."""
    spare = sizes.astype(np.int64) - 1
    if spare.sum() == 0:
        return np.ones(len(sizes), dtype=np.int64)
    scaled = (count - len(sizes)) * spare
    shares, remainders = np.divmod(scaled, spare.sum())
    order = np.argsort(-remainders, kind="stable")
    shares[order[: count - len(sizes) - shares.sum()]] += 1
    return shares + 1
