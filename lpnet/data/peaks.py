"""Peaks: five classes of points in the plane, the bands of MATLAB's peaks function.

The test problem of Haber and Ruthotto (2017) and of Günther et al., "Layer-parallel training of deep residual
neural networks" (SIMODS 2020, arXiv 1812.04352); the grid and the files are those of the latter's code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from lpnet.config import DataConfig
from lpnet.data.samples import Data, Samples, folder, missing, stratified_subset
from lpnet.errors import DataError
from lpnet.seeding import numpy_generator_for

CLASSES = 5
POINTS = 256
LIMIT = 3.0
TRAIN_SAMPLES = 5000
VALIDATION_SAMPLES = 1000


@dataclass(frozen=True)
class Square:
    """The grid of Peaks: where decision regions are drawn, beside the true classes.

    Args:
        axis: grid coordinates, the same in x and y, (points,).
        classes: true class at [row y, column x], (points, points), int64.
    """

    axis: np.ndarray
    classes: np.ndarray

    def points(self, dtype: torch.dtype) -> torch.Tensor:
        """All grid points (x, y), row by row, (points * points, 2); reshape predictions to `classes.shape`.

        No communication.
        """
        x, y = np.meshgrid(self.axis, self.axis)
        return torch.from_numpy(np.stack([x.ravel(), y.ravel()], axis=1)).to(dtype)


def height(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """z = peaks(x, y). No communication."""
    return np.asarray(
        3 * (1 - x) ** 2 * np.exp(-(x**2) - (y + 1) ** 2)
        - 10 * (x / 5 - x**3 - y**5) * np.exp(-(x**2) - y**2)
        - 1 / 3 * np.exp(-((x + 1) ** 2) - y**2)
    )


def _bands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grid axis, z on the grid, and the six borders of the five equal bands between its minimum and maximum."""
    axis = np.linspace(-LIMIT, LIMIT, POINTS)
    z = height(*np.meshgrid(axis, axis))
    return axis, z, np.linspace(z.min(), z.max(), CLASSES + 1)


def square() -> Square:
    """The grid and its true classes: class k where border_k < z <= border_{k+1}. No communication.

    The lowest point lies in no band by that rule; here it belongs to class 0, as its neighbours do.
    """
    axis, z, borders = _bands()
    return Square(axis, np.searchsorted(borders[1:-1], z, side="left"))


def generate(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """Grid points drawn by the seed, equally many per class, validation disjoint from training.

    Samples are sorted by class. Changing one of the two counts leaves the points of the other as they are.
    No communication.

    Raises:
        DataError: the counts are no multiple of five, or together more than the smallest class holds.
    """
    train = config.train_samples if config.train_samples is not None else TRAIN_SAMPLES
    validation = config.validation_samples if config.validation_samples is not None else VALIDATION_SAMPLES
    for key, count in (("train_samples", train), ("validation_samples", validation)):
        if count % CLASSES:
            raise DataError(
                f"data.{key} is {count}; Peaks has {CLASSES} classes with equally many samples, so use a multiple of "
                f"{CLASSES}, such as {max(1, count // CLASSES) * CLASSES}"
            )
    grid = square()
    _, z, borders = _bands()
    members = [np.flatnonzero((grid.classes == c) & (z > borders[0])) for c in range(CLASSES)]
    smallest = min(range(CLASSES), key=lambda c: len(members[c]))
    if (train + validation) // CLASSES > len(members[smallest]):
        raise DataError(
            f"data.train_samples {train} + data.validation_samples {validation} need "
            f"{(train + validation) // CLASSES} grid points per class, but class {smallest} has "
            f"{len(members[smallest])}; use at most {CLASSES * len(members[smallest])} in all"
        )
    chosen_train, chosen_validation = [], []
    for c in range(CLASSES):
        drawn = members[c][numpy_generator_for(seed, "peaks", layer=c).permutation(len(members[c]))]
        # From the two ends, so that neither count moves the other's points.
        chosen_train.append(drawn[: train // CLASSES])
        chosen_validation.append(drawn[len(drawn) - validation // CLASSES :])
    return _data(_at(grid, np.concatenate(chosen_train), dtype), _at(grid, np.concatenate(chosen_validation), dtype))


def _at(grid: Square, indices: np.ndarray, dtype: torch.dtype) -> Samples:
    return Samples(grid.points(dtype)[indices], torch.from_numpy(grid.classes.ravel()[indices]))


def _data(train: Samples, validation: Samples, classes: int = CLASSES) -> Data:
    features = train.x.shape[1]
    plane = features == 2 and classes == CLASSES
    names = tuple(f"class {c}" for c in range(classes))
    if plane:
        names = tuple(f"{lo:.1f} < z ≤ {hi:.1f}" for lo, hi in pairwise(_bands()[2]))
    return Data(train, validation, classes, features, names, square=square() if plane else None)


def read(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """The four text files of the layer-parallel paper's code, in their order. No communication.

    features_training.dat, labels_training.dat, features_validation.dat, labels_validation.dat: a sample per
    line, numbers separated by blanks; labels one-hot. Any number of features and classes is accepted.

    Raises:
        DataError: names the file and the line, what was expected and what to do.
    """
    root = folder(config)
    parts = {}
    for part, count in (("training", config.train_samples), ("validation", config.validation_samples)):
        x = _table(root / f"features_{part}.dat", "one sample per line, one number per feature")
        labels = root / f"labels_{part}.dat"
        y = _one_hot(labels)
        if len(x) != len(y):
            raise DataError(
                f"{root / f'features_{part}.dat'} holds {len(x)} samples, {labels} holds {len(y)} labels; "
                "the two files must belong together, line by line"
            )
        key = "data.train_samples" if part == "training" else "data.validation_samples"
        kept = stratified_subset(y.argmax(1), count, seed=seed, stream=f"subset/{part}", key=key)
        parts[part] = (x[kept], y[kept])
    (x, y), (x_val, y_val) = parts["training"], parts["validation"]
    for kind, first, second in (("features", x, x_val), ("labels", y, y_val)):
        if first.shape[1] != second.shape[1]:
            raise DataError(
                f"{root / f'{kind}_training.dat'} has {first.shape[1]} numbers per line, "
                f"{root / f'{kind}_validation.dat'} has {second.shape[1]}; they must agree"
            )
    train, validation = (
        Samples(torch.from_numpy(a).to(dtype), torch.from_numpy(b.argmax(1))) for a, b in ((x, y), (x_val, y_val))
    )
    return _data(train, validation, y.shape[1])


def _table(path: Path, expected: str) -> np.ndarray:
    """The numbers of a text file, (lines, columns); blank lines are passed over."""
    if not path.is_file():
        raise missing(path, expected, "*.dat")
    rows: list[list[float]] = []
    # latin-1 reads any byte, so that a binary file is reported by its first line and not by its encoding.
    for number, line in enumerate(path.read_text(encoding="latin-1").splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        row = []
        for word in words:
            try:
                row.append(float(word))
            except ValueError:
                raise DataError(f"{path}, line {number}: {word[:40]!r} is not a number; expected {expected}") from None
            if not math.isfinite(row[-1]):
                raise DataError(f"{path}, line {number}: {word} is not a finite number; remove the sample or repair it")
        if rows and len(row) != len(rows[0]):
            raise DataError(
                f"{path}, line {number}: expected {len(rows[0])} numbers as in the first line, found {len(row)}; "
                "the line is incomplete, or two files were mixed"
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{path} holds no numbers; expected {expected}")
    return np.array(rows, dtype=np.float64)


def _one_hot(path: Path) -> np.ndarray:
    """One-hot labels, (samples, classes)."""
    expected = "one sample per line: a 1 in the column of its class, 0 elsewhere"
    y = _table(path, expected)
    if y.shape[1] < 2:
        raise DataError(f"{path} has {y.shape[1]} column; expected {expected}, and so two columns or more")
    wrong = np.flatnonzero(((y == 1).sum(1) != 1) | ((y == 0).sum(1) != y.shape[1] - 1))
    if len(wrong):
        lines = path.read_text(encoding="latin-1").splitlines()
        number = [k for k, line in enumerate(lines, start=1) if line.split()][wrong[0]]
        raise DataError(f"{path}, line {number}: {lines[number - 1].strip()!r} is no class; expected {expected}")
    return y
