"""A replay table: items over shared steps, sampled and removed by selectors, as in Reverb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollstream.rate_limiter import RateLimiter
from rollstream.replay.arrays import Array, constant
from rollstream.replay.errors import InsertRefused, ReplayError, SampleRefused
from rollstream.replay.fields import Field, check_fields, gather_fields, gather_rows
from rollstream.replay.items import Items, NewItems
from rollstream.replay.priorities import largest_priority, listed
from rollstream.replay.sampling import Sample, draw_with_limit
from rollstream.replay.selectors import Fifo, Selector, Slots
from rollstream.replay.signature import Signature
from rollstream.replay.step_storage import STEP_BITS, Rows, StepStorage
from rollstream.replay.table_info import TableInfo

ANY_LAG = 1 << 62
"""Of items whose rows may be of any age."""


class Table:
    """A replay table with the semantics of Reverb (Cassirer et al., 2021, arXiv:2102.04736).

    An item is a window of consecutive steps of one episode, with a priority and a unique key. Windows share
    steps: each is stored once.

    >>> from rollstream.replay import ArraySpec, Fifo, MinSize, Transitions, Uniform, Writer
    >>> signature = {"observation": ArraySpec((), np.int64), "reward": ArraySpec((), np.float32)}
    >>> fields = {
    ...     "observation": Field("observation"),
    ...     "reward": Field("reward"),
    ...     "next_observation": Field("observation", "next"),
    ... }
    >>> table = Table(
    ...     signature, fields, max_size=100, sampler=Uniform(), remover=Fifo(), rate_limiter=MinSize(1)
    ... )
    >>> steps = {"observation": np.array([[0], [1], [2]]), "reward": np.ones((3, 1), np.float32)}
    >>> ends = np.zeros((3, 1), bool)
    >>> keys = Writer(table, Transitions(1)).write(
    ...     {**steps, "terminated": ends, "truncated": ends}, last_observation=np.array([3])
    ... )
    >>> sample = table.sample(4, np.random.default_rng(0))
    >>> sample.columns["observation"], sample.columns["next_observation"]
    (array([1, 0, 0, 0]), array([2, 1, 1, 1]))

    Args:
        signature: The columns of a step.
        fields: What a sample contains, by name.
        max_size: Maximum number of items. When an item is inserted into a full table, the remover selects one
            to remove, which may be the new one.
        max_length: Maximum number of steps per item.
        sampler: Selects items to sample.
        remover: Selects items to remove.
        rate_limiter: Decides when inserts and samples are allowed.
        max_times_sampled: Remove items once they have been sampled this often; 0 for no limit.
        initial_rows: Number of steps to allocate memory for; defaults to `max_size`, and 1/64 or 1024 more.
        seed: Seed of a random remover.
    """

    def __init__(
        self,
        signature: Signature,
        fields: Mapping[str, Field],
        *,
        max_size: int,
        sampler: Selector,
        remover: Selector,
        rate_limiter: RateLimiter,
        max_length: int = 1,
        max_times_sampled: int = 0,
        initial_rows: int | None = None,
        seed: int = 0,
    ):
        check_fields(signature, fields)
        if max_size < 1 or max_length < 1:
            raise ReplayError(f"max_size is {max_size} and max_length is {max_length}; set both to 1 or more")
        if rate_limiter.min_size > max_size:
            raise ReplayError(
                f"the rate limiter waits for {rate_limiter.min_size} items, but max_size is {max_size}, so "
                f"nothing could ever be sampled; set max_size to at least {rate_limiter.min_size}"
            )
        if sampler is remover:
            raise ReplayError("sampler and remover are the same object; create one selector for each")
        self.storage = StepStorage(signature, initial_rows or max_size + max(1024, max_size // 64))
        self.fields = dict(fields)
        self.max_size = max_size
        self.max_length = max_length
        self.history = max([field.history for field in fields.values()], default=0)
        """Number of rows before an item's first step that samples contain."""
        self._one_step = self.history == 0 and max_length == 1
        self.sampler = sampler
        self.remover = remover
        self.rate_limiter = rate_limiter
        self.max_times_sampled = max_times_sampled
        self.max_priority = 1.0
        """The largest priority so far, and the default for new items."""
        self.stale_updates = 0
        self._lag = 0  # of the rows of items; see `insert_unchecked`
        self._num_leaving = 0  # oldest items that are about to be removed
        self.storage.users.add(self)
        self._generator = np.random.default_rng(seed)
        self._items = Items(max_size + 1)  # one more while the remover selects
        for selector in (sampler, remover):
            selector.reset(self._items.capacity)

    @property
    def size(self) -> int:
        """Number of items."""
        return self._items.size

    @property
    def total_weight(self) -> float:
        """The sum of the sampler's weights; an item's probability is its weight divided by this.

        Sampling several tables in proportion to their total weights is sampling from one large table.
        """
        return self.sampler.total_weight

    # Insert ------------------------------------------------------------------------------------

    def can_insert(self, count: int = 1) -> bool:
        """Whether the rate limiter allows `count` inserts now."""
        return self.rate_limiter.can_insert(count)

    def insert(self, start: Rows, end: Rows, priorities: Array | float | None = None) -> Array:
        """Insert items one after the other, and return their keys.

        Args:
            start: Row of each item's first step.
            end: Row after each item's last step.
            priorities: Priorities of at least 0; the maximum priority so far by default.
        """
        lengths = self.storage.lengths(start, end)
        if lengths.size and not (lengths.min() >= 1 and lengths.max() <= self.max_length):
            raise ReplayError(
                f"items must be 1 to {self.max_length} consecutive steps of one episode; got lengths "
                f"{listed(lengths)}"
            )
        if priorities is not None:
            priorities = np.broadcast_to(np.asarray(priorities, np.float64), lengths.shape)
        self.check_insert(len(lengths), priorities)
        return self.insert_unchecked(start, end, priorities, ANY_LAG)

    def check_insert(self, count: int, priorities: Array | None = None) -> None:
        """Raise unless `count` items with these priorities may be inserted now."""
        if priorities is not None:
            largest_priority(priorities)
        if count and not self.rate_limiter.can_insert(count):
            raise InsertRefused(
                f"{self.rate_limiter!r} does not allow {count} inserts after {self.rate_limiter.counts()}"
            )

    def take_rows(self, count: int, num_items: int) -> Rows | slice:
        """Rows for new steps, some of which `num_items` items will refer to that are inserted next."""
        self._num_leaving = self._items.size + num_items - self.max_size
        rows = self.storage.take(count)
        self._num_leaving = 0
        return rows

    def insert_unchecked(self, start: Rows, end: Rows, priorities: Array | None, lag: int) -> Array:
        """Insert items that are valid and passed `check_insert`.

        None of their rows is older, by more than `lag` rows of the ring, than the first row of any item
        inserted before.
        """
        count = len(start)
        if lag > self._lag:
            self._lag = lag
        if priorities is not None:
            self.max_priority = max(self.max_priority, largest_priority(priorities))
        new = NewItems(start, end, self.max_priority if priorities is None else priorities)
        if count <= self.max_size - self._items.size:
            return self._add(new)
        if not isinstance(self.remover, Fifo):
            return np.concatenate([self._add_and_remove_one(new.part(i, 1)) for i in range(count)])
        if count <= self.max_size:
            return self._add_and_remove_oldest(self.remover, new)
        parts = [new.part(i, self.max_size) for i in range(0, count, self.max_size)]
        return np.concatenate([self._add_and_remove_oldest(self.remover, part) for part in parts])

    def _add_and_remove_oldest(self, remover: Fifo, new: NewItems) -> Array:
        """With a FIFO remover, removing before or after inserting is the same."""
        count = len(new.start)
        room = self.max_size - self.size
        if count <= room:
            return self._add(new)
        if room:
            added = self._add(new.part(0, room))
            return np.concatenate([added, self._add_and_remove_oldest(remover, new.part(room, count - room))])
        slots = remover.oldest(count)
        found = slots.stop - slots.start if isinstance(slots, slice) else count
        if found == count:
            return self._replace(slots, new)
        replaced = self._replace(slots, new.part(0, found))
        rest = new.part(found, count - found)
        return np.concatenate([replaced, self._add_and_remove_oldest(remover, rest)])

    def _add_and_remove_one(self, new: NewItems) -> Array:
        keys = self._add(new)
        if self.size > self.max_size:
            self._remove(self.remover.select(self._generator.random(1))[0])
        return keys

    def _add(self, new: NewItems) -> Array:
        count = len(new.start)
        slots = self._items.allocate(count)
        keys = self._items.write(slots, new)
        self.sampler.insert(slots, new.priorities)
        self.remover.insert(slots, new.priorities)
        self.rate_limiter.inserts += count
        return keys

    def _replace(self, slots: Slots | slice, new: NewItems) -> Array:
        """Remove and add the same number of items: faster, and what a full table does nearly always."""
        keys = self._items.replace(slots, new)
        self.sampler.replace(slots, new.priorities)
        self.remover.replace(slots, new.priorities)
        self.rate_limiter.inserts += len(keys)
        self.rate_limiter.deletes += len(keys)
        return keys

    # Update and delete -------------------------------------------------------------------------

    def update_priorities(self, keys: Array, priorities: Array) -> int:
        """Set priorities; return how many of the items still exist.

        Items that have been removed are ignored, and counted in `stale_updates`. If a key occurs twice, the
        last priority counts.
        """
        slots, found = self._items.find(keys)
        priorities = np.asarray(priorities, np.float64)
        if priorities.shape != found.shape:
            raise ReplayError(f"got {len(found)} keys, but priorities of shape {list(priorities.shape)}")
        self.max_priority = max(self.max_priority, largest_priority(priorities))
        if len(slots) < len(found):
            self.stale_updates += len(found) - len(slots)
            priorities = priorities[found]
        if slots.size:
            self._items.priorities[slots] = priorities
            self.sampler.update(slots, priorities)
            self.remover.update(slots, priorities)
        return slots.size

    def delete(self, keys: Array) -> int:
        """Remove items; return how many existed."""
        slots = np.unique(self._items.find(keys)[0])
        if slots.size:
            self._remove(slots)
        return slots.size

    def _remove(self, slots: Slots) -> None:
        self.sampler.remove(slots)
        self._remove_sampled(slots)

    def _remove_sampled(self, slots: Slots) -> None:
        """Remove items that the sampler no longer has."""
        self.remover.remove(slots)
        self._items.free(slots)
        self.rate_limiter.deletes += len(slots)

    # Sample ------------------------------------------------------------------------------------

    def can_sample(self, count: int = 1) -> bool:
        """Whether the rate limiter allows `count` samples now."""
        return self.rate_limiter.can_sample(count)

    def sample(self, count: int, generator: np.random.Generator) -> Sample:
        """Sample items with replacement, as if one after the other."""
        if count < 1:
            raise ReplayError(f"cannot sample {count} items; sample 1 or more")
        if not self.rate_limiter.can_sample(count):
            raise self._sample_refused(count)
        items, draws, lengths = self._items, None, None
        if self.max_times_sampled:
            draws = draw_with_limit(
                self.sampler, items, count, generator, self.max_times_sampled, self.rate_limiter.min_size
            )
            if draws is None:
                raise self._sample_refused(count)
            slots, probabilities = draws.slots, draws.probabilities
            records = items.read(slots)
        else:
            slots, probabilities = self.sampler.select(generator.random(count))
            records = items.read(slots)
            items.count_samples(slots)
        start, end = records[0], records[1]
        if self._one_step:
            columns = gather_rows(self.storage, self.fields, start, end)
        else:
            lengths = self._lengths(start, end)
            columns = gather_fields(
                self.storage, self.fields, start, end, lengths, max_length=self.max_length
            )
        self.rate_limiter.samples += count
        if draws is None:
            return Sample(columns, probabilities, records, items.size, None, lengths)
        if draws.exhausted.size:
            self._remove_sampled(draws.exhausted)
        return Sample(columns, probabilities, records, draws.table_sizes, draws.times_sampled, lengths)

    def _sample_refused(self, count: int) -> SampleRefused:
        return SampleRefused(
            f"{self.rate_limiter!r} does not allow {count} samples after {self.rate_limiter.counts()}"
        )

    # Rows --------------------------------------------------------------------------------------

    def _lengths(self, start: Rows, end: Rows) -> Array:
        return constant(len(start), 1, np.int64) if self.max_length == 1 else self.storage.lengths(start, end)

    def used_rows(self) -> Rows:
        """The rows of all items; see `RowUser`."""
        slots = self._items.slots()
        start, end = self._items.start[slots], self._items.end[slots]
        lengths = self._lengths(start, end)
        return self.storage.window_rows(start, end, lengths, max_length=self.max_length, history=self.history)

    def max_age(self) -> int:
        """Age of the first row of the oldest item, or somewhat more; see `RowUser`."""
        leaving = max(self._num_leaving, 0)
        if leaving >= self.size:
            return -1
        if not isinstance(self.remover, Fifo) or self._lag == ANY_LAG:
            return self.storage.capacity
        oldest = self._items.start[self.remover.nth(leaving)]
        return int(self.storage.ages(oldest)) + self._lag

    # State -------------------------------------------------------------------------------------

    def info(self) -> TableInfo:
        """Size, memory and counts. Takes time proportional to the size, to count episodes."""
        episodes = np.unique(self.storage.step_ids[self._items.start[self._items.slots()]] >> STEP_BITS).size
        rows, limiter = self.storage.num_used, self.rate_limiter
        item_bytes = self._items.item_bytes + self.sampler.item_bytes + self.remover.item_bytes
        return TableInfo(
            size=self.size,
            max_size=self.max_size,
            episodes=episodes,
            rows=rows,
            row_bytes=rows * self.storage.row_bytes,
            index_bytes=rows * self.storage.index_bytes + self.size * item_bytes,
            inserts=limiter.inserts,
            samples=limiter.samples,
            deletes=limiter.deletes,
            unique_samples=self._items.unique_samples,
            stale_updates=self.stale_updates,
        )

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything that future samples depend on; steps are views of the live arrays unless `copy`."""
        return {
            "storage": self.storage.state_dict(copy=copy),
            "items": self._items.state_dict(),
            "sampler": self.sampler.slots(),
            "remover": self.remover.slots(),
            "rate_limiter": self.rate_limiter.state_dict(),
            "generator": self._generator.bit_generator.state,
            "max_priority": self.max_priority,
            "unique_samples": self._items.unique_samples,
            "stale_updates": self.stale_updates,
            "lag": self._lag,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a table with the same arguments."""
        self.storage.load_state_dict(state["storage"])
        self._items.load_state_dict(state["items"], int(state["unique_samples"]))
        self.storage.release(self.used_rows())
        self._lag = int(state["lag"])
        for selector, slots in ((self.sampler, state["sampler"]), (self.remover, state["remover"])):
            selector.reset(self._items.capacity)
            selector.insert(np.asarray(slots), self._items.priorities[slots])
        self.rate_limiter.load_state_dict(state["rate_limiter"])
        self._generator.bit_generator.state = state["generator"]
        self.max_priority = float(state["max_priority"])
        self.stale_updates = int(state["stale_updates"])
