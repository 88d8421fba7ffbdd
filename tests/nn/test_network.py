"""Networks of several stacks with transitions, against their serial torch twin, for any ranks, levels and cycles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from network_case import CONVERGED, DOUBLE, near, twin_of

import lpnet
from lpnet.errors import UsageError
from lpnet.mgrit.hierarchy import build
from lpnet.nn import ConvStep, DenseStep

BATCH = 5


def block():
    return torch.nn.Sequential(torch.nn.BatchNorm2d(6), torch.nn.Tanh(), torch.nn.Conv2d(6, 6, 3, padding=1))


class Split(torch.nn.Module):
    """To a tuple of tensors."""

    def forward(self, u):
        return u[:, :2], u[:, 2:]


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)

    def forward(self, u, t):
        return torch.tanh(self.a(u[1])) * (1 + t), torch.tanh(self.b(u[0]))


class Joined(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 3)

    def forward(self, u):
        return self.inner(torch.cat(u, 1))


def stack(step, layers, seed):
    return lpnet.LayerStack(step, num_layers=layers, final_time=1.5, seed=seed, dtype=DOUBLE)


def convolutional():
    down = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, 2, 1), torch.nn.BatchNorm2d(6), torch.nn.Dropout(0.2))
    pool = torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(6, 8))
    return [torch.nn.Conv2d(1, 4, 3, padding=1), stack(ConvStep(4, init_scale=1.0), 6, 1), down, stack(block, 5, 2),
            pool, stack(DenseStep(8, init_scale=1.0), 7, 3), torch.nn.Linear(8, 3)], (1, 4, 4)


def tuples():
    return [torch.nn.Identity(), stack(DenseStep(5), 6, 1), Split(), stack(Halves, 5, 2), Joined()], (5,)


def neighbours():
    return [torch.nn.Identity(), stack(DenseStep(5), 5, 1), stack(lambda: torch.nn.Linear(5, 5), 4, 2),
            torch.nn.Linear(5, 3)], (5,)


def modules():
    widths = [5, 7, 4, 6, 3, 5, 8]
    layers = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh())
              for a, b in zip(widths, widths[1:], strict=False)]
    return [torch.nn.Identity(), *layers, torch.nn.Linear(8, 3)], (5,)


KINDS = {"convolutional": convolutional, "tuples": tuples, "neighbours": neighbours, "modules": modules}
kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind, comm, levels=2, **mgrit):
    torch.manual_seed(0)
    parts, shape = KINDS[kind]()
    options = {**CONVERGED, "coarsening": 2, **mgrit}
    net = lpnet.LayerParallel(network=lpnet.Network(parts, comm=comm, seed=4, dtype=DOUBLE),
                              mgrit=lpnet.MGRIT(levels=levels, **options))
    x = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    return net, x, torch.arange(BATCH) % 3


def same(net, twin, what):
    """Compare this rank's parameters or buffers with the twin's."""
    own = dict(twin.named_parameters()) | dict(twin.named_buffers())
    network, compared = net.stack, 0
    starts = dict(zip(network.names, network.bounds, strict=False))
    for shard in net.shards():
        part, _, inner = shard.name.partition(".")
        if shard.rows is not None:
            layer = twin.layers[starts[part]]
            prefix = "module." if hasattr(layer, "module") else ""
            names = [f"layers.{starts[part] + i}.{prefix}{inner}" for i in range(*shard.rows)]
        else:
            names = [f"layers.{starts[part]}.{inner}" if part in starts else shard.name]
        tensor = shard.tensor.grad if what == "grad" else shard.tensor
        if what == "grad" and not isinstance(own[names[0]], torch.nn.Parameter):
            continue
        for name, row in zip(names, tensor.unbind(0) if shard.rows is not None else [tensor], strict=True):
            near(row.detach(), (own[name].grad if what == "grad" else own[name]).detach(), name)
            compared += 1
    assert compared


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("levels", [2, 3])
@kinds
def test_a_training_pass_equals_the_serial_twin(comm, kind, levels):
    check_a_pass(*make(kind, comm, levels))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("levels, changes", [
    (1, {}), (2, {"coarsening": 3, "relaxation": "FCF"}), (3, {"cycle": "F"}), (2, {"adjoint": {"coarsening": 3}}),
])
def test_a_training_pass_of_other_cycles_equals_the_serial_twin(comm, levels, changes):
    check_a_pass(*make("convolutional", comm, levels, **changes))


def check_a_pass(net, x, y):
    twin = twin_of(net)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    logits, expected = net(inputs[0]), twin(inputs[1])
    near(logits.detach(), expected.detach(), "logits")
    F.cross_entropy(logits, y).backward()
    F.cross_entropy(expected, y).backward()
    if net.is_first:
        near(inputs[0].grad, inputs[1].grad, "input")
    same(net, twin, "grad")
    same(net, twin, "value")  # running statistics
    net.eval(), twin.eval()
    with torch.no_grad():
        near(net(x), twin(x), "evaluation")
    net.comm.free()


@pytest.mark.ranks(1, 3)
@kinds
def test_steps_equal_torchs_and_kept_states_start_the_next_one(comm, kind):
    net, x, y = make(kind, comm, 2)
    twin = twin_of(net)
    optimizers = [torch.optim.Adam(list(m.parameters()), lr=1e-2) for m in (net, twin) if list(m.parameters())]
    for _ in range(3):
        for loss in (F.cross_entropy(net(x, batch=7), y), F.cross_entropy(twin(x), y)):
            loss.backward()
        same(net, twin, "grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    net.comm.free()


@pytest.mark.ranks(1, 2, 3)
def test_one_iteration_is_no_serial_propagation_and_does_not_depend_on_the_ranks(comm):
    found = []
    for part in (comm, None):
        net, x, _ = make("convolutional", part, 2, forward_iterations=1, initial_guess="zero")
        net.eval()
        found.append(net(x).detach())
        found.append(twin_of(net).eval()(x).detach())
        net.comm.free()
    near(found[0], found[2])
    assert (found[0] - found[1]).abs().max() > 1e-4


@pytest.mark.ranks(1, 2, 4)
def test_checkpoints_of_any_number_of_ranks(comm, shared_tmp_path):
    net, x, y = make("convolutional", comm)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    F.cross_entropy(net(x, batch=3), y).backward()
    optimizer.step()
    lpnet.save(shared_tmp_path, net, optimizer, step=1)
    torch.manual_seed(9)
    again, _, _ = make("convolutional", comm)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    other = torch.optim.Adam(again.parameters(), lr=0.01)
    lpnet.load(shared_tmp_path, again, other)
    same(again, twin_of(net), "value")
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])
        assert int(other.state[q]["step"]) == 1
    alone, _, _ = make("convolutional", None)
    lpnet.load(shared_tmp_path, alone)
    near(alone.eval()(x).detach(), twin_of(net).eval()(x).detach())
    net.comm.free(), again.comm.free()


@pytest.mark.ranks(1, 2, 3)
def test_the_gradient_norm_equals_torchs(comm):
    from lpnet.optim.clip import clip_grad_norm

    net, x, y = make("convolutional", comm)
    twin = twin_of(net)
    for model in (net, twin):
        F.cross_entropy(model(x), y).backward()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    assert clip_grad_norm(net, 0.1) == pytest.approx(float(expected), rel=1e-9)
    same(net, twin, "grad") if comm.size == 1 else None
    net.comm.free()


def test_every_level_keeps_both_ends_of_a_transition():
    net, _, _ = make("convolutional", None, 3)
    assert net.stack.bounds == [0, 6, 7, 12, 13, 20]
    for points in net.hierarchy.levels:
        assert {0, 6, 7, 12, 13} <= set(points)
    assert build(20, lpnet.MGRIT(levels=3, coarsening=2), barriers=net.stack.barriers).levels == net.hierarchy.levels


def test_bad_input_is_refused():
    linear = torch.nn.Linear
    with pytest.raises(UsageError, match="an opening, layers and a closing; got 2"):
        lpnet.Network([linear(2, 2), linear(2, 2)])
    with pytest.raises(UsageError, match="last part of a network is a stack"):
        lpnet.Network([linear(2, 2), linear(2, 2), stack(DenseStep(2), 2, 0)])
    net = lpnet.LayerParallel(lpnet.Network([torch.nn.Identity(), linear(3, 4), linear(5, 2), torch.nn.Identity()]))
    with pytest.raises(UsageError, match=r"transition \(Linear\) cannot take a state \(2, 4\)"):
        net(torch.zeros(2, 3))
    with pytest.raises(UsageError, match="Network, which has both"):
        lpnet.LayerParallel(stack(DenseStep(2), 2, 0))
    for settings, text in (({"batching": "on"}, "batching is on; intervals of a network of several stacks differ"),
                           ({"initial_guess": "constant"}, "initial_guess constant"),
                           ({"coarse": "averaged"}, "coarse is averaged, which is not for a network of several"),
                           ({"storage": "c_points"}, "storage c_points")):  # fmt: skip
        network = lpnet.Network([torch.nn.Identity(), linear(3, 3), torch.nn.Identity()])
        with pytest.raises(UsageError, match=text):
            lpnet.LayerParallel(network, mgrit=lpnet.MGRIT(levels=2, **settings))
