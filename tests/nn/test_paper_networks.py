"""The networks of the papers and their follow-ups, small: converged they are their serial twins, for any ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from network_case import CONVERGED, DOUBLE, near, twin_of

import lpnet
from lpnet.nn import Classifier, ConvStep, DenseOpening, DenseStep, ImageClassifier, Replicate

BATCH, STEPS = 4, 12


class Encoder(torch.nn.Module):
    """Pre-norm attention and perceptron with a causal mask."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)])
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.perceptron = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 8))  # fmt: skip

    def forward(self, u, side):
        v = self.norms[0](u)
        attended = self.attention(v, v, v, attn_mask=side, need_weights=False)[0]
        return attended + self.perceptron(self.norms[1](u + attended))


class Gate(torch.nn.Module):
    """One explicit step of a GRU; its input is that of its place in the sequence."""

    def __init__(self):
        super().__init__()
        self.inputs, self.states = torch.nn.Linear(2, 18), torch.nn.Linear(6, 18, bias=False)

    def forward(self, u, side, layer):
        reset, update, new = self.inputs(side[layer]).chunk(3, 1)
        r, z, n = self.states(u).chunk(3, 1)
        r, z = torch.sigmoid(reset + r), torch.sigmoid(update + z)
        return (1 - z) * (torch.tanh(new + r * n) - u)


class Zeros(torch.nn.Module):
    """The first state of a GRU."""

    def forward(self, x):
        return x.new_zeros(len(x), 6)


def network(kind, comm):
    """Stack, opening, closing, a batch and the side input."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE)

    def stack(step, final_time=2.0):
        return lpnet.LayerStack(step, num_layers=STEPS, final_time=final_time, comm=comm, seed=3, dtype=DOUBLE)

    if kind == "indian pines":  # tanh, T=20, 16 classes
        ends = DenseOpening(10, 8, activation="tanh", generator=generator), Classifier(8, 16, generator=generator)
        return stack(DenseStep(8, "tanh", init_scale=1.0), 20.0), *ends, draw(BATCH, 10), None
    if kind == "mnist":
        ends = Replicate(4), ImageClassifier((4, 6, 6), 10, pooling=False, generator=generator)
        return stack(ConvStep(4, init_scale=1.0)), *ends, draw(BATCH, 1, 6, 6), None
    if kind == "transformer":
        closing = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Flatten(), torch.nn.Linear(40, 5))
        mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        return stack(Encoder), torch.nn.Embedding(7, 8), closing, torch.arange(BATCH * 5).reshape(BATCH, 5) % 7, mask
    return stack(Gate, 6.0), Zeros(), torch.nn.Linear(6, 3), draw(BATCH, 1), draw(STEPS, BATCH, 2)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("kind", ["indian pines", "mnist", "transformer", "gru"])
def test_a_training_pass_equals_the_serial_twin(comm, kind, levels):
    torch.manual_seed(0)
    made, opening, closing, x, side = network(kind, comm)
    net = lpnet.LayerParallel(made, opening=opening, closing=closing,
                              mgrit=lpnet.MGRIT(levels=levels, coarsening=2, **CONVERGED))
    twin, y = twin_of(net), torch.arange(BATCH) % 3
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for _ in range(2)]
    logits, expected = net(inputs[0], side=side), twin(inputs[1], side)
    near(logits.detach(), expected.detach(), "logits")
    F.cross_entropy(logits, y).backward()
    F.cross_entropy(expected, y).backward()
    if net.is_first and kind in ("indian pines", "mnist"):
        near(inputs[0].grad, inputs[1].grad, "input")
    own, compared = dict(twin.named_parameters()), 0
    for shard in net.shards():
        if not shard.tensor.requires_grad:
            continue
        inner = shard.name.removeprefix("stack.")
        prefix = "module." if kind in ("transformer", "gru") else ""
        names = [shard.name] if shard.rows is None else [f"layers.{i}.{prefix}{inner}" for i in range(*shard.rows)]
        for name, row in zip(names, [shard.tensor.grad] if shard.rows is None else shard.tensor.grad, strict=True):
            near(row, own[name].grad, name)
            compared += 1
    assert compared
    net.comm.free()
