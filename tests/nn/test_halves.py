"""Blocks in two units: the same weights, results and gradients as the whole blocks, bit for bit; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lpnet.config import ModelConfig
from lpnet.errors import UsageError
from lpnet.fdg.decoupled import FDG
from lpnet.nn.models import resnet, resnet_cifar, resnet_mnist, wide_resnet

X = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([1, 0, 3, 2, 1])
EVERY = ("block0.conv1", "block1.conv2", "block2.conv1")


def whole(name: str) -> str:
    return name.replace("a.", ".", 1).replace("b.", ".", 1) if name[:5] == "block" and name[6] in "ab" else name


def wide(**more: Any) -> torch.nn.Sequential:
    return wide_resnet(10, 2, seed=3, **more)


def basic(**more: Any) -> torch.nn.Sequential:
    return resnet_cifar(8, seed=3, **more)


@pytest.mark.parametrize(
    ("make", "split"),
    [
        (basic, ("block1.conv1",)),
        (basic, ("block2.conv2",)),
        (basic, EVERY),
        (wide, ("block1.conv1",)),
        (wide, ("block0.conv1", "block1.conv1", "block2.conv1")),
    ],
)
def test_equal_to_whole_blocks_bitwise(make, split):
    one, two = make(), make(split=split)
    assert len(two) == len(one) + len(split)
    for net in (one, two):
        F.cross_entropy(net(X), Y).backward()
    assert torch.equal(one(X), two(X))
    expected = {name: p.grad for name, p in one.named_parameters()}
    found = {whole(name): p.grad for name, p in two.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    statistics = {whole(name): buffer for name, buffer in two.named_buffers()}
    assert all(torch.equal(statistics[name], buffer) for name, buffer in one.named_buffers())


def test_units_have_names():
    names = [name for name, _ in resnet_mnist(8, split=["block1.conv2"]).named_children()]
    assert names == ["stem", "block0", "block1a", "block1b", "block2", "head"]
    assert len(resnet(18, split=["block7.conv1"])) == 11


def test_cut_within_a_block():
    """Modules on both sides of a cut within a block: backpropagation over them is that of the network."""
    one, two = resnet_cifar(8, seed=3), resnet_cifar(8, seed=3, split=["block1.conv2"])
    sgd = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    losses = []
    for net, modules, cuts in ((one, 1, []), (two, 2, [3])):
        fdg = FDG(net, modules=modules, cuts=cuts, loss=F.cross_entropy, optimizer=sgd, schedule="bp")
        losses.append([fdg.step(X, Y).loss for _ in range(3)])
        assert fdg.evaluate([(X[:3], Y[:3])]).samples == 3
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resnet_cifar(8, split=["block3.conv1"]), r"split names 'block3.conv1'; .* \(here: block0 to block2\)"),
        (lambda: resnet_cifar(8, split=["block1"]), "split names 'block1'; give BLOCK.conv1 or BLOCK.conv2"),
        (lambda: resnet_cifar(8, split=["stem.conv"]), "split names 'stem.conv'"),
        (lambda: resnet_cifar(8, split=["block1.conv1", "block1.conv2"]), "block1 twice, at conv1 and at conv2"),
        (lambda: wide(split=["block1.conv2"]), r"give BLOCK.conv1 for blocks .* \(here: block0 to block2\)"),
        (lambda: resnet(50, split=["block1.conv2"]), "here: none"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_refused_for_other_models():
    with pytest.raises(ValueError, match="model.split is for blocks of resnet_cifar"):
        ModelConfig(name="dense", split=["block1.conv1"])
