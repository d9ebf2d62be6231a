"""Where episodes start and end within a chunk of experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rollstream.replay.arrays import Array
from rollstream.replay.errors import ReplayError
from rollstream.replay.signature import flatten_columns
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


class Ends(NamedTuple):
    """Where episodes end within T steps of B streams, all of which are environment steps."""

    step_ids: Array
    """Of the row after each step, `[T, B]`."""
    positions: Array
    """Of the steps that end an episode, in the flattened columns."""
    final_ids: Array
    """Step ids of the rows of their final observations."""
    num_ended: int
    """Their number."""


_MAX_LOOPS = 16
_NONE = np.empty(0, np.int64)


def find_ends(
    values: Mapping[str, Array],
    first_ids: Array,
    final_observations: FinalObservations,
    next_episode: int,
) -> Ends:
    """Find where episodes end; as `find_episode_boundaries` without a mask, and faster for few."""
    terminated, truncated = values["terminated"], values["truncated"]
    step_ids = first_ids[None] + _index(len(terminated))
    if not (final_observations or np.count_nonzero(terminated) or np.count_nonzero(truncated)):
        return Ends(step_ids, _NONE, _NONE, 0)
    ended = np.logical_or(terminated, truncated)
    flat = ended.ravel().nonzero()[0]
    if len(flat) > _MAX_LOOPS:
        boundaries = find_episode_boundaries(first_ids, ended, None, final_observations, next_episode)
        return Ends(boundaries.step_ids[1:], flat, boundaries.step_ids.ravel()[flat] + 1, len(flat))
    if final_observations:
        _check_finals(ended, final_observations)
    final_ids, width = [], step_ids.shape[1]
    for number, position in enumerate(flat.tolist(), next_episode):
        final_ids.append(step_ids.item(position))
        later = step_ids[position // width :, position % width]
        later += (number << STEP_BITS) - final_ids[-1]
    return Ends(step_ids, flat, np.array(final_ids), len(final_ids))


@lru_cache(maxsize=64)
def _index(length: int) -> Array:
    """1 to `length`, as a column: the same array each time."""
    index = np.arange(1, length + 1)[:, None]
    index.flags.writeable = False
    return index


def _check_finals(ended: Array, final_observations: FinalObservations) -> None:
    for time, stream, _ in final_observations:
        if not ended[time, stream]:
            raise ReplayError(
                f"final_observations has step {time} of stream {stream}, which does not end an episode; "
                f"set terminated or truncated there"
            )


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
    _check_finals(ended, final_observations)
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


def as_arrays(columns: Mapping[str, Any]) -> dict[str, Array]:
    """Columns as flat arrays."""
    flat: dict[str, Array] = {}
    for name, value in columns.items():
        if type(value) is np.ndarray:  # the common case, and fast
            flat[name] = value
        else:
            flat.update((path, np.asarray(leaf)) for path, leaf in flatten_columns({name: value}).items())
    return flat


def chunk_shape(values: Mapping[str, Array]) -> tuple[int, int]:
    """T and B of columns `[T, B, ...]`."""
    if "terminated" not in values or "truncated" not in values:
        raise ReplayError("columns must include 'terminated' and 'truncated', to tell where episodes end")
    terminated, truncated = values["terminated"], values["truncated"]
    if terminated.ndim != 2 or terminated.shape != truncated.shape:
        raise ReplayError(
            f"'terminated' and 'truncated' must be [T, B], not {list(terminated.shape)} and "
            f"{list(truncated.shape)}"
        )
    return terminated.shape


def ended_steps(values: Mapping[str, Array]) -> Array:
    """Steps that end an episode, `[T, B]`."""
    return np.logical_or(values["terminated"], values["truncated"])
