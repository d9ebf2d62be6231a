"""Rounds: one rollout of every worker, joined along the environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollstream.engine import RollstreamError
from rollstream.replay.buffer import Chunk
from rollstream.replay.episode_boundaries import FinalObservations, as_arrays

Array = np.ndarray[Any, Any]
_NONE = np.empty(0, np.int64)


class Round(NamedTuple):
    """T steps of the B environments of all workers, without those of workers that sent nothing."""

    columns: dict[str, Array]
    """Flat columns, `[T, B, ...]`; zeros where a worker sent nothing."""
    last: dict[str, Array]
    """The observations after the last step, `[B, ...]`, named `last_observation`."""
    mask: Array | None
    """Which entries are environment steps; `None` if all are."""
    finals: FinalObservations
    """Step, environment and final observation."""
    reset: Array
    """Environments that were reset before the first step."""
    missing: Array
    """Environments whose worker sent nothing."""
    env_steps: int
    """Environment steps of the training so far."""


def join_chunks(chunks: Sequence[Chunk], length: int, width: int) -> Round:
    """The rollouts of one round as one; raise if they are not of `length` steps and `width` environments."""
    parts = [as_arrays(chunk.columns) for chunk in chunks]
    lasts = [as_arrays({"last_observation": chunk.last_observation}) for chunk in chunks]
    for chunk, part in zip(chunks, parts, strict=True):
        if len(part["reward"]) != length or chunk.streams.max() >= width:
            raise RollstreamError(
                f"a rollout has {len(part['reward'])} steps and reaches environment {chunk.streams.max()}; "
                f"replay on the device was created for {length} steps of {width} environments, from 0 on"
            )
    env_steps = max(chunk.env_steps for chunk in chunks)
    if len(chunks) == 1 and len(chunks[0].streams) == width:
        [chunk], [columns], [last] = chunks, parts, lasts
        reset = chunk.streams if chunk.after_reset else _NONE
        return Round(columns, last, chunk.mask, chunk.final_observations, reset, _NONE, env_steps)
    streams = np.concatenate([chunk.streams for chunk in chunks])

    def join(arrays: list[Any], axis: int) -> Array:
        joined = np.concatenate(arrays, axis)
        whole = np.zeros((*joined.shape[:axis], width, *joined.shape[axis + 1 :]), joined.dtype)
        whole[(slice(None),) * axis + (streams,)] = joined
        return whole

    return Round(
        {name: join([part[name] for part in parts], 1) for name in parts[0]},
        {name: join([last[name] for last in lasts], 0) for name in lasts[0]},
        None if chunks[0].mask is None else join([chunk.mask for chunk in chunks], 1),
        [(t, int(chunk.streams[i]), own) for chunk in chunks for t, i, own in chunk.final_observations],
        np.concatenate([_NONE, *(chunk.streams for chunk in chunks if chunk.after_reset)]),
        np.setdiff1d(np.arange(width), streams),
        env_steps,
    )
