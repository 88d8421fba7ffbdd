"""Every fast path equals the plain one to rounding: numpy kernels, side-by-side relaxation, their measured choice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lpnet
from lpnet.errors import UsageError
from lpnet.mgrit import batching
from lpnet.nn import kernels

STEPS = {
    "dense": (lambda activation: lpnet.nn.DenseStep(width=6, activation=activation), (9, 2)),
    "conv": (lambda activation: lpnet.nn.ConvStep(channels=4, activation=activation), (5, 1, 6, 6)),
}


class Flat(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.inner = torch.nn.Linear(features, 3)

    def forward(self, u):
        return self.inner(u.flatten(1))


def gradients(kind, activation, comm=None, dtype=torch.float64, **mgrit):
    """Loss and gradients after two warm steps of fixed iterations."""
    make, shape = STEPS[kind] if isinstance(kind, str) else kind
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y = torch.arange(shape[0]) % 3
    torch.manual_seed(1)
    step = make(activation)
    dense = isinstance(step, lpnet.nn.DenseStep)
    opening = lpnet.nn.ZeroExpand(2, 6) if dense else lpnet.nn.Replicate(step.channels)
    closing = Flat(6 if dense else step.channels * 36)
    stack = lpnet.LayerStack(step, num_layers=24, final_time=3.0, comm=comm, seed=4, dtype=dtype)
    settings = {"levels": 3, "coarsening": [4, 2], "forward_iterations": 2, "adjoint_iterations": 1} | mgrit
    net = lpnet.LayerParallel(stack, opening=opening, closing=closing, mgrit=lpnet.MGRIT(**settings))
    for _ in range(3):
        net.zero_grad()
        loss = F.cross_entropy(net(x, batch=0), y)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.1)
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    return loss.detach(), found, net


def assert_same(a, b, atol):
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=atol)
    for name, gradient in a[1].items():
        torch.testing.assert_close(gradient, b[1][name], rtol=0, atol=atol)


@pytest.mark.parametrize("activation", ["tanh", "relu", "smooth_relu"])
@pytest.mark.parametrize("kind", STEPS)
def test_numpy_kernels_equal_torchs(kind, activation, monkeypatch):
    fast = gradients(kind, activation)
    monkeypatch.setattr(kernels, "uses_numpy", lambda tensor: False)
    assert_same(fast, gradients(kind, activation), 1e-12)


@pytest.mark.parametrize("activation", ["tanh", "smooth_relu"])
def test_small_and_large_arrays_take_different_launches_and_agree(activation, monkeypatch):
    fast = gradients("dense", activation)
    monkeypatch.setattr(kernels, "SMALL", 0)
    assert_same(fast, gradients("dense", activation), 1e-12)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", STEPS)
def test_side_by_side_equals_one_by_one(comm, kind):
    for activation in ("tanh", "relu", "smooth_relu"):
        one = gradients(kind, activation, comm, batching="off")
        assert_same(one, gradients(kind, activation, comm, batching="on"), 1e-12)
        assert_same(one, gradients(kind, activation, comm, batching=["on", "off"]), 1e-12)
        assert_same(one, gradients(kind, activation, comm, storage="c_points"), 1e-12)


@pytest.mark.ranks(1, 2, 3)
def test_the_measured_choice_is_the_same_on_all_ranks_and_is_written_down(comm):
    *_, net = gradients("dense", "tanh", comm, batching="auto")
    choices = net.comm.all_gather_objects(net.batched)
    assert len(set(choices)) == 1
    assert net.mgrit.batching == ["on" if on else "off" for on in net.batched]
    again = gradients("dense", "tanh", comm, batching=net.mgrit.batching)[2]
    assert again.batched == net.batched


def test_the_choice_follows_the_clock(monkeypatch):
    """Every sweep timed as slower side by side: off; as faster: on."""
    for faster in (True, False):
        numbers, sign = iter(range(1000)), -1.0 if faster else 1.0
        monkeypatch.setattr(batching, "_time", lambda ops, n=numbers, s=sign: s * next(n))
        assert gradients("dense", "tanh", batching="auto")[2].batched == (faster, faster)


def test_one_forward_and_backward_call_few_kernels():
    """Launches per training step of a batched two-level solve do not grow with the layers that are side by side."""
    counts = []
    for layers in (32, 64):
        stack = lpnet.LayerStack(lpnet.nn.DenseStep(width=4), num_layers=layers, final_time=1.0, seed=0)
        settings = lpnet.MGRIT(coarsening=8, forward_iterations=1, adjoint_iterations=1, batching="on")
        net = lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=torch.nn.Identity(), mgrit=settings)
        for _ in range(2):
            net(torch.ones(3, 4), batch=0).sum().backward()
        solver = net._latest.forward_solver
        counts.append(max(len(p.ops) for (name, *_), p in solver._programs.items() if name == "refresh"))
    assert counts[0] == counts[1] <= 8 * 4 + 4


@pytest.mark.parametrize("bias", ["channel", "image"])
@pytest.mark.parametrize(("channels", "batching"), [(1, "off"), (2, "off"), (4, "on"), (8, "off")])
def test_parts_of_a_batch_side_by_side_equal_the_batch(channels, batching, bias, monkeypatch):
    def make(activation):
        return lpnet.nn.ConvStep(channels=channels, activation=activation, bias=bias, size=(6, 6))

    assert make("tanh").fold(8) == max(2, 8 // channels) and make("tanh").fold(7) == 1
    assert lpnet.nn.ConvStep(channels=16).fold(8) == lpnet.nn.ConvStep(channels=4, groups=2).fold(8) == 1
    folded = gradients((make, (8, 1, 6, 6)), "tanh", batching=batching)
    with monkeypatch.context() as patch:
        patch.setattr(lpnet.nn.ConvStep, "fold", lambda self, batch: 1)
        plain = gradients((make, (8, 1, 6, 6)), "tanh", batching=batching)
    assert_same(folded, plain, 1e-12)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("coarse", ["averaged", "half_steps"])
@pytest.mark.parametrize("kind", STEPS)
def test_converged_gradients_are_those_of_exact_propagation(comm, kind, coarse):
    """Over steps that change the weights: the coarse ones follow."""
    settings = {"forward_iterations": None, "adjoint_iterations": None, "tolerance": 1e-13}
    exact = gradients(kind, "tanh", comm, levels=1)
    for choice in ("off", "on"):
        assert_same(exact, gradients(kind, "tanh", comm, coarse=coarse, batching=choice, **settings), 1e-10)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("coarse", ["averaged", "half_steps"])
@pytest.mark.parametrize("kind", STEPS)
def test_fixed_iterations_do_not_depend_on_storage_or_batching(comm, kind, coarse):
    one = gradients(kind, "smooth_relu", comm, coarse=coarse)
    assert_same(one, gradients(kind, "smooth_relu", comm, coarse=coarse, batching="on"), 1e-12)
    assert_same(one, gradients(kind, "smooth_relu", comm, coarse=coarse, storage="c_points"), 1e-12)


def test_what_has_no_weights_to_average_is_refused():
    stack = lpnet.LayerStack(lambda: torch.nn.Linear(6, 6), num_layers=8)
    with pytest.raises(UsageError, match="mgrit.coarse is averaged, which is not for modules"):
        lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=Flat(6), mgrit=lpnet.MGRIT(coarse="averaged"))
    with pytest.raises(ValueError, match="mgrit.coarse is averaged with mgrit.spatial average"):
        lpnet.MGRIT(coarse="averaged", spatial="average")
