"""Returns, lengths and successes of episodes, which may span several rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollstream.replay.arrays import constant

Array = np.ndarray[Any, Any]
EPISODE_COLUMNS: tuple[str, ...] = ("episode_return", "episode_length", "episode_success")
_MAX_STEPS = 64
"""Steps whose rewards are kept before they are added up: adding those of one step takes 4 us."""


class EpisodeStatistics:
    """Accumulates the rewards of the current episode of each environment.

    Args:
        num_envs: Number of environments.
        gamma: Also record discounted returns with this discount factor, which scale rewards.
    """

    def __init__(self, num_envs: int, gamma: float | None = None):
        self._gamma = gamma
        self._sums = np.zeros((2, num_envs))
        self._returns, self._lengths = self._sums
        self._rewards: list[Array] = []
        """Of the steps, all of which count, that are not in the sums yet; their number is `_steps`."""
        self._steps = 0
        self._discounted = np.zeros(num_envs, np.float32)

    def lengths(self) -> Array:
        """Steps of the current episodes so far."""
        self._add_up()
        return self._lengths

    def columns(
        self,
        reward: Array,
        done: Array | None,
        mask: Array | None = None,
        clipped_reward: Array | None = None,
        episodes: Array | None = None,
    ) -> dict[str, Array]:
        """Columns `episode_return`, `episode_length` and `episode_success`: NaN except where one ended.

        >>> reward, done = np.array([[1.0], [2.0], [3.0]]), np.array([[False], [True], [False]])
        >>> EpisodeStatistics(1).columns(reward, done)["episode_return"].ravel()
        array([nan,  3., nan], dtype=float32)

        Args:
            reward: Rewards `[T, B]`.
            done: Whether an episode ended with the step; `None` if none did.
            mask: False where the step only reset the environment: it does not count.
            clipped_reward: Rewards for `discounted_return`, if others.
            episodes: The columns to fill in, `[3, T, B]`, with successes and else NaN.
        """
        if done is not None:
            if episodes is None:
                episodes = np.full((3, *reward.shape), np.nan, np.float32)
            self._end_episodes(reward, done, mask, episodes)
            columns: dict[str, Array] = dict(zip(EPISODE_COLUMNS, episodes, strict=True))
        else:
            self._continue_episodes(reward, mask)
            columns = dict.fromkeys(EPISODE_COLUMNS, constant(reward.shape, np.nan, np.float32))
        if self._gamma is not None:
            rewards = reward if clipped_reward is None else clipped_reward
            columns["discounted_return"] = self._discounted_returns(self._gamma, rewards, done)
        return columns

    def _continue_episodes(self, reward: Array, mask: Array | None) -> None:
        self._rewards.append(reward.copy())  # whoever postprocesses the rollout may change it
        self._steps += len(reward)
        if mask is not None:
            self._add_up()
            self._lengths -= np.count_nonzero(~mask, axis=0)
        elif self._steps >= _MAX_STEPS:
            self._add_up()

    def _add_up(self) -> None:
        """Add the rewards that are kept to the sums: one after the other, so the order is always the same."""
        if self._rewards:
            increments = np.concatenate([self._returns[None], *self._rewards])
            self._returns[:] = np.add.accumulate(increments)[-1]
            self._lengths += self._steps
            self._rewards, self._steps = [], 0

    def _end_episodes(self, reward: Array, done: Array, mask: Array | None, episodes: Array) -> None:
        self._add_up()
        increments = np.empty((2, *reward.shape))
        increments[0] = reward
        increments[1] = 1.0 if mask is None else mask
        increments[:, 0] += self._sums
        sums = increments.cumsum(axis=1)
        for index in np.flatnonzero(done.any(axis=0)):
            rows = done[:, index].nonzero()[0]
            ends = sums[:, rows, index]
            episodes[:2, rows, index] = ends
            episodes[:2, rows[1:], index] = ends[:, 1:] - ends[:, :-1]
            sums[:, -1, index] -= ends[:, -1]
        self._sums[:] = sums[:, -1]

    def _discounted_returns(self, gamma: float, reward: Array, done: Array | None) -> Array:
        column = np.empty(reward.shape, np.float32)
        for t, reward_t in enumerate(reward):
            column[t] = self._discounted = self._discounted * gamma + reward_t
            if done is not None:
                self._discounted = np.where(done[t], np.float32(0), self._discounted)
        return column

    def state_dict(self) -> dict[str, Any]:
        """Sums of the current episodes."""
        self._add_up()
        return {"sums": self._sums, "discounted": self._discounted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
        self._sums[:] = state["sums"]
        self._rewards, self._steps = [], 0
        self._discounted = np.array(state["discounted"])


def ended_episodes(batch: Any) -> Array:
    """Return, length and success (NaN if not reported) of the episodes that ended, `[N, 3]`.

    The batch may be a rollout.
    """
    batch = getattr(batch, "columns", batch)
    returns = batch["episode_return"]
    if returns is batch["episode_length"]:  # `EpisodeStatistics` has one array for all if there are none
        return _NO_EPISODES
    done = returns == returns
    if not np.count_nonzero(done):
        return _NO_EPISODES
    return np.stack([batch[name][done] for name in EPISODE_COLUMNS], axis=-1)


_NO_EPISODES = np.empty((0, len(EPISODE_COLUMNS)), np.float32)
