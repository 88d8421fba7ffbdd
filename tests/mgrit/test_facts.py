"""The forward solve: exact where theory says so, and equal to the independent reference after every iteration."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import reference_mgrit as ref
import torch
from mgrit_case import LIMIT, Case, gather, make, vectors

from lpnet.parallel.partition import explicit

# Every direction of the settings once at least: F, FCF, mixed; 2, 3, 4 levels; V, F; N divisible by c or not.
# With 4 ranks: 12/8 leaves ranks without a C-point, 11 and 22 put borders inside the intervals.
CASES = [
    Case(12),
    Case(12, relaxation="FCF"),
    Case(14, iterations=2),
    Case(14, relaxation="FCF", iterations=2),
    Case(12, coarsening=8),
    Case(11, coarsening=9, relaxation="FCF"),
    Case(7, coarsening=2, iterations=3),
    Case(22, 3, (4, 2)),
    Case(22, 3, (4, 2), relaxation="FCF"),
    Case(23, 3, 2, iterations=2),
    Case(23, 3, 2, relaxation=("FCF", "F"), iterations=2),
    Case(22, 3, 2, cycle="F"),
    Case(23, 4, 2, relaxation="FCF", cycle="F"),
    Case(29, 4, (2, 3, 2), relaxation=("F", "FCF", "FCFCF"), iterations=2),
    Case(14, relaxation="FCF", c_weight=0.7, iterations=2),
    Case(14, guess="zero"),
    Case(14, guess="coarse", iterations=1),
    Case(22, 3, 2, guess="coarse", iterations=3),
    Case(14, activation="relu", bias="scalar"),
    Case(14, activation="smooth_relu"),
    Case(4, coarsening=2),
]


def reported(case, report):
    """The residuals that the reference has too: a coarse start is iteration 1, nothing is measured before it."""
    return report.residuals[-case.iterations:] if case.guess == "coarse" else report.residuals


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_iterates_equal_the_reference(comm, case):
    dense, (u0,) = case.dense(), vectors(1)
    net = make(dense, comm, case.mgrit())
    *held, report = net.solve(torch.tensor(u0))
    expected = case.forward(dense, u0)
    np.testing.assert_allclose(gather(net, *held), expected.states, rtol=0, atol=LIMIT)
    np.testing.assert_allclose(reported(case, report), expected.residuals, rtol=LIMIT, atol=LIMIT)
    assert report.iterations == case.iterations
    if case.exact_points() <= case.layers:  # nothing propagates serially behind the scenes
        assert np.abs(expected.states - ref.propagate(dense, u0)).max() > 1e-9


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("layers", [12, 14])
def test_one_level_and_enough_iterations_are_serial_bit_for_bit(comm, layers, levels):
    iterations = 1 if levels == 1 else -(-layers // 4)
    case = Case(layers, levels, iterations=iterations)
    dense, u0 = case.dense(), torch.tensor(vectors(1)[0])
    net, serial = make(dense, comm, case.mgrit()), make(dense, None, Case(layers, 1).mgrit())
    _, exact, _ = serial.solve(u0)
    points, states, _ = net.solve(u0)
    assert torch.equal(states, exact[points.start:points.stop])
    np.testing.assert_allclose(exact.numpy(), ref.propagate(dense, u0.numpy()), rtol=0, atol=1e-13)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("relaxation", "per_iteration"), [("F", 1), ("FCF", 2)])
@pytest.mark.parametrize("iterations", [1, 2])
def test_exactness_grows_by_the_known_number_of_intervals(comm, relaxation, per_iteration, iterations):
    case = Case(26, relaxation=relaxation, iterations=iterations)
    dense, u0 = case.dense(), torch.tensor(vectors(1)[0])
    net, serial = make(dense, comm, case.mgrit()), make(dense, None, Case(26, 1).mgrit())
    error = np.abs(gather(net, *net.solve(u0)[:2]) - serial.solve(u0)[1].numpy()).max(axis=(1, 2))
    exact = 4 * (per_iteration * iterations + 1)  # the last F-sweep carries the exact C-point through one more interval
    assert (error[:exact] == 0).all()
    assert (error[exact:] > 1e-10).all()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", [
    Case(14), Case(14, relaxation="FCF", iterations=2), Case(12, coarsening=8, iterations=2),
    Case(22, 3, (4, 2), iterations=2), Case(23, 3, 2, relaxation="FCF", cycle="F"),
], ids=str)
def test_an_exact_guess_is_a_fixed_point(comm, case):
    dense, u0 = case.dense(), torch.tensor(vectors(1)[0])
    net, serial = make(dense, comm, case.mgrit()), make(dense, None, Case(case.layers, 1).mgrit())
    _, exact, _ = serial.solve(u0)
    for guess in (exact, "exact"):
        points, states, report = net.solve(u0, guess=guess)
        assert torch.equal(states, exact[points.start:points.stop])
        assert report.residuals == (0.0,) * (case.iterations + 1)
        assert report.rho is None


@pytest.mark.ranks(1, 3)
def test_a_given_guess_is_where_the_iteration_starts(comm):
    case = Case(14, relaxation="FCF")
    dense, u0 = case.dense(), vectors(1)[0]
    guess = vectors(15, seed=8)
    guess[0] = u0
    net = make(dense, comm, case.mgrit())
    *held, report = net.solve(torch.tensor(u0), guess=torch.tensor(guess))
    expected = case.forward(dense, u0, guess=guess)
    np.testing.assert_allclose(gather(net, *held), expected.states, rtol=0, atol=LIMIT)
    np.testing.assert_allclose(report.residuals, expected.residuals, rtol=LIMIT)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("kind", ["tolerance", "relative_tolerance"])
def test_a_tolerance_stops_at_the_first_iteration_below_it(comm, kind):
    case = Case(30, coarsening=2)
    dense, u0 = case.dense(), vectors(1)[0]
    net = make(dense, comm, case.mgrit(forward_iterations=None, **{kind: 1e-5}))
    *held, report = net.solve(torch.tensor(u0))
    bound = 1e-5
    if kind == "relative_tolerance":  # of the states, not of the first residual; their norm is over some set of points
        states = ref.propagate(dense, u0)
        bound *= float(np.sqrt((states[::2] ** 2).sum() / len(u0)))
    expected = case.forward(dense, u0, iterations=report.iterations)
    np.testing.assert_allclose(report.residuals, expected.residuals, rtol=1e-9, atol=LIMIT)
    assert report.residuals[-1] <= bound * (1.5 if kind == "relative_tolerance" else 1) < report.residuals[0]
    assert report.residuals[-2] > bound / (10 if kind == "relative_tolerance" else 1)
    assert report.rho == pytest.approx(report.residuals[-1] / report.residuals[-2])
    np.testing.assert_allclose(gather(net, *held), expected.states, rtol=0, atol=LIMIT)


@pytest.mark.ranks(1, 2)
def test_a_default_tolerance_converges_and_a_cap_ends_it(comm):
    case = Case(30, coarsening=2)
    dense, u0 = case.dense(), vectors(1)[0]
    net = make(dense, comm, case.mgrit(forward_iterations=None))
    *held, report = net.solve(torch.tensor(u0))
    assert 3 < report.iterations <= 15
    np.testing.assert_allclose(gather(net, *held), ref.propagate(dense, u0), rtol=0, atol=1e-10)
    capped = make(dense, comm, case.mgrit(forward_iterations=None, max_iterations=2))
    assert capped.solve(torch.tensor(u0))[2].iterations == 2


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("guess", ["coarse", "constant"])
def test_starting_from_the_coarsest_grid_is_the_coarse_guess(comm, guess):
    case = Case(22, 3, 2, guess="coarse", iterations=2)
    dense, u0 = case.dense(), vectors(1)[0]
    net = make(dense, comm, case.mgrit(initial_guess=guess, skip_first_down=True))
    *held, report = net.solve(torch.tensor(u0))
    expected = case.forward(dense, u0)
    np.testing.assert_allclose(gather(net, *held), expected.states, rtol=0, atol=LIMIT)
    np.testing.assert_allclose(reported(case, report), expected.residuals, rtol=LIMIT, atol=LIMIT)


@pytest.mark.ranks(1, 2, 3, 4)
def test_states_that_are_not_finite_do_not_hang_and_show_in_the_residual(comm):
    case = Case(12)
    u0 = vectors(1)[0]
    u0[0, 0] = np.nan
    net = make(case.dense(), comm, case.mgrit())
    _, _, report = net.solve(torch.tensor(u0))
    assert not np.isfinite(report.residuals[-1])


def drawn(rng, ranks):
    """Any settings, and any blocks of layers."""
    layers, levels = int(rng.integers(ranks, 40)), int(rng.integers(2, 6))
    case = Case(
        layers, levels, tuple(rng.integers(2, 6, size=levels - 1).tolist()),
        tuple(rng.choice(["F", "FCF", "FCFCF"], size=levels - 1).tolist()), str(rng.choice(["V", "F"])),
        int(rng.integers(1, 4)), str(rng.choice(["zero", "constant", "coarse"])), float(rng.choice([1.0, 0.8])),
        str(rng.choice(["tanh", "smooth_relu"])), str(rng.choice(["scalar", "vector"])))
    cuts = sorted(rng.choice(np.arange(1, layers), size=ranks - 1, replace=False).tolist())
    sizes = [b - a for a, b in pairwise([0, *cuts, layers])]
    return case, explicit(sizes, layers, ranks), {"batching": str(rng.choice(["on", "off"]))}


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_settings_and_any_partition_equal_the_reference(comm):
    rng = np.random.default_rng(10 + comm.size)
    for _ in range(10):
        case, partition, changes = drawn(rng, comm.size)
        dense, (u0, lam) = case.dense(), vectors(2)
        net = make(dense, comm, case.mgrit(**changes), partition=partition)
        *held, report = net.solve(torch.tensor(u0))
        *adjoint_held, adjoint = net.solve_adjoint(torch.tensor(lam))
        expected = case.forward(dense, u0)
        expected_adjoint = case.adjoint(dense, expected.states, lam)
        where = str((case, partition, changes))
        for part, plan in ((gather(net, *held), expected), (gather(net, *adjoint_held), expected_adjoint)):
            np.testing.assert_allclose(part, plan.states, rtol=0, atol=10 * LIMIT, err_msg=where)
        if len(case.grids()) > 1:
            np.testing.assert_allclose(report.residuals, expected.residuals, rtol=LIMIT, atol=LIMIT, err_msg=where)
            np.testing.assert_allclose(
                adjoint.residuals, expected_adjoint.residuals, rtol=LIMIT, atol=LIMIT, err_msg=where)


@pytest.mark.ranks(2, 3)
def test_cases_cover_a_rank_without_points_of_the_next_level(comm):
    case = CASES[4]
    net = make(case.dense(), comm, case.mgrit())
    points, _, _ = net.solve(torch.tensor(vectors(1)[0]))
    without = [not set(held) & set(case.grids()[1]) for held in net.comm.all_gather_objects(points)]
    assert any(without) == (comm.size == 3)
