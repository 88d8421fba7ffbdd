"""Data replicas x ranks that share layers: equal to one replica with the joined batch, and equal among each other."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from network_case import CONVERGED, DOUBLE, near

import lpnet
from lpnet.errors import UsageError
from lpnet.optim.clip import clip_grad_norm
from lpnet.parallel.grid_shape import grid_shape

LAYERS = 9


def dropped():
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Dropout(0.3))


def make(grid, step=None, comm=None, **mgrit):
    torch.manual_seed(7 + (0 if grid is None else 10 * grid.replica))  # replicas draw other ends; the first one's count
    stack = lpnet.LayerStack(step or lpnet.nn.DenseStep(6), num_layers=LAYERS, final_time=2.0,
                             comm=grid.layers if grid else comm, seed=3, dtype=DOUBLE)
    return lpnet.LayerParallel(stack, opening=torch.nn.Linear(4, 6), closing=torch.nn.Linear(6, 3), grid=grid,
                               mgrit=lpnet.MGRIT(levels=2, coarsening=2, **{**CONVERGED, **mgrit}))


def batch(count=7, seed=0):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE), torch.arange(count) % 3


def compare(comm, net, one, what):
    """This rank's tensors against the same rows of a network of one replica and one rank, and against the peers'."""
    whole = {shard.name: shard.tensor for shard in one.shards()}
    for shard in net.shards():
        mine, other = shard.tensor, whole[shard.name]
        if what == "grad":
            mine, other = mine.grad, other.grad
        near(mine.detach(), (other if shard.rows is None else other[slice(*shard.rows)]).detach(), shard.name)
        if net.grid.peers is not None:
            same = net.grid.peers.all_gather_objects(mine.detach().numpy().tobytes())
            assert all(bits == same[0] for bits in same), shard.name


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [None, dropped], ids=["dense", "dropout"])
def test_steps_equal_those_of_the_joined_batch(comm, replicas, step):
    if comm.size % replicas:
        with pytest.raises(UsageError, match=f"{replicas} replicas x 1 modules do not fit {comm.size} ranks; the near"):
            lpnet.Grid(comm, replicas=replicas)
        return
    grid = lpnet.Grid(comm, replicas=replicas)
    net, one = make(grid, step), make(None, step)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, one)]
    for k in range(3):
        for seed in (k, k + 10):  # two micro-batches
            x, y = batch(7 if k < 2 else 5, seed)
            part, weight = grid.part(len(x))
            if seed == k:
                net.begin_step(k, first=part.start), one.begin_step(k)
            if seed > k and step is dropped:  # the second pass of a step draws masks by global sample too
                net._key = copy.copy(one._key).__class__(one._key.step, one._key.micro, part.start)
            (F.cross_entropy(net(x[part], batch=k), y[part]) * weight).backward()
            F.cross_entropy(one(x, batch=k), y).backward()
            compare(comm, net, one, "grad")
        norms = clip_grad_norm(net, 0.1), clip_grad_norm(one, 0.1)
        assert norms[0] == pytest.approx(norms[1], rel=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(comm, net, one, "value")
    grid.free()


@pytest.mark.ranks(4)
def test_two_replicas_of_two_ranks_equal_two_ranks_with_the_joined_batch(comm):
    """One multigrid iteration from kept states: replicas change nothing but the sums over the batch."""
    grid = lpnet.Grid(comm, replicas=2)
    half = comm.Split(comm.rank // 2, comm.rank)
    fixed = {"forward_iterations": 1, "adjoint_iterations": 1, "tolerance": None}
    net, joined = make(grid, **fixed), make(None, comm=half, **fixed)
    joined.load_state_dict(net.state_dict()), net.load_state_dict(joined.state_dict())
    x, y = batch(8)
    part, weight = grid.part(8)
    for k in range(3):
        (F.cross_entropy(net(x[part], batch=0), y[part]) * weight).backward()
        F.cross_entropy(joined(x, batch=0), y).backward()
        for p, q in zip(net.parameters(), joined.parameters(), strict=True):
            near(p.grad, q.grad, f"step {k}")
        for model in (net, joined):
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
    grid.free()


@pytest.mark.ranks(2)
def test_frozen_thawed_copied_and_converted_networks_average_too(comm):
    grid = lpnet.Grid(comm, replicas=2)
    net, one = make(grid), make(None)
    for model in (net, one):
        model.stack.bias.requires_grad_(False)
    x, y = batch(6)
    part, _ = grid.part(6)

    def step(model, samples):
        F.cross_entropy(model(x[samples]), y[samples]).backward()

    step(net, part), step(one, slice(None))
    assert net.stack.bias.grad is None
    near(net.stack.weight.grad, one.stack.weight.grad)
    for model in (net, one):
        model.stack.bias.requires_grad_(True)
        model.zero_grad()
    step(net, part), step(one, slice(None))
    near(net.stack.bias.grad, one.stack.bias.grad)
    again = copy.deepcopy(net)
    again.zero_grad()
    step(again, part)
    near(again.stack.weight.grad, one.stack.weight.grad)
    net.float().double().zero_grad(), one.float().double().zero_grad()
    step(net, part), step(one, slice(None))
    near(net.stack.weight.grad, one.stack.weight.grad)
    grid.free()


@pytest.mark.ranks(2, 4)
def test_running_statistics_of_the_first_replica_are_everyones(comm):
    def normed():
        return torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6))

    grid = lpnet.Grid(comm, replicas=2)
    net = make(grid, normed)
    x, y = batch(8)
    part, weight = grid.part(8)
    (F.cross_entropy(net(x[part]), y[part]) * weight).backward()
    name = next(name for name, _ in net.named_buffers() if "mean" in name)
    before = grid.peers.all_gather_objects(dict(net.named_buffers())[name].clone())
    assert not torch.equal(*before)
    net.share_buffers()
    assert torch.equal(dict(net.named_buffers())[name], before[0])
    grid.free()


def test_the_grid_as_a_table():
    shape = grid_shape(12, replicas=2, modules=3)
    assert (shape.layers, str(shape)) == (2, "2 replicas x 3 modules x 2 layer ranks")
    assert [shape.place(rank) for rank in (0, 1, 2, 6, 11)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 2, 1)]
    assert shape.table().splitlines()[:3] == [
        "grid: 12 ranks = 2 replicas x 3 modules x 2 layer ranks",
        "  rank     0  1  2  3  4  5  6  7  8  9 10 11",
        "  replica  0  0  0  0  0  0  1  1  1  1  1  1",
    ]
    with pytest.raises(UsageError, match=r"3 replicas x 1 modules do not fit 4 ranks; the nearest grid is 2 replicas "
                                         r"x 1 modules x 2 layer ranks, or start 3 ranks"):
        grid_shape(4, replicas=3)
    with pytest.raises(UsageError, match=r"2 replicas x 2 modules x 3 layer ranks do not fit 8 ranks; .* 12 ranks"):
        grid_shape(8, replicas=2, modules=2, layers=3)
    with pytest.raises(UsageError, match="parallel.replicas is 0"):
        grid_shape(8, replicas=0)


@pytest.mark.ranks(4)
def test_a_stack_of_other_ranks_than_the_grids_is_refused(comm):
    grid = lpnet.Grid(comm, replicas=2)
    stack = lpnet.LayerStack(lpnet.nn.DenseStep(6), num_layers=LAYERS, comm=comm)
    with pytest.raises(UsageError, match=r"shared by 4 ranks, and a replica of the grid has 2; .* comm=grid.layers"):
        lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=torch.nn.Identity(), grid=grid)
    stack.comm.free(), grid.free()
