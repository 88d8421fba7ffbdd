"""The prefetching thread: order, bounds, errors, and a clean end in every way it can end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from lpnet.data.prefetch import Prefetch
from lpnet.errors import ConfigError, DataError


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lpnet-prefetch"]


@pytest.fixture(autouse=True)
def none_left():
    yield
    gc.collect()
    assert threads() == []


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.001)


def test_items_come_in_order():
    assert list(Prefetch(lambda step: step * step, last=6)) == [0, 1, 4, 9, 16, 25]
    assert list(Prefetch(lambda step: step, first=3, last=6, ahead=5)) == [3, 4, 5]
    assert list(Prefetch(lambda step: step, first=6, last=6)) == []


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_never_further_ahead_than_allowed(ahead):
    made = []
    with Prefetch(lambda step: made.append(step) or step, ahead=ahead) as items:
        for step in range(10):
            assert next(items) == step
            wait_until(lambda step=step: len(made) == step + 1 + ahead)
            time.sleep(0.002)
            assert len(made) == step + 1 + ahead


def test_works_while_the_other_side_works():
    """Made in the thread, not when asked for."""
    makers = set()
    with Prefetch(lambda step: makers.add(threading.get_ident()), last=3) as items:
        list(items)
    assert len(makers) == 1 and threading.get_ident() not in makers


def test_an_error_comes_where_its_item_would_have():
    def make(step):
        if step == 2:
            raise DataError("sample 2 is damaged")
        return step

    items = Prefetch(make, ahead=4)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(DataError, match="sample 2 is damaged"):
        next(items)
    assert list(items) == []


def test_close_while_the_thread_waits_and_while_it_works():
    items = Prefetch(lambda step: step, ahead=1)
    assert next(items) == 0
    items.close()
    items.close()
    assert threads() == [] and list(items) == []
    begun = threading.Event()

    def slow(step):
        begun.set()
        time.sleep(0.1)
        return step

    items = Prefetch(slow)
    begun.wait(5)
    items.close()
    assert threads() == []


def test_leaving_the_block_early_and_by_an_error():
    with Prefetch(lambda step: step) as items:
        next(items)
    assert threads() == []
    with pytest.raises(ZeroDivisionError), Prefetch(lambda step: step) as items:
        raise ZeroDivisionError
    assert threads() == []


def test_a_forgotten_iterator_ends_its_thread():
    items = Prefetch(lambda step: step)
    next(items)
    seen = weakref.ref(items)
    del items
    gc.collect()
    assert seen() is None
    wait_until(lambda: threads() == [])


def test_a_closed_one_holds_no_items():
    class Item:
        pass

    made: list[weakref.ref] = []

    def make(step):
        item = Item()
        made.append(weakref.ref(item))
        return item

    items = Prefetch(make, ahead=3)
    wait_until(lambda: len(made) == 3)
    items.close()
    gc.collect()
    assert all(reference() is None for reference in made)


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "1 / 0"])
def test_python_ends_while_the_thread_runs(end):
    code = (
        "import time, torch\n"
        "from lpnet.data.prefetch import Prefetch\n"
        "items = Prefetch(lambda step: torch.randn(50, 50) @ torch.randn(50, 50))\n"
        f"next(items)\n{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == {"pass": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[end]
    assert "Fatal" not in done.stderr and ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")


def test_importing_starts_nothing():
    assert threads() == []


def test_nothing_ahead():
    with pytest.raises(ConfigError, match="runs 0 batches ahead; it must be 1 or more"):
        Prefetch(lambda step: step, ahead=0)
