"""Selection by age: first in first out, and last in first out."""

from __future__ import annotations

import numpy as np

from rollstream.replay.arrays import Array, as_array, is_rotation
from rollstream.replay.selectors.base import OrderedSelector, Slots

_NONE = np.empty(0, np.int64)


class _Queue(OrderedSelector):
    """Items in insertion order, with gaps where items were removed."""

    def reset(self, capacity: int) -> None:
        """An empty queue."""
        self.size = 0
        self._capacity = capacity
        self._head = self._tail = 0
        self._queue, self._index = _NONE, _NONE
        self._in_order = True
        """Whether the queue is the slots from `_head` to size - 1, then from 0 to `_head`: new items only
        replaced the oldest, and none has been removed otherwise. Then `_queue` is not used."""

    @property
    def item_bytes(self) -> int:
        """Two entries of a queue and an index, once items have been removed."""
        return 0 if self._in_order else 24

    def _store_queue(self) -> None:
        """Make the queue long enough to be compacted rarely."""
        slots = self.slots()
        self._in_order = False
        self._queue = np.empty(2 * self._capacity + 64, np.int64)
        self._index = np.full(self._capacity, -1, np.int64)  # of a slot in `_queue`; other entries are gaps
        self._head, self._tail = 0, len(slots)
        self._queue[: self._tail] = slots
        self._index[slots] = np.arange(self._tail)

    def insert(self, slots: Slots | slice, priorities: Array | float) -> None:  # noqa: ARG002
        """Append."""
        if self._in_order:
            if isinstance(slots, slice) and slots.start == self.size and self._head == 0:
                self.size = slots.stop
                return
            if isinstance(slots, np.ndarray) and self.size == 0 and is_rotation(slots):
                self._head, self.size = int(slots[0]), len(slots)
                return
            self._store_queue()
        slots = as_array(slots)
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
        if self._in_order:
            return (np.arange(self.size) + self._head) % max(self.size, 1)
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
        if self._in_order:
            self._store_queue()
        stop = self._head + len(slots)
        if stop <= self._tail and (self._queue[self._head : stop] == slots).all():
            self._head = stop
        self._index[slots] = -1
        self.size -= len(slots)

    def replace(self, slots: Slots | slice, priorities: Array | float) -> None:
        """Advance the head if these are the oldest items."""
        if self._in_order and isinstance(slots, slice) and slots.start == self._head:
            self._head = slots.stop if slots.stop < self.size else 0
        else:
            super().replace(slots, priorities)

    def oldest(self, count: int) -> Slots | slice:
        """The oldest items, oldest first; a slice may be a part of them."""
        if self._in_order:
            return slice(self._head, min(self._head + count, self.size))
        return self.peek(count)

    def nth(self, index: int) -> int:
        """The item before which `index` others would be selected."""
        if self._in_order:
            return (self._head + index) % self.size
        return int(self.peek(index + 1)[-1])

    def peek(self, count: int) -> Slots:
        """The oldest items, oldest first."""
        if self._in_order:
            count = min(count, self.size)
            return np.arange(self._head, self._head + count) % max(self.size, 1)
        if self.size == self._tail - self._head:
            return self._queue[self._head : min(self._head + count, self._tail)].copy()
        start, found = self._head, [_NONE]
        while count > 0 and start < self._tail:
            stop = min(start + max(count, 64), self._tail)
            slots = self._between(start, stop)[:count]
            if len(found) == 1 and not len(slots):
                self._head = stop
            start, count = stop, count - len(slots)
            found.append(slots)
        return np.concatenate(found)


class Lifo(_Queue):
    """Selects the newest item."""

    def remove(self, slots: Slots) -> None:
        """Move the tail back if these are the newest items, otherwise leave gaps."""
        if self._in_order:
            self._store_queue()
        start = self._tail - len(slots)
        if start >= self._head and (self._queue[start : self._tail] == slots[::-1]).all():
            self._tail = start
        self._index[slots] = -1
        self.size -= len(slots)

    def peek(self, count: int) -> Slots:
        """The newest items, newest first."""
        if self._in_order:
            self._store_queue()
        stop, found = self._tail, [_NONE]
        while count > 0 and stop > self._head:
            start = max(stop - max(count, 64), self._head)
            slots = self._between(start, stop)[::-1][:count]
            if len(found) == 1 and not len(slots):
                self._tail = start
            stop, count = start, count - len(slots)
            found.append(slots)
        return np.concatenate(found)
