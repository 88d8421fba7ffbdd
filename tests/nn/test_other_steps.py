"""Convolutional steps and torch modules as steps: layout, precision, seeds, bad input (test_kinds: gradients)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lpnet
from lpnet.errors import UsageError
from lpnet.nn.conv import apart, side_by_side_channels

SIZE, BATCH, LAYERS = 5, 3, 7
X = torch.randn(BATCH, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Y = torch.tensor([0, 2, 1])


class Closing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4 * SIZE * SIZE, 3)

    def forward(self, u):
        return self.inner(u.flatten(1))


class Residual(torch.nn.Module):
    """A residual function with nested names and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(4, 2, 3, padding=1)
        self.rest = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Conv2d(2, 4, 1, bias=False))
        self.unused = torch.nn.Parameter(torch.zeros(2))

    def forward(self, u):
        return self.rest(self.first(u))


STEPS = {
    "tanh": lambda: lpnet.nn.ConvStep(channels=4, init_scale=1.0),
    "module": lambda: Residual,
}

def build(step, comm, dtype=torch.float64, **mgrit):
    torch.manual_seed(0)
    opening, closing = torch.nn.Conv2d(1, 4, 3, padding=1), Closing()
    stack = lpnet.LayerStack(step, num_layers=LAYERS, final_time=2.0, comm=comm, seed=1, dtype=dtype)
    return lpnet.LayerParallel(stack, opening=opening, closing=closing, mgrit=lpnet.MGRIT(**mgrit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 8])
def test_side_by_side_and_apart_are_inverse(dtype, channels):
    payloads = torch.randn(6, 2, 3, 4, channels, generator=torch.Generator().manual_seed(0)).to(dtype)[1::2]
    image = side_by_side_channels(payloads, dtype)
    assert image.shape == (2, 3 * channels, 3, 4)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(image[:, channels : 2 * channels], payloads[1].permute(0, 3, 1, 2))
    assert torch.equal(apart(image, 3, dtype), payloads)


@pytest.mark.parametrize("step", ["tanh", "module"])
def test_bfloat16_computes_F_in_bfloat16_and_keeps_float32(step):
    narrow = build(STEPS[step](), None, torch.bfloat16, levels=1)
    wide = build(STEPS[step](), None, torch.float32, levels=1)
    assert {p.dtype for p in narrow.parameters()} == {torch.float32}
    gradients = []
    for net in (narrow, wide):
        F.cross_entropy(net(X.float()), Y).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    error = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    assert 1e-5 < error < 3e-2  # different, by bfloat16's rounding of 4e-3


def test_dense_bfloat16():
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        stack = lpnet.LayerStack(lpnet.nn.DenseStep(width=8), num_layers=16, final_time=2.0, seed=1, dtype=dtype)
        net = lpnet.LayerParallel(stack, opening=lpnet.nn.ZeroExpand(2, 8), closing=torch.nn.Linear(8, 3),
                                  mgrit=lpnet.MGRIT(levels=2, coarsening=4, batching="on"))
        F.cross_entropy(net(X.float().flatten(1)[:, :2]), Y).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    error = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    assert 1e-5 < error < 3e-2


def test_a_module_that_changes_the_shape_is_refused():
    stack = lpnet.LayerStack(lambda: torch.nn.Linear(4, 3), num_layers=2, seed=0)
    net = lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=torch.nn.Identity())
    with pytest.raises(UsageError, match=r"\(2, 3\).*\(2, 4\).*keep shape and dtype"):
        net(torch.zeros(2, 4))


def test_a_factory_is_called_once_per_layer_under_its_seed():
    global_state = torch.random.get_rng_state()
    stack = lpnet.LayerStack(lambda: torch.nn.Linear(4, 4), num_layers=3, seed=5)
    again = lpnet.LayerStack(lambda: torch.nn.Linear(4, 4), num_layers=3, seed=5)
    assert torch.equal(torch.random.get_rng_state(), global_state)
    assert torch.equal(stack.weight, again.weight)
    assert not torch.equal(stack.weight[0], stack.weight[1])


@pytest.mark.parametrize("wrong, message", [
    ({"channels": 4, "groups": 3}, "4 channels cannot be split into 3 groups"),
    ({"channels": 4, "kernel": 2}, "kernel is 2; it must be odd"),
    ({"channels": 4, "bias": "image"}, "needs size"),
    ({"channels": 4, "activation": "gelu"}, "activation is 'gelu'"),
])
def test_bad_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        lpnet.nn.ConvStep(**wrong)


def test_a_state_of_another_shape_is_refused():
    stack = lpnet.LayerStack(lpnet.nn.ConvStep(channels=4), num_layers=2, seed=0)
    net = lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=torch.nn.Identity())
    with pytest.raises(UsageError, match=r"\(2, 3, 5, 5\).*\(batch, 4, height, width\)"):
        net(torch.zeros(2, 3, 5, 5))
