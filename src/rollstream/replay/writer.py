"""From time-major experience of several streams to steps and items of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollstream.replay.errors import ReplayError
from rollstream.replay.layout import Layout, layout_of
from rollstream.replay.steps import AGE, AGE_BITS, Rows, check, flattened, span
from rollstream.replay.table import Table
from rollstream.replay.windowing import Cut

Array = np.ndarray[Any, Any]


class Writer:
    """Writes what happens in some streams (environments, each one episode after the other) into a table.

    The newest observation of a stream is a row already, its tail: the next write says what was done on it,
    and adds a row for every observation that follows. Windows may begin in one write and end in a later one,
    and items come out the same however steps are spread over writes.

    A writer has references to rows that windows yet to come will need: save it together with its table.

    Args:
        table: to write to.
        cut: which steps become an item.
    """

    def __init__(self, table: Table, cut: Cut):
        if cut.length > table.length:
            raise ReplayError(
                f"windows of {cut.length} steps do not fit into a table whose items have at most "
                f"{table.length}: make it with length={cut.length}"
            )
        signature = table.steps.signature
        self.table = table
        self.cut = cut
        self._observations = {
            name: column
            for name, column in signature.items()
            if name == "observation" or name.startswith("observation/")
        }
        self._others = {name: c for name, c in signature.items() if name not in self._observations}
        if not self._observations:
            raise ReplayError(
                f"a table to write to has a column 'observation', and this has {', '.join(signature)}"
            )
        self._flags = [name for name in ("terminated", "truncated") if name not in signature]
        """Columns that are written with but not kept."""
        self._reach = cut.length + table.stack - 1
        """How many of its newest rows a stream may need again."""
        self._history = np.zeros((self._reach, 0), np.int64)
        """The newest rows of each stream, the tail last; those not held any more are of no meaning."""
        self._held = np.zeros(0, np.int64)
        """How many of them the stream refers to; 0 if it has not begun."""
        self._episodes = 0

    # Begin -------------------------------------------------------------------------------------

    def begin(self, streams: Array | Sequence[int], observation: Any) -> None:
        """Begin an episode in some streams; what was under way there is not continued.

        Args:
            streams: numbers of at least 0.
            observation: the first of each, `[len(streams), ...]`.
        """
        numbers = np.asarray(streams, np.int64)
        values = _arrays({"observation": observation})
        check(self._observations, values, (len(numbers),))
        self._know(int(numbers.max(initial=-1)) + 1)
        self._begin(numbers, values)

    def forget(self, streams: Array | Sequence[int]) -> None:
        """What was under way in some streams is not continued: their next write begins an episode."""
        numbers = np.asarray(streams, np.int64)
        self._know(int(numbers.max(initial=-1)) + 1)
        self._forget(numbers)

    def _begin(self, numbers: Array, values: dict[str, Array]) -> None:
        self._forget(numbers)
        steps = self.table.steps
        rows = steps.allocate(len(numbers))
        steps.previous[rows] = rows
        steps.stamp[rows] = np.arange(self._episodes, self._episodes + len(rows)) << AGE_BITS
        self._episodes += len(rows)
        for name in self._observations:
            steps.columns[name][rows] = values[name]
        for name in self._others:
            steps.columns[name][rows] = 0
        self._history[-1, numbers] = rows
        self._held[numbers] = 1

    def _know(self, count: int) -> None:
        new = count - len(self._held)
        if new > 0:
            self._held = np.concatenate([self._held, np.zeros(new, np.int64)])
            self._history = np.concatenate([self._history, np.zeros((self._reach, new), np.int64)], axis=1)

    def _forget(self, streams: Array) -> None:
        held = np.arange(self._reach, 0, -1)[:, None] <= self._held[streams]
        self.table.steps.release(self._history[:, streams][held])
        self._held[streams] = 0

    # Write -------------------------------------------------------------------------------------

    def write(
        self,
        columns: Mapping[str, Any],
        last: Any,
        final: Sequence[tuple[int, int, Any]] = (),
        *,
        real: Array | None = None,
        streams: Array | Sequence[int] | None = None,
        priorities: Array | float | None = None,
    ) -> Array:
        """Write T steps of B streams, and give the keys of the items that are complete now.

        Where the limiter does not allow so many items, `InsertRefused` is raised and nothing has changed.

        Args:
            columns: time-major, `[T, B, ...]`: those of the table, and `terminated` and `truncated` whether
                the table has them or not. The first observation of a stream begins an episode; later ones
                go on from where the stream was, unless `begin` says otherwise.
            last: the observation after the last step, `[B, ...]`.
            final: time, stream index and final observation of episodes that ended where the observation
                after it is already the first of the next episode. One that terminated may be left out: it is
                not bootstrapped from.
            real: which of the steps are steps, `[T, B]`. One that is not has the final observation of an
                episode, and the observation after it begins the next.
            streams: their numbers; by default 0 to B - 1.
            priorities: of the items that end with each step, `[T, B]`; by default the largest so far.
        """
        values = _arrays(columns)
        after = _arrays({"observation": last})
        ended = _ended(values)
        length, width = ended.shape
        chosen = slice(0, width) if streams is None else np.asarray(streams, np.int64)
        self._check(values, after, (length, width), chosen, real)
        if length == 0:
            return np.empty(0, np.int64)
        begun = self._begin_unknown(chosen, values, width)
        history = self._history[:, chosen]
        try:
            layout = layout_of(self.table.steps.stamp[history[-1]], ended, real, final, self._episodes)
            windows = self.cut.windows((layout.stamps[:-1] & AGE) + 1, real, layout.ended)
            places = windows.times * width + windows.streams
            if priorities is not None:
                priorities = np.broadcast_to(priorities, (length, width)).ravel()[places]
            self.table.require_insert(len(places), priorities)
        except Exception:
            self._forget(begun)
            self._episodes -= len(begun)
            raise
        self._episodes += layout.episodes
        rows, ends = self._append(layout, history[-1], values, after, final, real)
        known = np.concatenate([history, rows])
        begins = known.ravel().take(places + (self._reach - windows.lengths) * width)
        if layout.finals is not None:
            rows[layout.finals] = ends  # what follows on the last step of an episode
        keys = self.table.put(begins, rows.ravel().take(places), windows.lengths, priorities)
        self._keep(chosen, known, ends, layout.stamps[-1] & AGE)
        return keys

    def _check(
        self,
        values: dict[str, Array],
        after: dict[str, Array],
        leading: tuple[int, int],
        chosen: Array | slice,
        real: Array | None,
    ) -> None:
        if self._flags:
            values = {name: value for name, value in values.items() if name not in self._flags}
        check(self.table.steps.signature, values, leading)
        check(self._observations, after, leading[1:])
        count = leading[1] if isinstance(chosen, slice) else len(chosen)
        if count != leading[1] or (real is not None and real.shape != leading):
            raise ReplayError(
                f"columns are of {leading[0]} steps in {leading[1]} streams; there are {count} numbers of "
                f"streams" + ("" if real is None else f", and real is {list(real.shape)}")
            )

    def _begin_unknown(self, chosen: Array | slice, values: dict[str, Array], width: int) -> Array:
        """Begin an episode in those streams that have none; which they are."""
        self._know(width if isinstance(chosen, slice) else int(chosen.max(initial=-1)) + 1)
        if self._held[chosen].all():
            return _NONE
        numbers = np.arange(width) if isinstance(chosen, slice) else chosen
        unknown = np.flatnonzero(self._held[numbers] == 0)
        self._begin(numbers[unknown], {name: values[name][0, unknown] for name in self._observations})
        return numbers[unknown]

    def _append(
        self,
        layout: Layout,
        tails: Rows,
        values: dict[str, Array],
        after: dict[str, Array],
        final: Sequence[tuple[int, int, Any]],
        real: Array | None,
    ) -> tuple[Array, Rows]:
        """New rows for what was observed after each step, `[T, B]`, and for ends that are not among those."""
        steps = self.table.steps
        length, width = layout.stamps.shape[0] - 1, layout.stamps.shape[1]
        count = length * width
        allocated = steps.allocate(count if layout.finals is None else count + len(layout.finals[0]))
        new, ends = allocated[:count], allocated[count:]
        rows = new.reshape(length, width)
        before = np.concatenate([tails[None], rows[:-1]])  # the rows the steps were taken in
        if layout.begins is None:
            steps.previous[new] = before.ravel()
        else:
            steps.previous[new] = np.where(layout.begins, rows, before).ravel()
        steps.stamp[new] = layout.stamps[1:].ravel()
        inner, newest = span(new[: count - width]), new[count - width :]
        for name, column in self._observations.items():
            stored = steps.columns[name]
            if length > 1:
                stored[inner] = values[name][1:].reshape(-1, *column.shape)
            stored[newest] = after[name]
        if layout.finals is not None:
            self._append_ends(layout.stamps[layout.finals], before[layout.finals], ends, layout.finals, final)
            newest = allocated[count - width :]
        for name, column in self._others.items():
            stored, value = steps.columns[name], values[name]
            stored[tails] = value[0]
            if length > 1:
                stored[inner] = value[1:].reshape(-1, *column.shape)
            stored[newest] = 0
            if real is not None and layout.begins is not None:
                stored[before[~real]] = 0
        return rows, ends

    def _append_ends(
        self, stamps: Array, before: Rows, ends: Rows, finals: tuple[Array, Array], final: Sequence[Any]
    ) -> None:
        """Final observations; where none is given the one before stands in for it, and is not looked at."""
        steps = self.table.steps
        steps.previous[ends] = before
        steps.stamp[ends] = stamps + 1
        for name in self._observations:
            steps.columns[name][ends] = steps.columns[name][before]
        if final:
            places = zip(finals[0].tolist(), finals[1].tolist(), strict=True)
            index = dict(zip(places, ends.tolist(), strict=True))
            for time, stream, observation in final:
                for name, value in flattened({"observation": observation}).items():
                    steps.columns[name][index[time, stream]] = value

    def _keep(self, chosen: Array | slice, known: Rows, ends: Rows, age: Array) -> None:
        """Refer to those rows that windows yet to come may need, and to no others."""
        if self._reach == 1:
            unneeded = known[:-1].ravel()
        else:
            keep = np.minimum(np.maximum(age - self.cut.due(age) + self.table.stack, 1), age + 1)
            distance = np.arange(len(known) - 1, -1, -1)[:, None]
            held = distance < self._held[chosen] + (len(known) - self._reach)
            unneeded = known[held & (distance >= keep)]
            self._held[chosen] = keep
        self.table.steps.release(np.concatenate([unneeded, ends]) if ends.size else unneeded)
        self._history[:, chosen] = known[-self._reach :]

    # State -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the streams are; rows are in the table's state."""
        return {"history": self._history.copy(), "held": self._held.copy(), "episodes": self._episodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with a table loaded from what was saved at the same moment."""
        self._history, self._held = np.array(state["history"]), np.array(state["held"])
        self._episodes = int(state["episodes"])


_NONE = np.empty(0, np.int64)


def _arrays(columns: Mapping[str, Any]) -> dict[str, Array]:
    flat: dict[str, Array] = {}
    for name, value in columns.items():
        if type(value) is np.ndarray:  # the rule, and quickly told
            flat[name] = value
        else:
            flat.update((path, np.asarray(own)) for path, own in flattened({name: value}).items())
    return flat


def _ended(values: dict[str, Array]) -> Array:
    if "terminated" not in values or "truncated" not in values:
        raise ReplayError("columns to write have 'terminated' and 'truncated': which steps end an episode")
    terminated, truncated = values["terminated"], values["truncated"]
    if terminated.ndim != 2 or terminated.shape != truncated.shape:
        raise ReplayError(
            f"'terminated' and 'truncated' are [T, B], not {list(terminated.shape)} and "
            f"{list(truncated.shape)}"
        )
    return np.logical_or(terminated, truncated)
