"""Regularisation against the plain formula and finite differences, clipping against torch, on 1 to 4 ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lpnet.errors import LpnetError, UsageError
from lpnet.optim.clip import clip_grad_norm
from lpnet.optim.regularization import Regularization
from lpnet.optim.rows import RowSum, subtrees
from lpnet.parallel.comm import Comm
from lpnet.parallel.partition import Partition, uniform
from lpnet.parallel.shard import Shard

LAYERS, H = 7, 0.25
GAMMAS = {"tikhonov": 0.3, "classifier_tikhonov": 0.7, "ddt": 0.11}


def make_net(comm: Comm, values: dict[str, torch.Tensor], bounds: tuple[int, ...] | None = None) -> SimpleNamespace:
    """As much of a LayerParallel as regularisation and clipping look at."""
    partition = Partition(bounds) if bounds else uniform(LAYERS, comm.size)
    low, high = partition.block(comm.rank)
    shards = []
    for name, value in values.items():
        if name.startswith("stack."):
            shards.append(Shard(name, value[low:high].clone().requires_grad_(), (low, high), LAYERS))
        elif comm.rank == (0 if name.startswith("opening.") else comm.size - 1):
            shards.append(Shard(name, value.clone().requires_grad_()))
    stack = SimpleNamespace(h=H, starts=None)
    return SimpleNamespace(shards=lambda: shards, comm=comm, partition=partition, stack=stack)


def make_values(bias: tuple[int, ...] = (LAYERS, 1), dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "stack.weight": (LAYERS, 3, 3),
        "stack.bias": bias,
        "opening.weight": (3, 2),
        "closing.weight": (4, 3),
        "closing.bias": (4,),
    }
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def plain_value(values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The formula, differentiable."""
    total = torch.zeros((), dtype=torch.float64)
    for name, value in values.items():
        gamma = GAMMAS["classifier_tikhonov"] if name.startswith("closing.") else GAMMAS["tikhonov"]
        total = total + gamma / 2 * (value**2).sum()
        if name.startswith("stack."):
            total = total + GAMMAS["ddt"] / 2 * (((value[1:] - value[:-1]) / H) ** 2).sum()
    return total


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bias", [(LAYERS, 1), (LAYERS, 3)])
def test_value_and_gradient_equal_the_formula(comm, bias):
    comm = Comm(comm)
    values = make_values(bias)
    for bounds in (None, tuple(range(comm.size)) + (LAYERS,)):  # even blocks; single layers and a large last block
        net = make_net(comm, values, bounds)
        term = Regularization(net, **GAMMAS)
        whole = {name: value.clone().requires_grad_() for name, value in values.items()}
        plain_value(whole).backward()
        value = comm.sum(np.array([term.value()]))[0]
        assert value == pytest.approx(float(plain_value(values)), rel=1e-14)
        packed = term.rows.total(comm.sum(term.rows.pack(term.terms())))[0]
        alone = Regularization(make_net(Comm(), values), **GAMMAS)
        assert packed == alone.rows.total(alone.rows.pack(alone.terms()))[0], "bits depend on the number of ranks"
        term.add_gradient()
        term.add_gradient()  # adds, and fetches the boundary layers itself
        for shard in net.shards():
            expected = whole[shard.name].grad
            expected = expected if shard.rows is None else expected[slice(*shard.rows)]
            torch.testing.assert_close(shard.tensor.grad, 2 * expected, rtol=1e-13, atol=1e-14)
    comm.free()


@pytest.mark.ranks(1, 3)
def test_gradient_equals_finite_differences(comm):
    comm = Comm(comm)
    values = make_values()
    net = make_net(comm, values)
    term = Regularization(net, **GAMMAS)
    term.value()
    term.add_gradient()
    gradients = {
        name: part
        for parts in comm.all_gather_objects([(s.name, s.rows, s.tensor.grad) for s in net.shards()])
        for name, part in _join(parts)
    }
    eps = 1e-5
    for name, row, column in (
        ("stack.weight", 0, 2),
        ("stack.weight", 2, 1),
        ("stack.weight", 3, 4),
        ("stack.weight", 6, 8),
        ("stack.bias", 4, 0),
        ("closing.weight", 1, 2),
        ("opening.weight", 2, 1),
    ):
        ends = []
        for sign in (1, -1):
            shifted = {key: value.clone() for key, value in values.items()}
            shifted[name].view(shifted[name].shape[0], -1)[row, column] += sign * eps
            ends.append(comm.sum(np.array([Regularization(make_net(comm, shifted), **GAMMAS).value()]))[0])
        low, part = _owner(gradients, name, row)
        analytic = float(part.reshape(part.shape[0], -1)[row - low, column])
        assert (ends[0] - ends[1]) / (2 * eps) == pytest.approx(analytic, rel=1e-7, abs=1e-9)
    comm.free()


def _join(parts):
    return [((name, rows[0] if rows else 0), grad) for name, rows, grad in parts]


def _owner(gradients, name, row):
    low = max(low for key, low in gradients if key == name and low <= row)
    return low, gradients[name, low]


def test_changed_parameters_between_value_and_gradient():
    net = make_net(Comm(), make_values())
    term = Regularization(net, **GAMMAS)
    term.value()
    with torch.no_grad():
        net.shards()[0].tensor.add_(1.0)
    with pytest.raises(UsageError, match="call value again"):
        term.add_gradient()


@pytest.mark.ranks(1, 2, 3, 4)
def test_clipping_equals_torch(comm):
    comm = Comm(comm)
    values = make_values(dtype=torch.float32)
    for largest in (0.5, 1e6):
        net = make_net(comm, values)
        plain = [value.clone().requires_grad_() for value in values.values()]
        for parameter in plain:
            parameter.grad = torch.sin(3 * parameter.detach())
        for shard in net.shards():
            shard.tensor.grad = torch.sin(3 * shard.tensor.detach())
        expected = torch.nn.utils.clip_grad_norm_(plain, largest)
        norm = clip_grad_norm(net, largest)
        assert norm == pytest.approx(float(expected), rel=1e-6)
        assert len(set(comm.all_gather_objects(norm))) == 1
        for shard in net.shards():
            grad = plain[list(values).index(shard.name)].grad
            torch.testing.assert_close(
                shard.tensor.grad, grad if shard.rows is None else grad[slice(*shard.rows)], rtol=1e-6, atol=1e-8
            )
    comm.free()


def test_subtrees_tile_any_block():
    assert subtrees(0, 28) == [(0, 16), (16, 8), (24, 4)]
    assert subtrees(5, 12) == [(5, 1), (6, 2), (8, 4)]
    for low in range(20):
        for high in range(low, 40):
            blocks = subtrees(low, high)
            assert [i for first, size in blocks for i in range(first, first + size)] == list(range(low, high))
            assert all(first % size == 0 for first, size in blocks)


@pytest.mark.ranks(1, 2, 3, 4)
def test_sums_do_not_depend_on_the_partition(comm):
    comm = Comm(comm)
    rng = np.random.default_rng(0)
    terms = rng.standard_normal((3, 29)) * 10.0 ** rng.integers(-8, 8, (3, 29))
    results = set()
    for bounds in (uniform(29, comm.size).bounds, tuple(range(comm.size)) + (29,)):
        low, high = Partition(bounds).block(comm.rank)
        rows = RowSum([Shard("stack.weight", torch.zeros(high - low, 2), (low, high), 29)], Partition(bounds))
        results.add(rows.total(comm.sum(rows.pack([terms[:, low:high]]))).tobytes())
    alone = RowSum([Shard("stack.weight", torch.zeros(29, 2), (0, 29), 29)], Partition((0, 29)))
    results.add(alone.total(alone.pack([terms])).tobytes())
    assert len(results) == 1
    np.testing.assert_allclose(alone.total(alone.pack([terms])), terms.sum(1), rtol=1e-9)
    comm.free()


def test_shards_that_do_not_fit_the_partition():
    with pytest.raises(LpnetError, match="rows of one block"):
        RowSum([Shard("stack.weight", torch.zeros(3, 2), (0, 3), 7)], Partition((0, 4, 7)))
    with pytest.raises(LpnetError, match="outside the groups"):
        RowSum([Shard("middle.weight", torch.zeros(3, 2))], Partition((0, 4, 7)))
