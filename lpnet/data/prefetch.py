"""Prefetch: a thread that makes the next batches while the network works on this one.

The thread runs ahead by a bounded number of steps, in order, so that what it makes depends on the step alone and
never on time. It must not communicate: MPI belongs to the main thread. No communication.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from lpnet.errors import ConfigError

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterator over make(first), make(first + 1), ..., made ahead in one thread.

        with Prefetch(lambda step: load(order.at(step)), first=resumed_at, last=steps) as batches:
            for batch in batches: ...

    An error in `make` is raised where its item would have come. The thread ends with the last step, at `close`, when
    the iterator is forgotten, and before Python exits.

    Args:
        make: makes the item of a step; a pure function that reads files at most.
        first: first step.
        last: one past the last step; None: for ever.
        ahead: items that may lie ready; with the one in the making and the one in use, ahead + 2 exist at most.

    Raises:
        ConfigError: fewer than one item ahead.
    """

    def __init__(self, make: Callable[[int], Item], *, first: int = 0, last: int | None = None, ahead: int = 2) -> None:
        if ahead < 1:
            raise ConfigError(f"the prefetching thread runs {ahead} batches ahead; it must be 1 or more")
        self._shelf: _Shelf[Item] = _Shelf(ahead)
        # a daemon, and stopped by a finalizer: Python waits for other threads before it runs any finalizer
        thread = threading.Thread(
            target=_work, args=(self._shelf, make, first, last), name="lpnet-prefetch", daemon=True
        )
        self._stop = weakref.finalize(self, _stop, self._shelf, thread)
        thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return self._shelf.take()

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it, at most for the item in the making; twice is harmless. No communication."""
        self._stop()


class _Shelf(Generic[Item]):
    """What the two threads share; it does not know the iterator, so that a forgotten one is collected."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.changed = threading.Condition()
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.done = self.closed = False

    def wait_for_room(self) -> bool:
        """Whether to go on making."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.items) < self.ahead)
            return not self.closed

    def put(self, item: Item) -> None:
        """The next item."""
        with self.changed:
            self.items.append(item)
            self.changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing comes any more."""
        with self.changed:
            self.done, self.error = True, error
            self.changed.notify_all()

    def close(self) -> None:
        """Nothing is wanted any more."""
        with self.changed:
            self.closed = self.done = True
            self.error = None
            self.items.clear()
            self.changed.notify_all()

    def take(self) -> Item:
        """The next item, or the error that came in its place."""
        with self.changed:
            self.changed.wait_for(lambda: self.items or self.done)
            if self.items:
                item = self.items.popleft()
                self.changed.notify_all()
                return item
            error, self.error = self.error, None
        raise StopIteration if error is None else error


def _work(shelf: _Shelf[Item], make: Callable[[int], Item], first: int, last: int | None) -> None:
    """The thread."""
    step = first
    try:
        while (last is None or step < last) and shelf.wait_for_room():
            shelf.put(make(step))
            step += 1
    except BaseException as error:
        shelf.end(error)
    else:
        shelf.end()


def _stop(shelf: _Shelf[Item], thread: threading.Thread) -> None:
    """End the thread; the collector may run this in the thread itself, which cannot wait for itself."""
    shelf.close()
    if thread is not threading.current_thread():
        thread.join()
