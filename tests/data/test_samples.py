"""Checks that hold for every kind of data, and stratified subsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lpnet.config import DataConfig
from lpnet.data import Samples
from lpnet.data.samples import check, stratified_subset
from lpnet.errors import DataError


def subset(labels, count, seed=0):
    return stratified_subset(np.asarray(labels), count, seed=seed, stream="subset/test", key="data.train_samples")


@given(labels=st.lists(st.integers(0, 6), min_size=1, max_size=80), data=st.data())
def test_a_subset_keeps_the_shares(labels, data):
    labels = np.array(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    count = data.draw(st.integers(len(classes), len(labels)))
    chosen = subset(labels, count, seed=data.draw(st.integers(0, 99)))
    assert len(chosen) == len(set(chosen.tolist())) == count
    assert np.array_equal(chosen, np.sort(chosen))
    shares = np.array([(labels[chosen] == c).sum() for c in classes])
    assert (shares >= 1).all() and (shares <= sizes).all()
    # one each is set aside, the rest goes in proportion, to the nearest whole number or its neighbour
    rest = (count - len(classes)) * (sizes - 1) / max(1, (sizes - 1).sum())
    assert (np.abs(shares - 1 - rest) < 1).all()


def test_subsets_are_seeded():
    labels = np.arange(100) % 4
    assert np.array_equal(subset(labels, 20), subset(labels, 20))
    assert not np.array_equal(subset(labels, 20), subset(labels, 20, seed=1))
    assert set(subset(labels, 20)) <= set(subset(labels, 40))
    assert np.array_equal(subset(labels, None), np.arange(100))


def test_subsets_that_cannot_be():
    with pytest.raises(DataError, match="data.train_samples is 9, but there are 6 samples; use at most 6, or null"):
        subset([0, 0, 1, 1, 2, 2], 9)
    with pytest.raises(DataError, match="data.train_samples is 2, fewer than the 3 classes; .* use at least 3"):
        subset([0, 0, 1, 1, 2, 2], 2)


def samples(x, y) -> Samples:
    return Samples(torch.tensor(x), torch.tensor(y, dtype=torch.int64))


def test_check():
    check(samples([[1.0], [2.0]], [0, 1]), 2, "here")
    with pytest.raises(DataError, match="here: 2 inputs but 1 labels"):
        check(samples([[1.0], [2.0]], [0]), 2, "here")
    with pytest.raises(DataError, match="here: there are none; give at least one"):
        check(Samples(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)), 2, "here")
    with pytest.raises(DataError, match=r"label of sample 1 is 5, out of range 0\.\.2 \(2 of 3 labels are\)"):
        check(samples([[1.0], [2.0], [3.0]], [0, 5, -1]), 3, "here")
    with pytest.raises(DataError, match=r"sample 1 holds a number that is not finite in torch.float32 \(1 of 2"):
        check(samples([[1.0], [float("nan")]], [0, 1]), 2, "here")


def test_take():
    taken = samples([[1.0], [2.0], [3.0]], [0, 1, 2]).take(torch.tensor([2, 0]))
    assert taken.x.tolist() == [[3.0], [1.0]] and taken.y.tolist() == [2, 0] and len(taken) == 2


def test_the_configuration():
    with pytest.raises(ValueError, match="data.name spectra reads files; give --data.root FOLDER"):
        DataConfig(name="spectra")
    with pytest.raises(ValueError, match="data.name spectra needs data.cube and data.ground_truth"):
        DataConfig(name="spectra", root=".", cube="a.mat")
    with pytest.raises(ValueError, match="data.train_samples is 0; it must be greater than 0"):
        DataConfig(train_samples=0)
    with pytest.raises(ValueError, match="data.train_fraction is 1; it must lie between 0 and 1"):
        DataConfig(train_fraction=1)
