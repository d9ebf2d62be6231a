"""Messages that are sent when their time has come: `Actor.send_later`."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from rollstream.engine.actor import Actor, Message


class DelayedMessages:
    """Messages with the times at which they are to be sent, soonest first; of two at once, the older one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Actor[Any], Message]] = []
        self._numbers = count()
        self._lock = threading.Lock()
        self.time = 0.0
        """When the message that was taken last was due: a clock for engines on which time is virtual."""

    def add(self, actor: Actor[Any], message: Message, due: float) -> None:
        """Keep a message until its time."""
        with self._lock:
            heapq.heappush(self._heap, (due, next(self._numbers), actor, message))

    def next_due(self) -> float | None:
        """When the next message is due, if there is one."""
        heap = self._heap
        return heap[0][0] if heap else None

    def take(self, now: float = math.inf) -> tuple[Actor[Any], Message] | None:
        """Take the message that is due first, if it is due; without a time, whenever it is due."""
        with self._lock:
            if not self._heap or self._heap[0][0] > now:
                return None
            self.time, _, actor, message = heapq.heappop(self._heap)
            return actor, message

    def __len__(self) -> int:
        return len(self._heap)


class Alarm:
    """Calls a function at a time, in a thread that sleeps until then. The last time that was set counts."""

    def __init__(self, function: Callable[[], None]):
        self._function = function
        self._timer: threading.Timer | None = None
        self.due = math.inf
        """When it is called, by `time.monotonic`."""

    def set(self, seconds: float | None) -> None:
        """Call it after so many seconds; not at all if `None`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.due = None, math.inf
        if seconds is not None:
            self.due = time.monotonic() + seconds
            self._timer = threading.Timer(max(0.0, seconds), self._function)
            self._timer.daemon = True
            self._timer.start()


def earliest(*times: float | None) -> float | None:
    """The earliest of the times there are."""
    return min((time for time in times if time is not None), default=None)
