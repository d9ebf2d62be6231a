"""Writes time-major experience into a table as steps and items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollstream.replay.arrays import Array, as_slice
from rollstream.replay.episode_boundaries import (
    EpisodeBoundaries,
    FinalObservations,
    find_episode_boundaries,
)
from rollstream.replay.errors import ReplayError
from rollstream.replay.signature import check_columns, flatten_columns
from rollstream.replay.step_storage import STEP_BITS, STEP_MASK, Rows
from rollstream.replay.table import Table, largest_priority
from rollstream.replay.windowing import Windowing

_NONE = np.empty(0, np.int64)


class Writer:
    """Writes the experience of several streams into a table.

    A stream is the sequence of steps of one environment, episode after episode. Windows may start in one
    write and end in a later one: the items do not depend on how steps are split into writes.

    The newest observation of a stream already has a row, its tail. The next write fills in that row's action
    and reward, and appends a row for each observation that follows.

    A writer holds references to rows that future windows need, so save it together with its table.

    Args:
        table: The table to write to.
        windowing: Which windows become items.
    """

    def __init__(self, table: Table, windowing: Windowing):
        if windowing.max_length > table.max_length:
            raise ReplayError(
                f"windows have up to {windowing.max_length} steps and items of the table up to "
                f"{table.max_length}; create the table with max_length={windowing.max_length}"
            )
        signature = table.storage.signature
        self.table = table
        self.windowing = windowing
        self._observations = {
            name: spec for name, spec in signature.items() if name.partition("/")[0] == "observation"
        }
        self._others = {name: spec for name, spec in signature.items() if name not in self._observations}
        if not self._observations:
            raise ReplayError(
                f"the table has no column 'observation', only {', '.join(signature)}; add it to the signature"
            )
        self._not_stored = [name for name in ("terminated", "truncated") if name not in signature]
        self._history_length = windowing.max_length + table.stack - 1
        self._history = np.zeros((self._history_length, 0), np.int64)
        """The newest rows of each stream, the tail last."""
        self._num_held = np.zeros(0, np.int64)
        """How many of them the stream holds a reference to; 0 before its first step."""
        self._priorities = np.zeros((self._history_length - 1, 0))
        """Priorities of the items that start with the steps before the tail; NaN if not given."""
        self._num_episodes = 0

    # Streams -----------------------------------------------------------------------------------

    def reset(self, streams: Array | Sequence[int]) -> None:
        """Abandon the current episodes of some streams; their next write starts a new episode."""
        indices = np.asarray(streams, np.int64)
        self._add_streams(int(indices.max(initial=-1)) + 1)
        held = np.arange(self._history_length, 0, -1)[:, None] <= self._num_held[indices]
        self.table.storage.release(self._history[:, indices][held])
        self._num_held[indices] = 0

    def _add_streams(self, count: int) -> None:
        new = count - len(self._num_held)
        if new > 0:
            self._num_held = np.concatenate([self._num_held, np.zeros(new, np.int64)])
            rows = np.zeros((self._history_length, new), np.int64)
            self._history = np.concatenate([self._history, rows], axis=1)
            unknown = np.full((self._history_length - 1, new), np.nan)
            self._priorities = np.concatenate([self._priorities, unknown], axis=1)

    def _start_streams(self, streams: Array | slice, values: dict[str, Array], width: int) -> Array:
        """Start an episode in those streams that have none; return them."""
        self._add_streams(width if isinstance(streams, slice) else int(streams.max(initial=-1)) + 1)
        if self._num_held[streams].all():
            return _NONE
        indices = np.arange(width) if isinstance(streams, slice) else streams
        new = np.flatnonzero(self._num_held[indices] == 0)
        storage = self.table.storage
        rows = storage.allocate(len(new))
        storage.previous[rows] = rows
        storage.step_ids[rows] = np.arange(self._num_episodes, self._num_episodes + len(new)) << STEP_BITS
        self._num_episodes += len(new)
        for name in self._observations:
            storage.columns[name][rows] = values[name][0, new]
        for name in self._others:
            storage.columns[name][rows] = 0
        self._history[-1, indices[new]] = rows
        self._num_held[indices[new]] = 1
        return indices[new]

    # Write -------------------------------------------------------------------------------------

    def write(
        self,
        columns: Mapping[str, Any],
        last_observation: Any,
        final_observations: FinalObservations = (),
        *,
        mask: Array | None = None,
        streams: Array | Sequence[int] | None = None,
        priorities: Array | float | None = None,
    ) -> Array:
        """Write T steps of B streams; return the keys of the items they complete.

        Raises `InsertRefused`, and changes nothing, if the rate limiter does not allow these items.

        Args:
            columns: Time-major, `[T, B, ...]`: the table's columns, and `terminated` and `truncated` even if
                the table does not store them. A stream's first write starts an episode; later writes continue
                it.
            last_observation: The observation after the last step, `[B, ...]`.
            final_observations: Time index, stream index and final observation of episodes that end where the
                next row already starts another episode (same-step autoreset). Terminated episodes may be
                left out: nothing bootstraps from their final observation.
            mask: Which entries are environment steps, `[T, B]`; all by default. An entry that is not holds
                the final observation of an episode, and the next row starts another (next-step autoreset).
            streams: Stream indices; 0 to B - 1 by default.
            priorities: Priorities of the items that start with each step, `[T, B]`, even if a later write
                completes them; the maximum priority so far by default.
        """
        values = _as_arrays(columns)
        last_values = _as_arrays({"observation": last_observation})
        ended = _ended(values)
        length, width = ended.shape
        chosen = slice(0, width) if streams is None else np.asarray(streams, np.int64)
        self._check(values, last_values, (length, width), chosen, mask)
        if length == 0:
            return _NONE
        started = self._start_streams(chosen, values, width)
        history = self._history[:, chosen]
        try:
            first_ids = self.table.storage.step_ids[history[-1]]
            boundaries = find_episode_boundaries(
                first_ids, ended, mask, final_observations, self._num_episodes
            )
            counts = (boundaries.step_ids[:-1] & STEP_MASK) + 1
            windows = self.windowing.windows(counts, mask, boundaries.ended)
            index = windows.times * width + windows.streams
            start_index = index + (self._history_length - windows.lengths) * width
            step_priorities = self._step_priorities(chosen, priorities, (length, width))
            item_priorities = None
            if step_priorities is not None:
                item_priorities = step_priorities.ravel().take(start_index)
                item_priorities[np.isnan(item_priorities)] = self.table.max_priority
            self.table.check_insert(len(index), item_priorities)
        except Exception:
            self.reset(started)
            self._num_episodes -= len(started)
            raise
        self._num_episodes += boundaries.num_started
        rows, final_rows = self._append(
            boundaries, history[-1], values, last_values, final_observations, mask
        )
        newest = np.concatenate([history, rows])
        start = newest.ravel().take(start_index)
        if boundaries.finals is not None:
            rows[boundaries.finals] = final_rows  # the row after the last step of an episode
        keys = self.table.insert_unchecked(start, rows.ravel().take(index), windows.lengths, item_priorities)
        if step_priorities is not None:
            self._priorities[:, chosen] = step_priorities[length:]
        self._update_history(chosen, newest, final_rows, boundaries.step_ids[-1] & STEP_MASK)
        return keys

    def _step_priorities(
        self, streams: Array | slice, given: Array | float | None, shape: tuple[int, int]
    ) -> Array | None:
        """Priorities by first step: of the steps before this write, then of its own; `None` without any."""
        before = self._priorities[:, streams]
        if given is None and np.isnan(before).all():
            return None
        own = np.empty(shape)
        own[:] = np.nan if given is None else given
        if given is not None:
            largest_priority(own)  # raises if one is invalid
        return np.concatenate([before, own])

    def _check(
        self,
        values: dict[str, Array],
        last_values: dict[str, Array],
        shape: tuple[int, int],
        streams: Array | slice,
        mask: Array | None,
    ) -> None:
        if self._not_stored:
            values = {name: value for name, value in values.items() if name not in self._not_stored}
        check_columns(self.table.storage.signature, values, shape)
        check_columns(self._observations, last_values, shape[1:])
        if not isinstance(streams, slice) and len(streams) != shape[1]:
            raise ReplayError(f"columns have {shape[1]} streams, but streams has {len(streams)} indices")
        if mask is not None and mask.shape != shape:
            raise ReplayError(f"mask has shape {list(mask.shape)}; expected [T, B] = {list(shape)}")

    def _append(
        self,
        boundaries: EpisodeBoundaries,
        tails: Rows,
        values: dict[str, Array],
        last_values: dict[str, Array],
        final_observations: FinalObservations,
        mask: Array | None,
    ) -> tuple[Array, Rows]:
        """Append a row for the observation after each step, `[T, B]`, and for separate final observations."""
        storage = self.table.storage
        length, width = boundaries.step_ids.shape[0] - 1, boundaries.step_ids.shape[1]
        count = length * width
        num_finals = 0 if boundaries.finals is None else len(boundaries.finals[0])
        allocated = storage.allocate(count + num_finals)
        new, final_rows = allocated[:count], allocated[count:]
        rows = new.reshape(length, width)
        step_rows = np.concatenate([tails[None], rows[:-1]])
        if boundaries.starts is None:
            storage.previous[new] = step_rows.ravel()
        else:
            storage.previous[new] = np.where(boundaries.starts, rows, step_rows).ravel()
        storage.step_ids[new] = boundaries.step_ids[1:].ravel()
        inner, newest = as_slice(new[: count - width]), new[count - width :]
        for name, spec in self._observations.items():
            column = storage.columns[name]
            if length > 1:
                column[inner] = values[name][1:].reshape(-1, *spec.shape)
            column[newest] = last_values[name]
        if boundaries.finals is not None:
            self._write_finals(boundaries, step_rows, final_rows, final_observations)
            newest = allocated[count - width :]
        for name, spec in self._others.items():
            column, value = storage.columns[name], values[name]
            column[tails] = value[0]
            if length > 1:
                column[inner] = value[1:].reshape(-1, *spec.shape)
            column[newest] = 0
            if mask is not None and boundaries.starts is not None:
                column[step_rows[~mask]] = 0
        return rows, final_rows

    def _write_finals(
        self,
        boundaries: EpisodeBoundaries,
        step_rows: Array,
        final_rows: Rows,
        final_observations: FinalObservations,
    ) -> None:
        """Write final observations; a missing one is a copy of the observation before it, and never used."""
        assert boundaries.finals is not None
        storage = self.table.storage
        before = step_rows[boundaries.finals]
        storage.previous[final_rows] = before
        storage.step_ids[final_rows] = boundaries.step_ids[boundaries.finals] + 1
        for name in self._observations:
            storage.columns[name][final_rows] = storage.columns[name][before]
        if final_observations:
            times, streams = (index.tolist() for index in boundaries.finals)
            row_at = dict(zip(zip(times, streams, strict=True), final_rows.tolist(), strict=True))
            for time, stream, observation in final_observations:
                for name, value in flatten_columns({"observation": observation}).items():
                    storage.columns[name][row_at[time, stream]] = value

    def _update_history(self, streams: Array | slice, newest: Array, final_rows: Rows, counts: Array) -> None:
        """Hold references to the rows that future windows need, and to no others."""
        if self._history_length == 1:
            released = newest[:-1].ravel()
        else:
            needed = counts - self.windowing.next_start(counts) + self.table.stack
            needed = np.minimum(np.maximum(needed, 1), counts + 1)
            distance = np.arange(len(newest) - 1, -1, -1)[:, None]
            held = distance < self._num_held[streams] + (len(newest) - self._history_length)
            released = newest[held & (distance >= needed)]
            self._num_held[streams] = needed
        self.table.storage.release(np.concatenate([released, final_rows]) if final_rows.size else released)
        self._history[:, streams] = newest[-self._history_length :]

    # State -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The streams' newest rows; their content is in the table's state."""
        return {
            "history": self._history.copy(),
            "num_held": self._num_held.copy(),
            "priorities": self._priorities.copy(),
            "num_episodes": self._num_episodes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the streams; the table's state has to be of the same moment."""
        self._history, self._num_held = np.array(state["history"]), np.array(state["num_held"])
        self._priorities = np.array(state["priorities"])
        self._num_episodes = int(state["num_episodes"])


def _as_arrays(columns: Mapping[str, Any]) -> dict[str, Array]:
    flat: dict[str, Array] = {}
    for name, value in columns.items():
        if type(value) is np.ndarray:  # the common case, and fast
            flat[name] = value
        else:
            flat.update((path, np.asarray(leaf)) for path, leaf in flatten_columns({name: value}).items())
    return flat


def _ended(values: dict[str, Array]) -> Array:
    if "terminated" not in values or "truncated" not in values:
        raise ReplayError("columns must include 'terminated' and 'truncated', to tell where episodes end")
    terminated, truncated = values["terminated"], values["truncated"]
    if terminated.ndim != 2 or terminated.shape != truncated.shape:
        raise ReplayError(
            f"'terminated' and 'truncated' must be [T, B], not {list(terminated.shape)} and "
            f"{list(truncated.shape)}"
        )
    return np.logical_or(terminated, truncated)
