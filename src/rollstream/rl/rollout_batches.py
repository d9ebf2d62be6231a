"""Batches of whole rollouts, joined along the environment axis; old ones may be replayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollstream.engine import RollstreamError
from rollstream.rl.batch import FIRST_STATE, Batch, side_by_side
from rollstream.rl.episode_statistics import EPISODE_COLUMNS
from rollstream.rl.rollout import Rollout

Array = Any


def join_rollouts(rollouts: Sequence[Rollout]) -> Batch:
    """A batch `[T + 1, B]` of rollouts of the same length; the last row has the observations after them.

    One forward pass then computes the values of all observations. Other columns of the last row repeat the
    row before: `steps_of` leaves it out. No episode ends in it, but one may start: then the state of a
    recurrent policy is reset before the observation.
    """
    lengths = sorted({rollout.columns.shape[0] for rollout in rollouts})
    if len(lengths) > 1:
        raise RollstreamError(
            f"rollouts of {lengths[0]} and of {lengths[-1]} steps cannot be joined to one batch: give all "
            f"workers the same rollout_length"
        )
    columns = [dict(rollout.columns.per_step()) for rollout in rollouts]
    last = [_last_row(rollout) for rollout in rollouts]
    joined = jax.tree.map(lambda *parts: _join(parts[: len(last)], parts[len(last) :]), *columns, *last)
    states = [rollout.columns[FIRST_STATE] for rollout in rollouts if FIRST_STATE in rollout.columns]
    if states:
        joined[FIRST_STATE] = jax.tree.map(side_by_side, *states)
    return Batch(joined)


def steps_of(batch: Batch) -> Batch:
    """The steps `[T, B]` of joined rollouts."""
    return Batch(batch | batch.per_step().map(lambda column: column[:-1]))


def new_steps_of(batch: Batch, replay_ratio: int) -> Batch:
    """The steps that are not replayed, of which the batch has `replay_ratio` times as many behind them."""
    return steps_of(batch).map(lambda column: column[:, : column.shape[1] // (1 + replay_ratio)])


def _last_row(rollout: Rollout) -> dict[str, Any]:
    """What follows the last step of a rollout, `[B, ...]`."""
    row = dict(rollout.columns.per_step().map(lambda column: column[-1]))
    row |= {"observation": rollout.last_observation}
    if rollout.last_start is not None:
        row |= {"episode_start": rollout.last_start}
    return row | {name: np.full_like(row[name], np.nan) for name in EPISODE_COLUMNS if name in row}


def _join(columns: Sequence[Array], last: Sequence[Array]) -> Array:
    """Columns `[T, B, ...]` side by side, above rows `[B, ...]`; those of JAX stay on the device."""
    if any(isinstance(column, jax.Array) for column in columns):
        return jnp.concatenate([side_by_side(*columns), jnp.concatenate(last)[None]])
    length, width = len(columns[0]) + 1, sum(map(len, last))
    joined = np.empty((length, width, *columns[0].shape[2:]), columns[0].dtype)
    np.concatenate(columns, axis=1, out=joined[:-1])
    np.concatenate(last, out=joined[-1])
    return joined


class JoinRollouts:
    """Joins rollouts to a batch; with replay, together with batches from before, chosen at random.

    Args:
        replay_batches: Number of batches that are kept, with the newest; the oldest are dropped.
        replay_ratio: Number of replayed batches per batch of new rollouts.
        seed: Seed of the choice.
    """

    def __init__(self, replay_batches: int = 1, replay_ratio: int = 0, seed: int = 0):
        self._ratio = replay_ratio
        self._pool: deque[Batch] = deque(maxlen=replay_batches)
        self._generator = np.random.default_rng([seed, 0, 0, 8])

    def __call__(self, rollouts: Sequence[Rollout]) -> Batch:
        """The batch; the episodes that ended in replayed parts of it are left out."""
        batch = join_rollouts(rollouts)
        if not self._ratio:
            return batch
        if self._pool and self._pool[-1].shape != batch.shape:  # resumed with another number of workers
            self._pool.clear()
        self._pool.append(_without_episodes(batch))
        chosen = self._generator.integers(len(self._pool), size=self._ratio)
        return Batch.concatenate([batch, *(self._pool[index] for index in chosen)])

    def state_dict(self) -> dict[str, Any]:
        """The batches that are kept, and the state of the choice."""
        return {
            "pool": [dict(batch) for batch in self._pool],
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._pool.clear()
        self._pool.extend(Batch(batch) for batch in state["pool"])
        self._generator.bit_generator.state = state["generator"]


def _without_episodes(batch: Batch) -> Batch:
    nothing = {name: np.full_like(batch[name], np.nan) for name in EPISODE_COLUMNS if name in batch}
    return Batch(batch | nothing)
