"""LayerParallel as a torch module in an ordinary loop: graphs in flight, warm starts, evaluation, export."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import reference_mgrit as ref
import torch
import torch.nn.functional as F
from mgrit_case import (
    BATCH,
    CONVERGED,
    INPUTS,
    LIMIT,
    WARM,
    WIDTH,
    Case,
    ends,
    gather_parameters,
    gather_rows,
    make,
    network,
    samples,
)

import lpnet
from lpnet.mgrit.serial import gather_state_dict


def serial_gradient(case, x, y):
    twin = ref.twin(case.dense(), *ends())
    F.cross_entropy(twin(x), y).backward()
    return np.stack([step.weight.grad for step in twin[1]])


def weight_gradient(net):
    """Collective over net.comm."""
    return gather_rows(net, net.stack.weight.grad)


# graphs in flight


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_before_two_backwards(comm, first):
    case = Case(14)
    net, batches = network(case, comm, **CONVERGED), [samples(11), samples(12)]
    losses = [F.cross_entropy(net(x), y) for x, y in batches]
    for k in (first, 1 - first):
        net.zero_grad()
        losses[k].backward()
        np.testing.assert_allclose(weight_gradient(net), serial_gradient(case, *batches[k]), rtol=1e-10, atol=1e-11)


@pytest.mark.ranks(1, 2)
def test_one_loss_of_two_forwards(comm):
    case = Case(14)
    net, batches = network(case, comm, **CONVERGED), [samples(11), samples(12)]
    (F.cross_entropy(net(batches[0][0]), batches[0][1]) + F.cross_entropy(net(batches[1][0]), batches[1][1])).backward()
    expected = sum(serial_gradient(case, *batch) for batch in batches)
    np.testing.assert_allclose(weight_gradient(net), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.ranks(1, 2, 3)
def test_a_second_backward_raises_as_in_torch_and_a_retained_graph_gives_it_again(comm):
    case, (x, y) = Case(14), samples()
    net = network(case, comm, **CONVERGED)
    loss = F.cross_entropy(net(x), y)
    loss.backward(retain_graph=True)
    once = weight_gradient(net)
    loss.backward()
    np.testing.assert_allclose(weight_gradient(net), 2 * once, rtol=1e-13, atol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.ranks(1, 2)
def test_parameters_changed_before_the_backward_are_an_error(comm):
    net, (x, y) = network(Case(14), comm, **CONVERGED), samples()
    loss = F.cross_entropy(net(x), y)
    with torch.no_grad():
        net.stack.weight.mul_(1.01)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.ranks(1, 3)
def test_forwards_that_are_dropped_leave_no_memory(comm):
    net, (x, y) = network(Case(14, guess="constant", iterations=1), comm), samples()
    for _ in range(20):
        net(x)
    for _ in range(3):
        F.cross_entropy(net(x), y).backward()
    assert sum(len(pool) for pool in net._pools.values()) <= 2


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("frozen", ["stack", "ends"])
def test_frozen_parameters_get_no_gradient_and_the_others_do(comm, frozen):
    case, (x, y) = Case(14), samples()
    net = network(case, comm, **CONVERGED)
    for module in [net.stack] if frozen == "stack" else [net.opening, net.closing]:
        if module is not None:
            module.requires_grad_(False)
    F.cross_entropy(net(x), y).backward()
    if frozen == "stack":
        assert net.stack.weight.grad is None
        twin = ref.twin(case.dense(), *ends())
        F.cross_entropy(twin(x), y).backward()
        if net.opening is not None:
            torch.testing.assert_close(net.opening.weight.grad, twin[0].weight.grad, rtol=1e-10, atol=1e-11)
    else:
        np.testing.assert_allclose(weight_gradient(net), serial_gradient(case, x, y), rtol=1e-10, atol=1e-11)


@pytest.mark.ranks(1, 3)
def test_batches_of_other_sizes_just_work(comm):
    case = Case(14)
    net, (x, y) = network(case, comm, **CONVERGED), samples()
    for size in (5, 2, 5, 1):
        net.zero_grad()
        F.cross_entropy(net(x[:size]), y[:size]).backward()
        expected = serial_gradient(case, x[:size], y[:size])
        np.testing.assert_allclose(weight_gradient(net), expected, rtol=1e-10, atol=1e-11)


# training


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("changes", [WARM, WARM | {"storage": "c_points"}, WARM | {"levels": 1}, CONVERGED],
                         ids=["warm", "c-points", "one-level", "converged"])
def test_a_users_loop_with_adam_equals_one_rank_bit_for_bit(comm, changes):
    case, losses, weights = Case(14, relaxation="FCF"), [], []
    for where in (comm, None):
        net = network(case, where, **changes)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        history = []
        for step in range(4):
            x, y = samples(11 + step % 2)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x, batch=step % 2), y)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
        weights.append(gather_parameters(net))
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert net.comm.size == 1 and len(set(map(tuple, comm.allgather(losses[0])))) == 1
    for name, value in weights[1].items():
        assert np.array_equal(weights[0][name], value), name


@pytest.mark.ranks(1, 3)
def test_converged_training_equals_the_torch_twin(comm):
    case = Case(14)
    net, twin = network(case, comm, **CONVERGED), ref.twin(case.dense(), *ends())
    for model in (net, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            x, y = samples(11 + step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    expected = np.stack([step.weight.detach() for step in twin[1]])
    np.testing.assert_allclose(gather_parameters(net)["stack.weight"], expected, rtol=0, atol=1e-10)


@pytest.mark.ranks(1, 2, 4)
def test_local_logits_need_no_collective(comm):
    case, (x, y) = Case(14, iterations=4), samples()
    net = network(case, comm)
    before = copy.copy(net.comm.traffic)
    out = net.local_logits(x, None)
    (F.cross_entropy(out, y) if net.is_last else 0 * out.sum()).backward()
    assert net.comm.traffic.reductions == before.reductions
    np.testing.assert_allclose(weight_gradient(net), serial_gradient(case, x, y), rtol=1e-10, atol=1e-11)


# evaluation and export


@pytest.mark.ranks(1, 2, 3, 4)
def test_evaluation_propagates_exactly_whatever_the_iterations(comm):
    case, (x, _) = Case(30, coarsening=2), samples()
    net, twin = network(case, comm), ref.twin(case.dense(), *ends())
    expected = twin(x).detach().numpy()
    with torch.no_grad():
        logits = net(x)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=LIMIT)
    assert not logits.requires_grad
    exact = net.exact_logits(x)
    assert (exact is None) == (not net.is_last)
    if exact is not None:
        assert torch.equal(exact, logits)
    assert np.abs(net(x).detach().numpy() - expected).max() > 1e-4  # one iteration is far from it
    loss = net(x).sum()
    with torch.no_grad():
        net(x + 1)  # an evaluation between forward and backward disturbs nothing
    loss.backward()
    first = weight_gradient(net)
    net.zero_grad()
    net(x).sum().backward()
    assert np.array_equal(weight_gradient(net), first)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("activation", ["tanh", "relu", "smooth_relu"])
@pytest.mark.parametrize("bias", ["scalar", "vector"])
def test_the_serial_twin_is_an_ordinary_module(comm, activation, bias):
    case, (x, _) = Case(7, activation=activation, bias=bias), samples()
    net = network(case, comm)
    serial, state = net.to_serial(), gather_state_dict(net)
    exact = net.exact_logits(x)
    if comm.rank:
        assert serial is None and state is None
    else:
        assert isinstance(serial, torch.nn.Module) and not isinstance(serial, lpnet.LayerParallel)
        twin = ref.twin(case.dense(), *ends())
        np.testing.assert_allclose(serial(x).detach(), twin(x).detach(), rtol=0, atol=1e-13)
        names = {"opening.weight", "opening.bias", "closing.weight", "closing.bias"}
        assert set(state) == names | {f"layers.{i}.{name}" for i in range(7) for name in ("weight", "bias")}
        # as a user would load it: no lpnet
        renamed = {}
        for name, value in state.items():
            part, _, rest = name.partition(".")
            renamed[{"opening": "0.", "layers": "1.", "closing": "2."}[part] + rest] = value
        twin.load_state_dict(renamed)
        np.testing.assert_allclose(twin(x).detach(), serial(x).detach(), rtol=0, atol=1e-13)
    if exact is not None and comm.size == 1:
        np.testing.assert_allclose(serial(x).detach(), exact, rtol=0, atol=1e-13)
    if serial is not None:  # a copy: changing it changes nothing here
        with torch.no_grad():
            next(serial.parameters()).zero_()
    again = net.to_serial()
    assert again is None or next(again.parameters()).abs().sum() > 0


@pytest.mark.ranks(1, 2, 3, 4)
def test_parts_live_where_their_layers_are(comm):
    net = network(Case(7), comm)
    assert (net.is_first, net.is_last) == (comm.rank == 0, comm.rank == comm.size - 1)
    assert (net.opening is not None, net.closing is not None) == (net.is_first, net.is_last)
    low, high = net.partition.block(comm.rank)
    shards = {shard.name: shard for shard in net.shards()}
    assert shards["stack.weight"].rows == (low, high) and shards["stack.weight"].layers == 7
    assert tuple(shards["stack.weight"].tensor.shape) == (high - low, WIDTH, WIDTH)
    assert ("opening.weight" in shards, "closing.weight" in shards) == (net.is_first, net.is_last)
    counts = comm.allgather(sum(p.numel() for p in net.parameters()))
    assert sum(counts) == sum(p.numel() for p in ref.twin(Case(7).dense(), *ends()).parameters())


@pytest.mark.ranks(2, 3)
def test_printing_on_one_rank_talks_to_nobody(comm):
    net = network(Case(7), comm)
    before = copy.copy(net.comm.traffic)
    if comm.rank == 1:
        assert "LayerParallel" in repr(net) and f"{net.stack.low}" in repr(net.stack)
    assert net.comm.traffic == before


@pytest.mark.ranks(1, 2)
def test_a_deep_copy_has_a_life_of_its_own(comm):
    """As for averaged weights or the best model so far: neither sees the other's parameters or states."""
    net, (x, y) = network(Case(14), comm, **CONVERGED), samples()
    F.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        before = net(x)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        assert torch.equal(twin(x), before)
        twin.stack.weight.mul_(0.5)
        assert torch.equal(net(x), before) and not torch.equal(twin(x), before)
    with torch.no_grad():
        net.stack.weight.mul_(0.5)
    for model in (net, twin):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    assert torch.equal(net.stack.weight.grad, twin.stack.weight.grad) and net.stack.weight.grad.abs().sum() > 0


@pytest.mark.ranks(1, 2)
def test_precision_follows_the_module(comm):
    net, (x, y) = network(Case(14, guess="constant", iterations=4), comm), samples()
    net.float()
    logits = net(x.float())
    F.cross_entropy(logits, y).backward()
    assert logits.dtype == torch.float32 and net.stack.weight.grad.dtype == torch.float32
    np.testing.assert_allclose(weight_gradient(net), serial_gradient(Case(14), x, y), rtol=1e-3, atol=1e-5)


# wrong use


@pytest.mark.ranks(2, 3, 4)
def test_more_ranks_than_layers_is_an_error_on_every_rank(comm):
    with pytest.raises(lpnet.UsageError, match=f"1 layers cannot be shared by {comm.size} ranks"):
        lpnet.LayerStack(lpnet.nn.DenseStep(width=2), num_layers=1, comm=comm)


def test_wrong_shapes_are_named():
    net = network(Case(5), None)
    with pytest.raises(lpnet.UsageError, match="at least 1 sample"):
        net(torch.zeros(0, INPUTS, dtype=torch.float64))
    wide = make(Case(5).dense(), None, Case(5).mgrit())
    with pytest.raises(lpnet.UsageError, match=r"\(5, 3\).*4\)"):
        wide(torch.zeros(BATCH, INPUTS, dtype=torch.float64))
    with pytest.raises(lpnet.UsageError, match="final_time"):
        lpnet.LayerStack(lpnet.nn.DenseStep(width=2), num_layers=3, final_time=0.0)
    with pytest.raises(lpnet.UsageError, match="solve"):
        net.solve_adjoint(torch.zeros(BATCH, WIDTH, dtype=torch.float64))
