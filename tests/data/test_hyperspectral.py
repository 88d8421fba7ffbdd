"""Scenes and tables of spectra: the split, the normalisation, the map, every refusal."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lpnet.config import DataConfig
from lpnet.data import Data, load
from lpnet.data.hyperspectral import split_rows
from lpnet.errors import DataError

ROWS, COLUMNS, BANDS = 6, 5, 4


def scene(rows=ROWS, columns=COLUMNS):
    """Labels 0, 3, 7, 12 in a seeded pattern; spectra that tell where they come from."""
    rng = np.random.default_rng(0)
    truth = rng.permutation(np.resize([0, 3, 7, 7, 12], rows * columns)).reshape(rows, columns).astype(np.uint8)
    cube = rng.integers(-5, 9000, (rows, columns, BANDS)).astype(np.int16)
    return cube, truth


def write(folder, cube=None, truth=None):
    default = scene()
    scipy.io.savemat(folder / "cube.mat", {"cube": default[0] if cube is None else cube})
    scipy.io.savemat(folder / "gt.mat", {"gt": default[1] if truth is None else truth})
    return folder


def read(folder, seed=0, dtype=torch.float64, **options) -> Data:
    given = {"name": "hyperspectral", "cube": "cube.mat", "ground_truth": "gt.mat", **options}
    return load(DataConfig(root=str(folder), **given), seed, dtype)


def test_a_small_scene(tmp_path):
    cube, truth = scene()
    data = read(write(tmp_path))
    assert (data.classes, data.features) == (3, BANDS)
    assert data.class_names == ("class 3", "class 7", "class 12")
    places = data.scene
    assert (places.rows, places.columns) == (ROWS, COLUMNS) and places.labels.tolist() == [3, 7, 12]
    assert not set(places.train) & set(places.validation)
    assert sorted([*places.train, *places.validation]) == np.flatnonzero(truth).tolist()
    # renumbered in increasing order of the labels
    for samples, pixels in ((data.train, places.train), (data.validation, places.validation)):
        assert np.array_equal(places.labels[samples.y.numpy()], truth.ravel()[pixels])
    # normalised by the training pixels only
    spectra = cube.reshape(-1, BANDS).astype(float)
    mean, deviation = spectra[places.train].mean(0), spectra[places.train].std(0)
    np.testing.assert_allclose(data.validation.x, (spectra[places.validation] - mean) / deviation, atol=1e-13)
    np.testing.assert_allclose(data.train.x.mean(0), 0, atol=1e-13)
    np.testing.assert_allclose(data.train.x.std(0, correction=0), 1, atol=1e-13)
    # painting the true classes gives the ground truth
    assert np.array_equal(places.paint(data.train.y.numpy(), data.validation.y.numpy()), places.classes)
    assert np.array_equal(places.classes < 0, truth == 0)


def test_fraction_seed_and_subset(tmp_path):
    write(tmp_path)
    sizes = np.array([6, 12, 6])
    for fraction in (0.01, 0.3, 0.5, 0.99):
        data = read(tmp_path, train_fraction=fraction)
        counts = data.train.y.bincount().numpy()
        assert np.array_equal(counts, np.clip(np.floor(fraction * sizes + 0.5), 1, sizes - 1))
    first, other = read(tmp_path), read(tmp_path, seed=1)
    assert np.array_equal(first.scene.train, read(tmp_path).scene.train)
    assert not np.array_equal(first.scene.train, other.scene.train)
    part = read(tmp_path, train_samples=4, validation_samples=3)
    assert (len(part.train), len(part.validation)) == (4, 3)
    assert set(part.scene.train) <= set(first.scene.train)
    painted = part.scene.paint(part.train.y.numpy(), part.validation.y.numpy())
    assert (painted >= 0).sum() == 7
    with pytest.raises(DataError, match="data.train_samples is 13, but there are 12 samples"):
        read(tmp_path, train_samples=13)


@settings(max_examples=40)
@given(
    classes=st.lists(st.integers(-1, 3), min_size=0, max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**30),
)
def test_splits_are_disjoint_and_complete(classes, fraction, seed):
    rows = np.array([*classes, 0, 0, 1, 1, 2, 2, 3, 3])
    train, validation = split_rows(rows, fraction, seed=seed, labels=np.arange(4), source="here")
    assert not set(train) & set(validation)
    assert sorted([*train, *validation]) == np.flatnonzero(rows >= 0).tolist()
    for c in range(4):
        share, size = (rows[train] == c).sum(), (rows == c).sum()
        assert 1 <= share < size and (abs(share - fraction * size) <= 0.5 or share in (1, size - 1))


def test_a_constant_band_becomes_zero(tmp_path):
    cube, _ = scene()
    cube[:, :, 2] = 77
    data = read(write(tmp_path, cube=cube))
    assert (data.train.x[:, 2] == 0).all() and (data.validation.x[:, 2] == 0).all()


def test_variables_by_shape_and_by_name(tmp_path):
    cube, truth = scene()
    both = {"cube": cube, "truth": truth, "wavelengths": np.arange(BANDS), "note": "text", "weights": truth * 0.5}
    scipy.io.savemat(tmp_path / "all.mat", both)
    first = read(write(tmp_path))
    data = read(tmp_path, cube="all.mat", ground_truth="all.mat", ground_truth_variable="truth")
    assert torch.equal(data.train.x, first.train.x)
    data = read(tmp_path, cube="all.mat", ground_truth="all.mat")  # weights are no whole numbers
    assert torch.equal(data.train.x, first.train.x)
    scipy.io.savemat(tmp_path / "all.mat", {**both, "other": truth, "copy": cube})
    with pytest.raises(
        DataError,
        match=r"cube and copy could all be a numeric array \(rows, columns, bands\); .* set data.cube_variable",
    ):
        read(tmp_path, cube="all.mat")
    with pytest.raises(DataError, match="truth and other could all be .* set data.ground_truth_variable"):
        read(tmp_path, ground_truth="all.mat")
    with pytest.raises(
        DataError, match=r"no variable 'cub'; it holds: cube \(6, 5, 4\) int16; truth .* correct data.cube_variable"
    ):
        read(tmp_path, cube="all.mat", cube_variable="cub")
    with pytest.raises(
        DataError, match=r"variable weights, is \(6, 5\) float64; expected an array of whole numbers \(rows, columns\)"
    ):
        read(tmp_path, ground_truth="all.mat", ground_truth_variable="weights")


def test_a_mat_file_without_a_fit_lists_what_it_holds(tmp_path):
    write(tmp_path)
    scipy.io.savemat(tmp_path / "other.mat", {"a": np.zeros((3, 4)), "b": "text", "c": {"d": 1}})
    with pytest.raises(
        DataError, match=r"other.mat: no variable is a numeric array .* it holds: a \(3, 4\) float64; b \(1\) "
    ):
        read(tmp_path, cube="other.mat")
    scipy.io.savemat(tmp_path / "empty.mat", {})
    with pytest.raises(DataError, match="it holds: no variables; give another file"):
        read(tmp_path, cube="empty.mat")


def test_different_sizes_are_refused_with_both(tmp_path):
    write(tmp_path, truth=scene(7, 5)[1])
    message = (
        "cube.mat, variable cube, has 6 x 5 pixels; gt.mat, variable gt, has 7 x 5; the two files must be of one scene"
    )
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_missing_and_damaged_files(tmp_path):
    write(tmp_path)
    with pytest.raises(
        DataError, match=r"cub.mat does not exist; expected a \.mat file with .* in that folder: cube.mat, gt.mat"
    ):
        read(tmp_path, cube="cub.mat")
    whole = (tmp_path / "cube.mat").read_bytes()
    for content in (b"", b"not a mat file", whole[: len(whole) // 2], whole[:128]):
        (tmp_path / "bad.mat").write_bytes(content)
        with pytest.raises(DataError, match=r"bad.mat(.*cannot be read as a \.mat file|: no variable is)"):
            read(tmp_path, cube="bad.mat")
    (tmp_path / "new.mat").write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400))
    with pytest.raises(DataError, match="new.mat is a MATLAB 7.3 file, .* save it again with save -v7"):
        read(tmp_path, cube="new.mat")


def test_without_scipy(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(
        DataError, match=r"cube.mat: .mat files need scipy, which cannot be imported .*; pip install scipy"
    ):
        read(tmp_path)


def test_numbers_that_are_not_finite(tmp_path):
    cube, truth = scene()
    cube = cube.astype(float)
    row, column = np.argwhere(truth > 0)[3]
    cube[row, column, 2] = np.nan
    place = rf"cube.mat, variable cube: nan at row {row}, column {column}, band 2 is not a finite number \(1 of 120"
    with pytest.raises(DataError, match=place):
        read(write(tmp_path, cube=cube))
    cube[row, column, 2] = 0
    cube[truth == 0] = np.nan  # a masked background is never looked at
    assert torch.isfinite(read(write(tmp_path, cube=cube)).train.x).all()


def test_labels_out_of_range(tmp_path):
    _, truth = scene()
    wrong = truth.astype(int)
    wrong[1, 2] = -3
    with pytest.raises(DataError, match="gt.mat, variable gt: label -3 at flat index 7 is out of range; labels are 0"):
        read(write(tmp_path, truth=wrong))
    with pytest.raises(DataError, match=r"gt.mat, variable gt: 1 labels above 0; a classification needs two or more"):
        read(write(tmp_path, truth=(truth > 3) * 2))
    single = truth.copy()
    single[1, 2] = 99
    with pytest.raises(DataError, match="label 99 occurs once; a split .* needs two or more; set it to 0"):
        read(write(tmp_path, truth=single))
    with pytest.raises(DataError, match="no variable is an array of whole numbers"):
        read(write(tmp_path, truth=truth + 0.5))


def test_a_table_of_spectra(tmp_path):
    rng = np.random.default_rng(1)
    table, labels = rng.random((30, BANDS)), np.resize([1, 2, 4], 30)
    for shape in ((30, 1), (1, 30)):
        write(tmp_path, cube=table, truth=labels.reshape(shape).astype(float))
        data = read(tmp_path, name="spectra")
        assert data.scene is None and (data.classes, data.features) == (3, BANDS)
        assert data.class_names == ("class 1", "class 2", "class 4")
        assert len(data.train) == len(data.validation) == 15
    write(tmp_path, cube=table, truth=labels[:29, None])
    with pytest.raises(
        DataError, match="cube.mat, variable cube, holds 30 spectra; gt.mat, variable gt, holds 29 labels"
    ):
        read(tmp_path, name="spectra")
    table[4, 1] = np.inf
    write(tmp_path, cube=table, truth=labels[:, None])
    with pytest.raises(DataError, match="inf at sample 4, band 1 is not a finite number"):
        read(tmp_path, name="spectra")


def test_salinas_a(data_root):
    options = {"cube": "SalinasA_corrected.mat", "ground_truth": "SalinasA_gt.mat"}
    data = read(data_root / "salinas_a", dtype=torch.float32, **options)
    assert (data.classes, data.features, data.train.x.dtype) == (6, 204, torch.float32)
    assert data.class_names == ("class 1", "class 10", "class 11", "class 12", "class 13", "class 14")
    assert data.scene.classes.shape == (83, 86)
    sizes = data.train.y.bincount() + data.validation.y.bincount()
    assert sizes.tolist() == [391, 1343, 616, 1525, 674, 799]
    assert data.train.x.mean().abs() < 1e-5 and (data.train.x.std() - 1).abs() < 1e-3


def test_indian_pines_spectra(data_root):
    options = {"cube": "train_spectra_695x200.mat", "ground_truth": "train_labels_695.mat"}
    data = read(data_root / "indian_pines", name="spectra", **options)
    assert (data.classes, data.features) == (16, 200)
    assert (data.train.y.bincount() + data.validation.y.bincount()).tolist() == [50] * 13 + [15] * 3
    # the full cube is not there: the table is no scene, and the message says what the file holds
    with pytest.raises(DataError, match=re.escape("it holds: Train_X (695, 200) float64")):
        read(data_root / "indian_pines", cube=options["cube"], ground_truth="Indian_pines_gt.mat")
