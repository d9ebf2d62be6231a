"""Ways to cut the steps of an episode into windows, each an item."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.errors import ReplayError

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
