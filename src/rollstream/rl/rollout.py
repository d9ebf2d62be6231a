"""Rollouts: consecutive steps of several environments, as a worker samples them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import gymnasium
import jax
import numpy as np

from rollstream.rl.batch import Batch
from rollstream.rl.frame_stack import newest_frame
from rollstream.rl.params import Weights
from rollstream.rl.spaces import Observation, take
from rollstream.state_codec import serializable


@serializable
@dataclass
class Rollout:
    """Consecutive steps of B environments, before postprocessing."""

    columns: Batch
    """`observation`, `action`, `reward`, `terminated`, `truncated` and statistics of episodes, `[T, B, ...]`.
    With vector environments that reset in the step after the end of an episode, `mask` is False in those
    steps: they ignore their action and have no reward."""
    last_observation: Observation
    """The observation after the last step, `[B, ...]`."""
    final_observations: list[tuple[int, int, Observation]]
    """Step, environment and final observation of truncated episodes, where the next `observation` is already
    that of a new episode."""
    worker: int = 0
    """Index of the worker."""
    after_reset: bool = False
    """The environments were reset before the first step, so it starts an episode in each."""
    frames: Observation | None = None
    """If the worker acted on the device and `WorkerSpec.for_replay` is set: the newest frames of the
    observations and of the last one, `[T + 1, B, ...]`, on the host."""


Postprocess: TypeAlias = Callable[[Weights, Rollout], Any]
"""Turns a rollout into the item a worker sends, given the weights it was sampled with."""


def rollout_for_replay(policy: Any, *, frame_stack: int = 1) -> Postprocess:
    """Postprocessing for replay: the rollout itself; of stacked frames only the newest is sent."""

    def postprocess(_: Weights, rollout: Rollout) -> Rollout:
        return newest_frames(rollout, policy.observation_space, frame_stack)

    return postprocess


def newest_frames(rollout: Rollout, space: gymnasium.Space[Any], frame_stack: int) -> Rollout:
    """A rollout with the newest frame of each observation: replay has stored the others already.

    If the worker acted on the device, they are those that the host has.
    """
    frames = rollout.frames
    if frames is None and frame_stack == 1:
        return rollout
    if frames is None:
        observation, last = (
            newest_frame(own, space, frame_stack)
            for own in (rollout.columns["observation"], rollout.last_observation)
        )
    else:
        observation, last = take(frames, slice(-1)), take(frames, -1)
    return replace(
        rollout,
        columns=Batch(rollout.columns | {"observation": observation}),
        last_observation=last,
        frames=None,
        final_observations=[
            (t, i, newest_frame(final, space, frame_stack) if frame_stack > 1 else final)
            for t, i, final in rollout.final_observations
        ],
    )


def replace_reset_steps(batch: Batch, mask: np.ndarray[Any, Any], generator: np.random.Generator) -> Batch:
    """The batch without `mask`; steps that only reset an environment become copies of random other steps.

    Every row is then a step that was taken, the shape is static, and a plain mean over the rows is an
    unbiased estimate of the mean over the steps. At least one step has to be no reset.
    """
    columns = {name: column for name, column in batch.items() if name != "mask"}
    if mask.all():
        return Batch(columns)
    rows = np.arange(mask.size, dtype=np.int32).reshape(mask.shape)
    rows[~mask] = generator.choice(np.flatnonzero(mask), np.count_nonzero(~mask))
    t, i = np.unravel_index(rows[~mask], mask.shape)

    def filled(array: Any) -> Any:
        if isinstance(array, jax.Array):
            return _rows(array, rows)  # all of them: the shape, and with it the program, stays the same
        array = np.array(array)
        array[~mask] = array[t, i]
        return array

    return Batch(
        {
            name: column if name.startswith("episode_") else Batch({name: column}).map(filled)[name]
            for name, column in columns.items()
        }
    )


@jax.jit
def _rows(array: Any, rows: Any) -> Any:
    """Steps of an array `[T, B, ...]` by their number, in row-major order."""
    return array.reshape(-1, *array.shape[2:])[rows]
