"""Crops and flips: the same for a sample in any batch, uniform, and equal to a loop written for the test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lpnet.data import BatchOrder
from lpnet.data.augment import CropFlip, below, counted_bits, fraction
from lpnet.errors import ConfigError

SAMPLES = 97
IMAGES = torch.randn(SAMPLES, 3, 8, 10, generator=torch.Generator().manual_seed(0))


def by_hand(augment, indices, epoch):
    """One image after the other."""
    out = []
    for i in indices.tolist():
        row, column, mirrored = (int(part[0]) for part in augment.plan(torch.tensor([i]), epoch=epoch))
        height, width = IMAGES.shape[2:]
        canvas = torch.zeros(3, height + 2 * augment.pad, width + 2 * augment.pad)
        canvas[:, augment.pad : augment.pad + height, augment.pad : augment.pad + width] = IMAGES[i]
        window = canvas[:, row : row + height, column : column + width]
        out.append(window.flip(2) if mirrored else window)
    return torch.stack(out)


@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("flip", [True, False])
def test_equals_a_loop(pad, flip):
    augment = CropFlip(3, pad=pad, flip=flip)
    indices = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    out = augment(IMAGES[indices], indices, epoch=5)
    assert torch.equal(out, by_hand(augment, indices, 5))
    assert out.shape == IMAGES.shape and out.is_contiguous()


@given(batch=st.integers(1, SAMPLES), epoch=st.integers(0, 1000), seed=st.integers(0, 9))
def test_independent_of_the_batch_split(batch, epoch, seed):
    """However the samples are shared by batches or ranks, and in whatever order, each gets the same image."""
    augment = CropFlip(seed)
    whole = augment(IMAGES, torch.arange(SAMPLES), epoch=epoch)
    order = BatchOrder(SAMPLES, batch, seed)
    for step in range(order.batches):
        indices = order.at(step).indices
        assert torch.equal(augment(IMAGES[indices], indices, epoch=epoch), whole[indices])


def test_a_new_draw_for_every_epoch_seed_and_sample():
    plans = {
        (seed, epoch, index): tuple(int(p[0]) for p in CropFlip(seed).plan(torch.tensor([index]), epoch=epoch))
        for seed in range(4)
        for epoch in range(8)
        for index in range(32)
    }
    assert len(set(plans.values())) == 9 * 9 * 2  # all that there are
    same = CropFlip(0).plan(torch.arange(50), epoch=3)
    assert all(np.array_equal(a, b) for a, b in zip(same, CropFlip(0).plan(torch.arange(50), epoch=3), strict=True))


def test_windows_and_mirrors_are_uniform_and_independent():
    count = 81 * 2 * 200
    rows, columns, mirrored = CropFlip(1).plan(torch.arange(count), epoch=0)
    seen = np.bincount((rows * 9 + columns) * 2 + mirrored, minlength=162)
    chi_square = float(((seen - 200) ** 2 / 200).sum())
    assert abs(chi_square - 161) < 5 * math.sqrt(2 * 161)
    assert rows.min() == columns.min() == 0 and rows.max() == columns.max() == 8
    for series in (rows, columns, mirrored):  # neighbours know nothing of each other
        values = series.astype(float)
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / math.sqrt(count)
    later, *_ = CropFlip(1).plan(torch.arange(count), epoch=1)
    assert abs(np.corrcoef(rows, later)[0, 1]) < 5 / math.sqrt(count)


def test_the_random_numbers_stay_what_they_are():
    """A run that is resumed with a newer version sees the same images."""
    bits = counted_bits(0, "augment/crop_flip", epoch=2, indices=np.array([0, 49_999]), count=3)
    start = (bits[0, 0], bits[1, 2])
    assert bits.dtype == np.uint64 and bits.shape == (2, 3)
    assert start == (9573726661683180087, 11597619063141182470)


def test_bits_are_the_published_sequence(monkeypatch):
    """SplitMix64 from 1234567, the test vector that comes with its reference code."""
    monkeypatch.setattr("lpnet.data.augment.stream_seed", lambda *_, **__: 1234567)
    bits = counted_bits(0, "any", epoch=0, indices=np.arange(4), count=1)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert bits[:, 0].tolist() == expected


def test_ranges():
    bits = counted_bits(7, "test", epoch=0, indices=np.arange(2000), count=2)
    assert set(below(bits, 3).ravel().tolist()) == {0, 1, 2} and (below(bits, 1) == 0).all()
    numbers = fraction(bits)
    assert 0 <= numbers.min() < 0.01 and 0.99 < numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.02
    assert counted_bits(7, "test", epoch=0, indices=np.arange(0), count=3).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_any_precision(dtype):
    x = IMAGES.to(dtype)
    out = CropFlip(0)(x, torch.arange(SAMPLES), epoch=0)
    assert out.dtype == dtype
    assert torch.equal(out, CropFlip(0)(IMAGES.double(), torch.arange(SAMPLES), epoch=0).to(dtype))


def test_the_short_last_batch():
    indices = torch.tensor([96])
    whole = CropFlip(0)(IMAGES, torch.arange(SAMPLES), epoch=1)
    assert torch.equal(CropFlip(0)(IMAGES[indices], indices, epoch=1), whole[96:])
    assert CropFlip(0)(IMAGES[:0], torch.arange(0), epoch=1).shape == (0, 3, 8, 10)


def test_the_input_is_left_alone():
    before = IMAGES.clone()
    out = CropFlip(0, pad=0, flip=False)(IMAGES, torch.arange(SAMPLES), epoch=0)
    assert torch.equal(out, IMAGES) and out.data_ptr() != IMAGES.data_ptr() and torch.equal(IMAGES, before)


def test_a_negative_pad():
    with pytest.raises(ConfigError, match="pads by -1 pixels; it must be 0 or more"):
        CropFlip(0, pad=-1)
