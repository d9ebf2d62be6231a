"""A table together with who writes to it and what it is sampled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstream.replay.errors import ReplayError, SampleRefused
from rollstream.replay.steps import nested
from rollstream.replay.table import Table, TableInfo
from rollstream.replay.windowing import Cut
from rollstream.replay.writer import Writer
from rollstream.state_codec import serializable

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Chunk:
    """What happened in some streams, as it travels to where it is remembered: arguments of `Writer.write`."""

    columns: Mapping[str, Any]
    last: Any
    final: Sequence[tuple[int, int, Any]]
    streams: Array
    real: Array | None = None
    priorities: Array | None = None
    begins: bool = False
    """Whether the streams begin anew with it."""
    steps: int = 0
    """Environment steps there have been in all, with these."""


@serializable
@dataclass(frozen=True)
class Samples:
    """Items to learn from, and what they are known by where they are remembered."""

    rows: dict[str, Any]
    """Arrays `[N, ...]`: the table's fields, nested as they were, `length`, and `likelihood`: how likely each
    was drawn, relative to the least likely."""
    keys: Array
    steps: int
    """Environment steps there had been when they were drawn."""
    least: float = 1.0
    """The probability of the least likely."""


class Buffer:
    """Remembers chunks and gives samples, once there is enough to sample from.

    Args:
        table: where.
        cut: which steps become an item.
        batch_size: items of a sample.
        frame_axis: if observations are stacked, the axis of one that they are joined along.
        seed: of what is random in samples.
    """

    def __init__(
        self,
        table: Table,
        cut: Cut,
        *,
        batch_size: int,
        frame_axis: int | None = None,
        seed: int | Sequence[int] = 0,
    ):
        limiter = table.limiter
        if limiter.max_diff - limiter.min_diff < batch_size:
            raise ReplayError(
                f"{limiter!r} would never allow {batch_size} samples at once; make the batch smaller, or its "
                f"range at least as large"
            )
        self.table = table
        self.batch_size = batch_size
        self._frame_axis = frame_axis
        self.steps = 0
        """Environment steps there have been in all, as far as is known here."""
        self._writer = Writer(table, cut)
        self._generator = np.random.default_rng([*np.atleast_1d(seed), 0, 0, 7])

    def store(self, chunk: Chunk) -> int:
        """Remember it; how many items came of it."""
        if chunk.begins:
            self.forget(chunk)
        keys = self._writer.write(
            chunk.columns,
            chunk.last,
            chunk.final,
            real=chunk.real,
            streams=chunk.streams,
            priorities=chunk.priorities,
        )
        self.steps = max(self.steps, chunk.steps)
        return len(keys)

    def forget(self, chunk: Chunk) -> None:
        """The streams of a chunk do not go on from where they were."""
        self._writer.forget(chunk.streams)

    def sample(self) -> Samples | None:
        """Items drawn at random; `None` while there may be none."""
        if not self.table.may_sample(self.batch_size):
            return None
        try:
            drawn = self.table.sample(self.batch_size, self._generator)
        except SampleRefused:  # items that are sampled for the last time make the table smaller
            return None
        rows, least = nested(drawn.columns), drawn.probabilities.min()
        if self._frame_axis is not None:
            for name in ("observation", "next_observation"):
                rows[name] = joined(rows[name], self._frame_axis)
        rows["length"] = drawn.lengths.astype(np.float32)
        rows["likelihood"] = (drawn.probabilities / least).astype(np.float32)
        return Samples(rows, drawn.keys, self.steps, float(least))

    def update(self, keys: Array, priorities: Array) -> None:
        """How surprising items were."""
        self.table.update(keys, priorities)

    def info(self) -> TableInfo:
        """How the table stands."""
        return self.table.info()

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """All that is remembered, and where samples are; without a copy it changes with the buffer."""
        return {
            "table": self.table.state_dict(copy=copy),
            "writer": self._writer.state_dict(),
            "generator": self._generator.bit_generator.state,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.table.load_state_dict(state["table"])
        self._writer.load_state_dict(state["writer"])
        self._generator.bit_generator.state = state["generator"]
        self.steps = int(state["steps"])


def joined(stacks: Array, axis: int) -> Array:
    """Stacks `[N, k, ...]` with their frames joined along an axis, counted from the end.

    >>> joined(np.arange(6).reshape(1, 3, 2), -1)
    array([[0, 1, 2, 3, 4, 5]])
    >>> joined(np.arange(8).reshape(1, 2, 2, 2), -1).tolist()
    [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    """
    moved = np.moveaxis(stacks, 1, axis - 1)
    return moved.reshape(*moved.shape[: axis - 1], -1, *moved.shape[moved.ndim + axis + 1 :])
