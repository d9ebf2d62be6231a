"""Windowing: how the steps of an episode become items, like the adders of Acme (arXiv:2006.00979)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from rollstream.replay.arrays import Array, filled
from rollstream.replay.errors import ReplayError


class Windows(NamedTuple):
    """Windows that are complete with the steps of a write, ordered by time, then by stream."""

    times: Array
    """Time index of each window's last step."""
    streams: Array
    """Stream index."""
    lengths: Array


class Windowing(ABC):
    """Splits episodes into windows of consecutive steps; each window becomes an item."""

    max_length: int
    """Maximum number of steps in a window."""

    @abstractmethod
    def windows(self, counts: Array, mask: Array | None, ended: Array | None) -> Windows:
        """The windows that end with these steps.

        Args:
            counts: Number of steps of the episode up to and including each step, `[T, B]`.
            mask: Which entries are environment steps; `None` if all are.
            ended: Which steps end an episode; `None` if none does.
        """

    @abstractmethod
    def next_start(self, counts: Array) -> Array:
        """The step at which the next window starts, in ongoing episodes with `counts` steps so far."""


class Transitions(Windowing):
    """n-step transitions: a window of n steps starts at every step; at the end of an episode it is shorter.

    Args:
        n_step: n.
    """

    def __init__(self, n_step: int = 1):
        if n_step < 1:
            raise ReplayError(f"n_step is {n_step}; set it to 1 or more")
        self.max_length = n_step

    def windows(self, counts: Array, mask: Array | None, ended: Array | None) -> Windows:
        """A full window ends with each step that has enough before it, shorter ones at the episode's end."""
        full = counts >= self.max_length
        if mask is not None:
            full &= mask
        times, streams = full.nonzero()
        lengths = filled(len(times), self.max_length, np.int64)
        if ended is None or self.max_length == 1:
            return Windows(times, streams, lengths)
        end_times, end_streams = ended.nonzero()
        shorter = np.minimum(counts[end_times, end_streams], self.max_length - 1)
        times = np.concatenate([times, np.repeat(end_times, shorter)])
        streams = np.concatenate([streams, np.repeat(end_streams, shorter)])
        lengths = np.concatenate([lengths, *(np.arange(longest, 0, -1) for longest in shorter)])
        order = np.argsort(times * counts.shape[1] + streams, kind="stable")
        return Windows(times[order], streams[order], lengths[order])

    def next_start(self, counts: Array) -> Array:
        """The last n - 1 steps have no window yet."""
        return np.maximum(counts - (self.max_length - 1), 0)


class Sequences(Windowing):
    """Windows of `length` steps, one every `stride` steps; the rest of an episode becomes a shorter one.

    Args:
        length: Number of steps in a window.
        stride: Steps from the start of one window to the start of the next. Defaults to `length`: windows do
            not overlap.
    """

    def __init__(self, length: int, stride: int | None = None):
        self.max_length = length
        self.stride = length if stride is None else stride
        if length < 1 or self.stride < 1:
            raise ReplayError(f"length is {length} and stride is {self.stride}; set both to 1 or more")

    def windows(self, counts: Array, mask: Array | None, ended: Array | None) -> Windows:
        """Full windows, and the rest at the end of an episode."""
        excess = counts - self.max_length
        lengths = np.where((excess >= 0) & (excess % self.stride == 0), self.max_length, 0)
        if ended is not None:
            rest = np.maximum(counts - self.next_start(counts), 0)
            lengths = np.where(ended & (lengths == 0), rest, lengths)
        if mask is not None:
            lengths *= mask
        times, streams = lengths.nonzero()
        return Windows(times, streams, lengths[times, streams])

    def next_start(self, counts: Array) -> Array:
        """One stride after the last full window."""
        return np.maximum((counts - self.max_length) // self.stride + 1, 0) * self.stride


class Episodes(Sequences):
    """Whole episodes; longer ones are split after every `max_length` steps.

    Args:
        max_length: Maximum number of steps in an item.
    """

    def __init__(self, max_length: int):
        super().__init__(max_length)
