"""Selection by priority: smallest or largest first."""

from __future__ import annotations

import heapq
from typing import ClassVar

import numpy as np

from rollstream.replay.arrays import Array, as_array
from rollstream.replay.selectors.base import OrderedSelector, Slots


class _Heap(OrderedSelector):
    """Items by priority, then by the time of their last insert or update, oldest first."""

    sign: ClassVar[float]

    @property
    def item_bytes(self) -> int:
        """A heap entry is a tuple of three numbers, in up to two places."""
        return 184

    def reset(self, capacity: int) -> None:
        """An empty heap."""
        self.size = 0
        self._heap: list[tuple[float, int, int]] = []  # also has outdated entries, dropped lazily
        self._versions = [-1] * capacity  # of each item's current entry
        self._version = 0

    def insert(self, slots: Slots | slice, priorities: Array | float) -> None:
        """Push entries."""
        slots = as_array(slots)
        self.size += len(slots)
        self.update(slots, np.broadcast_to(priorities, slots.shape))

    def update(self, slots: Slots, priorities: Array) -> None:
        """Push new entries; the old ones are outdated."""
        for slot, priority in zip(slots.tolist(), priorities.tolist(), strict=True):
            self._versions[slot] = self._version
            heapq.heappush(self._heap, (self.sign * priority, self._version, slot))
            self._version += 1
        if len(self._heap) > 2 * self.size + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[float, int, int]) -> bool:
        return self._versions[entry[2]] == entry[1]

    def remove(self, slots: Slots) -> None:
        """The entries are outdated."""
        for slot in slots.tolist():
            self._versions[slot] = -1
        self.size -= len(slots)

    def peek(self, count: int) -> Slots:
        """The first items in order; they stay in the heap."""
        heap, found = self._heap, []
        while heap and len(found) < count:
            if not self._is_current(heap[0]):
                heapq.heappop(heap)
            elif count == 1:
                return np.array([heap[0][2]])
            else:
                found.append(heapq.heappop(heap))
        for entry in found:
            heapq.heappush(heap, entry)
        return np.array([slot for _, _, slot in found], np.int64)

    def slots(self) -> Slots:
        """All items in order."""
        current = sorted(entry for entry in self._heap if self._is_current(entry))
        return np.array([slot for _, _, slot in current], np.int64)


class MinHeap(_Heap):
    """Selects the item with the smallest priority; of several, the one least recently inserted or updated."""

    sign = 1.0


class MaxHeap(_Heap):
    """Selects the item with the largest priority; of several, the one least recently inserted or updated."""

    sign = -1.0
