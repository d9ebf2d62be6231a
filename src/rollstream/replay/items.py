"""The items of a table, in parallel arrays indexed by slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.arrays import Array
from rollstream.replay.selectors import Slots
from rollstream.replay.step_storage import Rows

_ONE = np.int64(1)
"""`np.add.at` takes 4 us for 1024 indices if the dtypes agree, and 76 us with a Python int."""


class NewItems(NamedTuple):
    """Items to insert: windows from row `start` up to, but not including, row `end`."""

    start: Rows
    end: Rows
    priorities: Array | float

    def part(self, index: int, count: int) -> NewItems:
        """`count` of them, from `index` on."""
        own = slice(index, index + count)
        given = self.priorities
        return NewItems(
            self.start[own], self.end[own], given[own] if isinstance(given, np.ndarray) else given
        )


class Items:
    """Keys, rows, priorities and sample counts of items.

    A key has the slot in its low bits and a counter above them, so keys increase and are never reused.

    Args:
        capacity: Number of slots.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.size = 0
        self._slot_bits = capacity.bit_length()
        self._slot_mask = np.array((1 << self._slot_bits) - 1)
        # Side by side, for they are read together. No memory backs the records beyond the capacity, which are
        # those of keys with an invalid slot; their key of 0 never matches.
        self._records = np.zeros((1 << self._slot_bits, 5), np.int64)
        self.start, self.end, self.keys, priorities, self.times_sampled = self._records.T
        self.priorities = priorities.view(np.float64)
        self.keys[:capacity] = -1
        self._removed_unique_samples = 0
        self._next_key = 0
        self._free = np.empty(capacity, np.int64)  # stack of freed slots
        self._num_free = 0
        self._high_water = 0  # slots from here on have never been used

    @property
    def item_bytes(self) -> int:
        """Memory per item."""
        return self._records.shape[1] * self._records.itemsize

    def slots(self) -> Slots:
        """The slots in use."""
        return np.flatnonzero(self.keys[: self.capacity] >= 0)

    @property
    def unique_samples(self) -> int:
        """Number of items sampled at least once; takes time proportional to the capacity."""
        return self._removed_unique_samples + int(np.count_nonzero(self.times_sampled[: self.capacity]))

    def find(self, keys: Array) -> tuple[Slots, Array]:
        """Slots of those items that exist, and a mask of which they are."""
        keys = np.asarray(keys, np.int64)
        slots = keys & self._slot_mask
        found = self.keys[slots] == keys
        return (slots, found) if np.count_nonzero(found) == len(found) else (slots[found], found)

    def read(self, slots: Slots) -> Array:
        """Start, end, key, priority and sample count of items, `[5, N]`."""
        return self._records.take(slots, axis=0).T.copy()

    def count_samples(self, slots: Slots) -> None:
        """Count one sample per slot."""
        np.add.at(self.times_sampled, slots, _ONE)

    def allocate(self, count: int) -> Slots | slice:
        """Take free slots."""
        self.size += count
        if not self._num_free:
            self._high_water += count
            return slice(self._high_water - count, self._high_water)
        reused = min(count, self._num_free)
        self._num_free -= reused
        slots = self._free[self._num_free : self._num_free + reused]
        if reused == count:
            return slots.copy()
        unused = np.arange(self._high_water, self._high_water + count - reused)
        self._high_water += len(unused)
        return np.concatenate([slots, unused])

    def write(self, slots: Slots | slice, new: NewItems) -> Array:
        """Write items into slots that are free, and return their keys."""
        count, bits = len(new.start), self._slot_bits
        if isinstance(slots, slice):
            first, step = (self._next_key << bits) | slots.start, (1 << bits) + 1
            keys = np.arange(first, first + count * step, step)
        else:
            keys = (np.arange(self._next_key, self._next_key + count) << bits) | slots
        self._next_key += count
        self.keys[slots] = keys
        self.start[slots], self.end[slots] = new.start, new.end
        self.priorities[slots] = new.priorities
        return keys

    def replace(self, slots: Slots | slice, new: NewItems) -> Array:
        """Write items into slots of others, and return their keys."""
        self._clear_times_sampled(slots)
        return self.write(slots, new)

    def _clear_times_sampled(self, slots: Slots | slice) -> None:
        if sampled := np.count_nonzero(self.times_sampled[slots]):
            self._removed_unique_samples += int(sampled)
            self.times_sampled[slots] = 0

    def free(self, slots: Slots) -> None:
        """Give slots back."""
        self.keys[slots] = -1
        self._clear_times_sampled(slots)
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
        self.size -= len(slots)

    def state_dict(self) -> dict[str, Any]:
        """The items, and which slots and keys come next."""
        slots = self.slots()
        return {
            "slots": slots,
            "keys": self.keys[slots],
            "start": self.start[slots],
            "end": self.end[slots],
            "priorities": self.priorities[slots],
            "times_sampled": self.times_sampled[slots],
            "free": self._free[: self._num_free].copy(),
            "next_key": self._next_key,
        }

    def load_state_dict(self, state: Mapping[str, Any], unique_samples: int) -> None:
        """Restore the items, and how many were sampled at least once."""
        slots = np.asarray(state["slots"])
        self.keys[: self.capacity] = -1
        self.keys[slots] = state["keys"]
        self.start[slots], self.end[slots] = state["start"], state["end"]
        self.priorities[slots] = state["priorities"]
        self.times_sampled[: self.capacity] = 0
        self.times_sampled[slots] = state["times_sampled"]
        self._removed_unique_samples = unique_samples - int(np.count_nonzero(state["times_sampled"]))
        self._num_free = len(state["free"])
        self._free[: self._num_free] = state["free"]
        self._next_key = int(state["next_key"])
        self.size = len(slots)
        self._high_water = self.size + self._num_free
