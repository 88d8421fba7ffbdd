"""Real modules as layers, against their serial torch twin: time, side inputs, tuples, norms, dropout, any ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from network_case import CONVERGED, DOUBLE, near, twin_of

import lpnet
from lpnet.errors import UsageError

LAYERS, BATCH = 9, 4


class Timed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, u, t, layer):
        return torch.tanh(self.inner(u)) * torch.cos(3 * t) / (1 + layer)


class Attention(torch.nn.Module):
    """Pre-norm attention with a mask of keys as side input."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, u, side):
        v = self.norm(u)
        found, _ = self.attention(v, v, v, key_padding_mask=side["pad"], need_weights=False)
        return found * side["scale"][:, None, None]


class Pair(torch.nn.Module):
    """Position and momentum, of different shapes."""

    def __init__(self):
        super().__init__()
        self.down, self.up = torch.nn.Linear(6, 3), torch.nn.Linear(3, 6)

    def forward(self, u):
        q, p = u
        return torch.tanh(self.up(p)), -torch.tanh(self.down(q))


class Twice(torch.nn.Module):
    """The opening of a tuple."""

    def forward(self, x):
        return x, x[:, :3]


class Both(torch.nn.Module):
    """The closing of a tuple."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(9, 3)

    def forward(self, u):
        return self.inner(torch.cat(u, 1))


def normalised(norm):
    def factory():
        conv = torch.nn.Conv2d(4, 4, 3, padding=1)
        return torch.nn.Sequential(norm(), torch.nn.Tanh(), conv)
    return factory


def dropped():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 6))


def image_closing():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 3))


IMAGE = (4, 3, 4)
PAD = torch.tensor([[False, False, True]] * 2 + [[False, False, False]] * 2)
SIDE = {"pad": PAD, "scale": torch.linspace(0.5, 1.0, BATCH, dtype=DOUBLE)}
KINDS = {  # factory of a layer, shape of a sample, opening, closing, side input
    "time": (Timed, (6,), torch.nn.Identity, lambda: torch.nn.Linear(6, 3), None),
    "side": (Attention, (3, 6), torch.nn.Identity,
             lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(18, 3)), SIDE),
    "tuple": (Pair, (6,), Twice, Both, None),
    "batchnorm": (normalised(lambda: torch.nn.BatchNorm2d(4)), IMAGE, torch.nn.Identity, image_closing, None),
    "groupnorm": (normalised(lambda: torch.nn.GroupNorm(2, 4)), IMAGE, torch.nn.Identity, image_closing, None),
    "dropout": (dropped, (6,), lambda: torch.nn.Sequential(lpnet.nn.Dropout(0.2)), lambda: torch.nn.Linear(6, 3), None),
}


def make(kind, comm, levels=2, **mgrit):
    factory, _, opening, closing, _ = KINDS[kind]
    torch.manual_seed(0)
    stack = lpnet.LayerStack(factory, num_layers=LAYERS, final_time=2.0, comm=comm, seed=1, dtype=DOUBLE)
    return lpnet.LayerParallel(stack, opening=opening(), closing=closing(),
                               mgrit=lpnet.MGRIT(levels=levels, coarsening=2, **{**CONVERGED, **mgrit}))


def batch(kind, seed=0, count=BATCH):
    x = torch.randn(count, *KINDS[kind][1], generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return x, torch.arange(count) % 3


def same(net, twin, what):
    """Compare this rank's tensors with the twin's: "grad" of parameters, "buffer" or "value"."""
    own = dict(twin.named_parameters()) | dict(twin.named_buffers())
    for shard in net.shards():
        names = [shard.name]
        rows = [shard.tensor.grad if what == "grad" else shard.tensor]
        if shard.rows is not None:
            inner = shard.name.removeprefix("stack.")
            names = [f"layers.{i}.module.{inner}" for i in range(*shard.rows)]
            rows = [None] * len(names) if rows[0] is None else rows[0].unbind(0)
        for name, row in zip(names, rows, strict=True):
            if what == "grad" and isinstance(own[name], torch.nn.Parameter) and own[name].grad is not None:
                near(row, own[name].grad, name)
            elif what == "value" or (what == "buffer" and not isinstance(own[name], torch.nn.Parameter)):
                near(row.detach(), own[name].detach(), name)


kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("levels, storage", [(2, "all"), (3, "all"), (2, "c_points")])
@kinds
def test_a_training_pass_equals_the_serial_twin(comm, kind, levels, storage):
    net = make(kind, comm, levels, storage=storage)
    twin, (x, y), side = twin_of(net), batch(kind), KINDS[kind][4]
    before = torch.random.get_rng_state()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    logits, expected = net(inputs[0], side=side), twin(inputs[1], side)
    near(logits.detach(), expected.detach(), "logits")
    F.cross_entropy(logits, y).backward()
    F.cross_entropy(expected, y).backward()
    if net.is_first:
        near(inputs[0].grad, inputs[1].grad, "input")
    same(net, twin, "grad")
    same(net, twin, "buffer")
    assert torch.equal(torch.random.get_rng_state(), before)
    net.eval(), twin.eval()
    with torch.no_grad():
        near(net(x, side=side), twin(x, side), "evaluation")
    near(net(x, side=side).detach(), twin(x, side).detach(), "evaluation with a graph")
    same(net, twin, "buffer")
    net.comm.free()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["batchnorm", "dropout"])
def test_steps_accumulation_and_retained_graphs_are_torchs(comm, kind):
    net = make(kind, comm, levels=3)
    twin = twin_of(net)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, twin)]
    for step in range(3):
        for seed in (step, step + 10):  # two micro-batches
            x, y = batch(kind, seed)
            for model in (net, twin):
                loss = F.cross_entropy(model(x), y)
                loss.backward(retain_graph=seed == step)
                if seed == step:
                    loss.backward()
        same(net, twin, "grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(net, twin, "value")
    same(net, twin_of(net), "value")
    net.comm.free()


@pytest.mark.ranks(1, 3)
def test_frozen_layers_and_parameters_of_modules(comm):
    def factory():
        module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
        module[0].requires_grad_(False)
        return module
    stack = lpnet.LayerStack(factory, num_layers=LAYERS, comm=comm, seed=1, dtype=DOUBLE)
    torch.manual_seed(0)
    net = lpnet.LayerParallel(stack, opening=torch.nn.Identity(), closing=torch.nn.Linear(6, 3),
                              mgrit=lpnet.MGRIT(levels=2, coarsening=2, **CONVERGED))
    twin, (x, y) = twin_of(net), batch("time")
    F.cross_entropy(net(x), y).backward()
    F.cross_entropy(twin(x), y).backward()
    named = dict(net.stack.named_parameters())
    assert named["0/weight"].grad is None and not named["0/weight"].requires_grad
    assert named["2/weight"].grad is not None
    for shard in net.shards():
        if shard.name == "stack.2.weight":
            for i in range(*shard.rows):
                near(shard.tensor.grad[i - shard.rows[0]], twin.layers[i].module[2].weight.grad)
    net.comm.free()


@pytest.mark.ranks(1, 2)
def test_dropout_is_new_every_pass_and_the_same_for_any_split(comm):
    net = make("dropout", comm)
    x, _ = batch("dropout", count=6)
    net.begin_step(4)
    whole, new = net(x).detach(), net(x).detach()
    assert not torch.equal(whole, new)
    net.begin_step(4)
    near(net(x).detach(), whole)
    for part in (slice(0, 2), slice(2, 6)):
        net.begin_step(4, first=part.start)
        near(net(x[part]).detach(), whole[part])
    net.begin_step(5)
    assert not torch.allclose(net(x).detach(), whole)
    net.comm.free()


def test_dropout_keeps_the_mean_and_drops_channels():
    net = lpnet.nn.Dropout(0.25, channels=True)
    from lpnet.nn.context import MaskKey
    from lpnet.nn.dropout import begin
    masks = {}
    begin([("", net)], MaskKey(), masks, seed=3, layer=0, batch=500)
    out = net(torch.ones(500, 8, 2, 2))
    kept = out[:, :, 0, 0] != 0
    assert torch.equal(out, kept[:, :, None, None].expand_as(out) / 0.75)
    assert float(kept.double().mean()) == pytest.approx(0.75, abs=0.02)
    assert len(masks) == 1 and torch.equal(net.eval()(out), out)


@pytest.mark.ranks(1, 2)
def test_checkpoints_hold_the_buffers_of_any_number_of_ranks(comm, shared_tmp_path):
    net = make("batchnorm", comm)
    x, y = batch("batchnorm")
    F.cross_entropy(net(x), y).backward()
    lpnet.save(shared_tmp_path, net, step=1)
    again = make("batchnorm", comm)
    lpnet.load(shared_tmp_path, again)
    same(again, twin_of(net), "value")
    assert "stack.0.running_mean" in {shard.name for shard in net.shards()}
    state = lpnet.gather_state_dict(net)
    if comm.rank == 0:
        assert int(state["layers.3.module.0.num_batches_tracked"]) == 1
    net.comm.free(), again.comm.free()


class Doubled(torch.nn.Linear):
    """A layer that changes the dtype."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, u):
        return super().forward(u).double()


class Empty(torch.nn.Module):
    """An opening whose state holds nothing."""

    def forward(self, x):
        return ()


def refused(factory, x, opening=None, side=None):
    stack = lpnet.LayerStack(factory, num_layers=2, seed=0)
    net = lpnet.LayerParallel(stack, opening=opening or torch.nn.Identity(), closing=torch.nn.Identity())
    return net(x, side=side)


def test_bad_input_is_refused_before_the_first_message():
    with pytest.raises(UsageError, match=r"layer 0 makes \(2, 3\).*state \(2, 4\)"):
        refused(lambda: torch.nn.Linear(4, 3), torch.zeros(2, 4))
    with pytest.raises(UsageError, match=r"layer 0 makes \(2, 4\) torch.float64 of a state \(2, 4\) torch.float32"):
        refused(Doubled, torch.zeros(2, 4))
    with pytest.raises(UsageError, match=r"the state is an empty tuple; it needs a floating tensor"):
        refused(lambda: torch.nn.Linear(4, 4), torch.zeros(2, 4), opening=Empty())
    with pytest.raises(UsageError, match=r"layer 0 cannot take a state \(1, 4\).*more than 1 value"):
        refused(lambda: torch.nn.BatchNorm1d(4), torch.zeros(1, 4))
    with pytest.raises(UsageError, match="of torch.int64; states are floating"):
        refused(lambda: torch.nn.Linear(4, 4), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(UsageError, match="with this side input"):
        refused(Attention, torch.zeros(4, 3, 6), side={**SIDE, "pad": PAD[:, :2]})
    with pytest.raises(UsageError, match=r"side\.detach"):
        refused(Attention, torch.zeros(4, 3, 6), side={**SIDE, "scale": torch.ones(4).requires_grad_()})

    class Random(torch.nn.Linear):
        def forward(self, u):
            return F.dropout(super().forward(u), 0.5, True)

    with pytest.raises(UsageError, match=r"global generator.*lpnet\.nn\.Dropout"):
        refused(lambda: Random(4, 4), torch.zeros(2, 4))


def test_a_copy_of_a_network_has_buffers_of_its_own():
    net = make("batchnorm", None)
    again = copy.deepcopy(net)
    net(batch("batchnorm")[0])
    assert int(again.stack._buffers["0/num_batches_tracked"][0]) == 0
    assert int(net.stack._buffers["0/num_batches_tracked"][0]) == 1
