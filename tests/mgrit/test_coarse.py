"""Coarse operators: averaged weights and half steps against the reference, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference_mgrit as ref
import torch
from mgrit_case import LIMIT, Case, gather, gather_rows, make, vectors

OPERATORS = ["averaged", "half_steps"]
CASES = [
    Case(22, relaxation="FCF", iterations=2),
    Case(30, coarsening=9, iterations=2),
    Case(17, coarsening=3, iterations=2, activation="smooth_relu", bias="scalar"),
    Case(22, 3, (4, 2), iterations=2),
    Case(23, 3, 2, cycle="F", guess="coarse", iterations=2),
    Case(22, relaxation="FCF", c_weight=0.7, iterations=2),
]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("coarse", OPERATORS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_iterates_and_gradients_equal_the_reference(comm, case, coarse):
    case = replace(case, coarse=coarse)
    dense, (u0, lam) = case.dense(), vectors(2)
    plain = replace(case, coarse="injected").forward(dense, u0)
    expected = case.forward(dense, u0)
    assert np.abs(expected.states - plain.states).max() > 1e-6, "the operators do not differ; the test shows nothing"
    backward = case.adjoint(dense, expected.states, lam)
    for storage in ("all", "c_points"):
        net = make(dense, comm, case.mgrit(storage=storage))
        *held, report = net.solve(torch.tensor(u0))
        *held_back, adjoint = net.solve_adjoint(torch.tensor(lam))
        kept = list(range(case.layers + 1)) if storage == "all" else ref.reverse(case.grids())[1]  # others read NaN
        np.testing.assert_allclose(gather(net, *held)[kept], expected.states[kept], rtol=0, atol=LIMIT)
        np.testing.assert_allclose(gather(net, *held_back)[kept], backward.states[kept], rtol=0, atol=LIMIT)
        for found, wanted in ((report, expected), (adjoint, backward)):
            residuals = found.residuals[-case.iterations :] if case.guess == "coarse" else found.residuals
            np.testing.assert_allclose(residuals, wanted.residuals, rtol=LIMIT, atol=LIMIT)
        weight, bias = ref.gradients(dense, expected.states, backward.states)
        computed = net.layer_gradients()
        np.testing.assert_allclose(gather_rows(net, computed["weight"]), weight, rtol=0, atol=10 * LIMIT)
        np.testing.assert_allclose(gather_rows(net, computed["bias"]), bias, rtol=0, atol=10 * LIMIT)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("coarse", OPERATORS)
@pytest.mark.parametrize("case", [Case(14), Case(14, relaxation="FCF", iterations=2), Case(22, 3, (4, 2))], ids=str)
def test_an_exact_guess_is_a_fixed_point(comm, case, coarse):
    dense, (u0, lam) = case.dense(), map(torch.tensor, vectors(2))
    net, serial = make(dense, comm, case.mgrit(coarse=coarse)), make(dense, None, Case(case.layers, 1).mgrit())
    exact = serial.solve(u0)[1]
    _, back, _ = serial.solve_adjoint(lam)
    points, states, report = net.solve(u0, guess="exact")
    assert torch.equal(states, exact[points.start : points.stop])
    assert report.residuals == (0.0,) * (case.iterations + 1)
    points, adjoints, report = net.solve_adjoint(lam, guess=back)
    assert torch.equal(adjoints, back[points.start : points.stop])
    assert report.residuals == (0.0,) * (case.iterations + 1)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("coarse", OPERATORS)
def test_enough_iterations_are_serial_bit_for_bit_and_ranks_change_no_bit(comm, coarse):
    case = Case(14, iterations=4, coarse=coarse)
    dense, (u0, lam) = case.dense(), map(torch.tensor, vectors(2))
    net, serial = make(dense, comm, case.mgrit()), make(dense, None, Case(14, 1).mgrit())
    points, states, _ = net.solve(u0)
    assert torch.equal(states, serial.solve(u0)[1][points.start : points.stop])
    points, adjoints, _ = net.solve_adjoint(lam)
    assert torch.equal(adjoints, serial.solve_adjoint(lam)[1][points.start : points.stop])
    case = Case(23, 3, (5, 2), coarse=coarse)
    dense = case.dense()
    net, one = make(dense, comm, case.mgrit()), make(dense, None, case.mgrit())
    points, states, _ = net.solve(u0)
    assert torch.equal(states, one.solve(u0)[1][points.start : points.stop])
    points, adjoints, _ = net.solve_adjoint(lam)
    assert torch.equal(adjoints, one.solve_adjoint(lam)[1][points.start : points.stop])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("coarse", OPERATORS)
def test_the_adjoint_may_have_its_own_levels(comm, coarse):
    case, other = Case(22, 3, 2, iterations=2, coarse=coarse), Case(22, 2, 5, iterations=2, coarse=coarse)
    dense, (u0, lam) = case.dense(), vectors(2)
    net = make(dense, comm, case.mgrit(adjoint={"levels": 2, "coarsening": 5}))
    net.solve(torch.tensor(u0))
    *held, _ = net.solve_adjoint(torch.tensor(lam))
    expected = other.adjoint(dense, case.forward(dense, u0).states, lam)
    np.testing.assert_allclose(gather(net, *held), expected.states, rtol=0, atol=LIMIT)
