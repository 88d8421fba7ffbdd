"""Refinement in depth and buffer layers: pure functions, and networks on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mgrit_case import gather_rows
from network_case import CONVERGED, DOUBLE, near, twin_of

import lpnet
from lpnet.errors import UsageError
from lpnet.mgrit.hierarchy import build
from lpnet.mgrit.refine import refine_rows

LAYERS, FACTOR = 7, 3


def make(comm, layers=LAYERS, levels=2, **mgrit):
    torch.manual_seed(0)
    stack = lpnet.LayerStack(lpnet.nn.DenseStep(4), num_layers=layers, final_time=2.0, comm=comm, seed=1,
                             dtype=DOUBLE)
    return lpnet.LayerParallel(stack, opening=torch.nn.Linear(3, 4), closing=torch.nn.Linear(4, 3),
                               mgrit=lpnet.MGRIT(levels=levels, coarsening=2, **{**CONVERGED, **mgrit}))


def batch():
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=DOUBLE), torch.arange(5) % 3


def by_hand(rows, interpolation):
    """Interpolated in numpy, column by column."""
    coarse, fine = np.arange(len(rows)), np.arange(FACTOR * len(rows)) / FACTOR
    if interpolation == "constant":
        return rows[np.floor(fine).astype(int)]
    flat = rows.reshape(len(rows), -1)
    return np.stack([np.interp(fine, coarse, c) for c in flat.T], 1).reshape(-1, *rows.shape[1:])


kinds = pytest.mark.parametrize("interpolation", ["constant", "linear"])


@kinds
def test_rows(interpolation):
    rows = torch.randn(LAYERS, 2, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    np.testing.assert_allclose(refine_rows(rows, FACTOR, interpolation), by_hand(rows.numpy(), interpolation),
                               rtol=0, atol=1e-14)
    assert torch.equal(refine_rows(rows, 1, interpolation), rows)
    assert refine_rows(torch.tensor([4, 6]), 2, interpolation).tolist() == [4, 4, 6, 6]


@pytest.mark.ranks(1, 2, 3)
@kinds
def test_a_network_and_its_optimiser(comm, interpolation):
    net, (x, y) = make(comm), batch()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(3):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    fine, other = lpnet.refine(net, FACTOR, interpolation=interpolation, optimizer=optimizer)
    assert fine.stack.num_layers == FACTOR * LAYERS and other.param_groups[0]["lr"] == 0.03
    for (_, p), (_, q) in zip(net.stack.named_parameters(), fine.stack.named_parameters(), strict=True):
        for coarse, found in ((p.detach(), q.detach()), (optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])):
            np.testing.assert_allclose(gather_rows(fine, found), by_hand(gather_rows(net, coarse), interpolation),
                                       rtol=0, atol=1e-14)
        assert int(other.state[q]["step"]) == 3
    twin, loss = twin_of(fine), F.cross_entropy(fine(x), y)
    near(loss.detach(), F.cross_entropy(twin(x), y).detach())
    change = float((fine(x) - net(x)).detach().abs().max())
    assert 0 < change < 0.2  # the same function of time, walked in smaller steps
    loss.backward()
    other.step()
    fine.comm.free()


def test_refine_takes_one_stack():
    network = lpnet.Network([torch.nn.Identity(), torch.nn.Linear(3, 3), torch.nn.Identity()])
    with pytest.raises(UsageError, match="one stack"):
        lpnet.refine(lpnet.LayerParallel(network), 2)
    with pytest.raises(UsageError, match="factor of a refinement is 0"):
        lpnet.refine(make(None), 0)
    with pytest.raises(UsageError, match="constant or linear"):
        lpnet.refine(make(None), 2, interpolation="cubic")


def test_buffer_layers_are_on_every_level():
    levels = build(20, lpnet.MGRIT(levels=3, coarsening=3, buffer_layers=2)).levels
    assert levels[1] == (0, 1, 2, 5, 8, 11, 14, 17, 18, 19, 20)
    assert {0, 1, 2, 18, 19, 20} <= set(levels[2])
    assert build(3, lpnet.MGRIT(levels=2, buffer_layers=5)).levels == (tuple(range(4)),)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("levels, batching", [(2, "off"), (2, "on"), (3, "off")])
def test_a_network_with_buffer_layers_equals_the_serial_twin(comm, levels, batching):
    net, (x, y) = make(comm, 14, levels, buffer_layers=2, batching=batching), batch()
    twin = twin_of(net)
    F.cross_entropy(net(x), y).backward()
    F.cross_entropy(twin(x), y).backward()
    expected = np.stack([layer.weight.grad for layer in twin.layers])
    np.testing.assert_allclose(gather_rows(net, net.stack.weight.grad), expected, rtol=0, atol=1e-10)
    net.comm.free()
