"""The numpy reference checked against what is known of MGRIT, before lpnet is checked against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference_mgrit as ref
import torch

CASES = [  # layers, levels, coarsening, relaxation, cycle
    (12, 2, 4, "F", "V"),
    (12, 2, 4, "FCF", "V"),
    (14, 2, 4, "F", "V"),
    (22, 3, [4, 2], "F", "V"),
    (23, 3, 2, ["FCF", "F"], "F"),
    (29, 4, [2, 3, 2], ["F", "FCF", "FCFCF"], "V"),
]


def problem(layers, activation="tanh", bias="vector", seed=3):
    net = ref.random_dense(layers, 4, final_time=3.0, activation=activation, bias=bias, seed=seed)
    u0, lam = np.random.default_rng(seed + 1).standard_normal((2, 5, 4))
    return net, u0, lam


@pytest.mark.parametrize(("layers", "levels", "coarsening", "relaxation", "cycle"), CASES)
def test_converges_to_serial_propagation_in_both_directions(layers, levels, coarsening, relaxation, cycle):
    net, u0, lam = problem(layers)
    grids = ref.coarsen(layers, levels, coarsening)
    options = {"iterations": layers, "relaxation": relaxation, "cycle": cycle}
    exact = ref.propagate(net, u0)
    forward = ref.solve_forward(net, u0, grids, **options)
    np.testing.assert_allclose(forward.states, exact, rtol=0, atol=1e-13)
    adjoint = ref.solve_adjoint(net, exact, lam, grids, **options)
    np.testing.assert_allclose(adjoint.states, ref.backpropagate(net, exact, lam), rtol=0, atol=1e-13)
    assert forward.residuals[-1] < 1e-14 and adjoint.residuals[-1] < 1e-14


@pytest.mark.parametrize(("relaxation", "per_iteration"), [("F", 1), ("FCF", 2), ("FCFCF", 3)])
@pytest.mark.parametrize("iterations", [1, 2])
def test_exactness_grows_by_the_known_number_of_intervals(relaxation, per_iteration, iterations):
    net, u0, _ = problem(38)
    grids = ref.coarsen(38, 2, 4)
    states = ref.solve_forward(net, u0, grids, iterations=iterations, relaxation=relaxation).states
    error = np.abs(states - ref.propagate(net, u0)).max(axis=(1, 2))
    # the iteration itself makes `per_iteration` intervals exact, the F-sweep after it the points of one more
    exact = 4 * (per_iteration * iterations + 1)
    assert (error[:exact] == 0).all()
    assert (error[exact:] > 1e-12).all()


@pytest.mark.parametrize("layers", [12, 14])
def test_enough_two_level_iterations_are_serial_bit_for_bit(layers):
    net, u0, lam = problem(layers)
    grids = ref.coarsen(layers, 2, 4)
    exact = ref.propagate(net, u0)
    assert (ref.solve_forward(net, u0, grids, iterations=-(-layers // 4)).states == exact).all()
    adjoint = ref.solve_adjoint(net, exact, lam, grids, iterations=-(-layers // 4)).states
    assert (adjoint == ref.backpropagate(net, exact, lam)).all()


@pytest.mark.parametrize(("layers", "levels", "coarsening", "relaxation", "cycle"), CASES)
def test_the_exact_solution_is_a_fixed_point_bit_for_bit(layers, levels, coarsening, relaxation, cycle):
    net, u0, lam = problem(layers)
    grids = ref.coarsen(layers, levels, coarsening)
    options = {"iterations": 2, "relaxation": relaxation, "cycle": cycle}
    exact = ref.propagate(net, u0)
    forward = ref.solve_forward(net, u0, grids, guess=exact, **options)
    assert (forward.states == exact).all() and forward.residuals == [0.0] * 3
    adjoints = ref.backpropagate(net, exact, lam)
    adjoint = ref.solve_adjoint(net, exact, lam, grids, guess=adjoints, **options)
    assert (adjoint.states == adjoints).all() and adjoint.residuals == [0.0] * 3


def test_two_levels_with_f_relaxation_are_parareal():
    net, u0, _ = problem(12)
    points = [0, 4, 8, 12]
    u = {a: np.zeros_like(u0) for a in points} | {0: u0}
    for _ in range(2):
        fine = {}
        for b in points[:-1]:
            x = u[b]
            for i in range(b, b + 4):
                x = net.step(i, x)
            fine[b + 4] = x
        old = dict(u)
        for b in points[:-1]:
            u[b + 4] = fine[b + 4] + net.step(b, u[b], 4) - net.step(b, old[b], 4)
    states = ref.solve_forward(net, u0, ref.coarsen(12, 2, 4), iterations=2).states
    np.testing.assert_allclose(states[points], np.stack([u[a] for a in points]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("guess", ["zero", "constant", "coarse"])
def test_guesses(guess):
    net, u0, _ = problem(14)
    grids = ref.coarsen(14, 3, 2)
    assert grids[2] == [0, 4, 8, 12]
    start = {"zero": 0 * u0, "constant": u0, "coarse": ref.propagate_coarse(net, u0, [0, 4, 8, 12, 14])[8]}[guess]
    first = ref.solve_forward(net, u0, grids, iterations=int(guess == "coarse"), guess=guess)
    assert (first.states[8] == start).all()
    assert (first.states[9] == net.step(8, start)).all()
    assert len(first.residuals) == 1
    assert ref.solve_forward(net, u0, grids, iterations=12, guess=guess).residuals[-1] < 1e-14


def test_levels_points_and_the_reversed_ones():
    grids = ref.coarsen(14, 4, [4, 2, 2])
    assert grids[1:] == [[0, 4, 8, 12], [0, 8]]  # a fourth level would have one point
    assert ref.reverse(grids)[1:] == [[14, 12, 8, 4, 0], [14, 8, 0]]


@pytest.mark.parametrize("activation", ["tanh", "relu", "smooth_relu"])
@pytest.mark.parametrize("bias", ["scalar", "vector"])
def test_steps_adjoint_identity_and_finite_differences(activation, bias):
    net, u, lam = problem(6, activation, bias)
    v = np.random.default_rng(9).standard_normal(u.shape)
    grid, states = [0, 2, 3, 6], ref.propagate(net, u)
    back = lam
    for a, b in [(6, 3), (3, 2), (2, 0)]:
        back = net.vjp(b, states[b], back, a - b)
    assert np.sum(lam * ref.tangent(net, states, v, grid)) == pytest.approx(np.sum(back * v), rel=1e-13)
    eps = 1e-6
    difference = (net.step(2, u + eps * v, 3) - net.step(2, u - eps * v, 3)) / (2 * eps)
    np.testing.assert_allclose(net.jvp(2, u, v, 3), difference, rtol=0, atol=1e-8)


@pytest.mark.parametrize("activation", ["tanh", "relu", "smooth_relu"])
@pytest.mark.parametrize("bias", ["scalar", "vector"])
def test_gradients_equal_autograd_of_the_torch_twin(activation, bias):
    net, x, lam = problem(6, activation, bias)
    twin = ref.twin(net, torch.nn.Identity(), torch.nn.Identity())
    u0 = torch.tensor(x, requires_grad=True)
    out = twin(u0)
    states = ref.propagate(net, x)
    np.testing.assert_allclose(out.detach().numpy(), states[-1], rtol=0, atol=1e-14)
    (out * torch.tensor(lam)).sum().backward()
    adjoints = ref.backpropagate(net, states, lam)
    weight, bias_gradient = ref.gradients(net, states, adjoints)
    np.testing.assert_allclose(u0.grad.numpy(), adjoints[0], rtol=0, atol=1e-13)
    for i, step in enumerate(twin[1]):
        np.testing.assert_allclose(step.weight.grad.numpy(), weight[i], rtol=0, atol=1e-13)
        np.testing.assert_allclose(step.bias.grad.numpy(), bias_gradient[i], rtol=0, atol=1e-13)
