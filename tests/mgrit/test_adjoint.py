"""The adjoint solve: transpose of the forward one, and equal to the reference after every iteration."""

from __future__ import annotations

import numpy as np
import pytest
import reference_mgrit as ref
import torch
from mgrit_case import LIMIT, Case, gather, gather_rows, make, vectors

CASES = [
    Case(12),
    Case(12, relaxation="FCF"),
    Case(14, iterations=2),
    Case(14, relaxation="FCF"),
    Case(12, coarsening=8),
    Case(11, coarsening=9),
    Case(7, coarsening=2, iterations=2),
    Case(22, 3, (4, 2)),
    Case(23, 3, 2, relaxation="FCF", iterations=2),
    Case(23, 4, 2, cycle="F"),
    Case(14, relaxation="FCF", c_weight=0.7, iterations=2),
    Case(14, guess="zero"),
    Case(22, 3, 2, guess="coarse", iterations=2),
    Case(14, activation="relu", bias="scalar"),
    Case(14, activation="smooth_relu", bias="scalar"),
    Case(14, activation="smooth_relu"),
]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("case", "storage"), [
    *((case, "all") for case in CASES), *((case, "c_points") for case in CASES[2:9:2]),
], ids=str)
def test_iterates_and_gradients_equal_the_reference(comm, case, storage):
    dense, (u0, lam) = case.dense(), vectors(2)
    net = make(dense, comm, case.mgrit(storage=storage))
    net.solve(torch.tensor(u0))
    *held, report = net.solve_adjoint(torch.tensor(lam))
    states = case.forward(dense, u0).states
    expected = case.adjoint(dense, states, lam)
    found = gather(net, *held)
    kept = list(range(case.layers + 1)) if storage == "all" else ref.reverse(case.grids())[1]  # others read NaN
    np.testing.assert_allclose(found[kept], expected.states[kept], rtol=0, atol=LIMIT)
    residuals = report.residuals[-case.iterations:] if case.guess == "coarse" else report.residuals
    np.testing.assert_allclose(residuals, expected.residuals, rtol=LIMIT, atol=LIMIT)
    assert report.iterations == case.iterations
    weight, bias = ref.gradients(dense, states, expected.states)
    computed = net.layer_gradients()
    np.testing.assert_allclose(gather_rows(net, computed["weight"]), weight, rtol=0, atol=10 * LIMIT)
    np.testing.assert_allclose(gather_rows(net, computed["bias"]), bias, rtol=0, atol=10 * LIMIT)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("layers", [12, 14])
@pytest.mark.parametrize("levels", [1, 2])
def test_one_level_and_enough_iterations_are_serial_bit_for_bit(comm, layers, levels):
    case = Case(layers, levels, iterations=1 if levels == 1 else -(-layers // 4))
    dense, (u0, lam) = case.dense(), map(torch.tensor, vectors(2))
    net, serial = make(dense, comm, case.mgrit()), make(dense, None, Case(layers, 1).mgrit())
    serial.solve(u0)
    net.solve(u0)
    _, exact, _ = serial.solve_adjoint(lam)
    points, adjoints, _ = net.solve_adjoint(lam)
    assert torch.equal(adjoints, exact[points.start:points.stop])
    expected = ref.backpropagate(dense, ref.propagate(dense, u0.numpy()), lam.numpy())
    np.testing.assert_allclose(exact.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", [Case(14), Case(14, relaxation="FCF", iterations=2), Case(22, 3, (4, 2))], ids=str)
def test_an_exact_guess_is_a_fixed_point(comm, case):
    dense, (u0, lam) = case.dense(), map(torch.tensor, vectors(2))
    net, serial = make(dense, comm, case.mgrit()), make(dense, None, Case(case.layers, 1).mgrit())
    serial.solve(u0)
    _, exact, _ = serial.solve_adjoint(lam)
    net.solve(u0, guess="exact")
    points, adjoints, report = net.solve_adjoint(lam, guess=exact)
    assert torch.equal(adjoints, exact[points.start:points.stop])
    assert report.residuals == (0.0,) * (case.iterations + 1)


@pytest.mark.ranks(1, 3)
def test_exactness_grows_backwards_by_one_interval_per_iteration(comm):
    case = Case(26)
    dense, (u0, lam) = case.dense(), map(torch.tensor, vectors(2))
    net, serial = make(dense, comm, case.mgrit()), make(dense, None, Case(26, 1).mgrit())
    serial.solve(u0)
    net.solve(u0, guess="exact")
    error = np.abs(gather(net, *net.solve_adjoint(lam)[:2]) - serial.solve_adjoint(lam)[1].numpy()).max(axis=(1, 2))
    assert (error[21:] == 0).all()  # the short interval 26..24 and, by the last F-sweep, the inside of 24..20
    assert (error[:21] > 1e-10).all()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("case", [Case(12, 3, 2), Case(14, 3, 2), Case(11, 3, 2, activation="smooth_relu")], ids=str)
def test_the_adjoint_is_the_transpose_on_every_level(comm, case, level):
    """<lambda, J v> == <J^T lambda, v>: the coarse start alone is propagation on the coarsest of level + 1 grids."""
    dense, (u0, lam, v) = case.dense(), vectors(3)
    net = make(dense, comm, case.mgrit(levels=level + 1, initial_guess="coarse"))
    states = gather(net, *net.solve(torch.tensor(u0))[:2])
    adjoints = gather(net, *net.solve_adjoint(torch.tensor(lam))[:2])
    grid = sorted(ref.reverse(case.grids())[level])
    if level:
        back = lam
        for b, a in zip(grid[-2::-1], grid[:0:-1], strict=True):
            back = dense.vjp(b, states[b], back, a - b)
            np.testing.assert_allclose(adjoints[b], back, rtol=0, atol=LIMIT)
    assert np.sum(lam * ref.tangent(dense, states, v, grid)) == pytest.approx(np.sum(adjoints[0] * v), rel=1e-12)


@pytest.mark.ranks(1, 2, 3)
def test_the_adjoint_direction_may_have_its_own_settings(comm):
    case, other = Case(22, 3, 2, iterations=2), Case(22, 2, 5, relaxation="FCF", guess="zero", iterations=2)
    dense, (u0, lam) = case.dense(), vectors(2)
    net = make(dense, comm, case.mgrit(
        adjoint={"levels": 2, "coarsening": 5, "relaxation": "FCF", "initial_guess": "zero"}))
    net.solve(torch.tensor(u0))
    *held, report = net.solve_adjoint(torch.tensor(lam))
    expected = other.adjoint(dense, case.forward(dense, u0).states, lam)
    np.testing.assert_allclose(gather(net, *held), expected.states, rtol=0, atol=LIMIT)
    np.testing.assert_allclose(report.residuals, expected.residuals, rtol=LIMIT)


@pytest.mark.ranks(1, 2)
def test_the_adjoint_stops_at_its_own_tolerance(comm):
    case = Case(30, coarsening=2)
    dense, (u0, lam) = case.dense(), vectors(2)
    net = make(dense, comm, case.mgrit(forward_iterations=None, adjoint_iterations=None, tolerance=1e-10,
                                       adjoint={"tolerance": 1e-3}))
    assert net.solve(torch.tensor(u0))[2].residuals[-1] <= 1e-10
    residuals = net.solve_adjoint(torch.tensor(lam))[2].residuals
    assert residuals[-1] <= 1e-3 < residuals[-2] and residuals[-1] > 1e-10
