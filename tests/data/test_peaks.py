"""Peaks: the generator against the definition, the reader against the oracle's files, every refusal."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lpnet.config import DataConfig
from lpnet.data import Data, load
from lpnet.data.peaks import height, square
from lpnet.errors import DataError


def generated(train: int | None = None, validation: int | None = None, seed: int = 0) -> Data:
    return load(DataConfig(train_samples=train, validation_samples=validation), seed, torch.float64)


def classes_by_definition(points: np.ndarray) -> np.ndarray:
    """Written out again, point by point, for the tests: lo < z <= hi."""
    axis = [-3 + 6 * k / 255 for k in range(256)]
    x, y = np.array(axis)[None, :], np.array(axis)[:, None]

    def z(x, y):
        first = 3 * (1 - x) ** 2 * np.exp(-(x**2) - (y + 1) ** 2)
        second = 10 * (x / 5 - x**3 - y**5) * np.exp(-(x**2) - y**2)
        return first - second - np.exp(-((x + 1) ** 2) - y**2) / 3

    low, high = z(x, y).min(), z(x, y).max()
    values = z(points[:, 0], points[:, 1])
    result = np.full(len(points), -1)
    borders = [low + (high - low) * c / 5 for c in range(5)] + [high]
    for c, (lo, hi) in enumerate(pairwise(borders)):
        result[(values > lo) & (values <= hi)] = c
    return result


def pairs(x: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.tolist()}


def test_defaults():
    data = generated()
    assert data.train.x.shape == (5000, 2) and data.validation.x.shape == (1000, 2)
    assert data.train.y.dtype == torch.int64 and data.train.x.dtype == torch.float64
    assert (data.classes, data.features, len(data.class_names)) == (5, 2, 5)
    assert data.train.y.bincount().tolist() == [1000] * 5
    assert data.validation.y.bincount().tolist() == [200] * 5
    assert data.class_names[0] == "-6.5 < z ≤ -3.6"


def test_labels_follow_the_definition():
    data = generated()
    for samples in (data.train, data.validation):
        assert np.array_equal(classes_by_definition(samples.x.numpy()), samples.y.numpy())
        steps = (samples.x + 3) * 255 / 6
        assert (steps - steps.round()).abs().max() < 1e-9 and samples.x.abs().max() <= 3


@settings(max_examples=15)
@given(train=st.integers(1, 1500), validation=st.integers(1, 297), seed=st.integers(0, 10**6))
def test_validation_is_disjoint_and_no_point_comes_twice(train, validation, seed):
    data = generated(5 * train, 5 * validation, seed)
    a, b = pairs(data.train.x), pairs(data.validation.x)
    assert len(a) == 5 * train and len(b) == 5 * validation
    assert a.isdisjoint(b)
    assert data.train.y.bincount().tolist() == [train] * 5


def test_all_points_of_the_smallest_class_fit():
    data = generated(5 * 1000, 5 * 798)
    low = data.train.y == 4, data.validation.y == 4
    assert len(pairs(data.train.x[low[0]]) | pairs(data.validation.x[low[1]])) == 1798


def test_the_seed_decides_and_one_count_does_not_move_the_other():
    first, again, other = generated(), generated(), generated(seed=1)
    assert torch.equal(first.train.x, again.train.x) and torch.equal(first.validation.x, again.validation.x)
    assert not torch.equal(first.train.x, other.train.x)
    assert torch.equal(generated(train=50).validation.x, first.validation.x)
    assert torch.equal(generated(validation=50).train.x, first.train.x)


def test_the_square():
    grid = square()
    assert grid.classes.shape == (256, 256) and grid.classes.dtype == np.int64
    points = grid.points(torch.float64)
    assert points.shape == (65536, 2)
    truth = classes_by_definition(points.numpy()).reshape(256, 256)
    lowest = np.unravel_index(height(*np.meshgrid(grid.axis, grid.axis)).argmin(), (256, 256))
    assert truth[lowest] == -1 and grid.classes[lowest] == 0  # in no band by the rule
    truth[lowest] = 0
    assert np.array_equal(grid.classes, truth)
    row, column = 200, 31
    assert points[row * 256 + column].tolist() == [grid.axis[column], grid.axis[row]]
    assert grid.points(torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        (
            13,
            None,
            "data.train_samples is 13; Peaks has 5 classes .* so use a multiple of 5, such as 10",
        ),
        (None, 3, "data.validation_samples is 3; .* such as 5"),
        (
            8000,
            1000,
            "8000 .* 1000 need 1800 grid points per class, but class 4 has 1798; use at most 8990 in all",
        ),
    ],
)
def test_numbers_that_do_not_fit(train, validation, message):
    with pytest.raises(DataError, match=message):
        generated(train, validation)


# files


def write(folder, x=((0.5, -1), (2, 3), (0, 0)), y=((1, 0), (0, 1), (0, 1))):
    for part in ("training", "validation"):
        for kind, rows in (("features", x), ("labels", y)):
            (folder / f"{kind}_{part}.dat").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    return folder


def read(folder, **options) -> Data:
    return load(DataConfig(name="peaks_files", root=str(folder), **options), 0, torch.float64)


def test_small_files(tmp_path):
    data = read(write(tmp_path))
    assert data.train.x.tolist() == [[0.5, -1.0], [2.0, 3.0], [0.0, 0.0]]
    assert data.train.y.tolist() == [0, 1, 1] and data.train.y.dtype == torch.int64
    assert (data.classes, data.features, data.square) == (2, 2, None)
    assert data.class_names == ("class 0", "class 1")
    assert read(tmp_path, train_samples=2).train.y.tolist() == [0, 1]


def test_blank_lines_are_passed_over(tmp_path):
    file = write(tmp_path) / "features_training.dat"
    file.write_text("\n1 2\n\n3 4\n5 6\n\n")
    assert read(tmp_path).train.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    file.write_text("\n1 2\n\n3 x\n")
    with pytest.raises(DataError, match="features_training.dat, line 4: 'x' is not a number"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("features_training.dat", "1 2\n3\n5 6\n", "line 2: expected 2 numbers as in the first line, found 1; "),
        ("features_training.dat", "1 2\n3 nan\n", "line 2: nan is not a finite number; remove"),
        ("features_training.dat", "1 2\n3 inf\n", "line 2: inf is not a finite number"),
        ("features_training.dat", "1,2\n", "line 1: '1,2' is not a number; expected one sample per line, one"),
        ("features_training.dat", b"\x89HDF\r\n\x1a\n\xff", r"line 1: '\\x89HDF' is not a number"),
        ("features_training.dat", "", "holds no numbers; expected one sample per line"),
        ("features_training.dat", "1 2\n3 4\n", "holds 2 samples, .*labels_training.dat holds 3 labels; "),
        ("features_validation.dat", "1\n2\n3\n", "has 2 numbers per line, .*_validation.dat has 1; they must"),
        ("labels_training.dat", "1 0\n0 0\n0 1\n", "line 2: '0 0' is no class; expected one sample per line: a 1"),
        ("labels_training.dat", "1 0\n\n1 1\n0 1\n", "line 3: '1 1' is no class"),
        ("labels_training.dat", "1 0\n0 1\n0 0.5\n", "line 3: '0 0.5' is no class"),
        ("labels_training.dat", "0\n1\n1\n", "has 1 column; expected .* two columns or more"),
        ("labels_validation.dat", "1 0 0\n0 1 0\n0 0 1\n", "labels_validation.dat has 3; they must agree"),
    ],
)  # fmt: skip
def test_malformed_files(tmp_path, file, content, message):
    write(tmp_path)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path)
    assert file in str(caught.value) and caught.value.exit_code == 2


def test_missing_files(tmp_path):
    (write(tmp_path) / "labels_validation.dat").unlink()
    with pytest.raises(
        DataError, match="labels_validation.dat does not exist; expected .* features_training.dat, .* Set --data.root"
    ):
        read(tmp_path)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(DataError, match=re.escape(f"data.root {nowhere} is not a folder; data.name peaks_files reads")):
        read(nowhere)


def test_the_oracle_files(oracle_root):
    data = read(oracle_root / "peaks")
    assert data.train.x.shape == (5000, 2) and data.validation.x.shape == (200, 2)
    assert data.train.y.tolist() == sorted(data.train.y.tolist())  # in the files' order, by class
    assert data.train.x[0].tolist() == [5.76470588235294e-01, -1.89411764705882e00]
    assert data.train.y.bincount().tolist() == [1000] * 5
    # the other code's points and labels obey the definition
    for samples in (data.train, data.validation):
        points = np.rint((samples.x.numpy() + 3) * 255 / 6) * 6 / 255 - 3
        assert np.array_equal(classes_by_definition(points), samples.y.numpy())
    assert data.square is not None
