"""The controller: which rung a run of numbers leads to, and when a gradient is compared. No networks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from lpnet.config import MGRIT
from lpnet.mgrit.control import SERIAL, Check, Controller, Rung, Seen, allowed_error, ladder, spacing

ADAPTIVE = MGRIT(levels=3, forward_iterations=2, adjoint_iterations=1, control="adaptive", check_every=4)
FINE = Seen(0.1, 0.1, 1e-3, 1e-3)


def exact(cosine):
    """A comparison with this cosine, of two gradients of equal norm."""
    return Check(cosine, math.sqrt(2 * (1 - cosine)))


def drive(controller, cosines, seen=FINE):
    """Steps whose comparisons give these cosines in turn; the rung of every step and what was decided."""
    left: Iterator[float] = iter(cosines)
    out = []
    for step in range(1000):
        plan = controller.plan(step)
        if not plan.compare:
            continue
        cosine = next(left, None)
        if cosine is None:
            return out
        out.append((step, plan.rung, controller.compared(step, seen, exact(cosine))))
    raise AssertionError("never compared")


def test_the_ladder_raises_iterations_then_takes_levels_off():
    assert ladder(ADAPTIVE, 3) == (
        Rung(3, 2, 1), Rung(3, 3, 2), Rung(3, 4, 3), Rung(3, 6, 5), Rung(2, 6, 5), SERIAL,
    )  # fmt: skip
    assert ladder(MGRIT(forward_iterations=2), 2) == (Rung(2, 2, None),)  # control fixed has one


def test_good_gradients_change_nothing_and_are_compared_at_the_spacing():
    controller = Controller(ADAPTIVE, 3, 4)
    found = drive(controller, [0.9999] * 10)
    assert {rung for _, rung, _ in found} == {Rung(3, 2, 1)}
    steps = [step for step, _, _ in found]
    assert steps[0] == 1 and [b - a for a, b in zip(steps[4:], steps[5:], strict=False)] == [4] * 5


def test_a_mild_fault_costs_its_gradient_and_one_rung():
    controller = Controller(ADAPTIVE, 3, 4)
    (_, _, decision), (step, rung, _) = drive(controller, [0.95, 0.9999])
    assert decision.reject and not decision.severe
    assert "0.9500" in decision.message and "rho forward 0.1" in decision.message
    assert rung == Rung(3, 3, 2) and step == 2  # the next step is compared at once


@pytest.mark.parametrize(
    "cosine, seen", [(0.5, FINE), (0.94, Seen(1.5, 0.1, 1.0, 1.0)), (math.nan, Seen(finite=False))]
)
def test_a_severe_fault_leads_to_serial_at_once_and_a_probe_back(cosine, seen):
    controller = Controller(ADAPTIVE, 3, 4)
    decision = controller.compared(1, seen, Check(cosine, math.nan if math.isnan(cosine) else 1.0))
    assert decision.reject and decision.severe and decision.warn
    plan = controller.plan(2)
    assert plan.rung == SERIAL and plan.compare and plan.other == Rung(2, 6, 5)
    bad = controller.compared(2, FINE, exact(0.99))  # right, but not SAFE: stays
    assert not bad.reject and controller.is_serial and not controller.plan(3).compare
    good = controller.compared(4, FINE, exact(0.9999))
    assert not good.reject and "back to" in good.message and controller.rung == Rung(2, 6, 5)


def test_probes_in_serial_become_rare():
    controller = Controller(ADAPTIVE, 3, 4)
    steps = [step for step, _, _ in drive(controller, [0.1] * 8)]
    gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
    assert gaps == sorted(gaps) and gaps[-1] == 8


def test_a_rung_is_left_downwards_only_where_the_error_below_is_small():
    """At rho 0.1 an iteration less costs ten times the error: 0.002 becomes 0.02, and 0.02 would become 0.2."""
    for error, expected in ((0.002, Rung(3, 2, 1)), (0.02, Rung(3, 3, 2))):
        controller = Controller(ADAPTIVE, 3, 4)
        controller.state.rung, controller.state.compared_at = 1, -1
        for step in (0, 1, 2, 3, 4, 5, 6):
            if controller.plan(step).compare:
                controller.compared(step, FINE, Check(1 - error**2 / 2, error))
        assert controller.rung == expected


def test_between_the_bounds_nothing_changes():
    controller = Controller(ADAPTIVE, 3, 4)
    controller.state.rung = 2
    assert {rung for _, rung, _ in drive(controller, [0.995] * 12)} == {Rung(3, 4, 3)}


def test_a_rung_that_fails_soon_after_it_was_reached_is_reached_more_slowly():
    controller = Controller(ADAPTIVE, 3, 4)
    found = drive(controller, [0.95] + ([0.99999] * 2 + [0.95]) * 3 + [0.99999] * 3)
    rungs = [rung for _, rung, _ in found]
    assert controller.state.patience > 2 and rungs[-1] != Rung(3, 2, 1)


def test_the_alarm():
    controller = Controller(ADAPTIVE, 3, 100)
    assert controller.alarm(5, FINE) == ""  # nothing to go by yet
    controller.compared(5, FINE, Check(1.0, 0.01))
    assert controller.alarm(6, FINE) == ""
    assert "predict" in controller.alarm(6, Seen(0.1, 0.1, 1e-3, 1e-2))  # ten times the residual
    assert "grows" in controller.alarm(6, Seen(1.2, 0.1, 1e-3, 1e-3))
    assert "not finite" in controller.alarm(6, Seen(finite=False))
    controller.state.quiet_until, controller.state.rho = 8, 1.1
    assert controller.alarm(7, Seen(1.2, 0.1, 1e-3, 1e-3)) == ""  # no worse than it was
    assert controller.alarm(7, Seen(1.8, 0.1, 1e-3, 1e-3)) != ""
    off = Controller(MGRIT(forward_iterations=2, check_every=0), 2, 0)
    assert off.alarm(6, Seen(1.2, 0.1, 1.0, 1.0)) == "" and not off.plan(6).compare


def test_alarms_that_turn_out_harmless_become_rare():
    controller = Controller(ADAPTIVE, 3, 64)
    steps = []
    for step in range(1, 130):
        if controller.plan(step).compare or controller.alarm(step, Seen(1.2, 0.1, 1.0, 1.0)):
            steps.append(step)
            controller.compared(step, Seen(1.2, 0.1, 1.0, 1.0), exact(0.995) if step % 64 else exact(0.9999))
            controller.state.rung = 0
    assert len(steps) < 14


def test_fixed_warns_with_the_cosine_and_stops_where_solves_diverge():
    controller = Controller(MGRIT(forward_iterations=2, adjoint_iterations=2, check_every=4), 2, 4)
    cold = controller.compared(1, Seen(0.33, 0.3, 1.0, 1.0), exact(-0.35))
    assert cold.warn and "cosine -0.350" in cold.message and not cold.reject and not cold.stop
    assert controller.compared(5, Seen(0.33, 0.3, 1.0, 1.0), exact(-0.36)).message == ""  # said already
    first = controller.compared(9, Seen(1.7, 0.3, 1.0, 1.0), exact(0.2))
    assert not first.stop and controller.plan(10).compare
    second = controller.compared(10, Seen(1.7, 0.3, 1.0, 1.0), exact(0.1))
    assert "multigrid diverges" in second.stop and "rho forward 1.7" in second.stop
    assert "lowest applied cosine -0.3600 at step 5" in controller.summary()


def test_the_state_goes_through_numbers():
    controller = Controller(ADAPTIVE, 3, 4)
    drive(controller, [0.95, 0.9999, 0.5, 0.99, 0.9999, 0.9999])
    other = Controller(ADAPTIVE, 3, 4)
    other.restore(controller.numbers())
    assert str(other.state) == str(controller.state)
    tail = [0.9999, 0.95, 0.9999, 0.5] * 3
    assert drive(other, tail) == drive(controller, tail)
    fixed = Controller(MGRIT(forward_iterations=2, adjoint_iterations=1), 3, 4)
    fixed.restore(controller.numbers())  # a ladder of one rung
    assert fixed.rung == Rung(3, 2, 1)


def test_cosine_and_error_of_scalar_products():
    assert Check.of(4.0, 2.0, 1.0) == Check(1.0, 1.0)
    assert Check.of(1.0, 0.0, 1.0) == Check(0.0, math.sqrt(2))
    assert Check.of(math.inf, 1.0, 1.0).below(-1)
    assert Check.of(0.0, 0.0, 0.0) == Check(1.0, 0.0) and Check.of(0.0, 0.0, 1.0) == Check(0.0, 1.0)
    assert allowed_error(0.99) == pytest.approx(0.1414, abs=1e-4)


def test_auto_spaces_comparisons_so_that_they_cost_less_than_three_per_cent():
    for check, step in ((256, 500), (2048, 300), (10, 4000)):
        every = spacing("auto", check=check, step=step)
        assert check / (every * step) < 0.03
    assert spacing(7, check=1, step=1) == 7 and spacing(0, check=1, step=1) == 0
