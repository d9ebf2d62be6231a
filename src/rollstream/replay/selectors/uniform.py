"""Uniform selection."""

from __future__ import annotations

import numpy as np

from rollstream.replay.arrays import Array, filled
from rollstream.replay.selectors.base import Selector, Slots


class Uniform(Selector):
    """Every item has the same probability."""

    item_bytes = 16

    def reset(self, capacity: int) -> None:
        """Items are stored without gaps, so a random index is a random item."""
        self.size = 0
        self._slots = np.empty(capacity, np.int64)
        self._index = np.full(capacity, -1, np.int64)  # of a slot in `_slots`

    def insert(self, slots: Slots, priorities: Array) -> None:  # noqa: ARG002
        """Append."""
        stop = self.size + len(slots)
        self._slots[self.size : stop] = slots
        self._index[slots] = np.arange(self.size, stop)
        self.size = stop

    def update(self, slots: Slots, priorities: Array) -> None:
        """Priorities are ignored."""

    def remove(self, slots: Slots) -> None:
        """Move the last items into the gaps."""
        size = self.size - len(slots)
        index = self._index[slots]
        self._index[slots] = -1
        last = self._slots[size : self.size]
        moved = last[self._index[last] >= 0]
        if moved.size:
            gaps = index[index < size]
            self._slots[gaps] = moved
            self._index[moved] = gaps
        self.size = size

    def replace(self, slots: Slots, priorities: Array) -> None:
        """The same slots stay selectable."""

    def select(self, uniforms: Array) -> tuple[Slots, Array]:
        """Any item."""
        index = (uniforms * self.size).astype(np.int64)
        return self._slots.take(index), filled(len(uniforms), 1.0 / self.size)

    def slots(self) -> Slots:
        """All items in storage order."""
        return self._slots[: self.size].copy()
