"""Residual networks of named units: sizes, weights that do not depend on the cut, shortcuts, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from lpnet.errors import UsageError
from lpnet.nn.resnet import resnet, resnet_cifar, resnet_mnist
from lpnet.nn.units import PadShortcut
from lpnet.nn.wide_resnet import wide_resnet

CASES = {
    "cifar": (lambda **o: resnet_cifar(14, **o), (3, 32, 32)),
    "cifar projection": (lambda **o: resnet_cifar(8, shortcut="projection", **o), (3, 32, 32)),
    "cifar group": (lambda **o: resnet_cifar(8, norm="group", **o), (3, 32, 32)),
    "mnist": (resnet_mnist, (1, 28, 28)),
    "resnet-18": (lambda **o: resnet(18, **o), (3, 32, 32)),
    "resnet-50": (lambda **o: resnet(50, stem="imagenet", **o), (3, 64, 64)),
    "wide": (lambda **o: wide_resnet(16, 2, dropout=0.3, **o), (3, 32, 32)),
}
each = pytest.mark.parametrize("case", CASES)


def build(case, **options):
    make, shape = CASES[case]
    return make(**options), shape


def count(network) -> int:
    return sum(p.numel() for p in network.parameters())


# the published numbers: He et al. 2016, table 6; Zagoruyko and Komodakis 2016, table 4; exact ones of common codes
@pytest.mark.parametrize(
    ("network", "published", "exact"),
    [
        (lambda: resnet_cifar(20), "0.27", 269_722),
        (lambda: resnet_cifar(32), "0.46", 464_154),
        (lambda: resnet_cifar(44), "0.66", 658_586),
        (lambda: resnet_cifar(56), "0.85", 853_018),
        (lambda: resnet_cifar(110), "1.73", 1_727_962),
        (lambda: resnet_cifar(1202), "19.42", 19_421_274),
        (lambda: wide_resnet(28, 10), "36.48", 36_479_194),
        (lambda: wide_resnet(16, 8), "10.96", 10_961_370),
        (lambda: wide_resnet(40, 2), "2.24", 2_243_546),
        (lambda: resnet(18, stem="imagenet", classes=1000), "11.69", 11_689_512),
        (lambda: resnet(34, stem="imagenet", classes=1000), "21.80", 21_797_672),
        (lambda: resnet(50, stem="imagenet", classes=1000), "25.56", 25_557_032),
        (lambda: resnet(101, stem="imagenet", classes=1000), "44.55", 44_549_160),
        (lambda: resnet(18), "11.17", 11_173_962),
    ],
)
def test_sizes(network, published, exact, monkeypatch):
    monkeypatch.setattr("lpnet.nn.units.initialise", lambda *_, **__: None)  # sizes need no weights
    made = network()
    assert count(made) == exact
    assert f"{count(made) / 1e6:.2f}" == published


def test_units_have_global_names():
    names = [name for name, _ in resnet_cifar(20).named_children()]
    assert names == ["stem", *(f"block{k}" for k in range(9)), "head"]
    assert len(wide_resnet(16, 1)) == 8 and len(resnet(18)) == 10 and len(resnet(50)) == 18 and len(resnet_mnist()) == 5
    part = resnet_cifar(20)[4:7]  # a cut keeps the names
    assert [name for name, _ in part.named_children()] == ["block3", "block4", "block5"]
    assert "block3.conv1.weight" in part.state_dict()


@each
def test_one_tensor_in_one_out(case):
    torch.manual_seed(0)
    network, shape = build(case, classes=7)
    x = torch.randn(4, *shape)
    logits = network(x)
    assert logits.shape == (4, 7) and torch.isfinite(logits).all()
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


@each
def test_a_unit_leaves_its_input_alone(case):
    """So the value that crosses a cut can be kept and used again."""
    network, shape = build(case)
    network.eval()  # running statistics shall not move between the two calls
    x = torch.randn(2, *shape)
    for unit in network:
        before = x.clone()
        out = unit(x)
        assert torch.equal(x, before) and out.data_ptr() != x.data_ptr()
        assert torch.equal(unit(x), out)
        x = out.detach()


@each
def test_cutting_changes_nothing(case):
    network, shape = build(case)
    network.eval()
    x = torch.randn(3, *shape)
    for cut in range(1, len(network)):
        assert torch.equal(network[cut:](network[:cut](x)), network(x))


def test_weights_depend_on_seed_and_name_only():
    first, second = resnet_cifar(20, seed=3).state_dict(), resnet_cifar(20, seed=3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = resnet_cifar(20, seed=4).state_dict()
    deeper = resnet_cifar(32, seed=3).state_dict()
    for name in first:
        if "conv" in name or name == "head.linear.weight":
            assert not torch.equal(first[name], other[name]), name
            if name in deeper and first[name].shape == deeper[name].shape:
                assert torch.equal(first[name], deeper[name]), name
    assert not torch.equal(first["block0.conv1.weight"], first["block1.conv1.weight"])
    assert not torch.equal(first["block0.conv1.weight"], first["block0.conv2.weight"])


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    resnet_cifar(8), wide_resnet(10, 1), resnet(18), resnet_mnist()
    assert torch.equal(torch.get_rng_state(), before)


def test_float64_starts_at_the_same_weights():
    single = resnet_cifar(8).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        double = resnet_cifar(8).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert double["stem.conv.weight"].dtype == torch.float64
    assert all(torch.equal(double[name].to(single[name].dtype), single[name]) for name in single)


@each
def test_initial_values(case):
    network, _ = build(case)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            fan_in = module.weight[0].numel()
            deviation = (2 / fan_in) ** 0.5  # He et al. 2015, equation 10
            assert abs(module.weight.std() / deviation - 1) < 5 / module.weight.numel() ** 0.5, name
            assert abs(module.weight.mean()) < 5 * deviation / module.weight.numel() ** 0.5, name
            assert module.bias is None
        elif isinstance(module, torch.nn.BatchNorm2d | torch.nn.GroupNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all()
        elif isinstance(module, torch.nn.Linear):
            assert (module.bias == 0).all() and abs(module.weight.std() * module.in_features**0.5 - 1) < 0.2


def test_shortcut_a():
    x = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    out = PadShortcut(3, 8, 2)(x)
    assert out.shape == (2, 8, 2, 3)
    assert torch.equal(out[:, 2:5], x[:, :, ::2, ::2])
    assert (out[:, :2] == 0).all() and (out[:, 5:] == 0).all()
    assert not list(PadShortcut(3, 8, 2).parameters())


def normed(x, weights, name):
    return F.batch_norm(x, None, None, weights[f"{name}.weight"], weights[f"{name}.bias"], training=True)


def test_the_cifar_network_written_out():
    """He et al. 2016, section 4.2, straight from the paper, with this network's weights in float64."""
    torch.manual_seed(1)
    network = resnet_cifar(14).double()
    w = network.state_dict()
    x = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    u = F.relu(normed(F.conv2d(x, w["stem.conv.weight"], padding=1), w, "stem.norm"))
    for k in range(6):
        stride = 2 if k in (2, 4) else 1
        z = F.conv2d(u, w[f"block{k}.conv1.weight"], stride=stride, padding=1)
        z = F.relu(normed(z, w, f"block{k}.norm1"))
        z = normed(F.conv2d(z, w[f"block{k}.conv2.weight"], padding=1), w, f"block{k}.norm2")
        if stride == 2:
            more = u.shape[1] // 2
            zeros = torch.zeros(5, more, *z.shape[2:], dtype=torch.float64)
            u = torch.cat([zeros, F.avg_pool2d(u, 1, 2), zeros], 1)
        u = F.relu(z + u)
        assert u.shape == (5, 16 * 2 ** (k // 2), 32 // 2 ** (k // 2), 32 // 2 ** (k // 2))
    logits = F.linear(F.avg_pool2d(u, 8).flatten(1), w["head.linear.weight"], w["head.linear.bias"])
    torch.testing.assert_close(network(x), logits, rtol=1e-12, atol=1e-12)


def test_the_wide_network_written_out():
    """Zagoruyko and Komodakis 2016, figure 1 (d) without dropout: B(3, 3)."""
    torch.manual_seed(1)
    network = wide_resnet(10, 2).double()
    w = network.state_dict()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    u = F.conv2d(x, w["stem.conv.weight"], padding=1)
    for k, stride in enumerate((1, 2, 2)):
        active = F.relu(normed(u, w, f"block{k}.norm1"))
        z = F.conv2d(active, w[f"block{k}.conv1.weight"], stride=stride, padding=1)
        z = F.conv2d(F.relu(normed(z, w, f"block{k}.norm2")), w[f"block{k}.conv2.weight"], padding=1)
        u = z + F.conv2d(active, w[f"block{k}.shortcut.weight"], stride=stride)
        assert u.shape[1] == 32 * 2**k
    pooled = F.relu(normed(u, w, "head.norm")).mean((2, 3))
    logits = F.linear(pooled, w["head.linear.weight"], w["head.linear.bias"])
    torch.testing.assert_close(network(x), logits, rtol=1e-12, atol=1e-12)


def test_stems():
    x = torch.zeros(1, 3, 64, 64)
    assert resnet(18, stem="imagenet").stem(x).shape == (1, 64, 16, 16)
    assert resnet(18).stem(x).shape == (1, 64, 64, 64)
    assert resnet_mnist().stem(torch.zeros(1, 1, 28, 28)).shape == (1, 8, 14, 14)
    assert resnet_mnist()[:-1](torch.zeros(2, 1, 28, 28)).shape == (2, 32, 4, 4)


def test_pooling_takes_all_pixels():
    """Not the corner of a map whose size the network was not written for."""
    head = resnet_cifar(8).head
    x = torch.randn(2, 64, 6, 7)
    torch.testing.assert_close(head(x), head.linear(F.adaptive_avg_pool2d(x, 1).flatten(1)))


def test_group_norm_sees_one_sample_at_a_time():
    network = resnet_cifar(8, norm="group").double()
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(network(x), torch.cat([network(x[:1]), network(x[1:])]), rtol=1e-10, atol=1e-10)


def test_dropout_is_on_in_training_only():
    network = wide_resnet(10, 1, dropout=0.5)
    x = torch.randn(2, 3, 16, 16)
    network.eval()
    assert torch.equal(network(x), network(x))
    assert not [m for m in wide_resnet(10, 1).modules() if isinstance(m, torch.nn.Dropout)]
    assert len([m for m in network.modules() if isinstance(m, torch.nn.Dropout)]) == 3


def test_a_small_network_learns():
    torch.manual_seed(0)
    network, x, y = resnet_mnist(seed=1), torch.randn(32, 1, 28, 28), torch.arange(32) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_copies_and_channels_last():
    network = resnet_cifar(8)
    x = torch.randn(4, 3, 32, 32)
    last = copy.deepcopy(network).to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), network(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resnet_cifar(21), r"a CIFAR ResNet has 6n \+ 2 layers; a depth of 21 is none, use 20 or 26"),
        (lambda: resnet_cifar(2), "a depth of 2 is none, use 8"),
        (lambda: resnet_cifar(-5), "a depth of -5 is none, use 8"),
        (lambda: resnet_mnist(9), "a ResNet for MNIST has .* use 8 or 14"),
        (lambda: wide_resnet(27), r"a wide ResNet has 6n \+ 4 layers; a depth of 27 is none, use 22 or 28"),
        (lambda: resnet(20), "there is no ResNet-20 in this family; use a depth of 18, 34, 50, 101 or 152"),
        (lambda: resnet(18, stem="mnist"), "stem is 'mnist'; it must be one of cifar, imagenet"),
        (lambda: resnet_cifar(8, norm="layer"), "norm is 'layer'; it must be one of batch, group"),
        (lambda: resnet_cifar(8, shortcut="none"), "shortcut is 'none'; it must be one of pad, projection"),
        (lambda: resnet_cifar(8, width=12, norm="group"), "makes 8 groups of 12 channels; use a multiple of 8"),
        (lambda: resnet_cifar(8, width=0), "3 channels and the first stage 0; both must be 1 or more"),
        (lambda: resnet_cifar(8, classes=0), "tell 0 classes apart; give 1 or more"),
        (lambda: wide_resnet(10, 0), "widen is 0; it must be 1 or more"),
        (lambda: wide_resnet(10, 1, dropout=1.0), "dropout is 1.0; it must be 0 or more and less than 1"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(UsageError, match=message):
        make()
