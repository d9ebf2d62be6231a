"""Ways to select items: which is sampled next, which is removed next. As in Reverb.

Items are known by slots, whole numbers below a bound. A selector is told of slots that are inserted, updated
and removed, all of them as arrays, and chooses some for given uniform random numbers, one for each choice:
n choices at once are the n choices one after the other.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rollstream.replay.errors import ReplayError

Array = np.ndarray[Any, Any]
Slots = Array


class Selector(ABC):
    """Selects among items. The table it is given to reserves its slots; it can be given to one only."""

    deterministic: ClassVar[bool]
    """Whether it selects the same item until something is inserted, updated or removed."""
    item_bytes: ClassVar[int]
    """What it keeps for an item."""
    size: int
    """How many items there are."""

    @abstractmethod
    def reserve(self, slots: int) -> None:
        """Be empty, and ready for slots below this number."""

    @abstractmethod
    def insert(self, slots: Slots, priorities: Array) -> None:
        """Have these items, too."""

    @abstractmethod
    def update(self, slots: Slots, priorities: Array) -> None:
        """Items have other priorities. Of one that is there twice the last counts."""

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Have these items no more; each is there once."""

    def replace(self, slots: Slots, priorities: Array) -> None:
        """Have other items in these slots."""
        self.remove(slots)
        self.insert(slots, priorities)

    @abstractmethod
    def choose(self, uniforms: Array) -> tuple[Slots, Array]:
        """An item, and the probability it was chosen with, for each number of [0, 1)."""

    @property
    def total(self) -> float:
        """The mass that probabilities are shares of: how often to sample here rather than elsewhere."""
        return float(self.size)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The items and all there is to know of them."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Ranking(Selector):
    """A selector that has an order: it always selects the first item."""

    deterministic = True

    @abstractmethod
    def ranked(self, count: int) -> Slots:
        """The first items, or all if there are fewer: what it would select if each was removed after."""

    def choose(self, uniforms: Array) -> tuple[Slots, Array]:
        """The first item, with certainty."""
        first = self.ranked(1)
        return np.repeat(first, len(uniforms)), np.ones(len(uniforms))


class Uniform(Selector):
    """Every item is as likely."""

    deterministic = False
    item_bytes = 16

    def reserve(self, slots: int) -> None:
        """Items are kept without gaps, so that a random number is a random item."""
        self.size = 0
        self._items = np.empty(slots, np.int64)
        self._places = np.full(slots, -1, np.int64)

    def insert(self, slots: Slots, priorities: Array) -> None:  # noqa: ARG002
        """At the end."""
        stop = self.size + len(slots)
        self._items[self.size : stop] = slots
        self._places[slots] = np.arange(self.size, stop)
        self.size = stop

    def update(self, slots: Slots, priorities: Array) -> None:
        """Priorities play no part."""

    def remove(self, slots: Slots) -> None:
        """The last items take the places of those that go."""
        size = self.size - len(slots)
        places = self._places[slots]
        self._places[slots] = -1
        last = self._items[size : self.size]
        staying = last[self._places[last] >= 0]
        if staying.size:
            holes = places[places < size]
            self._items[holes] = staying
            self._places[staying] = holes
        self.size = size

    def replace(self, slots: Slots, priorities: Array) -> None:
        """As likely as those before."""

    def choose(self, uniforms: Array) -> tuple[Slots, Array]:
        """Any."""
        places = (uniforms * self.size).astype(np.int64)
        return self._items.take(places), np.full(len(uniforms), 1.0 / self.size)

    def state_dict(self) -> dict[str, Any]:
        """The items in order."""
        return {"items": self._items[: self.size].copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.reserve(len(self._items))
        self.insert(np.asarray(state["items"]), np.empty(0))


class Prioritized(Selector):
    r"""An item is as likely as its priority to the power of the exponent: $p_i^\alpha / \sum_j p_j^\alpha$.

    Items of priority 0 are never selected, whatever the exponent, unless all have it: then any is as likely.

    The weights are the leaves of a tree of sums in which a node has 16 children. For each child
    there is the sum of those before it, so that going down one level is a look at 16 neighbours. Sums are
    always made from the children anew: they do not drift, and depend on nothing but the weights.

    Args:
        exponent: alpha, 0 for uniform sampling.
    """

    deterministic = False
    item_bytes = 18
    BITS = 4
    WIDTH = 1 << BITS
    TOP = 4096
    """Nodes without a parent, at most: those are added up when something is selected after a change. With 1M
    items, to select and update 1024 took 620 us with two levels under such a top, 955 us with three under a
    smaller one; 32 took 65 us and 67 us."""

    def __init__(self, exponent: float = 1.0):
        if exponent < 0:
            raise ReplayError(f"the exponent of priorities is {exponent:g} and has to be at least 0")
        self.exponent = exponent

    def reserve(self, slots: int) -> None:
        """A tree of zeros."""
        self.size = 0
        self._slots = slots
        self._there = np.zeros(slots, bool)
        self._sums: list[Array] = []  # of each level, from the weights up
        self._running: list[Array] = []  # beside each but the top: before each child, a row for a node
        count = slots
        while True:
            count = -(-count // self.WIDTH) * self.WIDTH
            self._sums.append(np.zeros(count))
            if count <= self.TOP:
                break
            count //= self.WIDTH
            self._running.append(np.zeros((count, self.WIDTH)))
        self._top = np.zeros(len(self._sums[-1]) + 1)  # before each node of the top level, and of all
        self._changed: list[Slots] = []  # weights that sums do not have yet
        self._changes = 0

    def insert(self, slots: Slots, priorities: Array) -> None:
        """With their weights."""
        self.size += len(slots)
        self._there[slots] = True
        self.update(slots, priorities)

    def update(self, slots: Slots, priorities: Array) -> None:
        """Other weights."""
        if self.exponent == 1:
            weights = priorities
        elif self.exponent == 0:
            weights = np.not_equal(priorities, 0).astype(np.float64)
        else:
            weights = np.power(priorities, self.exponent)
        self._set(slots, weights)

    def remove(self, slots: Slots) -> None:
        """Weights of 0."""
        self.size -= len(slots)
        self._there[slots] = False
        self._set(slots, 0.0)

    def replace(self, slots: Slots, priorities: Array) -> None:
        """Other weights."""
        self.update(slots, priorities)

    def _set(self, slots: Slots, weights: Array | float) -> None:
        self._sums[0][slots] = weights
        self._changed.append(slots)
        self._changes += len(slots)
        if self._changes > self.TOP:
            self._add_up()

    def _add_up(self) -> None:
        """Make the sums anew that have changed: once for all changes between two choices."""
        if not self._changed:
            return
        nodes = self._changed[0] if len(self._changed) == 1 else np.concatenate(self._changed)
        self._changed, self._changes = [], 0
        for level, running in enumerate(self._running):
            nodes = nodes >> self.BITS
            if nodes.size > 64:  # neighbours have the same parent: once is enough
                nodes = nodes[np.concatenate(([True], nodes[1:] != nodes[:-1]))]
            children = self._sums[level].reshape(-1, self.WIDTH).take(nodes, axis=0)
            sums = np.zeros_like(children)
            children[:, :-1].cumsum(axis=1, out=sums[:, 1:])
            running[nodes] = sums
            self._sums[level + 1][nodes] = sums[:, -1] + children[:, -1]
        self._sums[-1].cumsum(out=self._top[1:])

    @property
    def total(self) -> float:
        """The sum of all weights."""
        self._add_up()
        return float(self._top[-1])

    def choose(self, uniforms: Array) -> tuple[Slots, Array]:
        """By weight, down the tree.

        A target that rounding has carried to the end of a node may come out at an item without weight: then
        it is looked for again, with more care.
        """
        self._add_up()
        total = self._top[-1]
        if total == 0:
            there = np.flatnonzero(self._there)
            chosen = there[(uniforms * self.size).astype(np.int64)]
            return chosen, np.full(len(uniforms), 1.0 / self.size)
        slots = self._descend(uniforms * total)
        weights = self._sums[0].take(slots)
        if np.count_nonzero(weights) < len(weights):
            lost = np.flatnonzero(weights == 0)
            slots[lost] = self._descend(uniforms[lost] * total, careful=True)
            weights = self._sums[0].take(slots)
        return slots, weights / total

    def _descend(self, targets: Array, *, careful: bool = False) -> Slots:
        """The slots up to which weights add up to the targets.

        At every level it goes on with the last child before which the sum is not above what remains of the
        target. With care that remainder is kept below the sum of all children: the child then has a sum above
        0, however sums were rounded.
        """
        if careful:
            targets = np.minimum(targets, np.nextafter(self._top[-1], 0))
        nodes = self._top.searchsorted(targets, side="right") - 1
        np.minimum(nodes, len(self._top) - 2, out=nodes)
        before = self._top.take(nodes)
        for sums, running in zip(self._sums[:0:-1], self._running[::-1], strict=True):
            targets = targets - before
            if careful:
                targets = np.minimum(targets, np.nextafter(sums.take(nodes), 0))
            above = running.take(nodes, axis=0) > targets[:, None]
            # The child is the one before the first above the target: the last, if there is none (argmax 0).
            nodes = (nodes << self.BITS) + ((above.argmax(axis=1) - 1) & (self.WIDTH - 1))
            before = running.ravel().take(nodes)
        return nodes

    def state_dict(self) -> dict[str, Any]:
        """The weights of the items; sums follow from them."""
        slots = np.flatnonzero(self._there)
        return {"slots": slots, "weights": self._sums[0][slots]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.reserve(self._slots)
        slots = np.asarray(state["slots"])
        self.size = len(slots)
        self._there[slots] = True
        self._set(slots, np.asarray(state["weights"]))


class _Queue(Ranking):
    """Items in the order they came, with gaps where some were removed."""

    item_bytes = 24

    def reserve(self, slots: int) -> None:
        """An empty queue, long enough to be tidied up seldom."""
        self.size = 0
        self._queue = np.empty(2 * slots + 64, np.int64)
        self._places = np.full(slots, -1, np.int64)  # where in the queue; elsewhere an item is a gap
        self._head = self._tail = 0

    def insert(self, slots: Slots, priorities: Array) -> None:  # noqa: ARG002
        """At the end."""
        count = len(slots)
        if self._tail + count > len(self._queue):
            self._tidy()
        stop = self._tail + count
        self._queue[self._tail : stop] = slots
        self._places[slots] = np.arange(self._tail, stop)
        self._tail = stop
        self.size += count

    def _tidy(self) -> None:
        items = self._between(self._head, self._tail)
        self._head, self._tail = 0, len(items)
        self._queue[: self._tail] = items
        self._places[items] = np.arange(self._tail)

    def _between(self, start: int, stop: int) -> Slots:
        items = self._queue[start:stop]
        return items[self._places[items] == np.arange(start, stop)]

    def update(self, slots: Slots, priorities: Array) -> None:
        """Priorities play no part."""

    def state_dict(self) -> dict[str, Any]:
        """The items in order."""
        return {"items": self._between(self._head, self._tail)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.reserve(len(self._places))
        self.insert(np.asarray(state["items"]), np.empty(0))


class Fifo(_Queue):
    """The item that was inserted first."""

    def remove(self, slots: Slots) -> None:
        """A gap, unless they were the first ones."""
        stop = self._head + len(slots)
        if stop <= self._tail and (self._queue[self._head : stop] == slots).all():
            self._head = stop
        self._places[slots] = -1
        self.size -= len(slots)

    def ranked(self, count: int) -> Slots:
        """The oldest, oldest first."""
        if self.size == self._tail - self._head:
            return self._queue[self._head : min(self._head + count, self._tail)].copy()
        start, found = self._head, []
        while count > 0 and start < self._tail:
            stop = min(start + max(count, 64), self._tail)
            items = self._between(start, stop)[:count]
            if not found and not len(items):
                self._head = stop
            start, count = stop, count - len(items)
            found.append(items)
        return np.concatenate(found)


class Lifo(_Queue):
    """The item that was inserted last."""

    def remove(self, slots: Slots) -> None:
        """A gap, unless they were the last ones."""
        start = self._tail - len(slots)
        if start >= self._head and (self._queue[start : self._tail] == slots[::-1]).all():
            self._tail = start
        self._places[slots] = -1
        self.size -= len(slots)

    def ranked(self, count: int) -> Slots:
        """The newest, newest first."""
        stop, found = self._tail, []
        while count > 0 and stop > self._head:
            start = max(stop - max(count, 64), self._head)
            items = self._between(start, stop)[::-1][:count]
            if not found and not len(items):
                self._tail = start
            stop, count = start, count - len(items)
            found.append(items)
        return np.concatenate(found)


class _Heap(Ranking):
    """Items by priority; of equal ones that which was inserted or updated the longest time ago."""

    item_bytes = 184  # an entry is a tuple of three numbers, in up to two places
    sign: ClassVar[float]

    def reserve(self, slots: int) -> None:
        """An empty heap."""
        self.size = 0
        self._heap: list[tuple[float, int, int]] = []  # with items that were removed or updated since
        self._turns = [-1] * slots  # when an item was inserted or updated last
        self._turn = 0

    def insert(self, slots: Slots, priorities: Array) -> None:
        """By priority."""
        self.size += len(slots)
        self.update(slots, priorities)

    def update(self, slots: Slots, priorities: Array) -> None:
        """By another priority."""
        for slot, priority in zip(slots.tolist(), priorities.tolist(), strict=True):
            self._turns[slot] = self._turn
            heapq.heappush(self._heap, (self.sign * priority, self._turn, slot))
            self._turn += 1
        if len(self._heap) > 2 * self.size + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[float, int, int]) -> bool:
        return self._turns[entry[2]] == entry[1]

    def remove(self, slots: Slots) -> None:
        """They are passed over when their turn comes."""
        for slot in slots.tolist():
            self._turns[slot] = -1
        self.size -= len(slots)

    def ranked(self, count: int) -> Slots:
        """In order; they stay in the heap."""
        heap, found = self._heap, []
        while heap and len(found) < count:
            if not self._is_current(heap[0]):
                heapq.heappop(heap)
            elif count == 1:
                return np.array([heap[0][2]])
            else:
                found.append(heapq.heappop(heap))
        for entry in found:
            heapq.heappush(heap, entry)
        return np.array([slot for _, _, slot in found], np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Priorities and turns of the items."""
        current = sorted(entry for entry in self._heap if self._is_current(entry))
        return {
            "priorities": np.array([self.sign * entry[0] for entry in current], np.float64),
            "turns": np.array([entry[1] for entry in current], np.int64),
            "slots": np.array([entry[2] for entry in current], np.int64),
            "turn": self._turn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.reserve(len(self._turns))
        priorities, turns = np.asarray(state["priorities"]).tolist(), np.asarray(state["turns"]).tolist()
        slots = np.asarray(state["slots"]).tolist()
        self._heap = [(self.sign * p, turn, s) for p, turn, s in zip(priorities, turns, slots, strict=True)]
        for _, turn, slot in self._heap:
            self._turns[slot] = turn
        self.size, self._turn = len(slots), int(state["turn"])


class MinHeap(_Heap):
    """The item of the least priority; of several that inserted or updated the longest time ago."""

    sign = 1.0


class MaxHeap(_Heap):
    """The item of the largest priority; of several that inserted or updated the longest time ago."""

    sign = -1.0
