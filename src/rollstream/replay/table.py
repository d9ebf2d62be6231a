"""A table of items, each a window of steps: inserted, sampled, updated and removed as in Reverb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from rollstream.rate_limiter import RateLimiter
from rollstream.replay.errors import InsertRefused, ReplayError, SampleRefused, SignatureError
from rollstream.replay.selectors import Fifo, Ranking, Selector, Slots
from rollstream.replay.steps import ONE, Rows, Signature, Steps

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Field:
    """What of an item a sample holds.

    Args:
        column: which.
        at: the step the window begins with (`first`), the one after its last step, whose observation is
            bootstrapped from (`last`), or all `steps` from the first up to, but not with, the last:
            `[n, length, ...]`, zero after the item's own length.
        stack: so many steps up to that one, oldest first, as an axis of their own: `[n, stack, ...]`. The
            first step of an episode is repeated, as Gymnasium's `FrameStackObservation` does.
    """

    column: str
    at: Literal["first", "last", "steps"] = "first"
    stack: int = 1


class Sample(NamedTuple):
    """Items that were drawn, one after the other; every array has one entry for each."""

    keys: Array
    """To update or delete the items by."""
    probabilities: Array
    """With which each was drawn."""
    priorities: Array
    times_sampled: Array
    """With this time."""
    sizes: Array
    """How many items there were to draw from."""
    lengths: Array
    """Steps of each item."""
    columns: dict[str, Array]
    """The fields, in arrays of their own."""


@dataclass(frozen=True)
class TableInfo:
    """How a table stands."""

    size: int
    max_size: int
    episodes: int
    """Of which there are items."""
    rows: int
    """Steps in use, by items and by streams that go on."""
    row_bytes: int
    """Of those steps."""
    index_bytes: int
    """What is kept to find them: links and counts of steps in use, the items, and what selects among them."""
    inserts: int
    samples: int
    deletes: int
    """Items removed, for whatever reason."""
    unique_samples: int
    """Items that were sampled at least once."""
    stale_updates: int
    """Priorities that came for items already removed."""


class Table:
    """Items over steps they share, what selects among them, and how fast they may come and go.

    An item is a window of consecutive steps of one episode, from the row `first` to the row `last`, with a
    priority. Its key says which slot it is in and is unique and larger than those before.

    >>> from rollstream.replay import Column, Fifo, MinSize, Transitions, Uniform, Writer
    >>> signature = {"observation": Column((), np.int64), "reward": Column((), np.float32)}
    >>> fields = {
    ...     "observation": Field("observation"),
    ...     "reward": Field("reward"),
    ...     "next_observation": Field("observation", "last"),
    ... }
    >>> table = Table(
    ...     signature, fields, max_size=100, sampler=Uniform(), remover=Fifo(), limiter=MinSize(1)
    ... )
    >>> steps = {"observation": np.array([[0], [1], [2]]), "reward": np.ones((3, 1), np.float32)}
    >>> ends = np.zeros((3, 1), bool)
    >>> keys = Writer(table, Transitions(1)).write(
    ...     {**steps, "terminated": ends, "truncated": ends}, last=np.array([3])
    ... )
    >>> sample = table.sample(4, np.random.default_rng(0))
    >>> sample.columns["observation"], sample.columns["next_observation"]
    (array([1, 0, 0, 0]), array([2, 1, 1, 1]))

    Args:
        signature: the columns of a step.
        fields: what a sample holds, by name.
        max_size: how many items at most. One more is inserted first; then the remover selects which goes,
            and that may be the new one.
        length: how many steps an item has at most.
        sampler: selects what is sampled.
        remover: selects what is removed.
        limiter: how many inserts and samples are allowed.
        max_times_sampled: how often an item is sampled before it is removed; 0 for any number of times.
        rows: steps there is room for at first.
        seed: of the random numbers a remover needs.
    """

    def __init__(
        self,
        signature: Signature,
        fields: Mapping[str, Field],
        *,
        max_size: int,
        sampler: Selector,
        remover: Selector,
        limiter: RateLimiter,
        length: int = 1,
        max_times_sampled: int = 0,
        rows: int | None = None,
        seed: int = 0,
    ):
        _check_fields(signature, fields)
        if max_size < 1 or length < 1:
            raise ReplayError(f"max_size is {max_size} and length {length}: both have to be at least 1")
        if limiter.min_size > max_size:
            raise ReplayError(
                f"nothing could ever be sampled: the limiter waits for {limiter.min_size} items and the "
                f"table holds {max_size}; make max_size at least that"
            )
        if sampler is remover:
            raise ReplayError("a selector is either the sampler or the remover of a table: make two")
        self.steps = Steps(signature, max_size + 1024 if rows is None else rows)
        self.fields = dict(fields)
        self.max_size = max_size
        self.length = length
        self.stack = max([field.stack for field in fields.values()], default=1)
        self.sampler = sampler
        self.remover = remover
        self.limiter = limiter
        self.max_times_sampled = max_times_sampled
        self.size = 0
        self.largest_priority = 1.0
        """Of all there have been; what new items get that come without one."""
        self.unique_samples = 0
        self.stale_updates = 0
        self._generator = np.random.default_rng(seed)
        slots = max_size + 1  # one is over while the remover selects
        self._slot_bits = slots.bit_length()
        self._inserted = 0
        self._keys = np.full(slots + 1, -1, np.int64)
        self._keys[slots] = 0  # what no key is that asks for a slot beyond the last, as -1 does
        self._first, self._last = np.empty((2, slots), np.int64)
        self._priorities = np.empty(slots)
        self._times = np.zeros(slots, np.int32)
        self._vacant = np.empty(slots, np.int64)  # slots to use again, the last one first
        self._vacancies = 0
        self._fresh = 0  # slots from here on were never used
        sampler.reserve(slots)
        remover.reserve(slots)

    # Insert ------------------------------------------------------------------------------------

    def may_insert(self, count: int = 1) -> bool:
        """Whether the limiter allows so many inserts now."""
        return self.limiter.may_insert(count)

    def insert(self, first: Rows, last: Rows, priorities: Array | float | None = None) -> Array:
        """Insert items, one after the other, and give their keys.

        Args:
            first: the row each begins with.
            last: the row after its last step.
            priorities: of each, at least 0; if there are none the largest there has been.
        """
        lengths = self.steps.stamp.take(last) - self.steps.stamp.take(first)
        if lengths.size and not (lengths.min() >= 1 and lengths.max() <= self.length):
            raise ReplayError(
                f"an item is 1 to {self.length} consecutive steps of one episode; one of these is not: "
                f"from row to row there are {_numbers(lengths)} steps"
            )
        if priorities is not None:
            priorities = np.broadcast_to(np.asarray(priorities, np.float64), lengths.shape)
        self.require_insert(len(lengths), priorities)
        return self.put(first, last, lengths, priorities)

    def require_insert(self, count: int, priorities: Array | None = None) -> None:
        """Raise unless so many items may be inserted now, with these priorities."""
        if priorities is not None:
            _largest(priorities)
        if count and not self.limiter.may_insert(count):
            raise InsertRefused(
                f"{count} inserts are not allowed after {self.limiter.counts()} by {self.limiter!r}"
            )

    def put(self, first: Rows, last: Rows, lengths: Array, priorities: Array | None) -> Array:
        """Insert items that are known to be right, and allowed."""
        count = len(first)
        if priorities is None:
            priorities = np.empty(count)
            priorities.fill(self.largest_priority)
        else:
            self.largest_priority = max(self.largest_priority, _largest(priorities))
        if count <= self.max_size - self.size:
            return self._put(first, last, lengths, priorities)
        chunk = self.max_size if isinstance(self.remover, Fifo) else 1
        if count <= chunk:
            return self._put_and_remove(first, last, lengths, priorities)
        parts = (first, last, lengths, priorities)
        return np.concatenate(
            [self._put_and_remove(*(p[at : at + chunk] for p in parts)) for at in range(0, count, chunk)]
        )

    def _put_and_remove(self, first: Rows, last: Rows, lengths: Array, priorities: Array) -> Array:
        over = self.size + len(first) - self.max_size
        if over <= 0:
            return self._put(first, last, lengths, priorities)
        if isinstance(self.remover, Fifo):  # the oldest go, whether before or after the new ones come
            if over == len(first):
                return self._replace(self.remover.ranked(over), first, last, lengths, priorities)
            self._remove(self.remover.ranked(over))
            return self._put(first, last, lengths, priorities)
        keys = self._put(first, last, lengths, priorities)
        self._remove(self.remover.choose(self._generator.random(1))[0])
        return keys

    def _put(self, first: Rows, last: Rows, lengths: Array, priorities: Array) -> Array:
        slots = self._occupy(len(first))
        keys = self._write(slots, first, last, lengths, priorities)
        self.sampler.insert(slots, priorities)
        self.remover.insert(slots, priorities)
        self.size += len(slots)
        self.limiter.inserts += len(slots)
        return keys

    def _replace(self, slots: Slots, first: Rows, last: Rows, lengths: Array, priorities: Array) -> Array:
        """As many items go as come: what a full table does nearly always, and less than to do one by one."""
        gone = self._first[slots], self._last[slots]
        rows = self._rows(*gone, self._lengths(*gone))
        keys = self._write(slots, first, last, lengths, priorities)
        self.sampler.replace(slots, priorities)
        self.remover.replace(slots, priorities)
        self.steps.release(rows)
        self.limiter.inserts += len(slots)
        self.limiter.deletes += len(slots)
        return keys

    def _write(self, slots: Slots, first: Rows, last: Rows, lengths: Array, priorities: Array) -> Array:
        count = len(slots)
        keys = (np.arange(self._inserted, self._inserted + count) << self._slot_bits) | slots
        self._inserted += count
        self._keys[slots] = keys
        self._first[slots], self._last[slots] = first, last
        self._priorities[slots] = priorities
        self._times[slots] = 0
        self.steps.hold(self._rows(first, last, lengths))
        return keys

    def _occupy(self, count: int) -> Slots:
        used = min(count, self._vacancies)
        self._vacancies -= used
        again = self._vacant[self._vacancies : self._vacancies + used]
        if used == count:
            return again.copy()
        fresh = np.arange(self._fresh, self._fresh + count - used)
        self._fresh += len(fresh)
        return np.concatenate([again, fresh])

    def _lengths(self, first: Rows, last: Rows) -> Array:
        if self.length == 1:
            return np.ones(len(first), np.int64)
        return self.steps.stamp.take(last) - self.steps.stamp.take(first)

    def _rows(self, first: Rows, last: Rows, lengths: Array) -> Rows:
        """Every row that some items refer to: their steps, the one after, and those stacked on the first."""
        parts, row = [last], last
        for age in range(1, int(lengths.max(initial=1)) if self.length > 1 else 1):
            row = self.steps.previous.take(row)
            parts.append(row[lengths > age])
        parts.append(first)
        row = first
        for _ in range(self.stack - 1):
            row = self.steps.previous.take(row)
            parts.append(row)
        return np.concatenate(parts)

    # Remove ------------------------------------------------------------------------------------

    def delete(self, keys: Array) -> int:
        """Remove items; those already removed are passed over. Gives how many there were."""
        slots = np.unique(self._known(keys)[0])
        if slots.size:
            self._remove(slots)
        return slots.size

    def _known(self, keys: Array) -> tuple[Slots, Array]:
        """The slots of those items that are there, and which they are."""
        keys = np.asarray(keys, np.int64)
        slots = keys & ((1 << self._slot_bits) - 1)
        there = self._keys.take(slots, mode="clip") == keys
        return (slots, there) if np.count_nonzero(there) == len(there) else (slots[there], there)

    def _remove(self, slots: Slots, *, sampled: bool = False) -> None:
        """Remove items; those removed by sampling are not the sampler's any more."""
        if not sampled:
            self.sampler.remove(slots)
        self.remover.remove(slots)
        first, last = self._first[slots], self._last[slots]
        lengths = self._lengths(first, last)
        self.steps.release(self._rows(first, last, lengths))
        self._keys[slots] = -1
        self._vacant[self._vacancies : self._vacancies + len(slots)] = slots
        self._vacancies += len(slots)
        self.size -= len(slots)
        self.limiter.deletes += len(slots)

    # Update ------------------------------------------------------------------------------------

    def update(self, keys: Array, priorities: Array) -> int:
        """Give items other priorities; those already removed are passed over, and counted.

        Gives how many there were. Of an item that is there twice the last priority counts.
        """
        slots, there = self._known(keys)
        priorities = np.asarray(priorities, np.float64)
        if priorities.shape != there.shape:
            raise ReplayError(f"there are {len(there)} keys, and priorities {list(priorities.shape)}")
        self.largest_priority = max(self.largest_priority, _largest(priorities))
        if len(slots) < len(there):
            self.stale_updates += len(there) - len(slots)
            priorities = priorities[there]
        if slots.size:
            self._priorities[slots] = priorities
            self.sampler.update(slots, priorities)
            self.remover.update(slots, priorities)
        return slots.size

    # Sample ------------------------------------------------------------------------------------

    @property
    def total(self) -> float:
        """The mass that probabilities are shares of: the number of items, or the sum of their weights.

        Of several tables, each is to be sampled from in proportion to this.
        """
        return self.sampler.total

    def may_sample(self, count: int = 1) -> bool:
        """Whether the limiter allows so many samples now."""
        return self.limiter.may_sample(count)

    def sample(self, count: int, generator: np.random.Generator) -> Sample:
        """Draw items, as if one after the other, and copy what they hold."""
        if count < 1:
            raise ReplayError(f"a sample has at least one item, not {count}")
        if not self.limiter.may_sample(count):
            raise self._sample_refused(count)
        slots, probabilities, times, sizes, gone = self._draw(count, generator)
        first, last = self._first.take(slots), self._last.take(slots)
        lengths = self._lengths(first, last)
        sample = Sample(
            keys=self._keys.take(slots),
            probabilities=probabilities,
            priorities=self._priorities.take(slots),
            times_sampled=times,
            sizes=sizes,
            lengths=lengths,
            columns=self._gather(first, last, lengths),
        )
        self.limiter.samples += count
        if gone is not None and gone.size:
            self._remove(gone, sampled=True)
        return sample

    def _sample_refused(self, count: int) -> SampleRefused:
        return SampleRefused(
            f"{count} samples are not allowed after {self.limiter.counts()} by {self.limiter!r}"
        )

    def _draw(
        self, count: int, generator: np.random.Generator
    ) -> tuple[Slots, Array, Array, Array, Slots | None]:
        """Slots, probabilities, times sampled, sizes of the table, and which items have to go now."""
        if self.max_times_sampled:
            if isinstance(self.sampler, Ranking):
                return self._draw_in_order(self.sampler, count)
            return self._draw_with_limit(count, generator)
        uniforms = np.zeros(count) if self.sampler.deterministic else generator.random(count)
        slots, probabilities = self.sampler.choose(uniforms)
        return slots, probabilities, self._count(slots), np.full(count, self.size), None

    def _count(self, slots: Slots) -> Array:
        """How often each item has been sampled with this time; of one that is there twice in order."""
        before = self._times.take(slots)
        np.add.at(self._times, slots, ONE)
        times = self._times.take(slots)
        if np.count_nonzero(times != before + ONE):
            again = np.flatnonzero(times - before > 1)
            times[again] = before[again] + _turns(slots[again])
        self.unique_samples += int(np.count_nonzero(times == 1))
        return times

    def _draw_in_order(self, sampler: Ranking, count: int) -> tuple[Slots, Array, Array, Array, Slots]:
        """The first item until it has to go, then the next."""
        ranked = sampler.ranked(min(count, self.size))
        left = self.max_times_sampled - self._times[ranked]
        order = np.repeat(np.arange(len(ranked)), left)[:count]
        sizes = self.size - order
        if len(order) < count or sizes[-1] < self.limiter.min_size:
            raise self._sample_refused(count)
        slots = ranked[order]
        times = self._count(slots)
        gone = slots[times == self.max_times_sampled]
        sampler.remove(gone)
        return slots, np.ones(count), times, sizes, gone

    def _draw_with_limit(
        self, count: int, generator: np.random.Generator
    ) -> tuple[Slots, Array, Array, Array, Slots]:
        """Draw until an item has to go, and go on without it."""
        saved: Any = None
        if self.size - count < self.limiter.min_size:  # it may turn out on the way that these are too many
            state = generator.bit_generator.state
            saved = (self.sampler.state_dict(), self._times.copy(), self.unique_samples, state)
        uniforms = generator.random(count)
        parts: list[tuple[Slots, Array, Array, Array]] = []
        gone: list[Slots] = []
        done = 0
        while done < count:
            size = self.size - len(gone)
            if size < self.limiter.min_size:
                self.sampler.load_state_dict(saved[0])
                self._times, self.unique_samples, generator.bit_generator.state = saved[1:]
                raise self._sample_refused(count)
            slots, probabilities = self.sampler.choose(uniforms[done:])
            until = self._first_at_limit(slots)
            slots, probabilities = slots[:until], probabilities[:until]
            times = self._count(slots)
            if times[-1] == self.max_times_sampled:
                gone.append(slots[-1:])
                self.sampler.remove(slots[-1:])
            parts.append((slots, probabilities, times, np.full(len(slots), size)))
            done += len(slots)
        slots, probabilities, times, sizes = (np.concatenate(part) for part in zip(*parts, strict=True))
        return slots, probabilities, times, sizes, np.concatenate([np.empty(0, np.int64), *gone])

    def _first_at_limit(self, slots: Slots) -> int:
        """How many may be drawn up to the first that then has to go, with that one."""
        reached = np.flatnonzero(self._times.take(slots) + _turns(slots) >= self.max_times_sampled)
        return int(reached[0]) + 1 if reached.size else len(slots)

    # Columns -----------------------------------------------------------------------------------

    def _gather(self, first: Rows, last: Rows, lengths: Array) -> dict[str, Array]:
        places: dict[Any, Rows] = {"first": first, "last": last}
        padding: Array | None = None
        columns: dict[str, Array] = {}
        for name, field in self.fields.items():
            if field.at == "steps" and "steps" not in places:
                places["steps"], padding = self._walk(last, lengths)
            rows = places[field.at]
            if field.stack > 1:
                key = (field.at, field.stack)
                rows = (
                    places[key]
                    if key in places
                    else places.setdefault(key, self.steps.back(rows, field.stack))
                )
            columns[name] = self.steps.columns[field.column].take(rows, axis=0)
            if field.at == "steps" and padding is not None:
                columns[name][padding] = 0
        return columns

    def _walk(self, last: Rows, lengths: Array) -> tuple[Array, Array | None]:
        """The rows of all steps of each item, `[n, length]`, and which are only there to fill up."""
        walked = self.steps.back(self.steps.previous.take(last), self.length)
        if (lengths == self.length).all():
            return walked, None
        index = np.arange(self.length) + (self.length - lengths)[:, None]
        padding = index >= self.length
        index[padding] = self.length - 1
        return np.take_along_axis(walked, index, axis=1), padding

    # State -------------------------------------------------------------------------------------

    def info(self) -> TableInfo:
        """How the table stands. To count episodes all items are looked at."""
        items = self._keys[:-1] >= 0
        episodes = np.unique(self.steps.stamp[self._first[items]] >> 32).size
        rows = self.steps.in_use
        selector_bytes = self.sampler.item_bytes + self.remover.item_bytes
        item_bytes = sum(
            a.itemsize for a in (self._keys, self._first, self._last, self._priorities, self._times)
        )
        return TableInfo(
            size=self.size,
            max_size=self.max_size,
            episodes=episodes,
            rows=rows,
            row_bytes=rows * self.steps.row_bytes,
            index_bytes=rows * self.steps.index_bytes + self.size * (item_bytes + selector_bytes),
            inserts=self.limiter.inserts,
            samples=self.limiter.samples,
            deletes=self.limiter.deletes,
            unique_samples=self.unique_samples,
            stale_updates=self.stale_updates,
        )

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything, in plain arrays and numbers: what is sampled afterwards is exactly the same.

        Without a copy, most of it changes with the table.
        """
        slots = np.flatnonzero(self._keys[:-1] >= 0)
        return {
            "steps": self.steps.state_dict(copy=copy),
            "slots": slots,
            "keys": self._keys[slots],
            "first": self._first[slots],
            "last": self._last[slots],
            "priorities": self._priorities[slots],
            "times": self._times[slots],
            "vacant": self._vacant[: self._vacancies].copy(),
            "fresh": self._fresh,
            "inserted": self._inserted,
            "largest_priority": self.largest_priority,
            "unique_samples": self.unique_samples,
            "stale_updates": self.stale_updates,
            "sampler": self.sampler.state_dict(),
            "remover": self.remover.state_dict(),
            "limiter": self.limiter.state_dict(),
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, of a table made in the same way."""
        slots = np.asarray(state["slots"])
        self.steps.load_state_dict(state["steps"])
        self._keys[:-1] = -1
        self._keys[slots] = state["keys"]
        self._first[slots], self._last[slots] = state["first"], state["last"]
        self._priorities[slots] = state["priorities"]
        self._times[:] = 0
        self._times[slots] = state["times"]
        self._vacancies = len(state["vacant"])
        self._vacant[: self._vacancies] = state["vacant"]
        self._fresh, self._inserted = int(state["fresh"]), int(state["inserted"])
        self.size = len(slots)
        self.largest_priority = float(state["largest_priority"])
        self.unique_samples, self.stale_updates = int(state["unique_samples"]), int(state["stale_updates"])
        self.sampler.load_state_dict(state["sampler"])
        self.remover.load_state_dict(state["remover"])
        self.limiter.load_state_dict(state["limiter"])
        self._generator.bit_generator.state = state["generator"]


def _check_fields(signature: Signature, fields: Mapping[str, Field]) -> None:
    for name, field in fields.items():
        if field.column not in signature:
            raise SignatureError(
                f"field {name!r} is of column {field.column!r}, and the table has {', '.join(signature)}"
            )
        if field.at not in ("first", "last", "steps") or field.stack < 1:
            raise SignatureError(
                f"field {name!r} is at {field.at!r} with a stack of {field.stack}; fields are at 'first', "
                f"'last' or 'steps' with a stack of at least 1"
            )


def _largest(priorities: Array) -> float:
    """The largest of some priorities; raises unless all can be priorities."""
    if not priorities.size:
        return 0.0
    largest = priorities.max()
    if not (largest < np.inf and np.count_nonzero(priorities >= 0) == priorities.size):
        wrong = priorities[~((priorities >= 0) & (priorities < np.inf))]
        raise ReplayError(f"priorities are finite and at least 0, and among these are {_numbers(wrong)}")
    return float(largest)


def _turns(slots: Slots) -> Array:
    """For each slot how often it has been there, with this time."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    begins = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    index = np.arange(len(slots))
    turns = np.empty(len(slots), np.int64)
    turns[order] = index - np.maximum.accumulate(np.where(begins, index, 0)) + 1
    return turns


def _numbers(values: Array) -> str:
    text = ", ".join(f"{value:g}" for value in values[:5])
    return f"{text}, ..." if len(values) > 5 else text
