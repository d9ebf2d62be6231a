"""Samples of a table, and draws of items that are removed once they were sampled often enough."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.arrays import Array, filled
from rollstream.replay.items import Items
from rollstream.replay.selectors import OrderedSelector, Selector, Slots


class Sample:
    """Sampled items; every array has one entry per item.

    What few callers read is computed when it is read.
    """

    __slots__ = ("_lengths", "_records", "_table_sizes", "_times_sampled", "columns", "keys", "probabilities")

    def __init__(
        self,
        columns: dict[str, Array],
        probabilities: Array,
        records: Array,
        table_sizes: Array | int,
        times_sampled: Array | None,
        lengths: Array | None,
    ):
        self.columns = columns
        """The table's fields; copies. Frame stacks of one-step items share memory with those of their next
        observations."""
        self.keys: Array = records[2]
        """Identify items in `update_priorities` and `delete`."""
        self.probabilities = probabilities
        self._records = records
        self._table_sizes = table_sizes
        self._times_sampled = times_sampled
        self._lengths = lengths

    @property
    def start(self) -> Array:
        """The row of each item's first step."""
        return self._records[0]

    @property
    def priorities(self) -> Array:
        """The priority of each item."""
        return self._records[3].view(np.float64)

    @property
    def times_sampled(self) -> Array:
        """How often the item has been sampled, including this time."""
        if self._times_sampled is None:
            return self._records[4] + _occurrences(self.keys)
        return self._times_sampled

    @property
    def table_sizes(self) -> Array:
        """Number of items in the table when each was sampled."""
        return self._filled(self._table_sizes)

    @property
    def lengths(self) -> Array:
        """Number of steps of each item."""
        return self._filled(1 if self._lengths is None else self._lengths)

    def _filled(self, value: Array | int) -> Array:
        return filled(len(self.keys), value, np.int64) if isinstance(value, int) else value


class Draws(NamedTuple):
    """Items drawn one after the other, and counted."""

    slots: Slots
    probabilities: Array
    times_sampled: Array
    table_sizes: Array
    exhausted: Slots
    """Items that reached `max_times_sampled`: removed from the sampler, but not yet from the table."""


def draw_with_limit(
    sampler: Selector,
    items: Items,
    count: int,
    generator: np.random.Generator,
    max_times_sampled: int,
    min_size: int,
) -> Draws | None:
    """Draw `count` items, each of which is removed once it was sampled `max_times_sampled` times.

    Returns `None`, and changes nothing, if removing exhausted items leaves fewer than `min_size` on the way.
    """
    if isinstance(sampler, OrderedSelector):
        return _draw_in_order(sampler, items, count, max_times_sampled, min_size)
    return _draw_at_random(sampler, items, count, generator, max_times_sampled, min_size)


def _draw_in_order(
    sampler: OrderedSelector, items: Items, count: int, max_times_sampled: int, min_size: int
) -> Draws | None:
    """Draw the first item until it is exhausted, then the next one."""
    ranked = sampler.peek(min(count, items.size))
    remaining = max_times_sampled - items.times_sampled[ranked]
    order = np.repeat(np.arange(len(ranked)), remaining)[:count]
    sizes = items.size - order
    if len(order) < count or sizes[-1] < min_size:
        return None
    slots = ranked[order]
    times_sampled = _count_samples(items, slots)
    exhausted = slots[times_sampled == max_times_sampled]
    sampler.remove(exhausted)
    return Draws(slots, np.ones(count), times_sampled, sizes, exhausted)


def _draw_at_random(
    sampler: Selector,
    items: Items,
    count: int,
    generator: np.random.Generator,
    max_times_sampled: int,
    min_size: int,
) -> Draws | None:
    """Draw until an item is exhausted, remove it from the sampler, and continue."""
    saved: Any = None
    if items.size - count < min_size:  # too few may be left on the way
        saved = sampler.slots(), items.times_sampled.copy(), generator.bit_generator.state
    uniforms = generator.random(count)
    parts: list[tuple[Array, ...]] = []
    exhausted: list[Slots] = [np.empty(0, np.int64)]
    drawn, size = 0, items.size
    while drawn < count:
        if size < min_size:
            slots, items.times_sampled[:], generator.bit_generator.state = saved
            sampler.reset(items.capacity)
            sampler.insert(slots, items.priorities[slots])
            return None
        slots, probabilities = sampler.select(uniforms[drawn:])
        stop = _first_exhausted(items, slots, max_times_sampled)
        slots, probabilities = slots[:stop], probabilities[:stop]
        times_sampled = _count_samples(items, slots)
        parts.append((slots, probabilities, times_sampled, filled(len(slots), size, np.int64)))
        if times_sampled[-1] == max_times_sampled:
            exhausted.append(slots[-1:])
            sampler.remove(slots[-1:])
            size -= 1
        drawn += len(slots)
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Draws(*columns, exhausted=np.concatenate(exhausted))


def _first_exhausted(items: Items, slots: Slots, max_times_sampled: int) -> int:
    """The number of draws up to and including the first that exhausts an item."""
    reached = np.flatnonzero(items.times_sampled[slots] + _occurrences(slots) >= max_times_sampled)
    return int(reached[0]) + 1 if reached.size else len(slots)


def _count_samples(items: Items, slots: Slots) -> Array:
    """Count each draw, and return how often the item has been sampled, including this draw."""
    times_sampled = items.times_sampled[slots] + _occurrences(slots)
    items.count_samples(slots)
    return times_sampled


def _occurrences(slots: Slots) -> Array:
    """How often each slot has occurred so far, including this time.

    >>> _occurrences(np.array([3, 5, 3, 3])).tolist()
    [1, 1, 2, 3]
    """
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    index = np.arange(len(slots))
    occurrences = np.empty(len(slots), np.int64)
    occurrences[order] = index - np.maximum.accumulate(np.where(is_first, index, 0)) + 1
    return occurrences
