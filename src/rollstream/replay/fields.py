"""Fields: which columns of an item a sample contains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollstream.replay.arrays import Array
from rollstream.replay.errors import SignatureError
from rollstream.replay.signature import Signature
from rollstream.replay.step_storage import Rows, StepStorage


@dataclass(frozen=True)
class Field:
    """A column of an item, as samples contain it.

    Args:
        column: Name of the table's column.
        at: `first`, the first step of the window; `next`, the row after its last step, whose observation is
            bootstrapped from; `steps`, all steps of the window, `[N, max_length, ...]`; or `steps_and_next`,
            all steps and the row after the last, `[N, max_length + 1, ...]`. Both are zero-padded.
        stack: Frame stacking: that many steps up to and including this one, oldest first, `[N, stack, ...]`.
            The first step of an episode is repeated, as in Gymnasium's `FrameStackObservation`.
        before: That many steps before the window's first come in front of its own, to warm up a recurrent
            network (burn-in): `[N, before + max_length, ...]`. With `first`, only the first of them. The
            first step of an episode is repeated where there are fewer.
    """

    column: str
    at: Literal["first", "next", "steps", "steps_and_next"] = "first"
    stack: int = 1
    before: int = 0

    @property
    def history(self) -> int:
        """Number of rows before the window's first step that it needs."""
        return self.before + self.stack - 1


def check_fields(signature: Signature, fields: Mapping[str, Field]) -> None:
    """Raise `SignatureError` unless all fields are valid."""
    for name, field in fields.items():
        if field.column not in signature:
            raise SignatureError(
                f"field {name!r} needs column {field.column!r}; the columns are {', '.join(signature)}"
            )
        if field.at not in _PLACES:
            raise SignatureError(
                f"field {name!r} has at={field.at!r}; use {', '.join(map(repr, _PLACES[:-1]))} or "
                f"{_PLACES[-1]!r}"
            )
        if field.stack < 1:
            raise SignatureError(f"field {name!r} has stack={field.stack}; set it to 1 or more")
        if field.before < 0 or (field.before and field.at == "next"):
            raise SignatureError(
                f"field {name!r} has before={field.before} and at={field.at!r}; set before to 0 or more, "
                f"and at to 'first', 'steps' or 'steps_and_next' if it is more"
            )


_PLACES = ("first", "next", "steps", "steps_and_next")


def gather_rows(
    storage: StepStorage, fields: Mapping[str, Field], start: Rows, end: Rows
) -> dict[str, Array]:
    """`gather_fields` for windows of one step, without frame stacks and steps before them."""
    columns, gathered = storage.columns, {}
    for name, field in fields.items():
        if field.at == "steps_and_next":
            gathered[name] = columns[field.column].take(np.stack([start, end], axis=1), 0)
            continue
        rows = columns[field.column].take(end if field.at == "next" else start, 0)
        gathered[name] = rows[:, None] if field.at == "steps" else rows
    return gathered


def gather_fields(
    storage: StepStorage,
    fields: Mapping[str, Field],
    start: Rows,
    end: Rows,
    lengths: Array,
    *,
    max_length: int,
) -> dict[str, Array]:
    """Copy the fields of windows out of the storage.

    Frame stacks of one-step windows share their frames: both are views of one copy.
    """
    windows = _Windows(storage, start, end, lengths, max_length)
    gathered: dict[str, Array] = {}
    shared: dict[Any, Array] = {}
    for name, field in fields.items():
        if field.stack > 1 and max_length == 1 and not field.before and field.at in ("first", "next"):
            key = (field.column, field.stack)
            if key not in shared:
                rows = storage.preceding(end, field.stack + 1)
                shared[key] = storage.columns[field.column].take(rows, axis=0)
            gathered[name] = shared[key][:, :-1] if field.at == "first" else shared[key][:, 1:]
            continue
        rows, padding = windows.rows(field)
        gathered[name] = storage.columns[field.column].take(rows, axis=0)
        if padding is not None:
            gathered[name][padding] = 0
    return gathered


class _Windows:
    """The rows of fields of some windows; each kind is looked up once.

    Args:
        storage: The storage.
        start: Row of each window's first step.
        end: Row after each window's last step.
        lengths: Number of steps of each window.
        max_length: Maximum number of steps.
    """

    def __init__(self, storage: StepStorage, start: Rows, end: Rows, lengths: Array, max_length: int):
        self._storage = storage
        self._start, self._end = start, end
        self._lengths, self._max_length = lengths, max_length
        self._known: dict[Any, tuple[Rows, Array | None]] = {}

    def rows(self, field: Field) -> tuple[Rows, Array | None]:
        """The rows that a field takes, and which of them are padding; `None` if none can be."""
        key = (field.at, field.before, field.stack)
        if key not in self._known:
            rows, padding = self._unstacked(field)
            if field.stack > 1:
                rows = self._storage.preceding(rows, field.stack)
            self._known[key] = rows, padding
        return self._known[key]

    def _unstacked(self, field: Field) -> tuple[Rows, Array | None]:
        if field.at == "next":
            return self._end, None
        before = self._before(field.before) if field.before else None
        if field.at == "first":
            return (self._start if before is None else before[:, 0]), None
        if field.at == "steps":
            last = self._storage.previous.take(self._end)
            rows, padding = _step_rows(self._storage, last, self._lengths, self._max_length)
        else:
            rows, padding = _step_rows(self._storage, self._end, self._lengths + 1, self._max_length + 1)
        if before is not None:
            rows = np.concatenate([before, rows], axis=1)
            if padding is not None:
                padding = np.concatenate([np.zeros(before.shape, bool), padding], axis=1)
        return rows, padding

    def _before(self, count: int) -> Rows:
        """The rows of so many steps before each window, `[N, count]`."""
        key = ("before", count)
        if key not in self._known:
            self._known[key] = self._storage.preceding(self._start, count + 1)[:, :-1], None
        return self._known[key][0]


def _step_rows(
    storage: StepStorage, last: Rows, lengths: Array, max_length: int
) -> tuple[Rows, Array | None]:
    """The rows of all steps up to the last one, `[N, max_length]`, and which of them are padding."""
    rows = storage.preceding(last, max_length)
    if (lengths == max_length).all():
        return rows, None
    index = np.arange(max_length) + (max_length - lengths)[:, None]
    padding = index >= max_length
    index[padding] = max_length - 1
    return np.take_along_axis(rows, index, axis=1), padding
