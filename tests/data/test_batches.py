"""The order of batches is a function of (seed, step) and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lpnet.data import BatchOrder
from lpnet.errors import ConfigError

sizes = st.integers(1, 60)
modes = st.sampled_from(["reshuffled", "fixed"])


@settings(max_examples=60)
@given(
    samples=sizes, size=st.none() | st.integers(1, 70), seed=st.integers(0, 2**40), epoch=st.integers(0, 5), mode=modes
)
def test_an_epoch_visits_every_sample_once(samples, size, seed, epoch, mode):
    order = BatchOrder(samples, size, seed, mode)
    batches = [order.at(epoch * order.batches + k) for k in range(order.batches)]
    assert {batch.epoch for batch in batches} == {epoch}
    assert torch.equal(torch.cat([batch.indices for batch in batches]).sort().values, torch.arange(samples))
    lengths = sorted(len(batch.indices) for batch in batches)
    assert lengths[0] == samples - order.size * (order.batches - 1)  # the short one, if any
    assert set(lengths[1:]) <= {order.size}
    assert all(batch.indices.dtype == torch.int64 for batch in batches)


@settings(max_examples=40)
@given(
    samples=sizes, size=st.none() | st.integers(1, 70), seed=st.integers(0, 2**40), steps=st.lists(st.integers(0, 99))
)
def test_fixed_batches_keep_their_members(samples, size, seed, steps):
    order = BatchOrder(samples, size, seed, "fixed")
    seen = {}
    for step in steps:
        batch = order.at(step)
        assert batch.id is not None and 0 <= batch.id < order.batches
        assert torch.equal(seen.setdefault(batch.id, batch.indices), batch.indices)
        assert torch.equal(order.members_of(batch.id), batch.indices)


@settings(max_examples=40)
@given(
    samples=sizes, size=st.integers(1, 70), seed=st.integers(0, 2**40), steps=st.lists(st.integers(0, 99)), mode=modes
)
def test_a_step_needs_no_history(samples, size, seed, steps, mode):
    """Whatever was asked before, in whatever order, by whichever object."""
    one, other = BatchOrder(samples, size, seed, mode), BatchOrder(samples, size, seed, mode)
    forward = {step: one.at(step) for step in steps}
    for step in reversed(steps):
        again = other.at(step)
        assert (again.epoch, again.id) == (forward[step].epoch, forward[step].id)
        assert torch.equal(again.indices, forward[step].indices)


@pytest.mark.parametrize("mode", ["reshuffled", "fixed"])
def test_seeds_and_epochs_differ(mode):
    order, other = BatchOrder(1000, 50, 1, mode), BatchOrder(1000, 50, 2, mode)
    assert not torch.equal(order.at(0).indices, other.at(0).indices)
    first = torch.cat([order.at(k).indices for k in range(20)])
    second = torch.cat([order.at(20 + k).indices for k in range(20)])
    assert not torch.equal(first, second)


def test_reshuffled_members_have_no_id_and_change():
    order = BatchOrder(100, 10, 0)
    assert all(order.at(step).id is None for step in range(30))
    epochs = [{frozenset(order.at(10 * e + k).indices.tolist()) for k in range(10)} for e in range(3)]
    assert epochs[0].isdisjoint(epochs[1]) and epochs[1].isdisjoint(epochs[2])
    with pytest.raises(IndexError, match="no fixed members"):
        order.members_of(0)


@pytest.mark.parametrize("mode", ["reshuffled", "fixed"])
@pytest.mark.parametrize("size", [None, 7, 8])
def test_the_full_batch_is_one_batch_in_natural_order(mode, size):
    order = BatchOrder(7, size, 3, mode)
    assert order.full and order.batches == 1 and order.size == 7
    for step in (0, 1, 5):
        batch = order.at(step)
        assert (batch.epoch, batch.id) == (step, 0)
        assert torch.equal(batch.indices, torch.arange(7))
    assert torch.equal(order.members_of(0), torch.arange(7))


def test_the_order_is_the_one_of_earlier_runs():
    """A change here would silently change what a resumed run sees."""
    assert BatchOrder(8, 3, 0).at(0).indices.tolist() == [3, 5, 6]
    assert [BatchOrder(8, 3, 0, "fixed").at(k).id for k in range(6)] == [1, 2, 0, 2, 1, 0]


def test_indices_belong_to_the_caller():
    order = BatchOrder(20, 5, 0)
    order.at(0).indices.zero_()
    assert order.at(0).indices.unique().numel() == 5


def test_wrong_numbers_are_refused():
    with pytest.raises(ConfigError, match="there are 0 training samples; at least 1"):
        BatchOrder(0, 1, 0)
    with pytest.raises(ConfigError, match="data.batch_size is 0; it must be 1 or more, or null"):
        BatchOrder(5, 0, 0)
    with pytest.raises(IndexError, match="step -1: steps count from 0"):
        BatchOrder(5, 2, 0).at(-1)
    with pytest.raises(IndexError, match="batch 3 has no fixed members"):
        BatchOrder(5, 2, 0, "fixed").members_of(3)
