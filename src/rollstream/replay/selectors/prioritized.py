"""Prioritized selection (Schaul et al., 2016, arXiv:1511.05952)."""

from __future__ import annotations

import numpy as np

from rollstream.replay.arrays import Array, filled
from rollstream.replay.errors import ReplayError
from rollstream.replay.selectors.base import Selector, Slots
from rollstream.replay.selectors.sum_tree import SumTree


class Prioritized(Selector):
    r"""Selects item i with probability $p_i^\alpha / \sum_j p_j^\alpha$.

    Items of priority 0 are never selected, for any exponent, unless all items have priority 0: then all are
    equally likely.

    Args:
        priority_exponent: alpha; 0 is uniform sampling.
    """

    def __init__(self, priority_exponent: float = 1.0):
        if priority_exponent < 0:
            raise ReplayError(f"priority_exponent is {priority_exponent:g}; set it to 0 or more")
        self.priority_exponent = priority_exponent

    @property
    def item_bytes(self) -> int:
        """A weight, its share of the sums, and a flag."""
        return 10

    def reset(self, capacity: int) -> None:
        """A tree of zero weights."""
        self.size = 0
        self._present = np.zeros(capacity, bool)
        self._tree = SumTree(capacity)

    def insert(self, slots: Slots | slice, priorities: Array | float) -> None:
        """Set weights."""
        self.size += slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        self._present[slots] = True
        self.update(slots, priorities)

    def update(self, slots: Slots | slice, priorities: Array | float) -> None:
        """Set weights."""
        if self.priority_exponent == 1:
            weights = priorities
        elif self.priority_exponent == 0:
            weights = np.not_equal(priorities, 0)
        else:
            weights = priorities**self.priority_exponent
        self._tree.update(slots, weights)

    def remove(self, slots: Slots) -> None:
        """Set weights to 0."""
        self.size -= len(slots)
        self._present[slots] = False
        self._tree.update(slots, 0.0)

    def replace(self, slots: Slots | slice, priorities: Array | float) -> None:
        """Set weights."""
        self.update(slots, priorities)

    def select(self, uniforms: Array) -> tuple[Slots, Array]:
        """Sample from the sum tree."""
        if self._tree.total:
            return self._tree.sample(uniforms)
        index = (uniforms * self.size).astype(np.int64)
        return self.slots()[index], filled(len(uniforms), 1.0 / self.size)

    def slots(self) -> Slots:
        """All items by slot; their order does not matter."""
        return np.flatnonzero(self._present)

    @property
    def total_weight(self) -> float:
        """The sum of priorities to the power of alpha."""
        return self._tree.total
