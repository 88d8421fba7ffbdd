"""Residual steps: written-out forward, transposed derivative and gradient against numpy, and gradcheck."""

from __future__ import annotations

import numpy as np
import pytest
import reference_mgrit as ref
import torch

from lpnet.nn import DenseStep
from lpnet.nn.activations import FUNCTIONS
from lpnet.nn.context import Block
from lpnet.nn.layerwise import places

ACTIVATIONS = ["tanh", "relu", "smooth_relu"]
BIASES = ["scalar", "vector"]
LAYERS, WIDTH, BATCH, H = 4, 3, 5, 0.3


def parameters(bias, seed=1):
    net = ref.random_dense(LAYERS, WIDTH, final_time=H * LAYERS, bias=bias, seed=seed)
    return {"weight": torch.tensor(net.weight), "bias": torch.tensor(net.bias)}


def states(count, seed=2):
    return torch.tensor(np.random.default_rng(seed).standard_normal((count, BATCH, WIDTH)))


def run(launches):
    for launch in launches:
        launch()


class Engine:
    """One workspace with states packed into it."""

    def __init__(self, step, given, u):
        self.engine = step.engine(given, block=Block(h=H))
        self.engine.refresh()
        sizes = {"layer_slots": LAYERS, "kept_slots": LAYERS, "adjoint_slots": LAYERS + 1}
        self.space = self.engine.workspace(u.shape[1:], state_slots=LAYERS + 1, **sizes)
        self.linear: set[int] = set()
        for i, state in enumerate(u):
            self.space.pack(state, self.space.state(i))

    def advance(self, where, h=H, minus=None, plus=None):
        out = self.space.rows(LAYERS)[where]
        run(self.space.evaluate(where, where, where))
        self.linear -= set(places(where))
        run(self.space.advance(where, where, h, out, minus, plus))
        return self.space.unpack(out)

    def pull(self, where, lam, h=H, minus=None, plus=None):
        source = self.space.rows(LAYERS)
        for row, value in zip(source, lam, strict=True):
            self.space.pack(value, row)
        out = self.space.rows(LAYERS)[where]
        for i in set(places(where)) - self.linear:
            run(self.space.linearise(slice(i, i + 1)))
            self.linear.add(i)
        run(self.space.pull(where, where, where, source[where], h, out, minus, plus))
        return self.space.unpack(out)

    def gradients(self):
        run(self.space.gradient(slice(0, LAYERS), slice(0, LAYERS), slice(0, LAYERS), H))
        return self.engine.gradients()


class Layers(torch.autograd.Function):
    """The layers side by side, each from a state of its own, by the engine's operations only."""

    @staticmethod
    def forward(ctx, step, u, weight, bias):
        ctx.engine = Engine(step, {"weight": weight.detach(), "bias": bias.detach()}, u.detach())
        return ctx.engine.advance(slice(0, LAYERS))

    @staticmethod
    def backward(ctx, lam):
        back = ctx.engine.pull(slice(0, LAYERS), lam)
        grads = ctx.engine.gradients()
        return None, back, grads["weight"], grads["bias"]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, bias):
    step = DenseStep(width=WIDTH, activation=activation, bias=bias)
    given = parameters(bias)
    inputs = [states(LAYERS).requires_grad_(), *(given[name].requires_grad_() for name in ("weight", "bias"))]
    assert torch.autograd.gradcheck(lambda *args: Layers.apply(step, *args), inputs)
    layer = step.serial_layer({name: value[0] for name, value in given.items()}, H)
    names = [name for name, _ in layer.named_parameters()]

    def call(u, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (u,))

    assert torch.autograd.gradcheck(call, (inputs[0][0].detach().requires_grad_(), *layer.parameters()))


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("span", [1, 3])
def test_forward_vjp_and_gradient_equal_numpy(activation, bias, span):
    given, u, lam = parameters(bias), states(LAYERS), states(LAYERS, seed=3)
    net = ref.Dense(given["weight"].numpy(), given["bias"].numpy(), H, activation)
    engine = Engine(DenseStep(width=WIDTH, activation=activation, bias=bias), given, u)
    stepped = torch.stack([engine.advance(i, H * span) for i in range(LAYERS)])
    pulled = torch.stack([engine.pull(i, lam, H * span) for i in range(LAYERS)])
    for i in range(LAYERS):
        np.testing.assert_allclose(stepped[i], net.step(i, u[i].numpy(), span), rtol=0, atol=1e-14)
        np.testing.assert_allclose(pulled[i], net.vjp(i, u[i].numpy(), lam[i].numpy(), span), rtol=0, atol=1e-14)
    grads = engine.gradients()
    for i in range(LAYERS):
        weight, biases = net.gradient(i, u[i].numpy(), lam[i].numpy())
        np.testing.assert_allclose(grads["weight"][i], weight, rtol=0, atol=1e-14)
        np.testing.assert_allclose(grads["bias"][i], biases, rtol=0, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layers_side_by_side_equal_one_by_one(activation):
    given, u, lam = parameters("vector"), states(LAYERS), states(LAYERS, seed=3)
    engine = Engine(DenseStep(width=WIDTH, activation=activation), given, u)
    for where in (slice(0, LAYERS), slice(0, LAYERS, 2), slice(1, LAYERS, 2)):
        alone = range(LAYERS)[where]
        one_by_one = torch.stack([engine.advance(i) for i in alone])
        torch.testing.assert_close(engine.advance(where), one_by_one, rtol=0, atol=1e-14)
        one_by_one = torch.stack([engine.pull(i, lam) for i in alone])
        torch.testing.assert_close(engine.pull(where, lam), one_by_one, rtol=0, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_parareal_terms_cancel_bit_for_bit(activation):
    """plus + (Phi - minus) is plus where minus is Phi itself."""
    given, u, lam = parameters("scalar"), states(LAYERS), states(LAYERS, seed=3)
    engine = Engine(DenseStep(width=WIDTH, activation=activation, bias="scalar"), given, u)
    plus = engine.space.rows(1)[0].copy_(states(1, seed=4)[0].t())
    stepped, pulled = engine.advance(1), engine.pull(1, lam)
    minus = engine.space.rows(2)
    engine.space.pack(stepped, minus[0])
    engine.space.pack(pulled, minus[1])
    assert torch.equal(engine.advance(1, minus=minus[0], plus=plus), engine.space.unpack(plus))
    assert torch.equal(engine.pull(1, lam, minus=minus[1], plus=plus), engine.space.unpack(plus))
    assert (engine.advance(1, minus=minus[0]) == 0).all() and (engine.pull(1, lam, minus=minus[1]) == 0).all()


def test_smooth_relu_at_and_between_its_seams():
    x = torch.tensor([-1.0, -0.1, -0.05, 0.0, 0.05, 0.1, 1.0, -0.1 - 1e-9, 0.1 + 1e-9], dtype=torch.float64)
    x.requires_grad_()
    y = FUNCTIONS["smooth_relu"](x)
    np.testing.assert_allclose(y.detach(), ref.activate("smooth_relu", x.detach().numpy()), rtol=0, atol=1e-16)
    (grad,) = torch.autograd.grad(y.sum(), x)
    seams = np.abs(np.abs(x.detach().numpy()) - 0.1) < 1e-12  # torch's clamp and relu take one side there
    expected = ref.slope("smooth_relu", x.detach().numpy())
    np.testing.assert_allclose(grad[~seams], expected[~seams], rtol=0, atol=1e-8)


@pytest.mark.parametrize(("changes", "words"), [
    ({"width": 0}, "width is 0"), ({"activation": "gelu"}, "'gelu'"), ({"bias": "none"}, "'none'"),
])
def test_wrong_settings_are_named_with_a_remedy(changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        DenseStep(**{"width": 3} | changes)
    assert "must be" in str(caught.value)
