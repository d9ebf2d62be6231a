"""Selection by age: first in first out, and last in first out."""

from __future__ import annotations

import numpy as np

from rollstream.replay.arrays import Array
from rollstream.replay.selectors.base import OrderedSelector, Slots


class _Queue(OrderedSelector):
    """Items in insertion order, with gaps where items were removed."""

    item_bytes = 24

    def reset(self, capacity: int) -> None:
        """An empty queue, long enough to be compacted rarely."""
        self.size = 0
        self._queue = np.empty(2 * capacity + 64, np.int64)
        self._index = np.full(capacity, -1, np.int64)  # of a slot in `_queue`; other entries are gaps
        self._head = self._tail = 0

    def insert(self, slots: Slots, priorities: Array) -> None:  # noqa: ARG002
        """Append."""
        count = len(slots)
        if self._tail + count > len(self._queue):
            self._compact()
        stop = self._tail + count
        self._queue[self._tail : stop] = slots
        self._index[slots] = np.arange(self._tail, stop)
        self._tail = stop
        self.size += count

    def update(self, slots: Slots, priorities: Array) -> None:
        """Priorities are ignored."""

    def slots(self) -> Slots:
        """All items, oldest first."""
        return self._between(self._head, self._tail)

    def _compact(self) -> None:
        slots = self.slots()
        self._head, self._tail = 0, len(slots)
        self._queue[: self._tail] = slots
        self._index[slots] = np.arange(self._tail)

    def _between(self, start: int, stop: int) -> Slots:
        slots = self._queue[start:stop]
        return slots[self._index[slots] == np.arange(start, stop)]


class Fifo(_Queue):
    """Selects the oldest item."""

    def remove(self, slots: Slots) -> None:
        """Advance the head if these are the oldest items, otherwise leave gaps."""
        stop = self._head + len(slots)
        if stop <= self._tail and (self._queue[self._head : stop] == slots).all():
            self._head = stop
        self._index[slots] = -1
        self.size -= len(slots)

    def peek(self, count: int) -> Slots:
        """The oldest items, oldest first."""
        if self.size == self._tail - self._head:
            return self._queue[self._head : min(self._head + count, self._tail)].copy()
        start, found = self._head, []
        while count > 0 and start < self._tail:
            stop = min(start + max(count, 64), self._tail)
            slots = self._between(start, stop)[:count]
            if not found and not len(slots):
                self._head = stop
            start, count = stop, count - len(slots)
            found.append(slots)
        return np.concatenate(found)


class Lifo(_Queue):
    """Selects the newest item."""

    def remove(self, slots: Slots) -> None:
        """Move the tail back if these are the newest items, otherwise leave gaps."""
        start = self._tail - len(slots)
        if start >= self._head and (self._queue[start : self._tail] == slots[::-1]).all():
            self._tail = start
        self._index[slots] = -1
        self.size -= len(slots)

    def peek(self, count: int) -> Slots:
        """The newest items, newest first."""
        stop, found = self._tail, []
        while count > 0 and stop > self._head:
            start = max(stop - max(count, 64), self._head)
            slots = self._between(start, stop)[::-1][:count]
            if not found and not len(slots):
                self._tail = start
            stop, count = start, count - len(slots)
            found.append(slots)
        return np.concatenate(found)
