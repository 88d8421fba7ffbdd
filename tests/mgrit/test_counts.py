"""Work and messages are counted, not timed: evaluations, messages, bytes and reductions of a solve."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from mgrit_case import BATCH, WIDTH, Case, make, vectors

PAYLOAD = WIDTH * BATCH * 8


def traffic_of(net, work):
    """Messages, bytes, reductions, broadcasts of this rank during `work`, and what it returned."""
    before, names = copy.copy(net.comm.traffic), ("messages", "bytes", "reductions", "broadcasts")
    value = work()
    return [getattr(net.comm.traffic, name) - getattr(before, name) for name in names], value


def total(net, evaluations):
    """Evaluations per level over all ranks. Collective over net.comm."""
    return np.sum(net.comm.all_gather_objects(evaluations), axis=0)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("relaxation", ["F", "FCF"])
def test_two_levels(comm, iterations, relaxation):
    """Blocks that begin at C-points: one message per sweep and rank border, one per coarse solve."""
    case = Case(48, relaxation=relaxation, guess="zero", iterations=iterations)
    net, (u0, lam) = make(case.dense(), comm, case.mgrit()), map(torch.tensor, vectors(2))
    sweeps = 1 + iterations * (2 if relaxation == "FCF" else 1)
    (messages, size, reductions, broadcasts), (*_, report) = traffic_of(net, lambda: net.solve(u0))
    assert messages == (0 if net.is_last else sweeps + iterations)
    assert size == messages * PAYLOAD
    assert reductions == (net.comm.size > 1) and broadcasts == 0
    (messages, size, reductions, broadcasts), (*_, adjoint) = traffic_of(net, lambda: net.solve_adjoint(lam))
    # and one more per iteration: the value from which the coarse step across the border starts
    assert messages == (0 if net.is_first else sweeps + 2 * iterations)
    assert size == messages * PAYLOAD and reductions == (net.comm.size > 1)
    # forward: a layer is evaluated again only where its state has changed: all but layer 0 in every sweep
    assert total(net, report.evaluations).sum() == 48 + (sweeps - 1) * 47
    # adjoint: every sweep all layers, coarse steps of the old and the new values
    assert total(net, adjoint.evaluations).tolist() == [48 * sweeps, 2 * 12 * iterations]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", [
    Case(14, iterations=2), Case(23, 3, 2, relaxation="FCF"), Case(23, 4, 2, cycle="F"), Case(12, coarsening=8),
    Case(23, 3, 2, guess="coarse", iterations=2),
], ids=str)
def test_never_more_evaluations_than_the_plain_algorithm(comm, case):
    dense, (u0, lam) = case.dense(), vectors(2)
    net = make(dense, comm, case.mgrit())
    *_, report = net.solve(torch.tensor(u0))
    *_, adjoint = net.solve_adjoint(torch.tensor(lam))
    plain = case.forward(dense, u0)
    plain_adjoint = case.adjoint(dense, plain.states, lam)
    assert total(net, report.evaluations).sum() <= sum(plain.evaluations)
    assert (total(net, adjoint.evaluations) <= plain_adjoint.evaluations).all()
    if net.comm.size == 1:
        assert report.critical_path == sum(report.evaluations)
        assert adjoint.critical_path == sum(adjoint.evaluations)
    else:
        assert report.critical_path < total(net, report.evaluations).sum()
        assert report.critical_path >= max(sum(e) for e in net.comm.all_gather_objects(report.evaluations))
    assert len(set(net.comm.all_gather_objects(report.critical_path))) == 1


@pytest.mark.ranks(4)
def test_the_critical_path_of_one_iteration_is_the_cost_models(comm):
    """N = 64, c = N / P: two sweeps of 16 layers side by side and three coarse layers in a row; serial is 64."""
    case = Case(64, coarsening=16, guess="zero")
    net = make(case.dense(), comm, case.mgrit())
    *_, report = net.solve(torch.tensor(vectors(1)[0]))
    assert report.critical_path <= 2 * 16 + 4 < 64
    serial = make(case.dense(), comm, Case(64, 1).mgrit())
    assert serial.solve(torch.tensor(vectors(1)[0]))[2].critical_path == 64


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_warm_training_step_reduces_nothing_and_keeps_its_message_count(comm):
    case = Case(48)
    net = make(case.dense(), comm, case.mgrit(initial_guess="kept", forward_iterations=2, adjoint_iterations=1))
    x = torch.tensor(vectors(1)[0])

    def step():
        net.zero_grad()
        net(x, batch=0).square().sum().backward()

    step()  # cold
    (messages, size, reductions, broadcasts), _ = traffic_of(net, step)
    assert messages == (not net.is_last) * (3 + 2) + (not net.is_first) * (2 + 2)
    assert size == messages * PAYLOAD
    assert reductions == 0 and broadcasts == (net.comm.size > 1)  # the logits
    forward, adjoint = net.solve_reports(net.comm.sum(net.residual_squares()), BATCH)
    assert (forward.iterations, adjoint.iterations) == (2, 1)
    assert (len(forward.residuals), len(adjoint.residuals)) == (3, 2)


@pytest.mark.ranks(1, 2, 3)
def test_a_tolerance_costs_one_reduction_per_residual(comm):
    case = Case(24, coarsening=2, guess="zero")
    net = make(case.dense(), comm, case.mgrit(forward_iterations=None, tolerance=1e-8))
    (_, _, reductions, _), (*_, report) = traffic_of(net, lambda: net.solve(torch.tensor(vectors(1)[0])))
    assert reductions == (net.comm.size > 1) * (len(report.residuals) + 1)  # and the report's


@pytest.mark.ranks(1, 2, 4)
def test_evaluation_sends_one_state_over_every_border(comm):
    net = make(Case(12).dense(), comm, Case(12).mgrit())
    (messages, size, reductions, broadcasts), _ = traffic_of(net, lambda: net.exact_logits(torch.tensor(vectors(1)[0])))
    assert messages == (not net.is_last) and size == messages * PAYLOAD
    assert reductions == broadcasts == 0


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("coarse", "work"), [("averaged", 1), ("half_steps", 2)])
def test_evaluations_and_messages(comm, coarse, work):
    """12 intervals of 4, 2 iterations: coarse steps share no evaluation with fine ones."""
    case = Case(48, guess="zero", iterations=2, coarse=coarse)
    net, (u0, lam) = make(case.dense(), comm, case.mgrit()), map(torch.tensor, vectors(2))
    (messages, size, *_), (*_, report) = traffic_of(net, lambda: net.solve(u0))
    (back, back_size, *_), (*_, adjoint) = traffic_of(net, lambda: net.solve_adjoint(lam))
    # blocks begin at C-points: no coarse step crosses a border, and no weights travel
    assert messages == (not net.is_last) * 5 and size == messages * PAYLOAD
    assert back == (not net.is_first) * 7 and back_size == back * PAYLOAD
    fine, rough = total(net, report.evaluations)
    # K of the first values, then the new ones, which are K of the next iteration; at the start point once in all
    assert (fine, rough) == (48 + 2 * 47, work * (12 + 2 * 11))
    # every layer's fine sweep, old and new coarse values, and the coarse slopes once
    assert total(net, adjoint.evaluations).tolist() == [48 * 3, work * (12 + 2 * 2 * 12)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("coarse", ["averaged", "half_steps"])
def test_weights_cross_a_border_in_one_message(comm, coarse):
    """One interval holds the layers of all ranks: shares of its weights go down in one message a border."""
    case = Case(16, coarsening=16, guess="zero", coarse=coarse)
    plain, net = (make(case.dense(), comm, case.mgrit(coarse=kind)) for kind in ("injected", coarse))
    u0 = torch.tensor(vectors(1)[0])
    (before, *_), _ = traffic_of(plain, lambda: plain.solve(u0))
    (after, *_), _ = traffic_of(net, lambda: net.solve(u0))
    middle = net.stack.low <= 8
    assert after - before == (not net.is_first and (coarse == "averaged" or middle))
