"""Where the time goes: named spans, summed per name, and as a Chrome trace with one row per rank (for Perfetto).

    with trace.span("f_relax", level=0): ...        or    began = trace.begin(); ...; trace.end(began, "f_relax")

Off until `start`; a span then costs one call and one comparison. Recording sends nothing: the ranks meet once
in `start`, so that their clocks begin together, and once in `write`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpnet.parallel.comm import Comm

MAX_EVENTS = 200_000  # per rank, about 20 MB of JSON; totals go on beyond


@dataclass
class Total:
    """All spans of one name on this rank, those inside others included.

    Args:
        count: how many.
        seconds: their wall-clock time.
    """

    count: int = 0
    seconds: float = 0.0


class _Nothing:
    """The span of a tracer that is off."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()


class _Span:
    __slots__ = ("_args", "_began", "_name", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self._tracer = tracer
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._began = self._tracer.clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracer.record(self._began, self._name, self._args)


class Tracer:
    """Records the spans of one rank; the module's functions are those of the thread's tracer, or of one shared by all.

    Args:
        clock: nanoseconds; an emulated rank has a clock of its own, which is told the name of a span that ends.
        most: spans kept; None: MAX_EVENTS.
    """

    def __init__(self, clock: Callable[..., int] | None = None, most: int | None = None) -> None:
        self.on = False
        self._clock: Callable[[], int] = clock or time.perf_counter_ns
        self._ended: Callable[[str], int] = clock or (lambda name: time.perf_counter_ns())
        self._most = most
        self.dropped = 0
        self._keep = False
        self._origin = 0
        self._events: list[tuple[str, int, int, dict[str, Any]]] = []
        self._totals: dict[str, Total] = {}

    def start(self, comm: Comm | None = None, *, events: bool = True) -> None:
        """Forget everything and record from now on. Collective over comm.

        Args:
            comm: ranks whose clocks begin together; None: this one alone.
            events: keep every span for a trace; otherwise only totals.
        """
        self._events, self._totals, self.dropped = [], {}, 0
        self._keep = events
        if comm is not None:
            comm.barrier()
        self._origin = self._clock()
        self.on = True

    def stop(self) -> None:
        """Record no more; what there is stays. No communication."""
        self.on = False

    def span(self, name: str, **args: Any) -> _Span | _Nothing:
        """A context that is timed, with numbers or words shown beside it. No communication."""
        return _Span(self, name, args) if self.on else _NOTHING

    def is_on(self) -> bool:
        """Whether spans are recorded. No communication."""
        return self.on

    def clock(self) -> int:
        """Nanoseconds. No communication."""
        return self._clock()

    def begin(self) -> int:
        """The start of a span that `end` will name; 0 when off. No communication."""
        return self._clock() if self.on else 0

    def end(self, began: int, name: str, **args: Any) -> None:
        """The end of the span that `begin` started. No communication."""
        if began and self.on:
            self.record(began, name, args)

    def record(self, began: int, name: str, args: dict[str, Any]) -> None:
        """Note a span that ends now. No communication."""
        duration = self._ended(name) - began
        total = self._totals.get(name)
        if total is None:
            total = self._totals[name] = Total()
        total.count += 1
        total.seconds += duration * 1e-9
        if self._keep:
            if len(self._events) < (MAX_EVENTS if self._most is None else self._most):
                self._events.append((name, began - self._origin, duration, args))
            else:
                self.dropped += 1

    def count(self, name: str, **values: float | None) -> None:
        """Numbers drawn over time, such as a convergence factor; those that are None are left out. No communication."""
        shown = {key: value for key, value in values.items() if value is not None}
        if self.on and self._keep and shown:
            if len(self._events) < (MAX_EVENTS if self._most is None else self._most):
                self._events.append((name, self._clock() - self._origin, -1, shown))
            else:
                self.dropped += 1

    def totals(self) -> dict[str, Total]:
        """Count and seconds per name on this rank, most seconds first. No communication."""
        found = sorted(self._totals.items(), key=lambda pair: -pair[1].seconds)
        return {name: Total(total.count, total.seconds) for name, total in found}

    def write(self, path: str | Path, comm: Comm | None = None) -> None:
        """Write the spans of all ranks as a Chrome trace, on rank 0. Collective over comm.

        Raises:
            OSError: the file cannot be written; on every rank, as an LpnetError where another met it.
        """
        rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
        rows: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}/{size}"}},
            {"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank, "args": {"sort_index": rank}},
        ]
        for name, began, duration, args in self._events:
            if duration < 0:
                rows.append({"name": name, "ph": "C", "pid": 0, "tid": rank, "ts": began / 1e3, "args": args})
                continue
            # microseconds
            row = {"name": name, "ph": "X", "pid": 0, "tid": rank, "ts": began / 1e3, "dur": duration / 1e3}
            rows.append({**row, "args": args} if args else row)
        if self.dropped:
            end = self._events[-1][1] / 1e3
            text = f"{self.dropped} later spans of this rank are not shown"
            rows.append({"name": text, "ph": "i", "s": "t", "pid": 0, "tid": rank, "ts": end})
        mine = ",\n".join(json.dumps(row, default=str) for row in rows)
        if comm is None:
            _save(Path(path), [mine])
            return
        texts = comm.gather_objects(mine)
        comm.together(lambda: _save(Path(path), texts, comm.predicted) if texts is not None else None)


def _save(path: Path, texts: list[str], predicted: str | None = None) -> None:
    """The JSON of all ranks as one file, whole or not at all."""
    head = '{"displayTimeUnit": "ms", "traceEvents": [\n'
    name = json.dumps("lpnet" if predicted is None else f"lpnet, {predicted}")
    first = f'{{"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {{"name": {name}}}}},\n'
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(head + first + ",\n".join(texts) + "\n]}\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


_shared = Tracer()
_own = threading.local()


def use(tracer: Tracer | None) -> None:
    """Give this thread a tracer of its own; None: the shared one. No communication."""
    _own.tracer = tracer


def _tracer() -> Tracer:
    return getattr(_own, "tracer", None) or _shared


def start(comm: Comm | None = None, *, events: bool = True) -> None:
    """`Tracer.start` of this thread's tracer. Collective over comm."""
    _tracer().start(comm, events=events)


def stop() -> None:
    """`Tracer.stop` of this thread's tracer. No communication."""
    _tracer().stop()


def is_on() -> bool:
    """Whether spans are recorded. No communication."""
    return _tracer().on


def span(name: str, **args: Any) -> _Span | _Nothing:
    """A context that is timed, with numbers or words shown beside it. No communication."""
    return _tracer().span(name, **args)


def begin() -> int:
    """The start of a span that `end` will name; 0 when off. No communication."""
    return _tracer().begin()


def end(began: int, name: str, **args: Any) -> None:
    """The end of the span that `begin` started. No communication."""
    _tracer().end(began, name, **args)


def count(name: str, **values: float | None) -> None:
    """`Tracer.count` of this thread's tracer. No communication."""
    _tracer().count(name, **values)


def totals() -> dict[str, Total]:
    """Count and seconds per name on this rank, most seconds first. No communication."""
    return _tracer().totals()


def write(path: str | Path, comm: Comm | None = None) -> None:
    """`Tracer.write` of this thread's tracer. Collective over comm."""
    _tracer().write(path, comm)
