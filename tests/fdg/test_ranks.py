"""A module per rank == all modules in one process, bit for bit, in every mode and with every remedy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fdg_case import batches, conv, differences, run, sgd

from lpnet.fdg.compensation import Compensation
from lpnet.fdg.decoupled import FDG

CUTS = {1: [], 2: [3], 3: [1, 3], 4: [1, 2, 4]}
MODES = {
    "stash": {},
    "forward first": {"order": "forward_first"},
    "recompute": {"backward": "recompute"},
    "recompute forward first": {"backward": "recompute", "order": "forward_first"},
    "mixed": {"backward": "mixed"},
    "ddg": {"schedule": "ddg"},
    "fr": {"schedule": "fr"},
    "bp": {"schedule": "bp"},
    "shrink": {"shrink": 0.7},
    "prediction": {"compensation": Compensation(prediction="full")},
    "prediction and shrink, recompute": {
        "compensation": Compensation(prediction="half"), "shrink": 0.7, "backward": "recompute"},
    "prediction, mixed": {"compensation": Compensation(prediction="full"), "backward": "mixed"},
    "spike": {"compensation": Compensation(spike=True)},
    "accumulate": {"compensation": Compensation(accumulate=3)},
    "anneal": {"compensation": Compensation(anneal=8)},
    "nesterov": {"compensation": Compensation(nesterov=True)},
    "all": {"compensation": Compensation(shrink=0.8, prediction="full", spike=True, accumulate=2, anneal=9,
                                         nesterov=True)},
    "bfloat16 gradients": {"gradient_dtype": torch.bfloat16},
    "float16 gradients": {"gradient_dtype": torch.float16},
    "autocast": {"autocast": torch.bfloat16},
}  # fmt: skip


def schedule(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9], 0.3)


def make(comm, modules, **settings):
    network = conv(torch.float32, dropout=0.2)
    return FDG(network, comm=comm, modules=modules, loss=F.cross_entropy, optimizer=sgd(0.1), cuts=CUTS[modules],
               scheduler=schedule, **settings)  # fmt: skip


def two_epochs():
    """Batches of two epochs, each with a short last one."""
    return [pair for seed in (1, 2) for pair in batches(6, image=True, short=3, dtype=torch.float32, seed=seed)]


def assert_same(comm, one, two, reports_one, reports_two):
    """`one` on the ranks of comm, `two` in this process."""
    assert [loss for _, loss in reports_one] == [loss for _, loss in reports_two]
    assert [batch for batch, _ in reports_one] == list(range(len(reports_one)))
    whole = one.gather_state_dict()
    if comm.rank == 0:
        assert not list(differences(whole, two.gather_state_dict()))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_equal_one_process_bitwise(comm, mode):
    data, held_out = two_epochs(), batches(3, image=True, short=2, dtype=torch.float32)
    settings = {**MODES[mode], "clip_norm": 0.5 if mode in ("accumulate", "all", "shrink") else None}
    one, two = make(comm, comm.size, **settings), make(None, comm.size, **settings)
    found, expected = run(one, data, every=4, evaluation=held_out), run(two, data)
    assert_same(comm, one, two, found, expected)
    assert one.evaluate(held_out) == two.evaluate(held_out)
    one.close()


@pytest.mark.ranks(2, 3)
def test_only_the_ends_need_the_data(comm):
    data = two_epochs()
    given = [(x if comm.rank == 0 else None, y if comm.rank == comm.size - 1 else None) for x, y in data]
    one, two = make(comm, comm.size), make(None, comm.size)
    assert_same(comm, one, two, run(one, given, every=3, evaluation=given[:2]), run(two, data))
    one.close()


@pytest.mark.ranks(2, 4)
def test_messages_above_the_eager_limit(comm):
    """Activations of 4 MiB."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    twin = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    twin.load_state_dict(network.state_dict())
    data = [(torch.randn(1024 - 100 * k, 1024), torch.randn(1024 - 100 * k, 1024)) for k in range(4)]
    options = {"loss": F.mse_loss, "optimizer": sgd(), "modules": comm.size, "cuts": "uniform"}
    one, two = FDG(network, comm=comm, **options), FDG(twin, **options)
    assert_same(comm, one, two, run(one, data), run(two, data))
    one.close()


@pytest.mark.ranks(2, 3)
def test_a_slow_module_does_not_change_the_numbers(comm):
    """Ranks that stumble at random times, each in its own way."""
    import random
    import time

    class Slow(torch.nn.Module):
        def forward(self, x):
            time.sleep(random.random() * 0.01)
            return x

    data = two_epochs()
    one, two = make(comm, comm.size), make(None, comm.size)
    random.seed(comm.rank)
    one.members[0].stage.chain.add_module("slow", Slow())
    one.members[0].stage.chain.names.insert(one.members[0].stage.chain.high, "slow")
    one.members[0].stage.chain.high += 1
    found = run(one, data)
    assert [loss for _, loss in found] == [loss for _, loss in run(two, data)]
    one.close()


@pytest.mark.ranks(1, 2, 3)
def test_all_modules_stop_at_the_same_tick(comm):
    data = batches(20, image=True, dtype=torch.float32)
    for asking in range(comm.size):
        fdg, stopped = make(comm, comm.size), None
        for tick, (x, y) in enumerate(data):
            if tick == 5 and comm.rank == asking:
                fdg.request_stop()
            if fdg.step(x, y).stop:
                stopped = tick
                break
        told = comm.allgather(stopped)
        assert told == [told[0]] * comm.size
        assert 5 <= told[0] <= 5 + 2 * (comm.size - 1)
        fdg.flush()
        fdg.close()


@pytest.mark.ranks(2, 3)
def test_cuts_by_cost_are_shared(comm):
    network = conv(torch.float32)
    x, y = batches(1, image=True, dtype=torch.float32)[0]
    fdg = FDG(network, comm=comm, loss=F.cross_entropy, optimizer=sgd())
    fdg.step(x, y)
    assert comm.allgather(fdg.cuts) == [fdg.cuts] * comm.size
    fdg.flush()
    fdg.close()
