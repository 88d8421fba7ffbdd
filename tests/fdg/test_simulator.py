"""All modules in one process: equal to plain SGD for K = 1, to a second implementation for K = 2, 3, 4."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fdg_case import batches, conv, dense, differences, plain, run, sgd, twin
from reference_fdg import Reference

from lpnet.fdg.compensation import Compensation
from lpnet.fdg.decoupled import FDG
from lpnet.fdg.schedule import Schedule

CUTS = {1: [], 2: [3], 3: [1, 3], 4: [1, 2, 4]}
REMEDIES = {
    "none": ({}, {}),
    "shrink": ({"shrink": 0.5}, {"beta": 0.5}),
    "prediction": ({"prediction": "full"}, {"prediction": "full"}),
    "half prediction": ({"prediction": "half"}, {"prediction": "half"}),
    "spike": ({"spike": True}, {"spike": True}),
    "accumulate": ({"accumulate": 3}, {"accumulate": 3}),
    "anneal": ({"anneal": 12}, {"anneal": 12}),
    "nesterov": ({"nesterov": True}, {"nesterov": True}),
    "all": (
        {"shrink": 0.8, "prediction": "full", "spike": True, "accumulate": 2, "anneal": 9, "nesterov": True},
        {"beta": 0.8, "prediction": "full", "spike": True, "accumulate": 2, "anneal": 9, "nesterov": True},
    ),
}


def steps(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9], 0.3)


def factors(batch):
    return 1.0 if batch < 5 else 0.3 if batch < 9 else 0.09


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_module_is_plain_sgd_bitwise(dtype, clip):
    data = batches(20, image=True, short=3, dtype=dtype)
    one, two = conv(dtype), conv(dtype)
    losses = plain(one, data, sgd(), scheduler=steps, clip=clip)
    fdg = FDG(two, loss=F.cross_entropy, optimizer=sgd(), scheduler=steps, clip_norm=clip)
    assert run(fdg, data) == list(enumerate(losses))
    assert not list(differences(one.state_dict(), two.state_dict()))


def test_one_module_under_autocast_is_plain_sgd_bitwise():
    data = batches(6, image=True, dtype=torch.float32)
    one, two = conv(torch.float32), conv(torch.float32)
    optimizer = sgd()(list(one.parameters()))
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(one(x), y)
        loss.backward()
        optimizer.step()
    run(FDG(two, loss=F.cross_entropy, optimizer=sgd(), autocast=torch.bfloat16), data)
    assert not list(differences(one.state_dict(), two.state_dict()))


@pytest.mark.parametrize("modules", [2, 3, 4])
def test_backpropagation_over_modules_is_plain_sgd_bitwise(modules):
    data = batches(8, image=True, short=3)
    one, two = conv(), conv()
    losses = plain(one, data, sgd())
    fdg = FDG(two, loss=F.cross_entropy, optimizer=sgd(), modules=modules, cuts=CUTS[modules], schedule="bp")
    assert run(fdg, data) == list(enumerate(losses))
    assert not list(differences(one.state_dict(), two.state_dict()))


@pytest.mark.parametrize("modules", [2, 3, 4])
@pytest.mark.parametrize("settings", [
    {"schedule": "fdg", "order": "backward_first", "backward": "stash"},
    {"schedule": "fdg", "order": "forward_first", "backward": "stash"},
    {"schedule": "fdg", "order": "backward_first", "backward": "recompute"},
    {"schedule": "fdg", "order": "forward_first", "backward": "recompute"},
    {"schedule": "ddg", "order": "forward_first", "backward": "stash"},
    {"schedule": "fr", "order": "forward_first", "backward": "recompute"},
], ids=lambda settings: "-".join(settings.values()))  # fmt: skip
def test_equals_the_second_implementation_bitwise(modules, settings):
    data = batches(12, image=True, short=3)
    one, two = conv(), conv()
    ref = Reference(one, CUTS[modules], F.cross_entropy, lr=0.05, momentum=0.9, decay=1e-3, **settings)
    losses = ref.train(data)
    fdg = FDG(two, loss=F.cross_entropy, optimizer=sgd(), modules=modules, cuts=CUTS[modules], **settings)
    assert run(fdg, data) == list(enumerate(losses))
    assert not list(differences(one.state_dict(), two.state_dict()))


@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("modules", [1, 2, 3, 4])
def test_remedies_equal_the_second_implementation(modules, remedy):
    """With momentum, weight decay and a schedule of rates, to rounding: the formulas are written another way."""
    ours, theirs = REMEDIES[remedy]
    clip = 0.3 if remedy in ("none", "shrink", "accumulate", "all") else None
    data = batches(14, image=True, short=5)
    for order in ("backward_first", "forward_first"):
        one, two = conv(), conv()
        ref = Reference(one, CUTS[modules], F.cross_entropy, lr=0.03, momentum=0.8, decay=1e-2, order=order,
                        rates=factors, clip=clip, **theirs)  # fmt: skip
        losses = torch.tensor(ref.train(data))
        fdg = FDG(two, loss=F.cross_entropy, optimizer=sgd(0.03, 0.8, 1e-2), modules=modules, cuts=CUTS[modules],
                  order=order, scheduler=steps, clip_norm=clip, compensation=Compensation(**ours))  # fmt: skip
        found = run(fdg, data)
        assert [batch for batch, _ in found] == list(range(14))
        torch.testing.assert_close(torch.tensor([loss for _, loss in found]), losses, rtol=1e-9, atol=1e-11)
        for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("modules", [2, 3, 4])
def test_delayed_gradients_are_exact_for_the_weights_of_their_forward(modules):
    """Gradients that the optimisers get == gradients of the whole network at the weights recorded per module."""
    data, network = batches(11, image=True), conv()
    gradients: dict[int, list[list[torch.Tensor]]] = {}
    weights: dict[int, list[list[torch.Tensor]]] = {}

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            members = self.param_groups[0]["params"]
            gradients.setdefault(id(self), []).append([p.grad.clone() for p in members])
            super().step(closure)
            weights[id(self)].append([p.detach().clone() for p in members])

    fdg = FDG(network, loss=F.cross_entropy, optimizer=lambda p: Recording(p, lr=0.1), modules=modules,
              cuts=CUTS[modules])  # fmt: skip
    optimizers = [worker.update.optimizer for worker in fdg.members]
    for optimizer in optimizers:
        weights[id(optimizer)] = [[p.detach().clone() for p in optimizer.param_groups[0]["params"]]]
    run(fdg, data)
    schedule = Schedule(modules)
    for batch, (x, y) in enumerate(data):
        whole = conv()
        values = [value for module, optimizer in enumerate(optimizers, 1)
                  for value in weights[id(optimizer)][schedule.landed(module, batch)]]  # fmt: skip
        with torch.no_grad():
            for p, value in zip(whole.parameters(), values, strict=True):
                p.copy_(value)
        F.cross_entropy(whole(x), y).backward()
        found = [g for optimizer in optimizers for g in gradients[id(optimizer)][batch]]
        for p, g in zip(whole.parameters(), found, strict=True):
            torch.testing.assert_close(g, p.grad, rtol=1e-12, atol=1e-12)


def test_adam_prediction():
    """theta - lr s m / (sqrt(v) + eps), bias-corrected, for s updates ahead."""
    data, network = batches(9), dense()
    adam = lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)  # noqa: E731
    fdg = FDG(network, loss=F.cross_entropy, optimizer=adam, modules=2, cuts=[3],
              compensation=Compensation(prediction="full"), order="forward_first")  # fmt: skip
    for x, y in data:
        fdg.step(x, y)
    worker = fdg.members[0]
    found = worker.update.predict(8)
    for name, p in worker.update.parameters.items():
        state = worker.update.optimizer.state[p]
        count = int(state["step"])
        m, v = state["exp_avg"] / (1 - 0.8**count), state["exp_avg_sq"] / (1 - 0.95**count)
        torch.testing.assert_close(found[name], p - 0.01 * 2 * m / (v.sqrt() + 1e-7), rtol=1e-12, atol=1e-14)


def test_mixed_sees_old_activations_and_current_weights():
    """Two linear maps without anything between: dL/dx uses W now, dL/dW uses x then."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    ).double()
    first, second = network[0].weight, network[1].weight
    data = [(torch.randn(4, 3).double(), torch.randn(4, 3).double()) for _ in range(8)]
    fdg = FDG(network, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.2), modules=2, cuts=[2],
              backward="mixed", order="forward_first")  # fmt: skip
    outputs, seen = {}, {}
    hook = network[2].register_full_backward_hook(lambda m, gi, go: seen.__setitem__(len(seen), gi[0].clone()))
    for t, (x, y) in enumerate(data):
        batch = t - 2
        before = first.detach().clone(), second.detach().clone()
        outputs[t] = x @ first.detach().T
        fdg.step(x, y)
        if batch >= 0:
            old_x = data[batch][0]
            slope = seen[batch]
            torch.testing.assert_close(before[1] - second, 0.2 * slope.T @ outputs[batch], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(before[0] - first, 0.2 * (slope @ before[1]).T @ old_x, rtol=1e-12, atol=1e-12)
    hook.remove()


@pytest.mark.parametrize("modules", [2, 3, 4])
@pytest.mark.parametrize("backward", ["stash", "recompute", "mixed"])
@pytest.mark.parametrize("order", ["backward_first", "forward_first"])
def test_statistics_move_once_per_batch(modules, backward, order):
    data, network = batches(7, image=True), conv()
    fdg = FDG(network, loss=F.cross_entropy, optimizer=sgd(), modules=modules, cuts=CUTS[modules], backward=backward,
              order=order)  # fmt: skip
    run(fdg, data)
    counts = [int(value) for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")]
    assert counts == [7, 7, 7]


@pytest.mark.parametrize("modules", [2, 3, 4])
def test_dropout_masks_are_those_of_batch_and_unit(modules):
    """Recomputing draws the same masks; so does any number of modules; the global generator is left alone."""
    data = batches(9, image=True)
    results = []
    for backward, count in (("stash", modules), ("recompute", modules), ("stash", 1)):
        network = conv(dropout=0.5)
        torch.manual_seed(123)
        before = torch.random.get_rng_state()
        frozen = lambda p: torch.optim.SGD(p, lr=0.0)  # noqa: E731  the same weights in every mode
        fdg = FDG(network, loss=F.cross_entropy, optimizer=frozen, modules=count, cuts=CUTS[count], backward=backward)
        results.append(run(fdg, data))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert results[0] == results[1] == results[2]
    assert len({loss for _, loss in results[0]}) == 9


def test_recompute_draws_the_mask_of_the_forward():
    grads = {}
    for backward in ("stash", "recompute"):
        network = conv(dropout=0.5)
        fdg = FDG(network, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
                  modules=3, cuts=[1, 3], backward=backward)  # fmt: skip
        run(fdg, batches(9, image=True))
        grads[backward] = [s["momentum_buffer"] for o, _ in fdg.optimizers for s in o.state.values()]
    for a, b in zip(*grads.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("modules", [1, 2, 4])
def test_evaluation_changes_nothing(modules):
    data, held_out = batches(14, image=True, short=3), batches(3, image=True, short=2, seed=9)
    losses = []
    for every in (0, 5, 1):
        network = conv(dropout=0.3)
        network[1][2].eval()  # a frozen batch norm stays frozen
        fdg = FDG(network, loss=F.cross_entropy, optimizer=sgd(), modules=modules, cuts=CUTS[modules])
        if every:
            fdg.evaluate(held_out)
        losses.append(run(fdg, data, every=every, evaluation=held_out))
        assert network.training and not network[1][2].training
    assert losses[0] == losses[1] == losses[2]
    scores = fdg.evaluate(held_out)
    with torch.no_grad():
        outputs = [(twin(network).eval()(x), y) for x, y in held_out]
    assert scores.samples == sum(len(y) for _, y in outputs) == 18
    assert scores.accuracy == 100 * sum(int((out.argmax(1) == y).sum()) for out, y in outputs) / 18
    assert scores.loss == pytest.approx(sum(float(F.cross_entropy(out, y)) * len(y) for out, y in outputs) / 18)
    torch.testing.assert_close(fdg.predict(held_out[0][0]), outputs[0][0])


def test_reports_while_filling_steady_and_draining():
    data = batches(8, image=True)
    fdg = FDG(conv(), loss=F.cross_entropy, optimizer=sgd(), modules=3, cuts=[1, 3])
    reports = [fdg.step(x, y) for x, y in data]
    assert [report.batch for report in reports] == [None] * 4 + [0, 1, 2, 3]
    assert fdg.in_flight == 4
    reports += fdg.flush()
    assert fdg.in_flight == 0
    assert [report.tick for report in reports] == list(range(12))
    assert [report.batch for report in reports[4:]] == list(range(8))
    assert [report.staleness for report in reports[4:]] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert all(report.seconds > 0 and report.busy == report.seconds and not report.stop for report in reports)
    assert fdg.flush() == ()


def test_training_goes_on_after_a_flush():
    """A flush only lets the modules fill again: with a constant network the gradients are the same."""
    data = batches(10, image=True)
    fdg = FDG(conv(), loss=F.cross_entropy, optimizer=sgd(), modules=3, cuts=[1, 3])
    reports = [fdg.step(x, y) for x, y in data[:6]]
    reports += fdg.flush()
    reports += [fdg.step(x, y) for x, y in data[6:]]
    reports += fdg.flush()
    assert [report.batch for report in reports if report.batch is not None] == list(range(10))
    ref, rest = conv(), conv()
    one = Reference(ref, [1, 3], F.cross_entropy, lr=0.05, momentum=0.9, decay=1e-3)
    one.train(data[:6])
    rest.load_state_dict(ref.state_dict())
    two = Reference(rest, [1, 3], F.cross_entropy, lr=0.05, momentum=0.9, decay=1e-3)
    two.velocity = one.velocity
    losses = two.train(data[6:])
    found = [report.loss for report in reports if report.batch is not None and report.batch >= 6]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-10, atol=1e-12)


def test_updates_only_where_a_gradient_lands():
    """Weight decay alone would move the weights; while the modules fill nothing moves."""
    network = conv()
    before = twin(network).state_dict()
    fdg = FDG(network, loss=F.cross_entropy, optimizer=sgd(decay=0.5), modules=3, cuts=[1, 3])
    for x, y in batches(2, image=True):
        fdg.step(x, y)
    assert all(torch.equal(p, before[name]) for name, p in network.named_parameters())
    fdg.step(*batches(1, image=True)[0])
    moved = [name for name, p in network.named_parameters() if not torch.equal(p, before[name])]
    assert moved and all(name[0] in "34" for name in moved)


def test_the_stash_is_freed_at_use():
    fdg = FDG(conv(), loss=F.cross_entropy, optimizer=sgd(), modules=3, cuts=[1, 3], order="forward_first")
    most = [0, 0, 0]
    for x, y in batches(12, image=True):
        fdg.step(x, y)
        held = [len(worker.stage.flights) for worker in fdg.members]
        copies = [len(worker.stage._copies) for worker in fdg.members]
        assert all(a <= b for a, b in zip(copies, [max(h, 0) for h in held], strict=True))
        most = [max(pair) for pair in zip(most, held, strict=True)]
    assert most == [4, 2, 0]  # between ticks; d + 1 inside one
    fdg.flush()
    assert all(not worker.stage.flights and not worker.stage._copies for worker in fdg.members)
    assert all(p.grad is None for worker in fdg.members for p in worker.stage.chain.parameters())


def test_a_loader_may_use_its_memory_again():
    data, results = batches(9, image=True), []
    for again in (False, True):
        fdg = FDG(conv(), loss=F.cross_entropy, optimizer=sgd(), modules=3, cuts=[1, 3], backward="recompute")
        reports = []
        memory = torch.empty_like(data[0][0]), torch.empty_like(data[0][1])
        for x, y in data:
            memory[0].copy_(x), memory[1].copy_(y)
            reports.append(fdg.step(*memory) if again else fdg.step(x, y))
        results.append([report.loss for report in reports + list(fdg.flush())])
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_may_travel_in_half_precision(dtype):
    data = batches(10, image=True, dtype=torch.float32)
    losses = []
    for wire in (None, dtype):
        fdg = FDG(conv(torch.float32), loss=lambda out, y: 1e-6 * F.cross_entropy(out, y),
                  optimizer=sgd(2e4, decay=0.0), modules=3, cuts=[1, 3], gradient_dtype=wire)  # fmt: skip
        losses.append(torch.tensor([loss for _, loss in run(fdg, data)]))
    assert not torch.equal(*losses)
    torch.testing.assert_close(losses[1], losses[0], rtol=5e-3, atol=0)


def test_modules_without_parameters():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 6), torch.nn.ReLU(inplace=True),
                                  torch.nn.Linear(6, 4)).double()  # fmt: skip
    data = batches(9)
    fdg = FDG(network, loss=F.cross_entropy, optimizer=sgd(), modules=4, cuts=[1, 2, 3], clip_norm=0.5)
    before = [p.detach().clone() for p in network.parameters()]
    run(fdg, data)
    assert all(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert len(fdg.optimizers) == 2


def test_a_tied_parameter_keeps_both_names():
    network = dense()
    network[2][0].weight = network[1][0].weight
    fdg = FDG(network, loss=F.cross_entropy, optimizer=sgd(), modules=2, cuts=[3])
    run(fdg, batches(5))
    state = fdg.gather_state_dict()
    assert not list(differences(state, network.state_dict()))
    assert [shard.name for shard in fdg.shards() if "weight" in shard.name] == [
        "0.0.weight", "1.0.weight", "3.0.weight", "4.weight"]  # fmt: skip
