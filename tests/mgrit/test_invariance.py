"""P ranks == 1 rank, bit for bit, and what must not change a result: storage, batching, who owns what."""

from __future__ import annotations

import numpy as np
import pytest
import reference_mgrit as ref
import torch
from mgrit_case import WIDTH, Case, gather, gather_parameters, gather_rows, make, vectors

import lpnet
from lpnet.parallel.partition import explicit

OPTIONS = {
    "two-levels": (Case(14, iterations=2), {}),
    "one-level": (Case(14, 1), {}),
    "fcf": (Case(14, relaxation="FCF", iterations=2), {}),
    "three-levels": (Case(23, 3, (4, 2), iterations=2), {}),
    "four-levels-f-cycle": (Case(23, 4, 2, relaxation="FCF", cycle="F"), {}),
    "weighted": (Case(14, relaxation="FCFCF", c_weight=0.7), {}),
    "zero": (Case(14, guess="zero", iterations=2), {}),
    "coarse": (Case(23, 3, 2, guess="coarse", iterations=3), {}),
    "c-points-only": (Case(14, iterations=2), {"storage": "c_points"}),
    "wide-intervals": (Case(13, coarsening=12, iterations=1), {}),
    "one-layer-per-rank": (Case(4, coarsening=2, activation="smooth_relu", bias="scalar"), {}),
    "tolerance": (Case(23, coarsening=2), {"forward_iterations": None, "adjoint_iterations": None, "tolerance": 1e-6}),
    "other-adjoint": (Case(14, iterations=2), {"adjoint": {"coarsening": 3, "relaxation": "FCF"}}),
}


def everything(net, u0, lam):
    """States, adjoints, gradients and residual histories of one solve each way. Collective over net.comm."""
    *held, forward = net.solve(torch.tensor(u0))
    *adjoint_held, adjoint = net.solve_adjoint(torch.tensor(lam))
    grads = {name: gather_rows(net, value) for name, value in net.layer_gradients().items()}
    arrays = {"states": gather(net, *held), "adjoints": gather(net, *adjoint_held), **grads}
    return arrays, forward, adjoint


def assert_same(found, expected):
    (arrays, forward, adjoint), (arrays_1, forward_1, adjoint_1) = found, expected
    for name, value in arrays.items():
        assert np.array_equal(value, arrays_1[name], equal_nan=name in ("states", "adjoints")), name
    for report, report_1 in ((forward, forward_1), (adjoint, adjoint_1)):
        assert report.residuals == report_1.residuals
        assert (report.iterations, report.rho) == (report_1.iterations, report_1.rho)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("option", "dtype"), [
    *((option, torch.float64) for option in OPTIONS),
    *((option, torch.float32) for option in ("one-level", "fcf", "three-levels")),
], ids=lambda value: str(value).removeprefix("torch."))
def test_many_ranks_equal_one_bit_for_bit(comm, option, dtype):
    case, changes = OPTIONS[option]
    dense, (u0, lam) = case.dense(), vectors(2)
    found, expected = [everything(make(dense, c, case.mgrit(**changes), dtype=dtype), u0, lam) for c in (comm, None)]
    if option == "c-points-only":  # states that are not kept read NaN, and every rank keeps its first one
        for arrays, *_ in (found, expected):
            arrays["states"] = arrays["states"][::4]
            arrays["adjoints"] = arrays["adjoints"][[*range(0, 14, 4), 14]]
    assert_same(found, expected)


@pytest.mark.ranks(2, 3)
def test_uneven_blocks_equal_one_rank_bit_for_bit(comm):
    case = Case(14, relaxation="FCF")
    dense, (u0, lam) = case.dense(), vectors(2)
    sizes = {2: [13, 1], 3: [1, 2, 11]}[comm.size]
    net = make(dense, comm, case.mgrit(), partition=explicit(sizes, 14, comm.size))
    assert net.partition.bounds[1] == sizes[0]
    assert_same(everything(net, u0, lam), everything(make(dense, None, case.mgrit()), u0, lam))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", [
    Case(14, iterations=2), Case(23, 3, (4, 2), relaxation="FCF"), Case(12, coarsening=8),
], ids=str)
def test_keeping_c_points_only_changes_no_bit(comm, case):
    dense, (u0, lam) = case.dense(), vectors(2)
    every, few = [everything(make(dense, comm, case.mgrit(storage=s)), u0, lam) for s in ("all", "c_points")]
    kept = ref.reverse(case.grids())[1]
    for arrays, *_ in (every, few):
        arrays["states"], arrays["adjoints"] = arrays["states"][case.grids()[1]], arrays["adjoints"][kept]
    assert_same(few, every)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", [
    Case(16, iterations=2), Case(14, relaxation="FCF", iterations=2), Case(32, 3, (4, 2)),
    Case(27, 3, (3, 2), relaxation="FCF", cycle="F", activation="smooth_relu", bias="scalar"),
    Case(23, 4, 2, guess="coarse", iterations=2), Case(12, 1),
], ids=str)
def test_batching_changes_rounding_only(comm, case):
    dense, (u0, lam) = case.dense(), vectors(2)
    off, on = [everything(make(dense, comm, case.mgrit(batching=batching)), u0, lam) for batching in ("off", "on")]
    for name, value in on[0].items():
        np.testing.assert_allclose(value, off[0][name], rtol=0, atol=1e-12)
    for report, report_off in zip(on[1:], off[1:], strict=True):
        np.testing.assert_allclose(report.residuals, report_off.residuals, rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bias", ["scalar", "vector"])
def test_initial_parameters_depend_on_seed_and_layer_only(comm, bias):
    def initial(where, layers, seed):
        stack = lpnet.LayerStack(lpnet.nn.DenseStep(width=WIDTH, bias=bias), num_layers=layers, comm=where, seed=seed)
        net = lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=torch.nn.Identity(), mgrit=lpnet.MGRIT())
        torch.rand(1 + net.comm.rank)  # the global stream must not matter
        parameters = gather_parameters(net)
        net.comm.free()
        return parameters

    found, alone = initial(comm, 11, 4), initial(None, 11, 4)
    assert set(found) == {"stack.weight", "stack.bias"}
    assert all(np.array_equal(found[name], alone[name]) for name in alone)
    weight = found["stack.weight"]
    assert weight.shape == (11, WIDTH, WIDTH) and weight.dtype == np.float32
    assert found["stack.bias"].shape == (11, WIDTH if bias == "vector" else 1)
    assert len(np.unique(weight)) == weight.size  # no two layers alike
    assert np.array_equal(initial(None, 5, 4)["stack.weight"], weight[:5])
    assert not np.array_equal(initial(None, 11, 5)["stack.weight"], weight)


@pytest.mark.ranks(1, 3)
def test_a_solve_repeated_gives_the_same_bits(comm):
    """Nothing is left over from the solve before: neither states nor evaluations thought to be fresh."""
    case = Case(23, 3, 2, relaxation="FCF", iterations=2)
    dense, other, (u0, lam, v0) = case.dense(), case.dense(seed=9), vectors(3)
    net = make(dense, comm, case.mgrit())
    first = everything(net, u0, lam)
    everything(net, v0, u0)
    with torch.no_grad():
        low, high = net.partition.block(net.comm.rank)
        kept = net.stack.weight.clone()
        net.stack.weight.copy_(torch.tensor(other.weight[low:high]))
        changed = everything(net, u0, lam)
        net.stack.weight.copy_(kept)
    again = everything(net, u0, lam)
    assert_same(again, first)
    assert not np.array_equal(changed[0]["states"], first[0]["states"])


@pytest.mark.ranks(3)
def test_messages_above_the_eager_limit(comm):
    """States of 1.2 MB between the ranks: nothing waits for a receive that comes later."""
    dense = ref.random_dense(6, 3, final_time=1.0)
    u0, lam = np.random.default_rng(0).standard_normal((2, 50_000, 3))
    mgrit = Case(6, coarsening=2, relaxation="FCF").mgrit()
    found, expected = [everything(make(dense, c, mgrit), u0, lam) for c in (comm, None)]
    assert_same(found, expected)
