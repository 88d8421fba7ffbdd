"""Warm starts: states kept per batch id, what replaces them, and what happens without."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import reference_mgrit as ref
import torch
import torch.nn.functional as F
from mgrit_case import BATCH, WARM, Case, bare, ends, gather_rows, network, samples, vectors

import lpnet
from lpnet.mgrit.propagator import Propagator


def serial_gradient(case, x, y):
    twin = ref.twin(case.dense(), *ends())
    F.cross_entropy(twin(x), y).backward()
    return np.stack([step.weight.grad for step in twin[1]])


def weight_gradient(net):
    """Collective over net.comm."""
    return gather_rows(net, net.stack.weight.grad)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("storage", ["all", "c_points"])
def test_warm_starts_go_on_where_the_same_batch_ended(comm, storage):
    """One iteration per visit and batch id, batches in turn: states, adjoints and gradients as in the reference."""
    case = Case(26, coarsening=3)
    net, dense = bare(case, comm, storage=storage, **WARM), case.dense()
    u, lam = vectors(2), vectors(2, seed=8)
    for k in range(2):
        loss = (net(torch.tensor(u[k]), batch=k) * torch.tensor(lam[k])).sum()  # cold: to the tolerance
        loss.backward()
    states = [ref.propagate(dense, u[k]) for k in range(2)]
    adjoints = [ref.backpropagate(dense, states[k], lam[k]) for k in range(2)]
    other = case.dense(seed=4)
    with torch.no_grad():  # new parameters: the kept states are no longer exact
        low, high = net.partition.block(net.comm.rank)
        net.stack.weight.copy_(torch.tensor(other.weight[low:high]))
        net.stack.bias.copy_(torch.tensor(other.bias[low:high]))
    for _ in range(2):
        for k in (1, 0):
            net.zero_grad()
            out = net(torch.tensor(u[k]), batch=k)
            forward = case.forward(other, u[k], guess=states[k])
            np.testing.assert_allclose(out.detach(), forward.states[-1], rtol=0, atol=1e-10)
            (out * torch.tensor(lam[k])).sum().backward()
            adjoint = case.adjoint(other, forward.states, lam[k], guess=adjoints[k])
            states[k], adjoints[k] = forward.states, adjoint.states
            weight, _ = ref.gradients(other, states[k], adjoints[k])
            np.testing.assert_allclose(weight_gradient(net), weight, rtol=0, atol=1e-9)
            summed = net.comm.sum(net.residual_squares())
            for report, found in zip(net.solve_reports(summed, BATCH), (forward, adjoint), strict=True):
                np.testing.assert_allclose(report.residuals, found.residuals, rtol=0, atol=1e-9)
                assert report.residuals[0] > 1e-3 and report.iterations == 1


@pytest.mark.ranks(1, 3)
def test_a_trial_without_backward_leaves_the_kept_states(comm):
    case = Case(26, coarsening=3)
    net, (x, lam, z) = bare(case, comm, **WARM), map(torch.tensor, vectors(3))
    (net(x, batch=0) * lam).sum().backward()

    def visit(backward):
        net.zero_grad()
        out = net(x, batch=0)
        if backward:
            (out * lam).sum().backward()
        return out.detach()

    with torch.no_grad():
        net.stack.weight.mul_(1.5)
    rejected, again = visit(False), visit(False)
    net(z)  # no id: nothing to keep
    assert torch.equal(rejected, again) and torch.equal(visit(True), again)
    assert not torch.equal(visit(False), again)  # the backward has replaced the kept states


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("storage", ["all", "c_points"])
def test_states_that_are_still_in_memory_are_not_copied(comm, storage, monkeypatch):
    """The same bits as from copies; what else was in memory meanwhile is never taken for what was kept."""
    case = Case(26, coarsening=3)
    x, lam, z = map(torch.tensor, vectors(3))

    def train(copied):
        net, copies = bare(case, comm, storage=storage, **WARM), 0
        start = Propagator._start

        def counted(self, solver, start_, kept, root):
            nonlocal copies
            held = self._held[solver.problem.adjoint]
            if copied:
                self._held = [None, None]
            elif start_ == "given":
                copies += held is None or held[0]() is not kept or held[1] != kept.states._version
            start(self, solver, start_, kept, root)

        monkeypatch.setattr(Propagator, "_start", counted)
        outs = []
        for visit in (0, 0, 1, 0, 0, None, 0, 0):
            net.zero_grad()
            out = net(z if visit == 1 else x, batch=visit)
            if visit is not None:
                (out * lam).sum().backward()
                outs += [out.detach(), net.stack.weight.grad.clone()]
            del out  # a graph without a backward holds its states
            with torch.no_grad():
                net.stack.weight.mul_(1.01)
        monkeypatch.setattr(Propagator, "_start", start)
        return outs, copies

    (plain, _), (fast, copies) = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))
    assert copies == 2 + 1  # both directions after the other batch, the states after the pass without an id


@pytest.mark.ranks(1, 2, 3, 4)
def test_kept_states_move_to_any_number_of_ranks(comm):
    """What a checkpoint holds: C-point states by global point, of every batch id, in both directions."""
    case = Case(14)
    many, one, (x, z) = bare(case, comm, **WARM), bare(case, None, **WARM), map(torch.tensor, vectors(2))

    def visit(net, k):
        net.zero_grad()
        out = net((x, z)[k], batch=k)
        out.square().sum().backward()
        return out.detach(), gather_rows(net, net.stack.weight.grad)

    def entries(net):
        mine = [(name, point, payload.clone()) for name, point, payload in net.kept_state()]
        found = {(name, point): payload for part in net.comm.all_gather_objects(mine) for name, point, payload in part}
        assert sum(map(len, net.comm.all_gather_objects(mine))) == len(found)  # every point on one rank
        return found

    def load(net, found, k):
        blocks = {kind: (lambda point, kind=kind: found[f"mgrit/{kind}/{k}", point]) for kind in ("state", "adjoint")}
        net.load_kept_state(k, blocks)

    for k in range(2):
        visit(many, k)
    with torch.no_grad():
        for net in (many, one):
            net.stack.weight.mul_(1.3)
    saved = entries(many)
    assert {point for name, point in saved if name == "mgrit/state/1"} == {4, 8, 12}
    assert {point for name, point in saved if name == "mgrit/adjoint/0"} == {0, 4, 8, 12}
    for k in range(2):
        load(one, saved, k)
    expected = [visit(many, k) for k in range(2)]
    for net in (one, many):
        if net is many:
            net.forget()
            for k in range(2):
                load(net, saved, k)
        for k in range(2):
            out, grad = visit(net, k)
            assert torch.equal(out, expected[k][0]) and np.array_equal(grad, expected[k][1])


@pytest.mark.ranks(1, 2, 3)
def test_a_cold_start_converges_in_place_of_too_few_iterations(comm):
    case, (x, y) = Case(30, coarsening=2), samples()
    net = network(case, comm, **WARM)
    for kwargs in ({}, {"batch": 7}):
        net.zero_grad()
        F.cross_entropy(net(x, **kwargs), y).backward()
        forward, adjoint = net.solve_reports(net.comm.sum(net.residual_squares()), BATCH)
        assert forward.iterations > 1 and adjoint.iterations > 1
        np.testing.assert_allclose(weight_gradient(net), serial_gradient(case, x, y), rtol=1e-8, atol=1e-10)


@pytest.mark.ranks(1, 2)
def test_a_fixed_count_forced_on_a_cold_start_warns_once(comm, caplog):
    net, (x, y) = network(Case(14, guess="constant"), comm), samples()
    logging.getLogger("lpnet").propagate = True
    with caplog.at_level(logging.WARNING, logger="lpnet"):
        for _ in range(3):
            F.cross_entropy(net(x), y).backward()
    assert sum("cold start" in record.message for record in caplog.records) == 1


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("sizes", [(5, 1), (1, 5), (5, 3)], ids=str)
def test_a_batch_id_with_other_samples_in_number_is_an_error_on_every_rank(comm, sizes):
    net = bare(Case(12, coarsening=8), comm, **WARM)  # on 4 ranks some own no C-point
    x = torch.tensor(vectors(1)[0])
    net(x[:sizes[0]], batch=0).sum().backward()
    with pytest.raises(lpnet.UsageError, match=r"batch"):
        net(x[:sizes[1]], batch=0)
