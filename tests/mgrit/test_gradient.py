"""Gradients of a LayerParallel in an ordinary torch loop against autograd of the serial torch twin."""

from __future__ import annotations

import numpy as np
import pytest
import reference_mgrit as ref
import torch
import torch.nn.functional as F
from mgrit_case import CONVERGED, Case, ends, gather_rows, network, samples


def autograd(dense, x, y):
    """Loss, gradients by global name, and the gradient of x, from the torch twin."""
    twin = ref.twin(dense, *ends())
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(twin(x), y)
    loss.backward()
    grads = {
        "weight": np.stack([step.weight.grad for step in twin[1]]),
        "bias": np.stack([step.bias.grad for step in twin[1]]),
        "opening": twin[0].weight.grad, "closing": twin[2].weight.grad, "x": x.grad,
    }
    return loss.item(), {name: np.asarray(value) for name, value in grads.items()}


def own_gradients(net):
    """Gradients by the same names, on every rank. Collective over net.comm."""
    grads = {name: gather_rows(net, p.grad) for name, p in stacked(net).items()}
    ends = {"opening": net.opening.weight.grad.numpy() if net.is_first else None,
            "closing": net.closing.weight.grad.numpy() if net.is_last else None}
    for name, value in ends.items():
        grads[name] = next(part for part in net.comm.all_gather_objects(value) if part is not None)
    return grads


def stacked(net):
    names = {"weight", "bias"}
    return {name.rsplit(".", 1)[-1]: p for name, p in net.stack.named_parameters() if name.rsplit(".", 1)[-1] in names}


def error(net, dense, x, y):
    """Relative error of the whole gradient. Collective over net.comm."""
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    grads, (_, expected) = own_gradients(net), autograd(dense, x, y)
    assert set(grads) == set(expected) - {"x"}
    squares = sum(np.sum((grads[name].reshape(expected[name].shape) - expected[name]) ** 2) for name in grads)
    return float(np.sqrt(squares / sum(np.sum(expected[name] ** 2) for name in grads)))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bias", ["scalar", "vector"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "smooth_relu"])
def test_converged_gradient_equals_serial_autograd(comm, activation, bias):
    case = Case(14, activation=activation, bias=bias)
    dense, (x, y) = case.dense(), samples()
    net = network(case, comm, **CONVERGED)
    x.requires_grad_()
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    expected_loss, expected = autograd(dense, x.detach(), y)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    for name, value in own_gradients(net).items():
        np.testing.assert_allclose(value.reshape(expected[name].shape), expected[name], rtol=1e-10, atol=1e-11)
    if net.is_first and x.grad is not None:
        np.testing.assert_allclose(x.grad, expected["x"], rtol=1e-10, atol=1e-11)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", [Case(22, 3, (4, 2)), Case(23, 3, 2, relaxation="FCF"), Case(14, 1),
                                  Case(12, coarsening=8), Case(23, 3, 2, cycle="F")], ids=str)
@pytest.mark.parametrize("storage", ["all", "c_points"])
def test_converged_gradient_with_every_kind_of_hierarchy(comm, case, storage):
    dense, (x, y) = case.dense(), samples()
    net = network(case, comm, storage=storage, **CONVERGED)
    assert error(net, dense, x, y) < 1e-10


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("relaxation", ["F", "FCF"])
def test_the_error_falls_with_every_iteration_until_rounding(comm, relaxation):
    dense, (x, y) = Case(32).dense(), samples()
    errors = []
    for iterations in range(1, 9):
        net = network(Case(32, relaxation=relaxation, iterations=iterations), comm)
        errors.append(error(net, dense, x, y))
    for before, after in zip(errors, errors[1:], strict=False):
        assert after < before or after < 1e-12
    assert errors[0] > 1e-5 and errors[-1] < 1e-12


@pytest.mark.parametrize("bias", ["scalar", "vector"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "smooth_relu"])
@pytest.mark.parametrize("case", [Case(5, 1), Case(5, 2, 2, iterations=3)], ids=str)
def test_gradcheck(case, activation, bias):
    """Finite differences of the outputs against backward, for x and every parameter."""
    case = Case(case.layers, case.levels, case.coarsening, iterations=case.iterations, activation=activation, bias=bias)
    net = network(case, None)
    x, _ = samples()
    x = x[:2].requires_grad_()
    parameters = list(net.parameters())
    for p in parameters:
        p.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: net(x), (x, *parameters), fast_mode=True)


@pytest.mark.ranks(1, 2)
def test_gradients_add_up_over_backwards_as_in_torch(comm):
    case = Case(14, iterations=4)
    dense, (x, y), (x2, _) = case.dense(), samples(), samples(12)
    net = network(case, comm)
    F.cross_entropy(net(x), y).backward()
    F.cross_entropy(net(x2), y).backward()
    one, two = autograd(dense, x, y)[1], autograd(dense, x2, y)[1]
    for name, value in own_gradients(net).items():
        np.testing.assert_allclose(value.reshape(one[name].shape), one[name] + two[name], rtol=1e-10, atol=1e-11)


@pytest.mark.ranks(1, 2, 4)
def test_any_function_of_the_logits_may_be_differentiated(comm):
    """Not only a loss that every rank forms alike: weights on the classes, a penalty, a detached branch."""
    case = Case(14, iterations=4)
    dense, (x, _) = case.dense(), samples()
    net = network(case, comm)
    logits = net(x)
    (logits ** 3).mean().backward()
    twin = ref.twin(dense, *ends())
    (twin(x) ** 3).mean().backward()
    weight = np.stack([step.weight.grad for step in twin[1]])
    np.testing.assert_allclose(own_gradients(net)["weight"].reshape(weight.shape), weight, rtol=1e-10, atol=1e-11)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("changes", "adjoint"), [
    ({"levels": 1}, {"levels": 2}),
    ({"levels": 2}, {"levels": 1}),
    ({"levels": 2, "storage": "c_points"}, {"levels": 1}),
    ({"levels": 2, "storage": "c_points"}, {"relaxation": "FCF"}),
    ({"levels": 2}, {"coarsening": 3, "cycle": "F"}),
], ids=str)
def test_directions_with_levels_of_their_own_are_right_or_refused(comm, changes, adjoint):
    case = Case(14)
    dense, (x, y) = case.dense(), samples()
    try:
        case.mgrit(adjoint=adjoint, **changes, **CONVERGED)
    except ValueError as refused:
        assert "mgrit." in str(refused)
        return
    net = network(case, comm, adjoint=adjoint, **changes, **CONVERGED)
    assert error(net, dense, x, y) < 1e-10
