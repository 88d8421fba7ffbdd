"""Short messages on coarse levels: what they round, what they leave exact, what they save."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from mgrit_case import BATCH, WIDTH, Case, gather, gather_rows, make, vectors

SHORT = ["float32", "bfloat16"]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("layers", [12, 14])
def test_enough_iterations_are_serial_bit_for_bit(comm, short, layers):
    """Corrections die out exactly, so that what was rounded on the way leaves no trace."""
    case = Case(layers, iterations=-(-layers // 4))
    dense, (u0, lam) = case.dense(), map(torch.tensor, vectors(2))
    net, serial = make(dense, comm, case.mgrit(coarse_messages=short)), make(dense, None, Case(layers, 1).mgrit())
    _, exact, _ = serial.solve(u0)
    points, states, _ = net.solve(u0)
    assert torch.equal(states, exact[points.start:points.stop])
    _, exact, _ = serial.solve_adjoint(lam)
    points, adjoints, _ = net.solve_adjoint(lam)
    assert torch.equal(adjoints, exact[points.start:points.stop])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("case", [Case(24, 3, (4, 2)), Case(23, 3, 2, relaxation="FCF", cycle="F")], ids=str)
def test_an_exact_guess_is_a_fixed_point(comm, short, case):
    dense, (u0, lam) = case.dense(), map(torch.tensor, vectors(2))
    net, serial = make(dense, comm, case.mgrit(coarse_messages=short)), make(dense, None, Case(case.layers, 1).mgrit())
    exact = serial.solve(u0)[1]
    back = serial.solve_adjoint(lam)[1]
    points, states, report = net.solve(u0, guess="exact")
    assert torch.equal(states, exact[points.start : points.stop])
    assert report.residuals == (0.0,) * (case.iterations + 1)
    points, adjoints, report = net.solve_adjoint(lam, guess=back)
    assert torch.equal(adjoints, back[points.start : points.stop])
    assert report.residuals == (0.0,) * (case.iterations + 1)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("short", "limit"), [("float32", 1e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("case", [
    Case(48, 3, (4, 2), iterations=2), Case(48, 4, 2, relaxation="FCF", cycle="F"),
    Case(48, 3, (4, 2), guess="coarse", iterations=2), Case(48, 3, (4, 2), coarse="averaged"),
], ids=str)
def test_rounding_costs_a_part_of_the_correction(comm, short, limit, case):
    """Against the same solve with full messages, relative to how far that solve went."""
    dense, (u0, lam) = case.dense(), map(torch.tensor, vectors(2))

    def solve(**changes):
        net = make(dense, comm, case.mgrit(**changes))
        states = gather(net, *net.solve(u0)[:2])
        adjoints = gather(net, *net.solve_adjoint(lam)[:2])
        return states, adjoints, gather_rows(net, net.layer_gradients()["weight"])

    for found, full in zip(solve(coarse_messages=short), solve(), strict=True):
        assert not np.array_equal(found, full)
        assert np.linalg.norm(found - full) < limit * np.linalg.norm(full)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("short", "size"), [("own", 8), ("float32", 4), ("bfloat16", 2)])
def test_only_coarse_levels_send_fewer_bytes(comm, short, size):
    """Blocks begin at C-points: per border a state per sweep of level 0, and what the coarse level sends."""
    case = Case(48, iterations=2, guess="zero")
    net, (u0, lam) = make(case.dense(), comm, case.mgrit(coarse_messages=short)), map(torch.tensor, vectors(2))

    def sent(work):
        before = copy.copy(net.comm.traffic)
        work()
        return net.comm.traffic.messages - before.messages, net.comm.traffic.bytes - before.bytes

    number = WIDTH * BATCH
    assert sent(lambda: net.solve(u0)) == ((0, 0) if net.is_last else (3 + 2, number * (3 * 8 + 2 * size)))
    assert sent(lambda: net.solve_adjoint(lam)) == ((0, 0) if net.is_first else (3 + 4, number * (3 * 8 + 4 * size)))
