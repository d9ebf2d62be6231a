"""Samples of a table, and how its sampler draws them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.arrays import Array, constant, filled
from rollstream.replay.items import Items
from rollstream.replay.selectors import OrderedSelector, Selector, Slots

_ONE = np.int64(1)
"""`np.add.at` takes 4 us for 1024 indices if the dtypes agree, and 76 us with a Python int."""
_FEW = 64
"""Up to here, looking for duplicates in a set is faster: for 32 items, counting takes 2 us instead of 4."""


class Sample(NamedTuple):
    """Sampled items; every array has one entry per item. Where all entries are equal, it may be read-only."""

    keys: Array
    """Identify items in `update_priorities` and `delete`."""
    probabilities: Array
    priorities: Array
    times_sampled: Array
    """How often the item has been sampled, including this time."""
    table_sizes: Array
    """Number of items in the table when each was sampled."""
    lengths: Array
    """Number of steps of each item."""
    columns: dict[str, Array]
    """The table's fields; copies. Frame stacks of one-step items share memory with those of their next
    observations."""


class Draws(NamedTuple):
    """Items drawn one after the other."""

    slots: Slots
    probabilities: Array
    times_sampled: Array | None
    """`None` if the draws are not yet counted."""
    table_sizes: Array
    exhausted: Slots | None = None
    """Items that reached `max_times_sampled`: removed from the sampler, but not yet from the table."""


def draw_items(
    sampler: Selector,
    items: Items,
    count: int,
    generator: np.random.Generator,
    max_times_sampled: int,
    min_size: int,
) -> Draws | None:
    """Draw `count` items.

    Returns `None`, and changes nothing, if removing exhausted items leaves fewer than `min_size` on the way.
    """
    if isinstance(sampler, OrderedSelector):
        if max_times_sampled:
            return _draw_in_order(sampler, items, count, max_times_sampled, min_size)
        uniforms = np.zeros(count)
    elif max_times_sampled:
        return _draw_with_limit(sampler, items, count, generator, max_times_sampled, min_size)
    else:
        uniforms = generator.random(count)
    slots, probabilities = sampler.select(uniforms)
    return Draws(slots, probabilities, None, constant(count, items.size, np.int64))


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
    times_sampled = count_samples(items, slots, items.times_sampled[slots])
    exhausted = slots[times_sampled == max_times_sampled]
    sampler.remove(exhausted)
    return Draws(slots, np.ones(count), times_sampled, sizes, exhausted)


def _draw_with_limit(
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
    parts: list[Draws] = []
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
        times_sampled = count_samples(items, slots, items.times_sampled[slots])
        parts.append(Draws(slots, probabilities, times_sampled, filled(len(slots), size, np.int64)))
        if times_sampled[-1] == max_times_sampled:
            exhausted.append(slots[-1:])
            sampler.remove(slots[-1:])
            size -= 1
        drawn += len(slots)
    columns = (np.concatenate(column) for column in list(zip(*parts, strict=True))[:-1])
    return Draws(*columns, exhausted=np.concatenate(exhausted))


def _first_exhausted(items: Items, slots: Slots, max_times_sampled: int) -> int:
    """The number of draws up to and including the first that exhausts an item."""
    reached = np.flatnonzero(items.times_sampled[slots] + _occurrences(slots) >= max_times_sampled)
    return int(reached[0]) + 1 if reached.size else len(slots)


def count_samples(items: Items, slots: Slots, before: Array) -> Array:
    """Count each draw, and return how often the item has been sampled, including this draw."""
    times = before + 1
    if len(slots) <= _FEW and len(set(slots.tolist())) == len(slots):
        items.times_sampled[slots] = times
        return times
    np.add.at(items.times_sampled, slots, _ONE)
    after = items.times_sampled[slots]
    if np.count_nonzero(after != times):
        repeated = np.flatnonzero(after != times)
        times[repeated] = before[repeated] + _occurrences(slots[repeated])
    return times


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
