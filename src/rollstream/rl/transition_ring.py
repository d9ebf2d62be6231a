"""Which rows of a ring are transitions: the host's side of replay on the device, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.episode_boundaries import FinalObservations, find_episode_boundaries
from rollstream.replay.step_storage import STEP_MASK
from rollstream.replay.windowing import Transitions
from rollstream.rl.device_sampling import RingLayout

Array = np.ndarray[Any, Any]
_FEW = 0.25
"""Below this fraction of transitions among the rows, they are listed instead of drawn until one is found."""


class Appended(NamedTuple):
    """What a write adds to the ring."""

    items: Array
    """Transitions that it completes, by the step they start with, `[n - 1 + T, B]`; the first n - 1 steps are
    those before it."""
    ended: Array
    """Steps that end an episode, `[T, B]`."""
    ages: Array
    """Steps since the episode's start, `[T, B]`."""


class TransitionRing:
    """Knows which rows are transitions, counts them, and draws some of them uniformly.

    Args:
        layout: The layout of the ring.
    """

    def __init__(self, layout: RingLayout):
        self.layout = layout
        self.steps = 0
        """Steps of each environment written so far."""
        self.size = 0
        """Number of transitions."""
        self._is_item = np.zeros((layout.length, layout.num_envs), bool)
        self._counts = np.zeros(layout.num_envs, np.int64)
        """Steps of the current episodes so far."""
        self._windowing = Transitions(layout.n_step)
        self._needs_counts = layout.n_step > 1 or layout.frame_stack > 1

    @property
    def position(self) -> int:
        """The step in the ring that the next write starts with."""
        return self.steps % self.layout.length

    @property
    def is_full(self) -> bool:
        """Whether the next write removes transitions."""
        return self.steps >= self.layout.capacity

    def rows(self, step: int | Array, streams: int | Array) -> Any:
        """The rows of steps of some environments."""
        return step % self.layout.length * self.layout.num_envs + streams

    def reset(self, streams: Array) -> None:
        """The next write starts an episode in these environments."""
        self._counts[streams] = 0

    def append(
        self, ended: Array, mask: Array | None, finals: FinalObservations, missing: Array
    ) -> tuple[Appended, int]:
        """Add T steps of all environments; return what they add, and how many transitions are removed.

        Args:
            ended: Steps that end an episode, `[T, B]`.
            mask: Which entries are environment steps; `None` if all are.
            finals: Final observations that are not in the next row.
            missing: Environments whose steps are not there.
        """
        layout, position = self.layout, self.position
        leaving = (position - layout.capacity) % layout.length
        old = self._is_item[leaving : leaving + layout.rollout_length]
        removed = int(np.count_nonzero(old))
        old[:] = False
        new = self._appended(ended, mask, finals)
        if missing.size:
            new.items[:, missing] = False
            self._counts[missing] = 0
        steps = (position - layout.n_step + 1 + np.arange(len(new.items))) % layout.length
        self._is_item[steps] |= new.items
        self.steps += layout.rollout_length
        self.size += int(np.count_nonzero(new.items)) - removed
        return new, removed

    def _appended(self, ended: Array, mask: Array | None, finals: FinalObservations) -> Appended:
        if not self._needs_counts:
            return Appended(np.ones(ended.shape, bool) if mask is None else mask.copy(), ended, ended)
        boundaries = find_episode_boundaries(self._counts, ended, mask, finals, 1)
        ages = boundaries.step_ids & STEP_MASK
        self._counts = ages[-1].copy()
        windows = self._windowing.windows(ages[:-1] + 1, mask, boundaries.ended)
        before = self.layout.n_step - 1
        items = np.zeros((before + len(ended), ended.shape[1]), bool)
        items[windows.times - windows.lengths + 1 + before, windows.streams] = True
        return Appended(items, ended if mask is None else ended & mask, ages[:-1])

    def draw(self, count: int, generator: np.random.Generator) -> Array:
        """Rows of transitions, drawn uniformly with replacement."""
        layout = self.layout
        steps = min(self.steps, layout.capacity)
        first, candidates = self.rows(self.steps - steps, 0), steps * layout.num_envs
        if self.size < _FEW * candidates:
            listed = np.flatnonzero(self._is_item)
            return listed[generator.integers(len(listed), size=count)].astype(np.int32)
        rows = (first + generator.integers(candidates, size=count)) % layout.num_rows
        if self.size < candidates:
            is_item = self._is_item.reshape(-1)
            while (rejected := np.flatnonzero(~is_item[rows])).size:
                rows[rejected] = (
                    first + generator.integers(candidates, size=rejected.size)
                ) % layout.num_rows
        return rows.astype(np.int32)

    def state_dict(self) -> dict[str, Any]:
        """Which rows are transitions, and where episodes stand."""
        return {"steps": self.steps, "is_item": self._is_item.copy(), "counts": self._counts.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a ring with the same layout."""
        self.steps, self._counts = int(state["steps"]), np.array(state["counts"])
        self._is_item = np.array(state["is_item"])
        self.size = int(np.count_nonzero(self._is_item))


class FinalSlots:
    """Slots for final observations; each is taken until the step it belongs to leaves the ring.

    Args:
        count: Number of slots to begin with.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count))
        self._taken: dict[int, list[int]] = {}
        """Slots by the write, modulo the writes in the ring, whose step they belong to."""

    def release(self, write: int) -> None:
        """Free the slots of the steps of a write."""
        self._free += self._taken.pop(write, [])

    def take(self, write: int, count: int) -> list[int]:
        """Slots for steps of a write; their number doubles, as often as needed, if too few are free."""
        while len(self._free) < count:
            self._free += range(self.count, 2 * self.count)
            self.count *= 2
        slots = [self._free.pop() for _ in range(count)]
        self._taken.setdefault(write, []).extend(slots)
        return slots

    def state_dict(self) -> dict[str, Any]:
        """Which slots are free and which are taken."""
        pairs = [[write, slot] for write, slots in self._taken.items() for slot in slots]
        taken = np.array(pairs, np.int64).reshape(-1, 2)
        return {"count": self.count, "free": np.array(self._free, np.int64), "taken": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the slots."""
        self.count, self._free, self._taken = int(state["count"]), state["free"].tolist(), {}
        for write, slot in state["taken"].tolist():
            self._taken.setdefault(write, []).append(slot)
