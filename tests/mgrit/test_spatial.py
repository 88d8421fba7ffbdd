"""Spatial coarsening: converged it equals the serial network, its coarse steps are transposes of each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from network_case import CONVERGED, DOUBLE, near, twin_of

import lpnet
from lpnet.errors import UsageError
from lpnet.nn import ConvStep, Transfer

LAYERS, BATCH, SHAPE = 10, 3, (4, 6, 7)  # 7 is odd: sizes are rounded up


def normed():
    return torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.Tanh(), torch.nn.Conv2d(4, 4, 3, padding=1))


def halves():
    """A user's maps: every second row by injection, rows repeated back."""
    return Transfer(lambda u: u[:, :, ::2], lambda v: v.repeat_interleave(2, 2))


def make(comm, spatial="average", levels=2, step=None, **mgrit):
    torch.manual_seed(0)
    stack = lpnet.LayerStack(step or ConvStep(4, init_scale=1.0), num_layers=LAYERS, final_time=2.0, comm=comm, seed=1,
                             dtype=DOUBLE)
    closing = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 7, 3))
    options = {"coarsening": 2, **CONVERGED, **mgrit}
    return lpnet.LayerParallel(stack, opening=torch.nn.Conv2d(1, 4, 3, padding=1), closing=closing,
                               mgrit=lpnet.MGRIT(levels=levels, spatial=spatial, **options),
                               transfer=halves() if spatial == "user" else None)


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(BATCH, 1, 6, 7, generator=generator, dtype=DOUBLE), torch.arange(BATCH) % 3


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("spatial, levels, changes", [
    ("average", 2, {}),
    ("bilinear", 3, {"spatial_factor": [1, 2]}),
    ("average", 3, {"spatial_factor": [2, 4], "relaxation": "FCF", "storage": "c_points"}),
    ("user", 3, {"cycle": "F"}),
    ("normed", 2, {}),
], ids=str)  # fmt: skip
def test_a_training_pass_equals_the_serial_twin(comm, spatial, levels, changes):
    step = normed if spatial == "normed" else None
    net = make(comm, "average" if step else spatial, levels, step, **changes)
    twin, (x, y) = twin_of(net), batch()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    logits, expected = net(inputs[0]), twin(inputs[1])
    near(logits.detach(), expected.detach(), "logits")
    F.cross_entropy(logits, y).backward()
    F.cross_entropy(expected, y).backward()
    if net.is_first:
        near(inputs[0].grad, inputs[1].grad, "input")
    prefix = "module." if step else ""
    own = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    for shard in net.shards():
        if shard.rows is None:
            continue
        inner = shard.name.removeprefix("stack.")
        for i, row in zip(range(*shard.rows), shard.tensor if not shard.tensor.requires_grad else shard.tensor.grad,
                          strict=True):
            wanted = own[f"layers.{i}.{prefix}{inner}"]
            near(row, wanted.grad if shard.tensor.requires_grad else wanted, shard.name)
    net.comm.free()


def states_after_one_iteration(net, u0):
    """Two levels, F-relaxation, written out with plain torch: E, then the coarse correction on restricted states."""
    twin = net.to_serial()
    layers, h, c = twin.layers, net.stack.h, 2
    transfer = net.transfers[1]

    def coarse(u, b):
        small = layers[b](transfer.restrict(u)) - transfer.restrict(u)
        return u + c * h * transfer.prolong(small / h)

    old = {p: torch.zeros_like(u0) if p else u0 for p in range(0, LAYERS + 1, c)}
    arrived = {p: layers[p - 1](layers[p - 2](old[p - 2])) for p in range(c, LAYERS + 1, c)}
    new = {0: u0}
    for p in range(c, LAYERS + 1, c):
        new[p] = arrived[p] + (coarse(new[p - c], p - c) - coarse(old[p - c], p - c))
    return new


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("spatial", ["average", "bilinear", "user"])
def test_one_iteration_is_the_one_written_out(comm, spatial):
    net = make(comm, spatial, forward_iterations=1, initial_guess="zero")
    alone = make(None, spatial, forward_iterations=1, initial_guess="zero")
    u0 = torch.randn(BATCH, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    with torch.no_grad():
        wanted = states_after_one_iteration(alone, u0)
    points, states, report = net.solve(u0)
    assert report.iterations == 1
    for point, state in zip(points, states, strict=True):
        if point in wanted:
            np.testing.assert_allclose(state, wanted[point], rtol=0, atol=1e-12)
    net.comm.free()


@pytest.mark.parametrize("spatial", ["average", "bilinear", "user"])
def test_the_coarse_step_of_the_adjoint_is_the_transpose(spatial):
    """<lam, Phi_c' v> == <Phi_c'^T lam, v> on the restricted level, by the solver's own operations."""
    net = make(None, spatial)
    x, y = batch()
    F.cross_entropy(net(x), y).backward()
    (propagator,) = (p for pool in net._pools.values() for p in pool if p.forward_solver.levels > 1)
    space, h, layer = propagator.spaces[1], 0.3, 4
    u = space.fine.state(layer)
    v, lam = (torch.randn(u.shape, generator=torch.Generator().manual_seed(k), dtype=DOUBLE) for k in (5, 6))
    base, images, eps = u.clone(), [], 1e-6
    for sign in (eps, -eps):
        u.copy_(base + sign * v)
        out = torch.empty_like(u)
        for op in [*space.evaluate(layer, layer, layer), *space.advance(layer, layer, h, out, None, None)]:
            op()
        images.append(out)
    u.copy_(base)
    pulled = torch.empty_like(u)
    for op in [*space.evaluate(layer, layer, layer), *space.pull(layer, layer, layer, lam, h, pulled, None, None)]:
        op()
    forward = float((lam * (images[0] - images[1])).sum()) / (2 * eps)
    assert forward == pytest.approx(float((pulled * v).sum()), rel=1e-8)


@pytest.mark.ranks(1, 2, 4)
def test_an_exact_guess_is_a_bitwise_fixed_point(comm):
    net = make(comm, forward_iterations=3)
    u0 = torch.randn(BATCH, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    one = make(comm, "none", levels=1)
    _, exact, _ = one.solve(u0)
    _, states, report = net.solve(u0, guess="exact")
    assert torch.equal(states, exact) and report.residuals == (0.0,) * len(report.residuals)
    net.comm.free(), one.comm.free()


def refused(spatial="average", step=None, transfer=None, x=None, **mgrit):
    stack = lpnet.LayerStack(step or ConvStep(4), num_layers=LAYERS, seed=1)
    net = lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=torch.nn.Identity(),
                              mgrit=lpnet.MGRIT(levels=2, spatial=spatial, **mgrit), transfer=transfer)
    net(torch.zeros(2, *SHAPE) if x is None else x)


class Fixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6, 7))

    def forward(self, u):
        return u * self.scale


def test_bad_input_is_refused_before_the_first_message():
    with pytest.raises(UsageError, match=r"mgrit.spatial user and transfer= go together"):
        refused("user")
    with pytest.raises(UsageError, match=r"go together"):
        refused("average", transfer=halves())
    with pytest.raises(UsageError, match="not for dense layers"):
        refused(step=lpnet.nn.DenseStep(4))
    with pytest.raises(UsageError, match="batching is on, and levels with spatial coarsening run layer by layer"):
        refused(batching="on")
    with pytest.raises(UsageError, match=r"prolong makes \(2, 4, 3, 7\) .* of a state \(2, 4, 6, 7\)"):
        refused("user", transfer=Transfer(lambda u: u[:, :, ::2], lambda v: v))
    with pytest.raises(UsageError, match=r"restrict is not linear \(it is off by"):
        refused("user", transfer=Transfer(lambda u: u[:, :, ::2] ** 2, lambda v: v.repeat_interleave(2, 2)))
    with pytest.raises(UsageError, match=r"restrict and prolong cannot take a state \(2, 5\).*takes images"):
        refused(step=lambda: torch.nn.Linear(5, 5), x=torch.zeros(2, 5))
    with pytest.raises(UsageError, match=r"restricted to \(2, 4, 3, 4\): .*; set mgrit.spatial none"):
        refused(step=Fixed)
    with pytest.raises(UsageError, match="not for a network of several stacks"):
        network = lpnet.Network([torch.nn.Identity(), torch.nn.Linear(3, 3), torch.nn.Identity()])
        lpnet.LayerParallel(network, mgrit=lpnet.MGRIT(levels=2, spatial="average"))
    with pytest.raises(ValueError, match="spatial_factor is 0"):
        lpnet.MGRIT(spatial="average", spatial_factor=0)
