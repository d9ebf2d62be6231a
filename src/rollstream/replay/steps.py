"""Steps of episodes, each stored once however many items refer to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

import numpy as np

from rollstream.replay.errors import SignatureError

Array = np.ndarray[Any, Any]
Rows: TypeAlias = Array
"""Row numbers."""

AGE_BITS = 32
"""Of a row's stamp: the steps since its episode began; the number of the episode is above them."""
AGE = (1 << AGE_BITS) - 1
ONE = np.int32(1)
"""To count with: `np.add.at` takes 4 us for 1024 places where the dtypes agree, and 76 us with a plain 1."""


@dataclass(frozen=True)
class Column:
    """Shape and dtype of what a column holds for one step."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def bytes(self) -> int:
        """Of one step."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype)}{list(self.shape)}"


Signature: TypeAlias = Mapping[str, Column]
_AS_IT_IS = " !$&'()*+,:;=?@[]"
"""What names in a path may hold beside letters; a slash would be another name, and `#` an index."""


def flattened(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that are dicts or tuples of arrays as several, named by their paths.

    >>> list(flattened({"observation": {"where": [0.0], "what": ([1], [2])}, "reward": [0.0]}))
    ['observation/where', 'observation/what/#0', 'observation/what/#1', 'reward']
    """
    flat: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, Mapping):
            flat.update(
                flattened({f"{name}/{quote(part, safe=_AS_IT_IS)}": own for part, own in value.items()})
            )
        elif isinstance(value, tuple):
            flat.update(flattened({f"{name}/#{part}": own for part, own in enumerate(value)}))
        else:
            flat[name] = value
    return flat


def nested(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns as they were before `flattened`.

    >>> nested({"observation/where": 0, "observation/what/#0": 1, "observation/what/#1": 2, "reward": 3})
    {'observation': {'where': 0, 'what': (1, 2)}, 'reward': 3}
    """
    parts: dict[str, Any] = {}
    for path, value in columns.items():
        name, slash, rest = path.partition("/")
        if slash:
            parts.setdefault(name, {})[rest] = value
        else:
            parts[name] = value
    return {name: _joined(value) if isinstance(value, dict) else value for name, value in parts.items()}


def _joined(columns: dict[str, Any]) -> Any:
    whole = nested(columns)
    if next(iter(whole)).startswith("#"):
        return tuple(whole.values())
    return {unquote(name): value for name, value in whole.items()}


def signature_of(columns: Mapping[str, Any]) -> dict[str, Column]:
    """The signature of time-major columns `[T, B, ...]`.

    >>> str(signature_of({"reward": np.zeros((5, 2), np.float32)})["reward"])
    'float32[]'
    """
    arrays = {name: np.asarray(value) for name, value in flattened(columns).items()}
    return {name: Column(array.shape[2:], array.dtype) for name, array in arrays.items()}


def check(signature: Signature, columns: Mapping[str, Any], leading: tuple[int, ...]) -> None:
    """Raise unless the columns are exactly those of the signature, with these leading axes."""
    if columns.keys() != signature.keys():
        for name in signature:
            if name not in columns:
                raise SignatureError(f"column {name!r} is missing; there are {', '.join(columns) or 'none'}")
        unknown = ", ".join(sorted(columns.keys() - signature.keys()))
        raise SignatureError(f"the table has no column {unknown}; it has {', '.join(signature)}")
    for name, column in signature.items():
        value = columns[name]
        if value.shape != (*leading, *column.shape) or value.dtype != column.dtype:
            raise SignatureError(
                f"column {name!r} is {value.dtype}{list(value.shape)} and has to be "
                f"{np.dtype(column.dtype)}{[*leading, *column.shape]}"
            )


class Steps:
    """Rows that hold a step each: an observation, what was done on it and what came of it.

    A row knows the row of the step before it in its episode (`previous`; the first knows itself, so that
    walking back repeats it, as frame stacks do), and carries a `stamp`: the number of its episode and, in the
    lower 32 bits, the steps since that began. Rows are counted references to; one that nobody refers to any
    more is free.

    Columns are allocated ahead and backed by memory as they are written. When rows run out there are half as
    many again.

    Args:
        signature: the columns.
        rows: how many to begin with.
    """

    def __init__(self, signature: Signature, rows: int = 1024):
        self.signature = dict(signature)
        self.columns = {name: np.empty((rows, *c.shape), c.dtype) for name, c in self.signature.items()}
        self.previous = np.empty(rows, np.int64)
        self.stamp = np.empty(rows, np.int64)
        self.references = np.zeros(rows, np.int32)
        self.capacity = rows
        self.row_bytes = sum(column.bytes for column in self.signature.values())
        self._fresh = 0  # rows from here on were never used
        self._freed = np.empty(rows, np.int64)  # those that were, in a ring, in the order they became free
        self._head = 0
        self._free = 0

    @property
    def in_use(self) -> int:
        """How many rows are referred to."""
        return self._fresh - self._free

    @property
    def index_bytes(self) -> int:
        """What a row takes beside its columns."""
        return 8 + 8 + 4 + 8

    def age(self, rows: Rows) -> Array:
        """Steps between the beginning of the episode and each row."""
        return self.stamp[rows] & AGE

    # Rows --------------------------------------------------------------------------------------

    def allocate(self, count: int) -> Rows:
        """Some free rows, with one reference each. What is in them is left from before."""
        unused = self.capacity - self._fresh
        if count > self._free + unused:
            self._grow(self._fresh + count)
            unused = self.capacity - self._fresh
        if count <= self._free:
            rows = self._take(count)
        elif count <= unused:
            rows = self._begin(count)
        else:
            rows = np.concatenate([self._begin(unused), self._take(count - unused)])
        self.references[rows] = 1
        return rows

    def _begin(self, count: int) -> Rows:
        self._fresh += count
        return np.arange(self._fresh - count, self._fresh)

    def _take(self, count: int) -> Rows:
        """The rows that are free for longest: mostly neighbours, as they were the first time."""
        stop = self._head + count
        if stop <= self.capacity:
            rows = self._freed[self._head : stop].copy()
        else:
            stop -= self.capacity
            rows = np.concatenate([self._freed[self._head :], self._freed[:stop]])
        self._head = stop
        self._free -= count
        return rows

    def _grow(self, least: int) -> None:
        rows = max(least, self.capacity + self.capacity // 2)
        freed = self._take(self._free)
        for name, column in self.columns.items():
            self.columns[name] = _extended(column, rows)
        self.previous, self.stamp = _extended(self.previous, rows), _extended(self.stamp, rows)
        self.references = _extended(self.references, rows)
        self._freed = np.empty(rows, np.int64)
        self.capacity, self._head = rows, 0
        self._give(freed)

    def hold(self, rows: Rows) -> None:
        """One reference more to each; a row may be there several times."""
        np.add.at(self.references, rows, ONE)

    def release(self, rows: Rows) -> None:
        """One reference less to each; rows without any become free."""
        np.subtract.at(self.references, rows, ONE)
        unused = rows[self.references[rows] == 0]
        if unused.size > 1:  # each once: `previous` of rows nobody needs is a place to leave a mark in
            marks = np.arange(unused.size)
            self.previous[unused] = marks
            unused = unused[self.previous[unused] == marks]
        if unused.size:
            self._give(unused)

    def _give(self, rows: Rows) -> None:
        start = (self._head + self._free) % self.capacity
        stop = start + rows.size
        if stop <= self.capacity:
            self._freed[start:stop] = rows
        else:
            part = self.capacity - start
            self._freed[start:], self._freed[: stop - self.capacity] = rows[:part], rows[part:]
        self._free += rows.size

    def back(self, rows: Rows, count: int) -> Array:
        """Each row after the `count - 1` before it, oldest first: `[..., count]`.

        Before the first step of an episode there is that step again.
        """
        walked = np.empty((*rows.shape, count), np.int64)
        for index in range(count - 1, 0, -1):
            walked[..., index] = rows
            rows = self.previous.take(rows)
        walked[..., 0] = rows
        return walked

    # State -------------------------------------------------------------------------------------

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """All rows that have been used; without a copy they change with these."""
        arrays = {"previous": self.previous, "stamp": self.stamp, "references": self.references}
        own = {name: array[: self._fresh] for name, array in (self.columns | arrays).items()}
        own = {name: array.copy() for name, array in own.items()} if copy else own
        return {"columns": {name: own.pop(name) for name in self.columns}} | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have exactly these rows."""
        self._fresh = fresh = len(state["references"])
        self._head = self._free = 0
        if fresh > self.capacity:
            self._grow(fresh)
        for name, column in self.columns.items():
            column[:fresh] = state["columns"][name]
        self.previous[:fresh], self.stamp[:fresh] = state["previous"], state["stamp"]
        self.references[:fresh] = state["references"]
        self.references[fresh:] = 0
        self._give(np.flatnonzero(self.references[: self._fresh] == 0))


def span(rows: Rows) -> Rows | slice:
    """The same rows as a slice, if they are neighbours in order: numpy writes to those faster."""
    if rows.size > 1 and rows[-1] - rows[0] == rows.size - 1 and (rows[1:] - rows[:-1] == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _extended(array: Array, rows: int) -> Array:
    longer = np.zeros((rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
