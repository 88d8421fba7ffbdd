"""A training step counted, not timed: evaluations, messages, bytes and reductions, for a set of configurations."""

from __future__ import annotations

import copy

import pytest

from lpnet.config import MGRIT, Config, DataConfig, ModelConfig, OptimConfig
from lpnet.data.samples import load
from lpnet.mgrit.network import build_network
from lpnet.nn.models import DTYPES
from lpnet.train.strategies import make_strategy

SAMPLES, WIDTH = 40, 4
WARM = {"forward_iterations": 2, "adjoint_iterations": 1}

# settings of the multigrid -> per rank count: messages of the whole job per step; evaluations of all ranks per level
EXPECTED = {
    "one level": (MGRIT(levels=1), {1: 0, 2: 2, 4: 6}, ((32,), (32,))),
    # forward: 3 sweeps and 2 coarse solves; adjoint: 2 sweeps, a coarse solve, the old values
    "two levels": (MGRIT(coarsening=4, **WARM), {1: 0, 2: 9, 4: 27}, ((80, 14), (64, 16))),
    "batched": (MGRIT(coarsening=4, batching="on", **WARM), {1: 0, 2: 9, 4: 27}, ((80, 14), (64, 16))),
    "three levels": (MGRIT(levels=3, coarsening=[4, 2], **WARM), {1: 0, 2: 14, 4: 42}, None),
}


def strategy_for(comm, mgrit, optimiser):
    config = Config(
        method="mgrit",
        model=ModelConfig(layers=32, width=WIDTH),
        data=DataConfig(train_samples=SAMPLES, validation_samples=10),
        mgrit=mgrit,
        optim=OptimConfig(name=optimiser),
    )
    data = load(config.data, config.seed, DTYPES[config.model.dtype])
    net = build_network(config, data, comm)
    return net, data, make_strategy(net, config.optim)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_warm_step(comm, name):
    mgrit, expected_messages, expected_evaluations = EXPECTED[name]
    net, data, strategy = strategy_for(comm, mgrit, "adam")
    for _ in range(2):
        strategy.step(data.train, 0)
    before = copy.copy(net.comm.traffic)
    report = strategy.step(data.train, 0)
    after = net.comm.traffic
    messages = sum(net.comm.all_gather_objects(after.messages - before.messages))
    size = sum(net.comm.all_gather_objects(after.bytes - before.bytes))
    assert messages == expected_messages[net.comm.size]
    assert size == messages * WIDTH * SAMPLES * 4
    assert after.reductions - before.reductions == (net.comm.size > 1)  # loss, residuals, flags and norms together
    assert after.broadcasts == before.broadcasts
    if expected_evaluations is not None:
        for solve, expected in zip((report.forward, report.adjoint), expected_evaluations, strict=True):
            if solve is not None:
                gathered = net.comm.all_gather_objects(solve.evaluations)
                assert tuple(map(sum, zip(*gathered, strict=True))) == expected
    net.comm.free()


@pytest.mark.ranks(1, 3)
def test_an_lbfgs_step_takes_two_reductions_and_one_per_extra_trial(comm):
    net, data, strategy = strategy_for(comm, MGRIT(levels=1), "lbfgs")
    strategy.step(data.train, 0)
    before = net.comm.traffic.reductions
    steps = 3
    for _ in range(steps):
        strategy.step(data.train, 0)
    took = net.comm.traffic.reductions - before
    assert took == 0 if net.comm.size == 1 else took >= 2 * steps
    net.comm.free()
