"""The exact pipeline: its orders as tables, and equality with micro-batched backpropagation, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fdg_case import batches, conv, dense, differences, load, plain, save, sgd
from hypothesis import given
from hypothesis import strategies as st

from lpnet.errors import LpnetError, NumericsError, UsageError
from lpnet.fdg.decoupled import FDG
from lpnet.fdg.orders import actions, grid, held, times
from lpnet.fdg.pipeline import Pipeline

CUTS = {1: [], 2: [3], 3: [1, 3], 4: [1, 2, 4]}
INTERLEAVED = """\
module 1     F0   F1   F2             B0   F3   B1        B2        B3
module 2          F0   F1        B0   F2   B1   F3   B2        B3
module 3               F0   B0   F1   B1   F2   B2   F3   B3"""
GPIPE = """\
module 1     F0   F1   F2   F3                       B0   B1   B2   B3
module 2          F0   F1   F2   F3             B0   B1   B2   B3
module 3               F0   F1   F2   F3   B0   B1   B2   B3"""


def test_the_tables():
    assert grid("1f1b", 3, 4) == INTERLEAVED
    assert grid("gpipe", 3, 4) == GPIPE
    assert [str(action) for action in actions("1f1b", 1, 2, 1)] == ["F0", "B0"]


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 40))
def test_every_micro_batch_passes_and_nothing_waits_for_ever(order, modules, count):
    slots = times(order, modules, count)
    for module, row in enumerate(slots, 1):
        table = actions(order, module, modules, count)
        for kind in "FB":
            assert [action.batch for action in table if action.kind == kind] == list(range(count))
        flying = most = 0
        for action in table:
            flying += 1 if action.kind == "F" else -1
            most = max(most, flying)
        assert most == held(order, module, modules, count)
        assert row == sorted(set(row))
    assert max(row[-1] for row in slots) + 1 == 2 * (count + modules - 1)


def test_hundreds_of_micro_batches():
    table = actions("1f1b", 1, 4, 512)
    assert len(table) == 1024 and held("1f1b", 1, 4, 512) == 4 and held("gpipe", 1, 4, 512) == 512
    x, y = batches(1, size=300)[0]
    for order in ("gpipe", "1f1b"):
        one, two = dense(), dense()
        losses = micro_batched(one, [(x, y)], sgd(), 256)
        pipe = Pipeline(two, loss=F.cross_entropy, optimizer=sgd(), modules=4, cuts="uniform", micro_batches=256,
                        order=order)  # fmt: skip
        assert pipe.step(x, y).loss == losses[0]
        assert not list(differences(one.state_dict(), two.state_dict()))


def micro_batched(network, data, optimizer, count, *, clip=None, scheduler=None):
    """Plain torch: gradients of the parts of every batch add up."""
    optim = optimizer(list(network.parameters()))
    rate = scheduler(optim) if scheduler else None
    losses = []
    for x, y in data:
        optim.zero_grad()
        total, m = 0.0, min(count, len(y))
        for part, labels in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            weight = len(labels) / len(y)
            loss = F.cross_entropy(network(part), labels)
            (loss * weight).backward()
            total += float(loss.detach()) * weight
        if clip:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        optim.step()
        if rate:
            rate.step()
        losses.append(total)
    return losses


def rates(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("modules", [1, 2, 3, 4])
def test_equals_micro_batched_backpropagation_bitwise(order, modules):
    data = batches(6, image=True, short=3)
    one, two = conv(), conv()
    losses = micro_batched(one, data, sgd(), 4, scheduler=rates)
    pipe = Pipeline(two, loss=F.cross_entropy, optimizer=sgd(), modules=modules, cuts=CUTS[modules], order=order,
                    scheduler=rates)  # fmt: skip
    reports = [pipe.step(x, y) for x, y in data]
    assert [report.loss for report in reports] == losses
    assert [report.batch for report in reports] == list(range(6)) and pipe.flush() == ()
    assert not list(differences(one.state_dict(), two.state_dict()))


@pytest.mark.parametrize("modules", [1, 3])
def test_equals_training_on_the_joined_batch_to_rounding(modules):
    """Without batch norm, with clipping by the norm of all modules."""
    data = batches(6, size=9, short=4)
    one, two = dense(), dense()
    losses = plain(one, data, sgd(), clip=0.2)
    pipe = Pipeline(two, loss=F.cross_entropy, optimizer=sgd(), modules=modules, cuts="uniform", clip_norm=0.2,
                    micro_batches=3)  # fmt: skip
    reports = [pipe.step(x, y) for x, y in data]
    torch.testing.assert_close(torch.tensor([r.loss for r in reports]), torch.tensor(losses), rtol=1e-12, atol=1e-14)
    assert all(report.grad_norm > 0 for report in reports)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-13)


def test_one_micro_batch_on_one_module_is_plain_sgd_bitwise():
    data = batches(6, image=True, short=3)
    one, two = conv(), conv()
    losses = plain(one, data, sgd(), clip=0.4)
    pipe = Pipeline(two, loss=F.cross_entropy, optimizer=sgd(), micro_batches=1, clip_norm=0.4)
    assert [pipe.step(x, y).loss for x, y in data] == losses
    assert not list(differences(one.state_dict(), two.state_dict()))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_ranks_equal_one_process_bitwise(comm, order):
    data = batches(6, image=True, size=16, short=3, dtype=torch.float32)
    made = []
    for ranks in (comm, None):
        pipe = Pipeline(conv(torch.float32, dropout=0.3), comm=ranks, loss=F.cross_entropy, optimizer=sgd(),
                        modules=comm.size, cuts=CUTS[comm.size], micro_batches=8, order=order,
                        clip_norm=0.5)  # fmt: skip
        reports = [pipe.step(x, y) for x, y in data]
        made.append((pipe, [(report.loss, report.grad_norm) for report in reports], pipe.evaluate(data[:2])))
    (one, losses, scores), (two, expected, scored) = made
    assert losses == expected and scores == scored
    state = one.gather_state_dict()
    if comm.rank == 0:
        assert not list(differences(state, two.gather_state_dict()))
    one.request_stop()
    assert one.step(*data[0]).stop
    one.close()


@pytest.mark.ranks(3)
def test_what_fails_ends_all(comm):
    data = batches(4)
    data[2][0][5, 2] = float("nan")
    pipe = Pipeline(dense(), comm=comm, loss=F.cross_entropy, optimizer=sgd(), cuts="uniform")
    with pytest.raises(NumericsError, match=r"module 1/3, batch 2, unit 0 \('0'\): the samples are not finite"):
        for x, y in data:
            pipe.step(x, y)
    assert all(torch.isfinite(shard.tensor).all() for shard in pipe.shards())
    data = batches(4)
    pipe = Pipeline(dense(), comm=comm, loss=F.cross_entropy, optimizer=sgd(), cuts="uniform")
    with pytest.raises(LpnetError, match="the labels of batch 3 on module 3/3 are not those"):
        for k, (x, y) in enumerate(data):
            pipe.step(x, 3 - y if k == 3 and comm.rank == 2 else y)
    pipe.close()


def test_bad_input():
    for options, text in (
        ({"micro_batches": 0}, "there are 0 micro-batches; at least 1 is needed"),
        ({"order": "2f2b"}, "the order is '2f2b'; it must be one of gpipe, 1f1b"),
        ({"modules": 9}, "5 units cannot be shared by 9 modules"),
    ):
        with pytest.raises(UsageError, match=text):
            Pipeline(dense(), loss=F.cross_entropy, optimizer=sgd(), cuts="uniform", **options)


def test_checkpoints_go_from_one_method_to_the_other(tmp_path):
    """A pipeline has nothing in flight, so that any number of modules and either method can go on from it."""
    data = batches(7, image=True, dtype=torch.float32)
    options = {"loss": F.cross_entropy, "optimizer": sgd(), "scheduler": rates}
    pipe = Pipeline(conv(torch.float32), modules=3, cuts=[1, 3], **options)
    for x, y in data[:4]:
        pipe.step(x, y)
    path = save(pipe, tmp_path, 4)
    again = Pipeline(conv(torch.float32), modules=2, cuts=[3], **options)
    load(again, path)
    assert [again.step(x, y).loss for x, y in data[4:]] == [pipe.step(x, y).loss for x, y in data[4:]]
    fdg = FDG(conv(torch.float32), modules=2, cuts=[3], **options)
    load(fdg, path)
    assert fdg.batches == 4 and fdg.lr == pytest.approx(0.05 * 0.9**4)
    fdg.step(*data[4])
    assert [report.batch for report in fdg.flush() if report.batch is not None] == [4]
