"""The delay table: printed grids, and what must hold for any number of modules and batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpnet.errors import UsageError
from lpnet.fdg.schedule import Action, Schedule

PUBLISHED = """\
tick         0    1    2    3    4    5    6
module 1     F0   F1   F2   F3   F4B0 F5B1 F6B2        delay 4
module 2          F0   F1   F2B0 F3B1 F4B2 F5B3        delay 2
module 3               F0B0 F1B1 F2B2 F3B3 F4B4        delay 0"""
DRAINED = """\
tick         0    1    2    3    4    5    6    7
module 1     F0   F1   F2   F3   B0   B1   B2   B3          delay 4
module 2          F0   F1   F2B0 F3B1 B2   B3               delay 2
module 3               F0B0 F1B1 F2B2 F3B3                  delay 0"""
LOCKED = """\
tick         0    1    2    3    4    5
module 1     F0   F1   F2B0 F3B1 B2   B3          delay 2
module 2     F0   F1B0 F2B1 F3B2 B3               delay 1
module 3     F0B0 F1B1 F2B2 F3B3                  delay 0"""
EXACT = """\
tick         0    1
module 1     F0B0 F1B1        delay 0
module 2     F0B0 F1B1        delay 0"""

schedules = st.builds(
    Schedule,
    st.integers(1, 7),
    st.sampled_from(["fdg", "ddg", "fr", "bp"]),
    st.sampled_from([None, "backward_first", "forward_first"]),
)


def test_the_published_grid():
    assert Schedule(3).grid(ticks=7) == PUBLISHED
    assert Schedule(3, order="forward_first").grid(ticks=7) == PUBLISHED


def test_fill_and_drain():
    assert Schedule(3).grid(batches=4) == DRAINED


def test_the_baselines():
    assert Schedule(3, "ddg").grid(batches=4) == LOCKED
    assert Schedule(3, "fr").grid(batches=4) == LOCKED
    assert Schedule(2, "bp").grid(batches=2) == EXACT


def test_wide_numbers_keep_their_columns():
    lines = Schedule(2).grid(batches=1002).splitlines()
    assert lines[0].index("1001") == lines[1].index("F1001")


def test_orders_inside_a_tick():
    assert Schedule(3).actions(1, 5) == (Action("B", 1), Action("F", 5))
    assert Schedule(3, order="forward_first").actions(1, 5) == (Action("F", 5), Action("B", 1))
    assert Schedule(3).actions(3, 5) == (Action("F", 3), Action("B", 3))  # the last module always
    assert Schedule(3, "ddg").actions(1, 5) == (Action("F", 5), Action("B", 3))  # as published
    assert [str(action) for action in Schedule(3).actions(2, 4)] == ["B1", "F3"]


def test_updates_outstanding_while_filling_steady_and_draining():
    first = Schedule(3)
    assert [first.outstanding(1, batch) for batch in range(7)] == [0, 1, 2, 3, 3, 3, 3]
    assert [first.outstanding(2, batch) for batch in range(4)] == [0, 1, 1, 1]
    assert [first.outstanding(3, batch) for batch in range(4)] == [0, 0, 0, 0]
    late = Schedule(3, order="forward_first")
    assert [late.outstanding(1, batch) for batch in range(7)] == [0, 1, 2, 3, 4, 4, 4]
    assert [late.in_flight(1, tick, 5) for tick in range(10)] == [1, 2, 3, 4, 4, 3, 2, 1, 0, 0]
    assert [first.in_flight(2, tick, 5) for tick in range(10)] == [0, 1, 2, 2, 2, 2, 1, 0, 0, 0]
    assert [first.outstanding(1, batch, 4) for batch in range(12)] == [0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(("modules", "name", "order", "text"), [
    (0, "fdg", None, "there are 0 modules"),
    (2, "gpipe", None, "must be one of fdg, ddg, fr, bp"),
    (2, "fdg", "first", "must be one of backward_first, forward_first"),
])  # fmt: skip
def test_bad_input(modules, name, order, text):
    with pytest.raises(UsageError, match=text):
        Schedule(modules, name, order)


@given(schedules, st.integers(0, 30))
def test_every_batch_passes_every_module_once_each_way(schedule, batches):
    ticks = schedule.ticks(batches)
    assert ticks == (batches + {"fdg": 2 * schedule.modules - 2, "bp": 0}.get(schedule.name, schedule.modules - 1)
                     if batches else 0)  # fmt: skip
    for module in range(1, schedule.modules + 1):
        done = [action for tick in range(ticks) for action in schedule.actions(module, tick, batches)]
        for kind in "FB":
            assert [action.batch for action in done if action.kind == kind] == list(range(batches))
        assert schedule.actions(module, ticks, batches) == ()


@given(schedules, st.integers(1, 30))
def test_a_message_is_used_when_it_is_there_and_no_later(schedule, batch):
    forward, backward = schedule.forward_tick, schedule.backward_tick
    for module in range(1, schedule.modules):
        assert forward(module + 1, batch) == forward(module, batch) + schedule.forward_lag
        assert backward(module, batch) == backward(module + 1, batch) + schedule.backward_lag
    assert backward(schedule.modules, batch) == forward(schedule.modules, batch)


@given(schedules, st.integers(1, 25), st.integers(1, 5))
def test_outstanding_and_stash_by_counting(schedule, batches, accumulate):
    for module in range(1, schedule.modules + 1):
        updates, landed, seen, held, most = 0, 0, {}, 0, 0
        for tick in range(schedule.ticks(batches)):
            for kind, batch in schedule.actions(module, tick, batches):
                if kind == "F":
                    assert schedule.landed(module, batch) == landed
                    seen[batch] = updates
                    held += 1
                    most = max(most, held)
                else:
                    assert schedule.outstanding(module, batch, accumulate) == updates - seen[batch]
                    landed += 1
                    held -= 1
                    updates += landed % accumulate == 0
            assert schedule.in_flight(module, tick, batches) == held
        assert most <= schedule.stash(module) <= schedule.delay(module) + 1
        if batches > schedule.delay(module):
            assert most == schedule.stash(module)
