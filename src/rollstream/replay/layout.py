"""How the steps of a write lie in episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.errors import ReplayError
from rollstream.replay.steps import AGE_BITS

Array = np.ndarray[Any, Any]


class Layout(NamedTuple):
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


def layout_of(
    stamps: Array, ended: Array, real: Array | None, final: Sequence[tuple[int, int, Any]], episodes: int
) -> Layout:
    """How steps lie in episodes.

    Args:
        stamps: of the rows the first steps are taken in, `[B]`.
        ended: which steps end an episode, `[T, B]`.
        real: which are steps; `None` if all are.
        final: time, stream and observation of ends that the next observation does not show.
        episodes: how many there have been.
    """
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
        return Layout(stamps + index, None, None, None, 0)
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
    return Layout(own, begins, ended if some_ended else None, finals, count)
