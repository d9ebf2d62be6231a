"""Where episodes start and end within a chunk of experience."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.arrays import Array
from rollstream.replay.errors import ReplayError
from rollstream.replay.step_storage import STEP_BITS

FinalObservations = Sequence[tuple[int, int, Any]]
"""Time index, stream index and final observation of episodes whose next row starts another episode."""


class EpisodeBoundaries(NamedTuple):
    """Where episodes start and end within T steps of B streams."""

    step_ids: Array
    """Of the row of each step, and of the row after the last step, `[T + 1, B]`."""
    starts: Array | None
    """Steps after which the next row starts an episode, `[T, B]`; `None` if there are none."""
    ended: Array | None
    """Steps that end an episode, `[T, B]`; `None` if there are none."""
    finals: tuple[Array, Array] | None
    """Times and streams of steps whose final observation needs a row of its own; `None` if there are none."""
    num_started: int
    """Number of episodes that start."""


def find_episode_boundaries(
    first_ids: Array,
    ended: Array,
    mask: Array | None,
    final_observations: FinalObservations,
    next_episode: int,
) -> EpisodeBoundaries:
    """Find where episodes start and end.

    Args:
        first_ids: Step ids of the first steps, `[B]`.
        ended: Steps that end an episode, `[T, B]`.
        mask: Which entries are environment steps; `None` if all are. The others hold the final observation of
            an episode.
        final_observations: Final observations that are not in the next row.
        next_episode: Number of the next episode.
    """
    for time, stream, _ in final_observations:
        if not ended[time, stream]:
            raise ReplayError(
                f"final_observations has step {time} of stream {stream}, which does not end an episode; "
                f"set terminated or truncated there"
            )
    index = np.arange(len(ended) + 1)[:, None]
    if mask is not None:
        ended = ended & mask
    any_ended = bool(ended.any())
    if not any_ended and (mask is None or mask.all()):
        return EpisodeBoundaries(first_ids + index, None, None, None, 0)
    separate = ended  # steps whose final observation is not in the next row
    if mask is not None:
        separate = np.zeros_like(ended)
        for time, stream, _ in final_observations:
            separate[time, stream] = True
    starts = separate if mask is None else separate | ~mask
    num_started = int(np.count_nonzero(starts))
    episode_ids = np.empty((len(index), len(first_ids)), np.int64)
    episode_ids[0] = first_ids
    episode_ids[1:][starts] = np.arange(next_episode, next_episode + num_started) << STEP_BITS
    since = np.zeros(episode_ids.shape, np.int64)  # index of the episode's first row; 0 if it began before
    np.maximum.accumulate(np.where(starts, index[1:], 0), axis=0, out=since[1:])
    step_ids = episode_ids[since, np.arange(len(first_ids))] + index - since
    times, streams = separate.nonzero()
    finals = (times, streams) if times.size else None
    return EpisodeBoundaries(step_ids, starts, ended if any_ended else None, finals, num_started)
