"""Sinks: where finished futures arrive and one thread waits."""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue
from typing import Any, Protocol


class Sink(Protocol):
    """A queue of finished futures on which one thread waits."""

    def put(self, future: Any, /) -> None:
        """Add a finished future; may be called from any thread."""
        ...

    def wake(self) -> None:
        """Make `wait` return: the engine went idle, or a message nobody awaits failed."""
        ...

    def poll(self) -> Any | None:
        """Take a future if there is one; never waits."""
        ...

    def wait(self, timeout: float | None = None) -> Any | None:
        """Block until there is a future and take it; `None` when woken or after the timeout."""
        ...


class ListSink:
    """A sink for one thread: whatever can arrive without further messages is already there."""

    __slots__ = ("_futures", "put")

    def __init__(self) -> None:
        self._futures: deque[Any] = deque()
        self.put = self._futures.append

    def wake(self) -> None:
        """Nobody sleeps here."""

    def poll(self) -> Any | None:
        """Take the next future, if there is one."""
        return self._futures.popleft() if self._futures else None

    def wait(self, timeout: float | None = None) -> Any | None:  # noqa: ARG002
        """As `poll`: waiting would change nothing."""
        return self.poll()


class QueueSink:
    """A sink that any thread may fill and one thread waits on."""

    __slots__ = ("_queue", "_woken", "put")

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._woken = False
        self.put = self._queue.put

    def wake(self) -> None:
        """Put one wake-up into the queue, however often it is asked for."""
        if not self._woken:
            self._woken = True
            self._queue.put(None)

    def poll(self) -> Any | None:
        """Take the next future, if there is one."""
        while not self._queue.empty():
            if (future := self._take(None)) is not None:
                return future
        return None

    def wait(self, timeout: float | None = None) -> Any | None:
        """Block on the queue, without using the processor."""
        try:
            return self._take(timeout)
        except Empty:
            return None

    def _take(self, timeout: float | None) -> Any | None:
        future = self._queue.get(timeout=timeout)
        if future is None:
            self._woken = False  # before its owner looks at the engine: a later wake-up is not lost
        return future
