"""Rollouts: consecutive steps of several environments, as a worker samples them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import gymnasium
import jax
import numpy as np

from rollstream.rl.batch import FIRST_STATE, Batch
from rollstream.rl.frame_stack import newest_frame
from rollstream.rl.params import Weights
from rollstream.rl.spaces import Observation, take
from rollstream.rl.vector import VectorStep
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
    last_state: Any = None
    """The state of a recurrent policy after the last step, `[B, ...]`; that before the first one is among the
    columns."""
    last_start: Any = None
    """Where the observation after the last step is the first of an episode, `[B]`, if the policy is
    recurrent."""
    last_value: Any = None
    """Value of the observation after the last step, `[B]`, if an inference actor has evaluated it."""
    final_value: Any = None
    """Values of `final_observations`, `[T, B]`, NaN elsewhere, if an inference actor has evaluated them."""
    final_states: list[Any] = field(default_factory=list)
    """Its state after the last step of each episode in `final_observations`."""
    version: float | None = None
    """The version of the weights that acted, or the oldest of them."""


class RecordedStates:
    """What a learner needs to evaluate a rollout of a recurrent policy again.

    Args:
        first: State before the first step, `[B, ...]`.
        length: Number of steps.
        num_envs: Number of environments.
    """

    def __init__(self, first: Any, length: int, num_envs: int):
        self._starts = np.zeros((length + 1, num_envs), bool)
        first = jax.tree.map(lambda own: np.asarray(own)[None], first)
        self.columns = {FIRST_STATE: first, "episode_start": self._starts[:-1]}
        """The state before the first step, and where episodes start in later ones."""
        self.last_start = self._starts[-1]
        """Where one starts after the last step."""
        self.final: list[Any] = []
        """States at the end of truncated episodes."""

    def add(self, t: int, step: VectorStep, state: Any) -> None:
        """Record a step, and the state after it: before that of environments with a new episode is reset."""
        if truncated := [i for i, _ in step.final_observations if not step.terminated[i]]:
            state = jax.tree.map(np.asarray, state)
            self.final += [take(state, i) for i in truncated]
        if started := step.started:
            self._starts[t + 1, started] = True


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

    Sequences of a recurrent policy keep `mask`, with which a loss leaves these steps out, and the columns
    that the policy is evaluated on, in order. In the other columns steps are replaced: whoever averages them,
    to standardize advantages for instance, need not know the mask.
    """
    kept = _EVALUATED if FIRST_STATE in batch else ()
    columns = {name: column for name, column in batch.items() if name != "mask" or name in kept}
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
            name: column
            if name.startswith("episode_") or name in kept
            else Batch({name: column}).map(filled)[name]
            for name, column in columns.items()
        }
    )


_EVALUATED = (FIRST_STATE, "observation", "action", "log_prob", "terminated", "truncated", "mask")
"""Columns of sequences whose order matters."""


@jax.jit
def _rows(array: Any, rows: Any) -> Any:
    """Steps of an array `[T, B, ...]` by their number, in row-major order."""
    return array.reshape(-1, *array.shape[2:])[rows]
