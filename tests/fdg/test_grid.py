"""Data replicas x modules, and a module that several ranks share: equal to one process on the joined batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fdg_case import batches, conv, dense, differences, load, run, save, sgd

import lpnet
from lpnet.errors import LpnetError, NumericsError, UsageError
from lpnet.fdg.compensation import Compensation
from lpnet.fdg.decoupled import FDG
from lpnet.fdg.pipeline import Pipeline
from lpnet.fdg.place import arrange
from lpnet.parallel.comm import Comm


def mine(data, replica, replicas=2):
    return [(x.chunk(replicas)[replica], y.chunk(replicas)[replica]) for x, y in data]


def assert_close(one, two):
    for (name, a), b in zip(two.items(), one.values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("settings", [
    {},
    {"backward": "recompute", "clip_norm": 0.3, "shrink": 0.7},
    {"backward": "mixed"},
    {"compensation": Compensation(prediction="full", accumulate=2)},
], ids=lambda settings: "-".join(map(str, settings)) or "stash")  # fmt: skip
def test_two_replicas_of_two_modules(comm, settings):
    data = batches(10, size=8)
    one = FDG(dense(), comm=comm, modules=2, cuts=[2], loss=F.cross_entropy, optimizer=sgd(), **settings)
    two = FDG(dense(), modules=2, cuts=[2], loss=F.cross_entropy, optimizer=sgd(), **settings)
    assert (one.place.replica, one.place.local) == divmod(comm.rank, 2)[:1] + ((comm.rank % 2 + 1,),)
    found, expected = run(one, mine(data, one.place.replica)), run(two, data)
    assert [batch for batch, _ in found] == list(range(10))
    torch.testing.assert_close(torch.tensor([loss for _, loss in found]),
                               torch.tensor([loss for _, loss in expected]), rtol=1e-10, atol=0)  # fmt: skip
    state = one.gather_state_dict()
    if comm.rank == 0:
        assert_close(state, two.gather_state_dict())
    scores, whole = one.evaluate(mine(data, one.place.replica)), two.evaluate(data)
    assert scores.samples == whole.samples == 80 and scores.accuracy == whole.accuracy
    assert scores.loss == pytest.approx(whole.loss)
    one.close()


@pytest.mark.ranks(2)
def test_two_replicas_of_one_module(comm):
    """Plain data parallelism is K = 1."""
    data = batches(6, size=8)
    one = FDG(dense(), comm=comm, modules=1, loss=F.cross_entropy, optimizer=sgd(), clip_norm=0.5)
    two = FDG(dense(), modules=1, loss=F.cross_entropy, optimizer=sgd(), clip_norm=0.5)
    run(one, mine(data, comm.rank))
    run(two, data)
    state = one.gather_state_dict()
    if comm.rank == 0:
        assert_close(state, two.gather_state_dict())
    one.close()


@pytest.mark.ranks(4)
def test_replicas_start_from_the_same_weights(comm):
    torch.manual_seed(100 + comm.rank)
    network = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 4)).double()
    fdg = FDG(network, comm=comm, modules=2, cuts=[1], loss=F.cross_entropy, optimizer=sgd())
    weights = comm.allgather(fdg.members[0].stage.chain.state_dict())
    assert not list(differences(weights[0], weights[2])) and not list(differences(weights[1], weights[3]))
    fdg.close()


@pytest.mark.ranks(4)
def test_a_pipeline_with_replicas(comm):
    data = batches(5, size=8)
    one = Pipeline(dense(), comm=comm, modules=2, cuts=[2], loss=F.cross_entropy, optimizer=sgd(), clip_norm=0.3)
    two = Pipeline(dense(), modules=2, cuts=[2], loss=F.cross_entropy, optimizer=sgd(), clip_norm=0.3)
    losses = [one.step(x, y).loss for x, y in mine(data, one.place.replica)]
    assert losses == pytest.approx([two.step(x, y).loss for x, y in data])
    state = one.gather_state_dict()
    if comm.rank == 0:
        assert_close(state, two.gather_state_dict())
    one.close()


@pytest.mark.ranks(4)
def test_replicas_stop_and_fail_together(comm):
    data = batches(30, size=8)
    for asking in range(4):
        fdg = FDG(dense(), comm=comm, modules=2, cuts=[2], loss=F.cross_entropy, optimizer=sgd())
        stopped = None
        for tick, (x, y) in enumerate(mine(data, fdg.place.replica)):
            if tick == 4 and comm.rank == asking:
                fdg.request_stop()
            if fdg.step(x, y).stop:
                stopped = tick
                break
        told = comm.allgather(stopped)
        assert told == [told[0]] * 4 and 4 <= told[0] <= 8
        fdg.flush()
        fdg.close()
    data[5][0][7, 0] = float("nan")  # seen by the second replica only
    fdg = FDG(dense(), comm=comm, modules=2, cuts=[2], loss=F.cross_entropy, optimizer=sgd())
    with pytest.raises(NumericsError, match=r"module 1/2, batch 5, unit 0 \('0'\): the samples are not finite"):
        for x, y in mine(data, fdg.place.replica):
            fdg.step(x, y)
    ticks = comm.allgather(fdg.members[0].tick)
    assert ticks == [ticks[0]] * 4
    fdg = FDG(dense(), comm=comm, modules=2, cuts=[2], loss=F.cross_entropy, optimizer=sgd())
    with pytest.raises((ValueError, LpnetError), match="one of four is ill"):
        for k, (x, y) in enumerate(mine(batches(9), fdg.place.replica)):
            if k == 6 and comm.rank == 3:

                def ill(*_):
                    raise ValueError("one of four is ill")

                fdg.members[0].stage.chain.register_forward_hook(ill)  # fmt: skip
            fdg.step(x, y)


@pytest.mark.ranks(4)
def test_replicas_resume_bitwise(comm, shared_tmp_path):
    data = batches(9, image=True, size=8, dtype=torch.float32)

    def make():
        return FDG(conv(torch.float32, dropout=0.2), comm=comm, modules=2, cuts=[3], loss=F.cross_entropy,
                   optimizer=sgd())  # fmt: skip

    one = make()
    for x, y in mine(data, one.place.replica)[:5]:
        one.step(x, y)
    path = save(one, shared_tmp_path, 5)
    expected = run(one, mine(data, one.place.replica)[5:])
    two = make()
    load(two, path)
    assert run(two, mine(data, two.place.replica)[5:]) == expected
    for a, b in zip(one.members, two.members, strict=True):
        assert not list(differences(a.stage.chain.state_dict(), b.stage.chain.state_dict()))
    one.close()
    two.close()


# a module on several ranks


def layer_parallel(width=6, layers=8):
    """A LayerParallel unit and a plain one behind it."""

    def make(comm):
        stack = lpnet.LayerStack(lpnet.nn.DenseStep(width=width), num_layers=layers, final_time=2.0, comm=comm, seed=3,
                                 dtype=torch.float64)  # fmt: skip
        torch.manual_seed(5)
        opening, closing = torch.nn.Linear(6, width), torch.nn.Linear(width, 6)
        return lpnet.LayerParallel(stack, opening=opening, closing=closing, mgrit=lpnet.MGRIT(levels=1))

    torch.manual_seed(6)
    return make, torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(6, 4)).double()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shared", [0, 1])
def test_a_module_may_be_layer_parallel(comm, shared):
    """Two ranks share one of two modules; equal to all of it in one process, to rounding."""
    made, plain = layer_parallel()
    if shared == 0:
        network, ranks = [made, plain], [2, 1]
    else:
        network, ranks = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double(), made], [1, 2]
    data = batches(9, size=5, short=3)
    options = {"cuts": [1], "loss": F.cross_entropy, "optimizer": sgd(), "backward": "recompute", "clip_norm": 0.6}
    twin = copy.deepcopy(network)
    one = FDG(network, comm=comm, ranks_per_module=ranks, **options)
    two = FDG(twin, modules=2, **options)
    found, expected = run(one, data, every=4, evaluation=data[:2]), run(two, data)
    torch.testing.assert_close(torch.tensor([loss for _, loss in found]),
                               torch.tensor([loss for _, loss in expected]), rtol=1e-9, atol=0)  # fmt: skip
    state = one.gather_state_dict()
    if comm.rank == 0:
        assert_close(state, two.gather_state_dict())
    assert one.evaluate(data).accuracy == two.evaluate(data).accuracy
    one.request_stop() if comm.rank == 2 else None
    stops = [one.step(x, y).stop for x, y in data[:6]]
    assert comm.allgather(stops) == [stops] * 3 and any(stops)
    one.flush()
    one.close()


@pytest.mark.ranks(3)
def test_a_shared_module_resumes(comm, shared_tmp_path):
    data = batches(9, size=5, short=3)

    def fresh():
        network = list(layer_parallel())
        return FDG(network, comm=comm, ranks_per_module=[2, 1], cuts=[1], loss=F.cross_entropy, optimizer=sgd(),
                   backward="recompute", compensation=Compensation(accumulate=2))  # fmt: skip

    one = fresh()
    for x, y in data[:4]:
        one.step(x, y)
    path = save(one, shared_tmp_path, 4)
    expected = run(one, data[4:])
    two = fresh()
    load(two, path)
    assert run(two, data[4:]) == expected
    one.close()
    two.close()


@pytest.mark.ranks(3)
def test_a_shared_module_cannot_keep_old_weights(comm):
    options = {"comm": comm, "ranks_per_module": [2, 1], "loss": F.cross_entropy, "optimizer": sgd()}
    with pytest.raises(UsageError, match="module 1 is shared by several ranks, which keep no old weights"):
        FDG(list(layer_parallel()), cuts=[1], **options)
    with pytest.raises(UsageError, match=r"module 1 of 2 units is shared by 2 ranks; such a module is one unit"):
        FDG(dense(), cuts=[2], backward="recompute", **options)
    with pytest.raises(UsageError, match=r"ranks_per_module is \[2, 0\]; 2 modules need 2 positive numbers"):
        FDG(dense(), cuts=[2], **{**options, "ranks_per_module": [2, 0]})


@pytest.mark.ranks(4)
def test_the_places(comm):
    world = Comm(comm)
    place = arrange(world, 1, [2])
    assert (place.replica, place.local, place.group.rank) == (comm.rank // 2, (1,), comm.rank % 2)
    assert place.peers.size == 2 and place.peers.rank == place.replica
    assert (place.chain is None) == (comm.rank % 2 == 1)
    with pytest.raises(UsageError, match=r"3 modules on 4 ranks; use one rank per module \(3\), a multiple of them"):
        arrange(world, 3)
