"""Appends the rows of a write to the storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rollstream.replay.arrays import Array, as_array
from rollstream.replay.episode_boundaries import Ends, EpisodeBoundaries, FinalObservations
from rollstream.replay.signature import Signature, flatten_columns
from rollstream.replay.step_storage import Rows, StepStorage


def part(rows: Rows | slice, start: int, stop: int) -> Rows | slice:
    """Some of these rows."""
    if isinstance(rows, slice):
        return slice(rows.start + start, rows.start + stop)
    return rows[start:stop]


def append_steps(
    storage: StepStorage,
    observations: Signature,
    others: Signature,
    zeroed: Sequence[str],
    taken: Rows | slice,
    tails: Rows | slice,
    values: Mapping[str, Array],
    last_values: Mapping[str, Array],
    ends: Ends,
    final_observations: FinalObservations,
) -> tuple[Rows, Rows]:
    """Append steps of which every one is an environment step; return the row of each and the one after it.

    Rows of final observations come before those of the newest observations, so that the next steps follow
    right after these.

    Args:
        storage: The storage.
        observations: The columns of observations.
        others: All other columns.
        zeroed: Those of them that are 0 in rows without a step.
        taken: Rows for the observation after each step, and for final observations.
        tails: Rows of the first steps.
        values: Columns, `[T, B, ...]`.
        last_values: Observations after the last step, `[B, ...]`.
        ends: Where episodes end.
        final_observations: Final observations that are known.
    """
    count, width = ends.step_ids.size, ends.step_ids.shape[1]
    split, stop = count - width, count + ends.num_ended
    inner, newest = part(taken, 0, split), part(taken, stop - width, stop)
    if isinstance(taken, slice) and isinstance(tails, slice) and tails.stop == taken.start:
        whole = slice(tails.start, tails.start + count)  # the steps are consecutive: the common case
        new = np.arange(tails.start, taken.stop)
    else:
        whole = None
        new = np.concatenate([as_array(tails), as_array(taken)])
    steps, rows = new[:count], new[width:]
    if ends.num_ended:
        rows = rows[ends.num_ended :].copy()
        rows[:split] = new[width:count]
        storage.previous[inner], storage.previous[newest] = steps[:split], steps[split:]
        storage.step_ids[inner] = ends.step_ids[:-1].ravel()
        storage.step_ids[newest] = ends.step_ids[-1]
    else:
        storage.previous[taken] = steps
        storage.step_ids[taken] = ends.step_ids.ravel()
    for name, spec in observations.items():
        column = storage.columns[name]
        column[newest] = last_values[name]
        if split:
            column[inner] = values[name][1:].reshape(split, *spec.shape)
    for name, spec in others.items():
        column, value = storage.columns[name], values[name]
        if whole:
            column[whole] = value.reshape(count, *spec.shape)
        else:
            column[tails] = value[0]
            if split:
                column[inner] = value[1:].reshape(split, *spec.shape)
    for name in zeroed:
        storage.columns[name][part(taken, split, stop)] = 0
    if ends.num_ended:
        finals, first_rows = part(taken, split, stop - width), rows.take(ends.positions)
        storage.previous[first_rows] = first_rows
        storage.step_ids[finals] = ends.final_ids
        rows[ends.positions] = new[count : count + ends.num_ended]
        before = steps.take(ends.positions)
        write_finals(storage, observations, ends.positions, width, before, finals, final_observations)
    return steps, rows


def append_windows(
    storage: StepStorage,
    observations: Signature,
    others: Signature,
    taken: Rows,
    tails: Rows,
    values: Mapping[str, Array],
    last_values: Mapping[str, Array],
    boundaries: EpisodeBoundaries,
    final_observations: FinalObservations,
    mask: Array | None,
) -> tuple[Array, Rows]:
    """Append a row for the observation after each step, `[T, B]`, and for separate final observations."""
    length, width = boundaries.step_ids.shape[0] - 1, boundaries.step_ids.shape[1]
    count = length * width
    new, final_rows = taken[:count], taken[count:]
    rows = new.reshape(length, width)
    step_rows = np.concatenate([tails[None], rows[:-1]])
    if boundaries.starts is None:
        storage.previous[new] = step_rows.ravel()
    else:
        storage.previous[new] = np.where(boundaries.starts, rows, step_rows).ravel()
    storage.step_ids[new] = boundaries.step_ids[1:].ravel()
    inner, newest = new[: count - width], taken[count - width :]
    for name, spec in observations.items():
        column = storage.columns[name]
        if length > 1:
            column[inner] = values[name][1:].reshape(-1, *spec.shape)
        column[new[count - width :]] = last_values[name]
    if boundaries.finals is not None:
        before = step_rows[boundaries.finals]
        storage.step_ids[final_rows] = boundaries.step_ids[boundaries.finals] + 1
        index = boundaries.finals[0] * width + boundaries.finals[1]
        write_finals(storage, observations, index, width, before, final_rows, final_observations)
    for name, spec in others.items():
        column, value = storage.columns[name], values[name]
        column[tails] = value[0]
        if length > 1:
            column[inner] = value[1:].reshape(-1, *spec.shape)
        column[newest] = 0
        if mask is not None and boundaries.starts is not None:
            column[step_rows[~mask]] = 0
    return rows, final_rows


def write_finals(
    storage: StepStorage,
    observations: Signature,
    index: Array,
    width: int,
    before: Rows,
    final_rows: Rows | slice,
    final_observations: FinalObservations,
) -> None:
    """Write final observations; a missing one is a copy of the observation before it, and never used."""
    storage.previous[final_rows] = before
    if len(final_observations) < len(before):
        for name in observations:
            storage.columns[name][final_rows] = storage.columns[name].take(before, 0)
    if final_observations:
        row_at = dict(zip(index.tolist(), as_array(final_rows).tolist(), strict=True))
        for time, stream, observation in final_observations:
            row = row_at[time * width + stream]
            for name, value in flatten_columns({"observation": observation}).items():
                storage.columns[name][row] = value
