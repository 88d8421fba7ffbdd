"""Spans: totals, a Chrome trace with one row per rank, next to nothing when off."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lpnet.io import trace
from lpnet.io.trace import Tracer
from lpnet.parallel.comm import Comm


def spans(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    return [row for row in content["traceEvents"] if row["ph"] == "X"]


def test_off_records_nothing(tmp_path: Path) -> None:
    tracer = Tracer()
    with tracer.span("a", level=1):
        pass
    tracer.end(tracer.begin(), "b")
    assert tracer.totals() == {}
    assert tracer.span("a") is tracer.span("b")  # the same object: nothing is made
    began = time.process_time()
    for _ in range(10_000):
        with tracer.span("a"):
            pass
    assert time.process_time() - began < 0.5  # 50 microseconds a span; it takes a fraction of one


def test_spans_and_totals(tmp_path: Path) -> None:
    tracer = Tracer()
    tracer.start()
    with tracer.span("outer", level=0):
        for _ in range(3):
            began = tracer.begin()
            time.sleep(0.002)
            tracer.end(began, "inner", chunk=1)
    with pytest.raises(ValueError), tracer.span("failing"):
        raise ValueError
    tracer.stop()
    with tracer.span("late"):
        pass
    totals = tracer.totals()
    assert list(totals) == ["outer", "inner", "failing"]
    assert totals["inner"].count == 3 and totals["outer"].seconds >= totals["inner"].seconds >= 0.006
    tracer.write(tmp_path / "trace.json")
    rows = spans(tmp_path / "trace.json")
    assert [row["name"] for row in rows] == ["inner"] * 3 + ["outer", "failing"]
    outer = rows[3]
    assert outer["args"] == {"level": 0}
    for inner in rows[:3]:
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json"]


def test_totals_alone_keep_no_events(tmp_path: Path) -> None:
    tracer = Tracer()
    tracer.start(events=False)
    with tracer.span("a"):
        pass
    assert tracer.totals()["a"].count == 1
    tracer.write(tmp_path / "trace.json")
    assert spans(tmp_path / "trace.json") == []


def test_too_many_events_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_EVENTS", 5)
    tracer = Tracer()
    tracer.start()
    for _ in range(8):
        tracer.end(tracer.begin(), "a")
    assert tracer.totals()["a"].count == 8 and tracer.dropped == 3
    tracer.write(tmp_path / "trace.json")
    assert len(spans(tmp_path / "trace.json")) == 5
    assert "3 later spans" in (tmp_path / "trace.json").read_text()


def test_the_functions_of_the_module_share_a_tracer() -> None:
    trace.start()
    try:
        with trace.span("a"):
            trace.end(trace.begin(), "b")
        assert set(trace.totals()) == {"a", "b"}
    finally:
        trace.stop()
        trace.start()
        trace.stop()


@pytest.mark.ranks(1, 3)
def test_one_row_per_rank(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    tracer = Tracer()
    tracer.start(mine)
    for index in range(mine.rank + 1):
        with tracer.span("work", index=index):
            pass
    path = shared_tmp_path / "trace.json"
    tracer.write(path, mine)
    mine.barrier()
    rows = spans(path)
    for rank in range(mine.size):
        assert [row["args"]["index"] for row in rows if row["tid"] == rank] == list(range(rank + 1))
    assert all(0 <= row["ts"] < 5e6 for row in rows)
    names = [row["args"].get("name") for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == "M"]
    assert [f"rank {rank}/{mine.size}" in names for rank in range(mine.size)] == [True] * mine.size


@pytest.mark.ranks(2)
def test_a_failed_write_is_told_to_all(comm: Any, shared_tmp_path: Path) -> None:
    mine = Comm(comm)
    tracer = Tracer()
    tracer.start(mine)
    with pytest.raises(Exception, match="No such file"):
        tracer.write(shared_tmp_path / "missing" / "trace.json", mine)
