"""Storage of steps: each step is stored once, however many items share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import numpy as np

from rollstream.replay.arrays import Array, as_array
from rollstream.replay.signature import Signature

Rows: TypeAlias = Array
"""Row indices."""

STEP_BITS = 32
"""A step id is `episode << STEP_BITS | step`, where `step` counts from 0 at the start of the episode."""
STEP_MASK = (1 << STEP_BITS) - 1
ONE = np.int32(1)
_NONE = np.empty(0, np.int64)


class RowUser(Protocol):
    """Whoever refers to rows: a table for its items, a writer for its streams."""

    def used_rows(self) -> Rows:
        """The rows in use, once per reference."""
        ...

    def max_age(self) -> int:
        """An upper bound of the age (see `StepStorage.ages`) of the rows in use; -1 if there are none."""
        ...


class StepStorage:
    """Rows that hold one step each, with a link to the previous step of the episode.

    `previous` of an episode's first row is that row itself, so walking back repeats the first observation,
    as frame stacking does.

    Rows are a ring: new steps overwrite the oldest, up to the oldest row that is still in use. Where items
    are not removed in the order of their insertion, the ring comes to a row that stays in use; from then on,
    the rows that nobody uses are looked for, and reused in any order. When rows run out, the capacity grows.

    Columns are allocated up front, and backed by memory as they are written.

    Args:
        signature: The columns of a step.
        capacity: Initial number of rows.
    """

    def __init__(self, signature: Signature, capacity: int = 1024):
        self.signature = dict(signature)
        self.columns = {name: np.zeros((capacity, *s.shape), s.dtype) for name, s in self.signature.items()}
        self.previous = np.empty(capacity, np.int64)
        self.step_ids = np.empty(capacity, np.int64)
        self.capacity = capacity
        self.row_bytes = sum(spec.nbytes for spec in self.signature.values())
        self.users: WeakSet[RowUser] = WeakSet()
        self._high_water = 0  # rows from here on have never been used
        self._next = 0  # of the ring
        self._room = capacity  # rows of the ring from there on that are known to be free
        self._free: Rows | None = None  # the free rows, once they are no ring
        self._held: Array | None = None  # references by `allocate`

    @property
    def refcounts(self) -> Array:
        """Number of references to each row; takes time proportional to the capacity."""
        counts = np.zeros(self.capacity, np.int64) if self._held is None else self._held.astype(np.int64)
        for user in self.users:
            counts += np.bincount(user.used_rows(), minlength=self.capacity)
        return counts.astype(np.int32)

    @property
    def num_used(self) -> int:
        """Number of rows in use; takes time proportional to the capacity."""
        return int(np.count_nonzero(self._used()))

    @property
    def index_bytes(self) -> int:
        """Bytes per row besides the columns."""
        return self.previous.itemsize + self.step_ids.itemsize

    def _used(self) -> Array:
        used = np.zeros(self.capacity, bool) if self._held is None else self._held > 0
        for user in self.users:
            used[user.used_rows()] = True
        return used

    # Allocation --------------------------------------------------------------------------------

    def take(self, count: int) -> Rows | slice:
        """Take free rows with undefined content; they are free again if nobody uses them by the next call."""
        if count > self._room:
            self._find_room(count)
        self._room -= count
        if self._free is not None:
            first = len(self._free) - self._room - count
            rows = self._free[first : first + count]
            self._high_water = max(self._high_water, int(rows.max(initial=-1)) + 1)
            return rows
        start = self._next if self._next < self.capacity else 0
        stop = start + count
        if stop <= self.capacity:
            self._next = stop
            if stop > self._high_water:
                self._high_water = stop
            return slice(start, stop)
        self._next, self._high_water = stop - self.capacity, self.capacity
        return np.arange(start, stop) % self.capacity

    def ages(self, rows: Any) -> Any:
        """Age of rows within the ring: the newest has age 0."""
        return (self._next - 1 - rows) % self.capacity

    def allocate(self, count: int) -> Rows:
        """Take free rows with undefined content, and hold a reference to each until `release`."""
        if count <= self._room:
            rows = as_array(self.take(count))
        else:
            free = np.flatnonzero(~self._used())
            if len(free) < count:
                self._grow(self.capacity + count - len(free))
                free = np.flatnonzero(~self._used())
            rows, self._room = free[:count], 0
            self._high_water = max(self._high_water, int(rows.max(initial=-1)) + 1)
        if self._held is None:
            self._held = np.zeros(self.capacity, np.int32)
        self._held[rows] += ONE
        return rows

    def release(self, rows: Rows) -> None:
        """Drop references of `allocate`, as far as there are any."""
        if self._held is not None:
            np.subtract.at(self._held, rows, ONE)
            np.maximum(self._held, 0, out=self._held)
            if not self._held.any():
                self._held = None

    def _find_room(self, count: int) -> None:
        if self._free is None:
            ages = [user.max_age() for user in self.users]
            if self._held is not None:
                ages.append(int(self.ages(np.flatnonzero(self._held)).max(initial=-1)))
            self._room = self.capacity - 1 - max(ages, default=-1)
            if count <= self._room:
                return
        free = np.flatnonzero(~self._used())
        if len(free) >= count + self.capacity // 128:  # else the next search would come soon
            self._free, self._room = free, len(free)
        else:
            self._grow(self.capacity + max(count, self.capacity // 8))

    def _grow(self, capacity: int) -> None:
        """Add rows: at the end of the ring if the newest row is last there, else to the free ones."""
        used = self._used()
        if self._free is None and not used[self._next :].any():
            self._room = capacity - self._next
        else:
            self._free = np.concatenate([np.flatnonzero(~used), np.arange(self.capacity, capacity)])
            self._room = len(self._free)
        for name, column in self.columns.items():
            self.columns[name] = _resized(column, capacity)
        self.previous, self.step_ids = _resized(self.previous, capacity), _resized(self.step_ids, capacity)
        if self._held is not None:
            self._held = _resized(self._held, capacity)
        self.capacity = capacity

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

    def window_rows(self, start: Rows, end: Rows, lengths: Array, *, max_length: int, history: int) -> Rows:
        """All rows of some windows: their steps, the row after them, and those before the first."""
        parts, row = [end], end
        for steps in range(1, max_length):
            longer = lengths > steps
            if not longer.any():
                break
            row = self.previous.take(row)
            parts.append(row[longer])
        parts.append(start)
        row = start
        for _ in range(history):
            row = self.previous.take(row)
            parts.append(row)
        return np.concatenate(parts)

    def steps_before(self, rows: Rows) -> Array:
        """Number of stored steps of the episode before each row."""
        return self.step_ids.take(rows) & STEP_MASK

    # State -------------------------------------------------------------------------------------

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """All rows ever used; views of the live arrays unless `copy`."""

        def used(array: Array) -> Array:
            return array[: self._high_water].copy() if copy else array[: self._high_water]

        return {
            "columns": {name: used(column) for name, column in self.columns.items()},
            "previous": used(self.previous),
            "step_ids": used(self.step_ids),
            "refcounts": self.refcounts[: self._high_water],
            "next_row": self._next if self._free is None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the rows, with all references as those of `allocate`; the capacity grows if needed."""
        self._high_water = count = len(state["refcounts"])
        if count > self.capacity:
            self._grow(count)
        next_row = state["next_row"]
        is_ring = next_row is not None and count in (next_row, self.capacity)
        self._free, self._next = None if is_ring else _NONE, int(next_row or 0)
        self._room = 0  # not known
        for name, column in self.columns.items():
            column[:count] = state["columns"][name]
        self.previous[:count], self.step_ids[:count] = state["previous"], state["step_ids"]
        self._held = np.zeros(self.capacity, np.int32)
        self._held[:count] = state["refcounts"]


def _resized(array: Array, rows: int) -> Array:
    longer = np.zeros((rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
