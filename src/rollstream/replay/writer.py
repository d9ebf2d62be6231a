"""From time-major experience of several streams to steps and items of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.errors import ReplayError
from rollstream.replay.steps import AGE, AGE_BITS, Rows, check, flattened, span
from rollstream.replay.table import Table

Array = np.ndarray[Any, Any]


class Windows(NamedTuple):
    """Items that end with steps of a write, in the order of time and then of streams."""

    times: Array
    """Index of the last step of each."""
    streams: Array
    """Index of its stream."""
    lengths: Array


class Cut(ABC):
    """A way to cut the steps of an episode into windows, each an item."""

    length: int
    """How many steps a window has at most."""

    @abstractmethod
    def windows(self, taken: Array, real: Array | None, ended: Array | None) -> Windows:
        """Those that are complete with some steps.

        Args:
            taken: how many steps an episode has with each of these, `[T, B]`.
            real: which are steps; `None` if all are.
            ended: which are the last of an episode; `None` if none is.
        """

    @abstractmethod
    def due(self, taken: Array) -> Array:
        """Of episodes with so many steps, which go on: the step that the next window begins with."""


class Transitions(Cut):
    """A window of n steps from every step on; at the end of an episode of those steps that are left.

    Args:
        steps: n.
    """

    def __init__(self, steps: int = 1):
        if steps < 1:
            raise ReplayError(f"a transition has at least 1 step, not {steps}")
        self.length = steps

    def windows(self, taken: Array, real: Array | None, ended: Array | None) -> Windows:
        """One that ends with each step that has enough before it, and shorter ones at the end."""
        enough = taken >= self.length
        if real is not None:
            enough &= real
        times, streams = enough.nonzero()
        lengths = np.full(len(times), self.length)
        if ended is None or self.length == 1:
            return Windows(times, streams, lengths)
        end_times, end_streams = ended.nonzero()
        counts = np.minimum(taken[end_times, end_streams], self.length - 1)
        times = np.concatenate([times, np.repeat(end_times, counts)])
        streams = np.concatenate([streams, np.repeat(end_streams, counts)])
        lengths = np.concatenate([lengths, *(np.arange(count, 0, -1) for count in counts)])
        order = np.argsort(times * taken.shape[1] + streams, kind="stable")
        return Windows(times[order], streams[order], lengths[order])

    def due(self, taken: Array) -> Array:
        """Each but the last n - 1 steps has its window."""
        return np.maximum(taken - (self.length - 1), 0)


class Sequences(Cut):
    """Windows of some steps, one every `stride` steps; at the end of an episode a shorter one with the rest.

    Args:
        length: steps of a window.
        stride: from the beginning of one to that of the next. By default they do not overlap.
    """

    def __init__(self, length: int, stride: int | None = None):
        self.length = length
        self.stride = length if stride is None else stride
        if length < 1 or self.stride < 1:
            raise ReplayError(f"sequences of {length} steps every {self.stride}: both have to be at least 1")

    def windows(self, taken: Array, real: Array | None, ended: Array | None) -> Windows:
        """Those that are full, and what is left at the end that is in none of them."""
        over = taken - self.length
        lengths = np.where((over >= 0) & (over % self.stride == 0), self.length, 0)
        if ended is not None:
            rest = np.maximum(taken - self.due(taken), 0)
            lengths = np.where(ended & (lengths == 0), rest, lengths)
        if real is not None:
            lengths *= real
        times, streams = lengths.nonzero()
        return Windows(times, streams, lengths[times, streams])

    def due(self, taken: Array) -> Array:
        """After the full ones."""
        return np.maximum((taken - self.length) // self.stride + 1, 0) * self.stride


class Episodes(Sequences):
    """Whole episodes; one of more than `length` steps is cut there.

    Args:
        length: what a table can hold, its own `length`.
    """

    def __init__(self, length: int):
        super().__init__(length)


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
        self._know(numbers)
        self._begin(numbers, values)

    def forget(self, streams: Array | Sequence[int]) -> None:
        """What was under way in some streams is not continued: their next write begins an episode."""
        numbers = np.asarray(streams, np.int64)
        self._know(numbers)
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

    def _know(self, streams: Array) -> None:
        count = int(streams.max(initial=-1)) + 1
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
        ended = _ended(values)
        length, width = ended.shape
        numbers = np.arange(width) if streams is None else np.asarray(streams, np.int64)
        self._check(values, (length, width), numbers, real)
        after = _arrays({"observation": last})
        check(self._observations, after, (width,))
        if length == 0:
            return np.empty(0, np.int64)
        self._begin_unknown(numbers, values)
        tails = self._history[-1, numbers]
        layout = _layout(self.table.steps.stamp.take(tails), ended, real, final, self._episodes)
        windows = self.cut.windows((layout.stamps[:-1] & AGE) + 1, real, layout.ended)
        if priorities is not None:
            priorities = np.broadcast_to(priorities, (length, width))[windows.times, windows.streams]
        self.table.require_insert(len(windows.times))
        self._episodes += layout.episodes
        rows, ends = self._append(layout, tails, values, after, final, real)
        known = np.concatenate([self._history[:, numbers], rows])
        begins = known[self._reach + windows.times - windows.lengths, windows.streams]
        if layout.finals is not None:
            rows[layout.finals] = ends  # what follows on the last step of an episode
        keys = self.table.insert(begins, rows[windows.times, windows.streams], priorities)
        self._keep(numbers, known, ends, layout.stamps[-1] & AGE)
        return keys

    def _check(
        self, values: dict[str, Array], leading: tuple[int, int], numbers: Array, real: Array | None
    ) -> None:
        signature = self.table.steps.signature
        only_flags = [name for name in ("terminated", "truncated") if name not in signature]
        if only_flags:
            values = {name: value for name, value in values.items() if name not in only_flags}
        check(signature, values, leading)
        if len(numbers) != leading[1] or (real is not None and real.shape != leading):
            raise ReplayError(
                f"columns are of {leading[0]} steps in {leading[1]} streams; there are {len(numbers)} "
                f"numbers of streams" + ("" if real is None else f", and real is {list(real.shape)}")
            )

    def _begin_unknown(self, numbers: Array, values: dict[str, Array]) -> None:
        self._know(numbers)
        known = self._held[numbers] > 0
        if not known.all():
            unknown = np.flatnonzero(~known)
            self._begin(numbers[unknown], {name: values[name][0, unknown] for name in self._observations})

    def _append(
        self,
        layout: _Layout,
        tails: Rows,
        values: dict[str, Array],
        after: dict[str, Array],
        final: Sequence[tuple[int, int, Any]],
        real: Array | None,
    ) -> tuple[Array, Rows]:
        """New rows for what was observed after each step, `[T, B]`, and for ends that are not among those."""
        steps = self.table.steps
        shape = layout.stamps[1:].shape
        count = shape[0] * shape[1]
        ending = 0 if layout.finals is None else len(layout.finals[0])
        allocated = steps.allocate(count + ending)
        new, ends = allocated[:count], allocated[count:]
        rows = new.reshape(shape)
        before = np.concatenate([tails[None], rows[:-1]])  # the rows the steps were taken in
        steps.previous[new] = (
            before if layout.begins is None else np.where(layout.begins, rows, before)
        ).ravel()
        steps.stamp[new] = layout.stamps[1:].ravel()
        inner = span(new[: count - shape[1]]) if shape[0] > 1 else None
        newest = np.concatenate([rows[-1], ends]) if ending else rows[-1]
        for name, column in self._observations.items():
            stored, value = steps.columns[name], values[name]
            if inner is not None:
                stored[inner] = value[1:].reshape(-1, *column.shape)
            stored[rows[-1]] = after[name]
        for name, column in self._others.items():
            stored, value = steps.columns[name], values[name]
            stored[tails] = value[0]
            if inner is not None:
                stored[inner] = value[1:].reshape(-1, *column.shape)
            stored[newest] = 0
            if real is not None and layout.begins is not None:
                stored[before[~real]] = 0
        if layout.finals is not None:
            self._append_ends(layout.stamps[layout.finals], before[layout.finals], ends, layout.finals, final)
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

    def _keep(self, numbers: Array, known: Rows, ends: Rows, age: Array) -> None:
        """Refer to those rows that windows yet to come may need, and to no others."""
        keep = np.minimum(np.maximum(age - self.cut.due(age) + self.table.stack, 1), age + 1)
        distance = np.arange(len(known) - 1, -1, -1)[:, None]
        held = distance < self._held[numbers] + (len(known) - self._reach)
        unneeded = known[held & (distance >= keep)]
        self.table.steps.release(np.concatenate([unneeded, ends]) if ends.size else unneeded)
        self._history[:, numbers] = known[-self._reach :]
        self._held[numbers] = keep

    # State -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the streams are; rows are in the table's state."""
        return {"history": self._history.copy(), "held": self._held.copy(), "episodes": self._episodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with a table loaded from what was saved at the same moment."""
        self._history, self._held = np.array(state["history"]), np.array(state["held"])
        self._episodes = int(state["episodes"])


class _Layout(NamedTuple):
    """How the steps of a write lie in episodes."""

    stamps: Array
    """Of the row each step is taken in and of the one after the last, `[T + 1, B]`."""
    begins: Array | None
    """After which steps an episode begins; `None` if after none."""
    ended: Array | None
    """Which steps are the last of an episode; `None` if none is."""
    finals: tuple[Array, Array] | None
    """Times and streams of those whose final observation is not the next one."""
    episodes: int
    """How many begin."""


def _layout(
    stamps: Array, ended: Array, real: Array | None, final: Sequence[tuple[int, int, Any]], episodes: int
) -> _Layout:
    for time, stream, _ in final:
        if not ended[time, stream]:
            raise ReplayError(
                f"there is a final observation of step {time} in stream {stream}, which ended nothing"
            )
    index = np.arange(len(ended) + 1)[:, None]
    if real is not None:
        ended = ended & real
    some_ended = bool(ended.any())
    if not some_ended and (real is None or real.all()):
        return _Layout(stamps + index, None, None, None, 0)
    apart = ended
    if real is not None:
        apart = np.zeros_like(ended)
        for time, stream, _ in final:
            apart[time, stream] = True
    begins = apart if real is None else apart | ~real
    count = int(np.count_nonzero(begins))
    first = np.empty((len(index), len(stamps)), np.int64)
    first[0] = stamps
    first[1:][begins] = np.arange(episodes, episodes + count) << AGE_BITS
    since = np.zeros(first.shape, np.int64)  # the step the episode begins with, 0 if that was before
    np.maximum.accumulate(np.where(begins, index[1:], 0), axis=0, out=since[1:])
    own = first[since, np.arange(len(stamps))] + index - since
    times, streams = apart.nonzero()
    finals = (times, streams) if times.size else None
    return _Layout(own, begins, ended if some_ended else None, finals, count)


def _arrays(columns: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(value) for name, value in flattened(columns).items()}


def _ended(values: dict[str, Array]) -> Array:
    if "terminated" not in values or "truncated" not in values:
        raise ReplayError("columns to write have 'terminated' and 'truncated': which steps end an episode")
    terminated, truncated = values["terminated"], values["truncated"]
    if terminated.ndim != 2 or terminated.shape != truncated.shape:
        raise ReplayError(
            f"'terminated' and 'truncated' are [T, B], not {list(terminated.shape)} and "
            f"{list(truncated.shape)}"
        )
    return terminated.astype(bool, copy=False) | truncated.astype(bool, copy=False)
