"""Reference-counted storage of steps: each step is stored once, however many items share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from rollstream.replay.arrays import Array
from rollstream.replay.signature import Signature

Rows: TypeAlias = Array
"""Row indices."""

STEP_BITS = 32
"""A step id is `episode << STEP_BITS | step`, where `step` counts from 0 at the start of the episode."""
STEP_MASK = (1 << STEP_BITS) - 1
ONE = np.int32(1)
"""`np.add.at` takes 4 us for 1024 indices if the dtypes agree, and 76 us with a Python int."""


class StepStorage:
    """Rows that hold one step each, with links to the previous step of the episode and a reference count.

    `previous` of an episode's first row is that row itself, so walking back repeats the first observation,
    as frame stacking does. A row without references is free and will be reused.

    Columns are allocated up front, and backed by memory as they are written. When rows run out, the capacity
    grows by half.

    Args:
        signature: The columns of a step.
        capacity: Initial number of rows.
    """

    def __init__(self, signature: Signature, capacity: int = 1024):
        self.signature = dict(signature)
        self.columns = {name: np.empty((capacity, *s.shape), s.dtype) for name, s in self.signature.items()}
        self.previous = np.empty(capacity, np.int64)
        self.step_ids = np.empty(capacity, np.int64)
        self.refcounts = np.zeros(capacity, np.int32)
        self.capacity = capacity
        self.row_bytes = sum(spec.nbytes for spec in self.signature.values())
        self._high_water = 0  # rows from here on have never been used
        self._free_rows = np.empty(capacity, np.int64)  # ring buffer, in the order rows became free
        self._free_head = 0
        self._num_free = 0

    @property
    def num_used(self) -> int:
        """Number of rows with references."""
        return self._high_water - self._num_free

    @property
    def index_bytes(self) -> int:
        """Bytes per row besides the columns."""
        arrays = (self.previous, self.step_ids, self.refcounts, self._free_rows)
        return sum(array.itemsize for array in arrays)

    # Allocation --------------------------------------------------------------------------------

    def allocate(self, count: int) -> Rows:
        """Take free rows, with one reference each and undefined content."""
        unused = self.capacity - self._high_water
        if count > self._num_free + unused:
            self._grow(self._high_water + count)
            unused = self.capacity - self._high_water
        if count <= self._num_free:
            rows = self._pop_free(count)
        elif count <= unused:
            rows = self._take_unused(count)
        else:
            rows = np.concatenate([self._take_unused(unused), self._pop_free(count - unused)])
        self.refcounts[rows] = 1
        return rows

    def retain(self, rows: Rows) -> None:
        """Add a reference to each row; a row may occur several times."""
        np.add.at(self.refcounts, rows, ONE)

    def release(self, rows: Rows) -> None:
        """Drop a reference to each row, and free those without any left."""
        np.subtract.at(self.refcounts, rows, ONE)
        free = rows[self.refcounts[rows] == 0]
        if free.size > 1:  # drop duplicates: `previous` of a free row can be overwritten
            marks = np.arange(free.size)
            self.previous[free] = marks
            free = free[self.previous[free] == marks]
        if free.size:
            self._push_free(free)

    def _take_unused(self, count: int) -> Rows:
        self._high_water += count
        return np.arange(self._high_water - count, self._high_water)

    def _pop_free(self, count: int) -> Rows:
        """The rows that have been free longest: mostly contiguous, as they were at first."""
        stop = self._free_head + count
        if stop <= self.capacity:
            rows = self._free_rows[self._free_head : stop].copy()
        else:
            stop -= self.capacity
            rows = np.concatenate([self._free_rows[self._free_head :], self._free_rows[:stop]])
        self._free_head = stop
        self._num_free -= count
        return rows

    def _push_free(self, rows: Rows) -> None:
        start = (self._free_head + self._num_free) % self.capacity
        stop = start + rows.size
        if stop <= self.capacity:
            self._free_rows[start:stop] = rows
        else:
            split = self.capacity - start
            self._free_rows[start:], self._free_rows[: stop - self.capacity] = rows[:split], rows[split:]
        self._num_free += rows.size

    def _grow(self, at_least: int) -> None:
        capacity = max(at_least, self.capacity + self.capacity // 2)
        free = self._pop_free(self._num_free)
        for name, column in self.columns.items():
            self.columns[name] = _resized(column, capacity)
        self.previous, self.step_ids = _resized(self.previous, capacity), _resized(self.step_ids, capacity)
        self.refcounts = _resized(self.refcounts, capacity)
        self._free_rows = np.empty(capacity, np.int64)
        self.capacity, self._free_head = capacity, 0
        self._push_free(free)

    # Windows -----------------------------------------------------------------------------------

    def preceding(self, rows: Rows, count: int) -> Array:
        """Each row with the `count - 1` rows before it, oldest first: `[..., count]`.

        The first row of an episode is repeated where there is none before it.
        """
        stacked = np.empty((*rows.shape, count), np.int64)
        for index in range(count - 1, 0, -1):
            stacked[..., index] = rows
            rows = self.previous.take(rows)
        stacked[..., 0] = rows
        return stacked

    def lengths(self, start: Rows, end: Rows) -> Array:
        """Number of steps from `start` up to `end`; not positive unless `end` follows in the same episode."""
        return self.step_ids.take(end) - self.step_ids.take(start)

    def window_rows(self, start: Rows, end: Rows, lengths: Array, *, max_length: int, stack: int) -> Rows:
        """All rows of some windows: their steps, the row after them, and the frames stacked on the first."""
        parts, row = [end], end
        for steps in range(1, max_length):
            longer = lengths > steps
            if not longer.any():
                break
            row = self.previous.take(row)
            parts.append(row[longer])
        parts.append(start)
        row = start
        for _ in range(stack - 1):
            row = self.previous.take(row)
            parts.append(row)
        return np.concatenate(parts)

    # State -------------------------------------------------------------------------------------

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """All rows ever used; views of the live arrays unless `copy`."""

        def used(array: Array) -> Array:
            return array[: self._high_water].copy() if copy else array[: self._high_water]

        return {
            "columns": {name: used(column) for name, column in self.columns.items()},
            "previous": used(self.previous),
            "step_ids": used(self.step_ids),
            "refcounts": used(self.refcounts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the rows; the capacity grows if needed."""
        self._high_water = count = len(state["refcounts"])
        self._free_head = self._num_free = 0
        if count > self.capacity:
            self._grow(count)
        for name, column in self.columns.items():
            column[:count] = state["columns"][name]
        self.previous[:count], self.step_ids[:count] = state["previous"], state["step_ids"]
        self.refcounts[:count] = state["refcounts"]
        self.refcounts[count:] = 0
        self._push_free(np.flatnonzero(self.refcounts[:count] == 0))


def _resized(array: Array, rows: int) -> Array:
    longer = np.zeros((rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
