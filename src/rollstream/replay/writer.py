"""Writes time-major experience into a table as steps and items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollstream.replay.appending import append_steps, append_windows, part
from rollstream.replay.arrays import Array, as_array, as_slice
from rollstream.replay.episode_boundaries import (
    FinalObservations,
    as_arrays,
    chunk_shape,
    ended_steps,
    find_ends,
    find_episode_boundaries,
)
from rollstream.replay.errors import ReplayError
from rollstream.replay.priorities import largest_priority
from rollstream.replay.signature import check_columns
from rollstream.replay.step_storage import STEP_BITS, STEP_MASK, Rows
from rollstream.replay.table import Table
from rollstream.replay.windowing import Transitions, Windowing

_NONE = np.empty(0, np.int64)
_UNKNOWN = (None, None)


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
        self._history_length = windowing.max_length + table.history
        self._history = np.zeros((self._history_length, 0), np.int64)
        """The newest rows of each stream, the tail last."""
        self._num_held = np.zeros(0, np.int64)
        """How many of them the stream holds a reference to; 0 before its first step."""
        self._priorities = np.zeros((self._history_length - 1, 0))
        """Priorities of the items that start with the steps before the tail; NaN if not given."""
        self._num_episodes = 0
        self._one_step = isinstance(windowing, Transitions) and self._history_length == 1
        self._specs = [(name, spec.shape, np.dtype(spec.dtype)) for name, spec in signature.items()]
        self._specs += [(name, (), None) for name in self._not_stored]
        self._expected: dict[tuple[int, ...], list[Any]] = {}
        """Names, shapes and dtypes of columns, by T and B."""
        only = self._observations.get("observation")
        self._last_spec = None if only is None else (only.shape, np.dtype(only.dtype))
        self._tails: dict[Any, tuple[Array | slice, Array | slice]] = {}
        """Streams that were last written together, and their tails if these are consecutive rows."""
        used_next = {field.column for field in table.fields.values() if "next" in field.at}
        self._zeroed = [name for name in self._others if name in used_next]
        """Columns that are sampled from rows whose step is not yet complete."""
        table.storage.users.add(self)

    # Streams -----------------------------------------------------------------------------------

    def reset(self, streams: Array | Sequence[int]) -> None:
        """Abandon the current episodes of some streams; their next write starts a new episode."""
        self._separate(np.asarray(streams, np.int64))
        indices = np.asarray(streams, np.int64)
        self._add_streams(int(indices.max(initial=-1)) + 1)
        self._num_held[indices] = 0

    def used_rows(self) -> Rows:
        """The rows that future windows need; see `RowUser`."""
        self._store_tails()
        return self._history[np.arange(self._history_length, 0, -1)[:, None] <= self._num_held]

    def max_age(self) -> int:
        """Age of the oldest of them; see `RowUser`."""
        return int(self.table.storage.ages(self.used_rows()).max(initial=-1))

    def _store_tails(self) -> None:
        """Write the tails that are known as slices into the history."""
        for streams, tails in self._tails.values():
            self._history[-1, streams] = as_array(tails)

    def _separate(self, streams: Array) -> None:
        """Forget the slices if some of them are of these streams."""
        known = [as_array(streams) for streams, _ in self._tails.values()]
        if known and np.isin(streams, np.concatenate(known)).any():
            self._store_tails()
            self._tails.clear()

    def _add_streams(self, count: int) -> None:
        new = count - len(self._num_held)
        if new > 0:
            self._num_held = np.concatenate([self._num_held, np.zeros(new, np.int64)])
            rows = np.zeros((self._history_length, new), np.int64)
            self._history = np.concatenate([self._history, rows], axis=1)
            unknown = np.full((self._history_length - 1, new), np.nan)
            self._priorities = np.concatenate([self._priorities, unknown], axis=1)

    def _start_streams(self, streams: Array | slice, values: Mapping[str, Array], width: int) -> Array:
        """Start an episode in those streams that have none; return them."""
        self._add_streams(width if isinstance(streams, slice) else int(streams.max(initial=-1)) + 1)
        if self._num_held[streams].all():
            return _NONE
        indices = np.arange(width) if isinstance(streams, slice) else streams
        new = np.flatnonzero(self._num_held[indices] == 0)
        storage = self.table.storage
        rows = as_array(self.table.take_rows(len(new), 0))
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
        shape = self._matching_shape(columns, last_observation)
        if shape is not None:
            values, last_values = columns, {"observation": last_observation}
        else:
            values, last_values = as_arrays(columns), as_arrays({"observation": last_observation})
            shape = chunk_shape(values)
            self._check(values, last_values, shape)
        chosen = slice(0, shape[1]) if streams is None else np.asarray(streams, np.int64)
        if streams is not None and len(streams) != shape[1]:
            raise ReplayError(f"columns have {shape[1]} streams, but streams has {len(streams)} indices")
        if mask is not None and mask.shape != shape:
            raise ReplayError(f"mask has shape {list(mask.shape)}; expected [T, B] = {list(shape)}")
        if shape[0] == 0:
            return _NONE
        if self._one_step and mask is None:
            return self._write_transitions(values, last_values, shape, chosen, final_observations, priorities)
        return self._write_windows(values, last_values, shape, chosen, final_observations, mask, priorities)

    def _write_transitions(
        self,
        values: Mapping[str, Array],
        last_values: Mapping[str, Array],
        shape: tuple[int, int],
        streams: Array | slice,
        final_observations: FinalObservations,
        priorities: Array | float | None,
    ) -> Array:
        """Write steps each of which is an item: a window of one step, without stacked frames before it."""
        table, storage = self.table, self.table.storage
        count, width = shape[0] * shape[1], shape[1]
        group = width if isinstance(streams, slice) else streams.tobytes()
        started, (_, tails) = _NONE, self._tails.get(group, _UNKNOWN)
        if tails is None:
            self._separate(as_array(streams))
            started = self._start_streams(streams, values, width)
            tails = as_slice(self._history[-1, streams])
        try:
            ends = find_ends(values, storage.step_ids[tails], final_observations, self._num_episodes)
            if priorities is not None:
                priorities = np.broadcast_to(np.asarray(priorities, np.float64), shape).ravel()
            table.check_insert(count, priorities)
        except Exception:
            self._abandon(started)
            raise
        self._num_episodes += ends.num_ended
        oldest = storage.ages(tails.start) if isinstance(tails, slice) else int(storage.ages(tails).max())
        lag = oldest + 1 + 2 * width
        stop = count + ends.num_ended
        taken = table.take_rows(stop, count)
        first, last = append_steps(
            storage,
            self._observations,
            self._others,
            self._zeroed,
            taken,
            tails,
            values,
            last_values,
            ends,
            final_observations,
        )
        keys = table.insert_unchecked(first, last, priorities, lag)
        tails = part(taken, stop - width, stop)
        if isinstance(tails, slice):
            self._tails[group] = streams, tails
        else:
            self._history[-1, streams] = tails
            self._tails.pop(group, None)
        return keys

    def _abandon(self, started: Array) -> None:
        """Undo `_start_streams`."""
        if started.size:
            self.reset(started)
            self._num_episodes -= len(started)

    def _write_windows(
        self,
        values: Mapping[str, Array],
        last_values: Mapping[str, Array],
        shape: tuple[int, int],
        chosen: Array | slice,
        final_observations: FinalObservations,
        mask: Array | None,
        priorities: Array | float | None,
    ) -> Array:
        """Write steps of which `windowing` makes items."""
        table, (length, width) = self.table, shape
        self._separate(as_array(chosen))
        started = self._start_streams(chosen, values, width)
        history = self._history[:, chosen]
        try:
            first_ids = table.storage.step_ids[history[-1]]
            boundaries = find_episode_boundaries(
                first_ids, ended_steps(values), mask, final_observations, self._num_episodes
            )
            counts = (boundaries.step_ids[:-1] & STEP_MASK) + 1
            windows = self.windowing.windows(counts, mask, boundaries.ended)
            index = windows.times * width + windows.streams
            start_index = index + (self._history_length - windows.lengths) * width
            step_priorities = self._step_priorities(chosen, priorities, (length, width))
            item_priorities = None
            if step_priorities is not None:
                item_priorities = step_priorities.ravel().take(start_index)
                item_priorities[np.isnan(item_priorities)] = table.max_priority
            table.check_insert(len(index), item_priorities)
        except Exception:
            self._abandon(started)
            raise
        self._num_episodes += boundaries.num_started
        held = np.arange(self._history_length, 0, -1)[:, None] <= self._num_held[chosen]
        oldest = int((table.storage.ages(history) * held).max(initial=0)) + 1
        lag = oldest + (self._history_length + 1) * width
        num_finals = 0 if boundaries.finals is None else len(boundaries.finals[0])
        taken = as_array(table.take_rows(length * width + num_finals, len(index)))
        rows, final_rows = append_windows(
            table.storage,
            self._observations,
            self._others,
            taken,
            history[-1],
            values,
            last_values,
            boundaries,
            final_observations,
            mask,
        )
        newest = np.concatenate([history, rows])
        start = newest.ravel().take(start_index)
        if boundaries.finals is not None:
            rows[boundaries.finals] = final_rows  # the row after the last step of an episode
        keys = table.insert_unchecked(start, rows.ravel().take(index), item_priorities, lag)
        if step_priorities is not None:
            self._priorities[:, chosen] = step_priorities[length:]
        self._update_history(chosen, newest, boundaries.step_ids[-1] & STEP_MASK)
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
            largest_priority(own.ravel())  # raises if one is invalid
        return np.concatenate([before, own])

    def _check(self, values: dict[str, Array], last_values: dict[str, Array], shape: tuple[int, int]) -> None:
        if self._not_stored:
            values = {name: value for name, value in values.items() if name not in self._not_stored}
        check_columns(self.table.storage.signature, values, shape)
        check_columns(self._observations, last_values, shape[1:])

    def _matching_shape(self, columns: Mapping[str, Any], last_observation: Any) -> tuple[int, int] | None:
        """T and B if all columns are arrays that match the signature: the common case, and faster."""
        last, ends = self._last_spec, columns.get("terminated")
        if last is None or type(last_observation) is not np.ndarray or type(ends) is not np.ndarray:
            return None
        shape = ends.shape
        expected = self._expected.get(shape)
        if expected is None:
            if len(shape) != 2:
                return None
            if len(self._expected) > 64:
                self._expected.clear()
            expected = [(name, shape + own, dtype) for name, own, dtype in self._specs]
            self._expected[shape] = expected
        if len(columns) != len(expected) or last_observation.shape != shape[1:] + last[0]:
            return None
        for name, own, dtype in expected:
            value = columns.get(name)
            if type(value) is not np.ndarray or value.shape != own:
                return None
            if value.dtype is not dtype and dtype is not None:
                return None
        return shape if last_observation.dtype is last[1] else None

    def _update_history(self, streams: Array | slice, newest: Array, counts: Array) -> None:
        """Hold the rows that future windows need, and no others."""
        needed = counts - self.windowing.next_start(counts) + 1 + self.table.history
        self._num_held[streams] = np.minimum(np.maximum(needed, 1), counts + 1)
        self._history[:, streams] = newest[-self._history_length :]

    # State -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The streams' newest rows; their content is in the table's state."""
        self._store_tails()
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
        self._tails.clear()
        self.table.storage.release(self.used_rows())
