"""Where to cut: exact by brute force, measured without a trace, printed with what it promises."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from fdg_case import batches, conv
from hypothesis import given
from hypothesis import strategies as st

from lpnet.errors import LpnetError, UsageError
from lpnet.fdg import cuts
from lpnet.fdg.cuts import UnitCost, best_cuts, measure, plan
from lpnet.fdg.schedule import Schedule

# seconds of ResNet-20's stem, nine blocks and head, batch 128, one core: see performance.md
RESNET20 = [0.020, 0.086, 0.089, 0.092, 0.052, 0.049, 0.047, 0.036, 0.039, 0.037, 0.001]


def slowest(costs, cuts):
    bounds = [0, *cuts, len(costs[0])]
    return max(sum(row[low:high]) for row, low, high in zip(costs, bounds, bounds[1:], strict=False))


@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=4, max_size=9), st.booleans())
def test_no_other_cut_is_faster(modules, units, again):
    rows = [[cost * (2 if again and k < modules - 1 else 1) for cost in units] for k in range(modules)]
    found = best_cuts(rows)
    every = [list(cuts) for cuts in combinations(range(1, len(units)), modules - 1)]
    assert found in every
    assert slowest(rows, found) == min(slowest(rows, cuts) for cuts in every)


def test_the_cut_of_resnet_20():
    assert best_cuts([RESNET20] * 2) == [4]
    assert best_cuts([RESNET20]) == []
    assert best_cuts([[1.0] * 3] * 3) == [1, 2]
    with pytest.raises(UsageError, match="2 units cannot be shared by 3 modules"):
        best_cuts([[1.0] * 2] * 3)


PLAN = """\
module  units                 share  ms   delay  stash MiB  weights MiB  old weights MiB
1       0-1 (stem .. block0)  0.400  4.0  4      36.0       2.0          8.0
2       2-2 (block1)          0.300  3.0  2      14.0       4.0          8.0
3       3-4 (block2 .. head)  0.300  3.0  0      13.0       7.0          0.0
cuts [2, 3]: predicted speed-up 2.50 (largest share 0.400)"""


def test_gradients_take_over_what_the_graph_frees():
    """What a backward holds at most, by looking at every unit it may have come to."""
    rng = random.Random(0)
    for _ in range(50):
        units = [
            UnitCost(str(k), 1.0, 1.0, *(rng.randrange(100) for _ in range(4)), rng.random() < 0.5, rng.random() < 0.5)
            for k in range(rng.randint(1, 7))
        ]
        made = plan(units, Schedule(1)).modules[0]
        weights = sum(unit.parameters for unit in units)
        held = [cuts._graph(units[:k]) if k else 0 for k in range(len(units) + 1)]
        most = max(graph + sum(unit.parameters for unit in units[k:]) for k, graph in enumerate(held))
        assert made.shared == held[-1] + weights - most >= 0
        assert made.peak(0) == units[0].input + most + made.workspace


def test_the_printed_plan():
    mib = 1 << 20
    units = ["stem", "block0", "block1", "block2", "head"]
    times = [(1, 1), (1, 1), (1, 2), (1, 1), (0.5, 0.5)]
    weights = [1, 1, 4, 5, 2]
    keeps = {"keeps_input": True, "keeps_output": True}
    costs = [
        UnitCost(
            name, forward / 1e3, backward / 1e3, weight * mib, 2 * mib, mib, 2 * mib if k < 2 else 4 * mib, **keeps
        )
        for k, (name, (forward, backward), weight) in enumerate(zip(units, times, weights, strict=True))
    ]
    made = plan(costs, Schedule(3))
    assert made.cuts == [2, 3] and made.text() == PLAN
    first, second, third = made.modules
    # module 1 holds 4 graphs: input 1, 2 inside each unit, 2 between the units, 2 behind the last
    assert (first.stash, first.copies, first.weights) == (4 * 9 * mib, 4 * 2 * mib, 2 * mib)
    assert (second.stash, second.copies) == (2 * 7 * mib, 2 * 4 * mib)
    assert (third.stash, third.copies) == (1 * (1 + 2 + 4 + 2 + 4) * mib, 0)
    again = plan(costs, Schedule(3), made.cuts, backward="recompute")
    assert again.modules[0].stash == (4 * 1 + 8) * mib and again.modules[0].copies == 0
    assert again.speedup == pytest.approx(10 / 6)
    late = plan(costs, Schedule(3, order="forward_first"), made.cuts)
    assert late.modules[0].stash == 5 * 9 * mib
    with pytest.raises(UsageError, match=r"cuts are \[2\]; 3 modules of 5 units"):
        plan(costs, Schedule(3), [2])


class Sleeps(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x * 1.0


def test_measured_by_time_not_by_count():
    units = {str(k): Sleeps(seconds) for k, seconds in enumerate([0.03, 0.001, 0.001, 0.001, 0.001, 0.03])}
    units["6"] = torch.nn.Linear(6, 4)
    x, y = batches(1, dtype=torch.float32)[0]
    costs = measure(units, x, y, F.cross_entropy)
    assert plan(costs, Schedule(2)).cuts[0] in range(1, 6)
    assert costs[0].forward > 0.02 > costs[1].forward


def test_measuring_leaves_no_trace_and_counts_what_is_kept():
    network = conv(torch.float32, dropout=0.5)
    x, y = batches(1, image=True, dtype=torch.float32)[0]
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state, kept = torch.random.get_rng_state(), x.clone()
    costs = measure(dict(network._modules), x, y, F.cross_entropy)
    assert torch.equal(torch.random.get_rng_state(), state) and torch.equal(x, kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())
    assert [cost.name for cost in costs] == list("01234")
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)
    stem = costs[0]
    assert stem.input == x.numel() * 4 and stem.output == 8 * 4 * 36 * 4 and stem.parameters == (72 + 8) * 4
    assert stem.keeps_input and not stem.keeps_output  # batch norm keeps its input, inside the unit
    assert 8 * 4 * 36 * 4 <= stem.inner <= 8 * 4 * 36 * 4 + 1000


def test_a_unit_that_returns_no_tensor():
    class Pair(torch.nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(LpnetError, match="unit 'b' returns a tuple"):
        measure({"a": torch.nn.Linear(6, 6), "b": Pair()}, batches(1, dtype=torch.float32)[0][0])
