"""Measured staleness against gradients made by plain torch; measuring changes nothing; times of the modules."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from fdg_case import batches, conv, dense, differences, run, sgd

from lpnet.errors import ConfigError, UsageError
from lpnet.fdg.compensation import Compensation
from lpnet.fdg.decoupled import FDG
from lpnet.fdg.pipeline import Pipeline
from lpnet.io.metrics import read

LR = 0.3


def plain_sgd(parameters):
    """Without momentum an update tells its gradient."""
    return torch.optim.SGD(parameters, lr=LR)


def flat(state: dict[str, torch.Tensor], names) -> torch.Tensor:
    return torch.cat([state[name].flatten() for name in names])


def backpropagated(state: dict[str, torch.Tensor], x, y) -> dict[str, torch.Tensor]:
    net = dense()
    net.load_state_dict(state)
    F.cross_entropy(net(x), y).backward()
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("modules, cuts", [(2, [3]), (3, [2, 4]), (4, [1, 2, 4])])
@pytest.mark.parametrize("schedule", ["fdg", "ddg"])
def test_against_plain_torch(modules, cuts, schedule):
    data, followed = batches(12), 4
    fdg = FDG(dense(), modules=modules, cuts=cuts, loss=F.cross_entropy, optimizer=plain_sgd, schedule=schedule,
              staleness_every=followed)  # fmt: skip
    states, measured = [], {}
    for x, y in data:
        states.append({name: tensor.clone() for name, tensor in fdg.gather_state_dict().items()})
        report = fdg.step(x, y)
        if report.measured is not None:
            measured[report.measured.batch] = report.measured
    states.append(fdg.gather_state_dict())
    assert list(measured) == ([4] if schedule == "fdg" and modules > 2 else [4, 8])
    found, table = measured[followed], fdg.schedule
    assert len(found.cosine) == len(found.drift) == modules
    bounds = [0, *cuts, 5]
    for k in range(1, modules + 1):
        names = [name for name in states[0] if bounds[k - 1] <= int(name.split(".")[0]) < bounds[k]]
        tick, forward = table.backward_tick(k, followed), table.forward_tick(k, followed)
        now, after = flat(states[tick], names), flat(states[tick + 1], names)
        used = now  # within the tick the backward comes before the forward, where there is a delay
        if table.delay(k):
            used = flat(states[forward + (1 if table.backward_first(k) else 0)], names)
        fresh = flat(backpropagated(states[tick], *data[followed]), names)
        assert found.cosine[k - 1] == pytest.approx(float(F.cosine_similarity((now - after) / LR, fresh, 0)), abs=1e-9)
        assert found.drift[k - 1] == pytest.approx(float((now - used).norm() / now.norm()), abs=1e-12)
    assert found.drift[-1] == 0 and found.drift[0] > 0
    if schedule == "ddg":
        assert found.cosine[-1] == pytest.approx(1.0)  # the last module sees the new weights of none before it


CASES = {
    "stash": {},
    "prediction": {"compensation": Compensation(0.7, "full")},
    "recompute": {"backward": "recompute"},
    "mixed": {"backward": "mixed"},
    "accumulated": {"compensation": Compensation(accumulate=2), "clip_norm": 0.5},
}


@pytest.mark.parametrize("case", CASES)
def test_measuring_changes_no_bit(case):
    data = batches(11, image=True, short=3)
    results = []
    for every in (0, 3):
        torch.manual_seed(5)
        fdg = FDG(conv(dropout=0.2), modules=3, cuts=[1, 3], loss=F.cross_entropy, optimizer=sgd(), seed=1,
                  staleness_every=every, **CASES[case])  # fmt: skip
        results.append((run(fdg, data, every=4, evaluation=data[:1]), fdg.gather_state_dict(), torch.rand(1)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][2], results[1][2])
    assert list(differences(results[0][1], results[1][1])) == []


@pytest.mark.ranks(3)
def test_ranks_measure_what_one_process_measures(comm):
    data = batches(10, image=True, short=3)
    found = []
    for where in (None, comm):
        fdg = FDG(conv(), comm=where, modules=3, cuts=[1, 3], loss=F.cross_entropy, optimizer=sgd(), staleness_every=3,
                  compensation=Compensation(0.7, "full"))  # fmt: skip
        reports = [fdg.step(x, y) for x, y in data] + list(fdg.flush())
        found.append([report.measured for report in reports if report.measured is not None])
    assert [one.batch for one in found[0]] == [3, 6, 9]
    assert found[0] == found[1]


@pytest.mark.ranks(2)
def test_replicas_are_refused(comm):
    with pytest.raises(UsageError, match="leave staleness_every out with data replicas"):
        FDG(dense(), comm=comm, modules=1, cuts=[], loss=F.cross_entropy, optimizer=sgd(), staleness_every=2)


def test_a_negative_number_is_refused():
    with pytest.raises(UsageError, match="staleness_every is -1"):
        FDG(dense(), modules=2, cuts=[2], loss=F.cross_entropy, optimizer=sgd(), staleness_every=-1)


@pytest.mark.parametrize("kind", [FDG, Pipeline])
def test_times_of_modules_in_one_process(kind):
    net = kind(dense(), modules=3, cuts=[2, 4], loss=F.cross_entropy, optimizer=sgd())
    for x, y in batches(5):
        net.step(x, y)
    times = net.stopwatch.all()
    assert [(row.module, row.rank, row.ticks) for row in times] == [(1, 0, 5), (2, 0, 5), (3, 0, 5)]
    assert all(row.wait_receive == row.wait_send == 0 and row.busy > 0 for row in times)
    assert sum(row.busy for row in times) <= times[0].seconds == times[1].seconds


CONFIG = """
method: fdg
model: {layers: 5, width: 6, activation: tanh, opening: dense}
data: {name: peaks, train_samples: 100, validation_samples: 50, batch_size: 20}
fdg: {modules: 3, cuts: [2, 5], staleness_every: 4}
optim: {name: sgd, lr: 0.1, momentum: 0.9}
run: {steps: 16, eval_every: 0, checkpoint_every: 0, plots: false, trace: true}
"""


@pytest.mark.ranks(1, 3)
def test_the_run_folder_tells_staleness_times_and_spans(comm, shared_tmp_path):
    from lpnet.configfile import parse
    from lpnet.parallel.comm import Comm
    from lpnet.train.trainer import train

    path, out = shared_tmp_path / "config.yaml", shared_tmp_path / "out"
    if comm.rank == 0:
        path.write_text(CONFIG)
    comm.barrier()
    mine = Comm(comm)
    assert train(parse([str(path), "--run.out", str(out)]).config, mine) == 0
    mine.free()
    if comm.rank:
        return
    rows = read(out / "metrics.jsonl")
    measured = [row for row in rows if "staleness_batch" in row]
    assert [row["staleness_batch"] for row in measured] == [4, 8]  # 12 lands while the run is drained
    assert all(len(row["staleness_cosine"]) == len(row["staleness_drift"]) == 3 for row in measured)
    assert all(-1 <= value <= 1 + 1e-12 for row in measured for value in row["staleness_cosine"])
    times = rows[-1]["modules"]
    assert [(row["module"], row["ticks"]) for row in times] == [(1, 20), (2, 20), (3, 20)]  # 16 + 2K - 2
    assert [row["rank"] for row in times] == ([0, 1, 2] if comm.size == 3 else [0, 0, 0])
    for row in times:
        assert set(row) == {"module", "rank", "ticks", "seconds", "busy", "wait_receive", "wait_send"}
        if comm.size == 3:
            assert row["busy"] + row["wait_receive"] + row["wait_send"] == pytest.approx(row["seconds"])
    events = [event for event in json.loads((out / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    for k in (1, 2, 3):
        own = [event for event in events if event.get("args", {}).get("module") == k]
        counts = {name: sum(event["name"] == name for event in own) for name in ("forward", "backward", "update")}
        assert counts == {"forward": 16, "backward": 16, "update": 16}
        assert {event["tid"] for event in own} == {k - 1 if comm.size == 3 else 0}
    waits = {event["name"] for event in events if event["name"].startswith("wait")}
    streams = ("activation", "gradient", "evaluation", "closing")
    assert waits <= {f"wait {stream}" for stream in streams} | {f"wait to send {stream}" for stream in streams} | {
        "wait to send"
    }
    assert bool(waits) == (comm.size == 3)


def test_the_pipeline_has_no_stale_gradients():
    from lpnet.config import Config, FDGConfig
    from lpnet.train.build import check

    with pytest.raises(ConfigError, match="method pipeline has none"):
        check(Config(method="pipeline", fdg=FDGConfig(staleness_every=2)), 1)


def test_a_module_without_parameters_has_no_cosine():
    net = torch.nn.Sequential(torch.nn.Flatten(), *dense())
    fdg = FDG(net, modules=2, cuts=[1], loss=F.cross_entropy, optimizer=sgd(), staleness_every=2)
    found = [fdg.step(x, y).measured for x, y in batches(6)]
    first = next(one for one in found if one is not None)
    assert math.isnan(first.cosine[0]) and math.isnan(first.drift[0]) and first.cosine[1] == pytest.approx(1.0)
