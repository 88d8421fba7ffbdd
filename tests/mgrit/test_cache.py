"""Kept states within a budget: what stays, what goes to disk, in which precision; class means as a start."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mgrit_case import Case, bare

import lpnet
from lpnet.errors import SaveError
from lpnet.mgrit.cache import MEANS, Pair, StateCache
from lpnet.mgrit.propagator import Kept

MIB = 2**20


def pair(value, dtype=torch.float32):
    return Pair(Kept(torch.full((4, 3), value).to(dtype)), Kept(torch.full((2, 3), -value).to(dtype)))


def same(one, two):
    return all(torch.equal(a.states, b.states) for a, b in zip(one, two, strict=True))


def test_drop_keeps_the_batches_that_came_first():
    cache = StateCache(2.0, "drop")
    for batch in range(4):
        cache.put(batch, pair(float(batch)), size=MIB)
    cache.put(MEANS, pair(9.0), size=MIB)  # never dropped
    assert [batch for batch, _ in cache.items()] == [MEANS, 0, 1] and cache.dropped == 2
    cache.put(1, pair(7.0), size=MIB)
    assert same(cache.get(1), pair(7.0)) and cache.get(3) == Pair(None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disk_gives_every_batch_back(dtype):
    cache = StateCache(2.0, "disk")
    for batch in range(5):
        cache.put(batch, pair(float(batch), dtype), size=MIB)
    assert len(cache) == 5 and len(cache._on_disk) == 3
    for batch in (0, 3, 1, 4, 2):
        found = cache.get(batch)
        assert found.state.states.dtype == dtype and same(found, pair(float(batch), dtype))
        cache.put(batch, found, size=MIB)
        assert len(cache._on_disk) == 3
    assert [batch for batch, _ in cache.items()] == list(range(5))


def test_a_damaged_file_is_named():
    cache = StateCache(1.0, "disk")
    for batch in range(2):
        cache.put(batch, pair(1.0), size=MIB)
    cache._path(0, 0).write_bytes(b"short")
    with pytest.raises(SaveError, match="5 bytes of batch 0, expected 48"):
        cache.get(0)


def test_other_states_for_a_while():
    cache = StateCache()
    cache.put(0, pair(1.0), size=0.0)
    copies = cache.copies([0, 5, None])
    cache.get(0).state.states.fill_(2.0)
    with cache.replaced(copies):
        assert same(cache.get(0), pair(1.0))
    assert cache.get(0).state.states[0, 0] == 2.0 and list(copies) == [0]


@pytest.mark.parametrize("dtype, error", [("same", 0.0), ("float32", 1e-6), ("bfloat16", 2e-2)])
def test_narrow_storage_costs_its_rounding(dtype, error):
    """After a cold pass the kept states are exact; a warm pass of one iteration differs by their rounding."""
    case = Case(26, coarsening=3)
    nets = [bare(case, None, initial_guess="kept", forward_iterations=1, adjoint_iterations=1, cache_dtype=d)
            for d in ("same", dtype)]  # fmt: skip
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for net in nets:
        for _ in range(2):
            out = net(x, batch=0)
            out.square().sum().backward()
        found.append(out.detach())
    difference = float((found[0] - found[1]).norm() / found[0].norm())
    assert difference <= error and (dtype == "same" or difference > 0)


@pytest.mark.ranks(1, 3)
def test_a_budget_gives_the_same_starts_on_all_ranks(comm):
    """Ranks with other numbers of C-points decide alike: else a warm and a cold solve would wait for each other."""
    case = Case(13, coarsening=3)
    size = 8 * 4 * 5 / MIB
    net = bare(case, comm, initial_guess="kept", forward_iterations=1, adjoint_iterations=1, cache_mib=12 * size)
    for _ in range(2):
        for batch in range(4):
            x = torch.full((5, 4), 0.1 * (1 + batch), dtype=torch.float64)
            net(x, batch=batch).square().sum().backward()
    kept = [batch for batch, _ in net._cache.items()]
    assert 0 < len(kept) < 4 and all(other == kept for other in net.comm.all_gather_objects(kept))


def test_class_means_start_samples_that_were_never_seen():
    stack = lpnet.LayerStack(lpnet.nn.DenseStep(width=4), num_layers=24, final_time=3.0, seed=0, dtype=torch.float64)
    settings = {"coarsening": 4, "forward_iterations": 1, "adjoint_iterations": 1}
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(3, 4, dtype=torch.float64, generator=generator)
    residuals = {}
    for guess in ("class_mean", "zero"):
        net = lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=torch.nn.Identity(),
                                  mgrit=lpnet.MGRIT(**settings, initial_guess=guess))  # fmt: skip
        for _ in range(2):
            y = torch.randint(0, 3, (30,), generator=generator)
            x = centres[y] + 0.05 * torch.randn(30, 4, dtype=torch.float64, generator=generator)
            out = net(x, classes=y)
            F.cross_entropy(out, y).backward()
            residuals[guess] = net.solve_reports(net.residual_squares())[0].residuals[0]
    assert residuals["class_mean"] < 0.2 * residuals["zero"]
    assert len(net._cache) == 0  # the guess zero keeps nothing
