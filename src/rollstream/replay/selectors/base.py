"""The interface of selectors.

Items are identified by slots, indices below the table's capacity. All operations are vectorized: selecting n
items at once returns what n selections in a row would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np

from rollstream.replay.arrays import Array, as_array

Slots: TypeAlias = Array
"""Slot indices. Where consecutive slots may be a slice, the type says so: most are, and slices are faster."""


class Selector(ABC):
    """Selects items of a table. Every table needs its own."""

    size: int
    """Number of items."""

    @property
    @abstractmethod
    def item_bytes(self) -> int:
        """Memory per item."""

    @abstractmethod
    def reset(self, capacity: int) -> None:
        """Drop all items and make room for slots below `capacity`."""

    @abstractmethod
    def insert(self, slots: Slots | slice, priorities: Array | float) -> None:
        """Add items."""

    @abstractmethod
    def update(self, slots: Slots, priorities: Array) -> None:
        """Change priorities; if a slot occurs twice, the last one counts."""

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Remove items; the slots are distinct."""

    def replace(self, slots: Slots | slice, priorities: Array | float) -> None:
        """Remove items and add new ones in the same slots."""
        self.remove(as_array(slots))
        self.insert(slots, priorities)

    @abstractmethod
    def select(self, uniforms: Array) -> tuple[Slots, Array]:
        """Select an item for each random number in [0, 1); return slots and their probabilities."""

    @abstractmethod
    def slots(self) -> Slots:
        """All items, in the order in which inserting them again restores the selector."""

    @property
    def total_weight(self) -> float:
        """The sum of all weights; an item's probability is its weight divided by this."""
        return float(self.size)


class OrderedSelector(Selector):
    """A selector that always selects the first item of some order."""

    @abstractmethod
    def peek(self, count: int) -> Slots:
        """The first `count` items in order, or all if there are fewer."""

    def select(self, uniforms: Array) -> tuple[Slots, Array]:
        """The first item, with probability 1."""
        return np.repeat(self.peek(1), len(uniforms)), np.ones(len(uniforms))
