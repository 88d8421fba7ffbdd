"""Every kind of step through the solver, against plain torch written here: iterates, gradients, any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import reference_mgrit as ref
import torch
import torch.nn.functional as F
from mgrit_case import CONVERGED, Case, gather, gather_parameters, gather_rows

import lpnet
from lpnet.nn import ConvStep, ModuleStep

LAYERS, TIME = 10, 1.5


def smooth_relu(x):
    return torch.where(x.abs() < 0.1, x * x / 0.4 + x / 2 + 0.025, torch.relu(x))


def perceptron():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))


def by_hand(p, u):
    return torch.tanh(u @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]


KINDS = {  # the step, F(parameters, u) in plain torch, shape of a sample's state
    "conv": (ConvStep(4), lambda p, u: torch.tanh(F.conv2d(u, p["weight"], p["bias"], padding=1)), (4, 3, 5)),
    "conv-groups": (
        ConvStep(4, kernel=5, groups=2, activation="relu"),
        lambda p, u: torch.relu(F.conv2d(u, p["weight"], p["bias"], padding=2, groups=2)), (4, 3, 5)),
    "conv-image-bias": (
        ConvStep(2, activation="smooth_relu", bias="image", size=(3, 5)),
        lambda p, u: smooth_relu(F.conv2d(u, p["weight"], padding=1) + p["bias"]), (2, 3, 5)),
    "module": (ModuleStep(perceptron), by_hand, (4,)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind, comm, **changes):
    """A network of some layers with biases that are not zero. Collective over comm."""
    step, _, shape = KINDS[kind]
    torch.manual_seed(3)
    closing = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(int(np.prod(shape)), 3, dtype=torch.float64))
    stack = lpnet.LayerStack(step, num_layers=LAYERS, final_time=TIME, comm=comm, seed=1, dtype=torch.float64)
    net = lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=closing,
                              mgrit=Case(LAYERS, coarsening=3).mgrit(**changes))
    with torch.no_grad():
        for name, p in stack.named_parameters():
            if "bias" in name:
                for i, row in zip(range(stack.low, stack.high), p, strict=True):
                    row.copy_(torch.linspace(-0.3, 0.3, row.numel()).reshape(row.shape) + 0.02 * i)
    return net, closing


def batch(kind, count=4, seed=0):
    shape = (count, *KINDS[kind][2])
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape)), torch.arange(count) % 3


class Twin(torch.nn.Module):
    """The same layers as a list of parameters."""

    def __init__(self, kind, parameters, closing):
        super().__init__()
        self.function, self.closing = KINDS[kind][1], closing
        self.p = [{name.removeprefix("stack."): torch.tensor(value[i]).requires_grad_()
                   for name, value in parameters.items() if name.startswith("stack.")} for i in range(LAYERS)]

    def step(self, i, u, span=1):
        return u + TIME / LAYERS * span * self.function(self.p[i], u)

    def forward(self, u):
        for i in range(LAYERS):
            u = self.step(i, u)
        return self.closing(u)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("storage", ["all", "c_points"])
@kinds
def test_converged_gradient_equals_serial_autograd(comm, kind, storage):
    net, closing = make(kind, comm, storage=storage, **CONVERGED)
    twin, (x, y) = Twin(kind, gather_parameters(net), closing), batch(kind)
    expected = F.cross_entropy(twin(x), y)
    names = list(twin.p[0])
    grads = torch.autograd.grad(expected, [layer[name] for layer in twin.p for name in names])
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    local = {name.replace("/", "."): p.grad for name, p in net.stack.named_parameters()}
    assert sorted(local) == sorted(names)
    for k, name in enumerate(names):
        found = gather_rows(net, local[name])
        np.testing.assert_allclose(found, np.stack(grads[k::len(names)]), rtol=1e-10, atol=1e-12, err_msg=name)
    net.comm.free()


@pytest.mark.ranks(1, 2, 4)
@kinds
def test_iterates_equal_the_reference(comm, kind):
    net, closing = make(kind, comm)
    twin, (x, _) = Twin(kind, gather_parameters(net), closing), batch(kind)

    def step(b, a, u):
        with torch.no_grad():
            return twin.step(b, torch.tensor(u), a - b).numpy()

    expected = ref.Solver(ref.coarsen(LAYERS, 2, 3), step).solve(x.numpy(), "constant", 1)
    *held, report = net.solve(x)
    np.testing.assert_allclose(gather(net, *held), expected.states, rtol=0, atol=1e-12)
    np.testing.assert_allclose(report.residuals, expected.residuals, rtol=1e-12)
    states = expected.states
    lam = torch.tensor(np.random.default_rng(1).standard_normal(x.shape))

    def back(b, a, lam):
        u = torch.tensor(states[a]).requires_grad_()
        return torch.autograd.grad(twin.step(a, u, b - a), u, torch.tensor(lam))[0].numpy()

    adjoint = ref.Solver(ref.reverse(ref.coarsen(LAYERS, 2, 3)), back).solve(lam.numpy(), "constant", 1)
    *held, report = net.solve_adjoint(lam)
    np.testing.assert_allclose(gather(net, *held), adjoint.states, rtol=0, atol=1e-12)
    np.testing.assert_allclose(report.residuals, adjoint.residuals, rtol=1e-12)
    net.comm.free()


@pytest.mark.ranks(2, 3)
@kinds
def test_training_equals_one_rank_bit_for_bit(comm, kind):
    found = []
    for where in (comm, None):
        net, _ = make(kind, where, initial_guess="kept", forward_iterations=2, adjoint_iterations=1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(3):
            x, y = batch(kind)
            optimizer.zero_grad()
            F.cross_entropy(net(x, batch=0), y).backward()
            optimizer.step()
        found.append(gather_parameters(net))
        net.comm.free()
    for name, value in found[1].items():
        assert np.array_equal(found[0][name], value), name


@kinds
def test_gradcheck(kind):
    net, _ = make(kind, None, levels=1)
    x = batch(kind, count=2)[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: net(x), (x, *net.parameters()), fast_mode=True)


@kinds
def test_the_serial_twin_computes_the_same(kind):
    net, closing = make(kind, None)
    x, _ = batch(kind)
    twin = Twin(kind, gather_parameters(net), closing)
    np.testing.assert_allclose(net.to_serial()(x).detach(), twin(x).detach(), rtol=0, atol=1e-13)


@kinds
@pytest.mark.parametrize("batching", ["off", "on"])
def test_changed_parameters_are_followed(kind, batching):
    """Operations are bound once; none may hold a copy of a parameter as it was."""
    net, closing = make(kind, None, batching=batching, **CONVERGED)
    x, _ = batch(kind)
    net(x).sum().backward()
    for change in range(2):
        with torch.no_grad():
            for p in net.stack.parameters():
                p.add_(0.1 + 0.1 * change)
        twin = Twin(kind, gather_parameters(net), closing)
        expected = twin(x)
        np.testing.assert_allclose(net(x).detach(), expected.detach(), rtol=0, atol=1e-12)
        with torch.no_grad():
            np.testing.assert_allclose(net(x), expected.detach(), rtol=0, atol=1e-12)
