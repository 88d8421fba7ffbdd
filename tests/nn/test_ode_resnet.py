"""The CIFAR ODE-ResNet, layer-parallel against its serial twin, and its seeds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from network_case import CONVERGED, DOUBLE, near, twin_of

import lpnet
from lpnet.errors import UsageError

X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
Y = torch.tensor([0, 4, 9])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("norm, levels", [(None, 2), ("batch", 2), ("batch", 3), ("group", 2)])
def test_a_training_pass_equals_the_serial_twin(comm, norm, levels):
    network = lpnet.models.ode_resnet_cifar(12, widths=(8, 8, 16), norm=norm, comm=comm, seed=2, dtype=DOUBLE)
    net = lpnet.LayerParallel(network, mgrit=lpnet.MGRIT(levels=levels, coarsening=2, **CONVERGED))
    twin = twin_of(net)
    assert len(twin.layers) == 14
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    losses = [F.cross_entropy(model(x), Y) for model, x in zip((net, twin), inputs, strict=True)]
    for loss in losses:
        loss.backward()
    near(losses[0].detach(), losses[1].detach())
    if net.is_first:
        near(inputs[0].grad, inputs[1].grad)
    own = dict(twin.named_parameters())
    starts = dict(zip(network.names, network.bounds, strict=False))
    for name, p in net.stack.named_parameters():
        part, _, inner = name.partition(".")
        if part.startswith("transition"):
            near(p.grad, own[f"layers.{starts[part]}.{inner}"].grad, name)
            continue
        prefix = "" if norm is None else "module."
        for i, row in zip(range(network._modules[part].low, network._modules[part].high), p.grad, strict=True):
            near(row, own[f"layers.{starts[part] + i}.{prefix}{inner.replace('/', '.')}"].grad, name)
    again = twin_of(net)
    for (name, found), (_, expected) in zip(again.named_buffers(), twin.named_buffers(), strict=True):
        near(found.double(), expected.double(), name)
    net.comm.free()


@pytest.mark.ranks(2, 3)
def test_initial_weights_do_not_depend_on_the_ranks(comm):
    states = []
    for part in (comm, None):
        net = lpnet.LayerParallel(lpnet.models.ode_resnet_cifar(6, widths=(8, 8, 8), comm=part, seed=5))
        states.append(net.comm.broadcast_object(lpnet.gather_state_dict(net)))
        net.comm.free()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_layers_that_three_stages_cannot_share_are_refused():
    with pytest.raises(UsageError, match="10 layers among 3 stages"):
        lpnet.models.ode_resnet_cifar(10)
