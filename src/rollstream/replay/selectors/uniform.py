"""Uniform selection."""

from __future__ import annotations

import numpy as np

from rollstream.replay.arrays import Array, as_array, filled, is_rotation
from rollstream.replay.selectors.base import Selector, Slots

_NONE = np.empty(0, np.int64)


class Uniform(Selector):
    """Every item has the same probability."""

    def reset(self, capacity: int) -> None:
        """Items are stored without gaps, so a random index is a random item."""
        self.size = 0
        self._capacity = capacity
        self._slots, self._index = _NONE, _NONE
        self._in_order = True
        """Whether the slots are 0 to size - 1: none has been removed. Then `_slots` is not used."""

    @property
    def item_bytes(self) -> int:
        """Two indices, once items have been removed."""
        return 0 if self._in_order else 16

    def insert(self, slots: Slots | slice, priorities: Array | float) -> None:  # noqa: ARG002
        """Append."""
        if self._in_order:
            if isinstance(slots, slice) and slots.start == self.size:
                self.size = slots.stop
                return
            if isinstance(slots, np.ndarray) and self.size == 0 and is_rotation(slots) and slots[0] == 0:
                self.size = len(slots)
                return
            self._store_slots()
        slots = as_array(slots)
        stop = self.size + len(slots)
        self._slots[self.size : stop] = slots
        self._index[slots] = np.arange(self.size, stop)
        self.size = stop

    def _store_slots(self) -> None:
        self._in_order = False
        self._slots = np.arange(self._capacity)
        self._index = np.arange(self._capacity)  # of a slot in `_slots`
        self._index[self.size :] = -1

    def update(self, slots: Slots, priorities: Array) -> None:
        """Priorities are ignored."""

    def remove(self, slots: Slots) -> None:
        """Move the last items into the gaps."""
        if self._in_order:
            self._store_slots()
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

    def replace(self, slots: Slots | slice, priorities: Array | float) -> None:
        """The same slots stay selectable."""

    def select(self, uniforms: Array) -> tuple[Slots, Array]:
        """Any item."""
        index = (uniforms * self.size).astype(np.int64)
        slots = index if self._in_order else self._slots.take(index)
        return slots, filled(len(uniforms), 1.0 / self.size)

    def slots(self) -> Slots:
        """All items in storage order."""
        return np.arange(self.size) if self._in_order else self._slots[: self.size].copy()
