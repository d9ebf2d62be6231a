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
            bootstrapped from; or `steps`, all steps of the window, `[N, max_length, ...]`, zero-padded.
        stack: Frame stacking: that many steps up to and including this one, oldest first, `[N, stack, ...]`.
            The first step of an episode is repeated, as in Gymnasium's `FrameStackObservation`.
    """

    column: str
    at: Literal["first", "next", "steps"] = "first"
    stack: int = 1


def check_fields(signature: Signature, fields: Mapping[str, Field]) -> None:
    """Raise `SignatureError` unless all fields are valid."""
    for name, field in fields.items():
        if field.column not in signature:
            raise SignatureError(
                f"field {name!r} needs column {field.column!r}; the columns are {', '.join(signature)}"
            )
        if field.at not in ("first", "next", "steps"):
            raise SignatureError(f"field {name!r} has at={field.at!r}; use 'first', 'next' or 'steps'")
        if field.stack < 1:
            raise SignatureError(f"field {name!r} has stack={field.stack}; set it to 1 or more")


def gather_rows(
    storage: StepStorage, fields: Mapping[str, Field], start: Rows, end: Rows
) -> dict[str, Array]:
    """`gather_fields` for windows of one step, without frame stacks."""
    columns, gathered = storage.columns, {}
    for name, field in fields.items():
        rows = columns[field.column].take(end if field.at == "next" else start, axis=0)
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
    rows_at: dict[Any, Rows] = {"first": start, "next": end}
    padding: Array | None = None
    gathered: dict[str, Array] = {}
    shared: dict[Any, Array] = {}
    for name, field in fields.items():
        if field.stack > 1 and max_length == 1 and field.at != "steps":
            key = (field.column, field.stack)
            if key not in shared:
                rows = storage.preceding(end, field.stack + 1)
                shared[key] = storage.columns[field.column].take(rows, axis=0)
            gathered[name] = shared[key][:, :-1] if field.at == "first" else shared[key][:, 1:]
            continue
        if field.at == "steps" and "steps" not in rows_at:
            rows_at["steps"], padding = _step_rows(storage, end, lengths, max_length)
        rows = rows_at[field.at]
        if field.stack > 1:
            key = (field.at, field.stack)
            if key not in rows_at:
                rows_at[key] = storage.preceding(rows, field.stack)
            rows = rows_at[key]
        gathered[name] = storage.columns[field.column].take(rows, axis=0)
        if field.at == "steps" and padding is not None:
            gathered[name][padding] = 0
    return gathered


def _step_rows(storage: StepStorage, end: Rows, lengths: Array, max_length: int) -> tuple[Rows, Array | None]:
    """The rows of all steps of each window, `[N, max_length]`, and which of them are padding."""
    rows = storage.preceding(storage.previous.take(end), max_length)
    if (lengths == max_length).all():
        return rows, None
    index = np.arange(max_length) + (max_length - lengths)[:, None]
    padding = index >= max_length
    index[padding] = max_length - 1
    return np.take_along_axis(rows, index, axis=1), padding
