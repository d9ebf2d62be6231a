"""Returns, lengths and successes of episodes, which may span several rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollstream.rl.batch import Batch

Array = np.ndarray[Any, Any]
EPISODE_COLUMNS: tuple[str, ...] = ("episode_return", "episode_length", "episode_success")


class EpisodeStatistics:
    """Accumulates the rewards of the current episode of each environment.

    Args:
        num_envs: Number of environments.
        gamma: Also record discounted returns with this discount factor, which scale rewards.
    """

    def __init__(self, num_envs: int, gamma: float | None = None):
        self._gamma = gamma
        self._sums = np.zeros((2, num_envs))  # returns and lengths
        self._none: dict[str, Array] = {}
        self._discounted = np.zeros(num_envs, np.float32)

    @property
    def lengths(self) -> Array:
        """Steps of the current episodes so far."""
        return self._sums[1]

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
            self._sums[0] += reward.sum(axis=0, dtype=float)
            self._sums[1] += len(reward) if mask is None else mask.sum(axis=0)
            columns = self._no_episodes(reward.shape)
        if self._gamma is not None:
            rewards = reward if clipped_reward is None else clipped_reward
            columns["discounted_return"] = self._discounted_returns(self._gamma, rewards, done)
        return columns

    def _no_episodes(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Columns of a rollout in which no episode ended: read-only, and always the same."""
        if not self._none or self._none["episode_return"].shape != shape:
            nothing = np.full(shape, np.nan, np.float32)
            nothing.flags.writeable = False
            self._none = dict.fromkeys(EPISODE_COLUMNS, nothing)
        return dict(self._none)

    def _end_episodes(self, reward: Array, done: Array, mask: Array | None, episodes: Array) -> None:
        increments = np.empty((2, *reward.shape))
        increments[0] = reward
        increments[1] = 1.0 if mask is None else mask
        sums = increments.cumsum(axis=1)
        sums += self._sums[:, None]
        for index in np.flatnonzero(done.any(axis=0)):
            rows = done[:, index].nonzero()[0]
            ends = sums[:, rows, index]
            episodes[:2, rows, index] = ends
            episodes[:2, rows[1:], index] = ends[:, 1:] - ends[:, :-1]
            sums[:, -1, index] -= ends[:, -1]
        self._sums = sums[:, -1].copy()

    def _discounted_returns(self, gamma: float, reward: Array, done: Array | None) -> Array:
        column = np.empty(reward.shape, np.float32)
        for t, reward_t in enumerate(reward):
            column[t] = self._discounted = self._discounted * gamma + reward_t
            if done is not None:
                self._discounted = np.where(done[t], np.float32(0), self._discounted)
        return column

    def state_dict(self) -> dict[str, Any]:
        """Sums of the current episodes."""
        return {"sums": self._sums, "discounted": self._discounted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
        self._sums = np.array(state["sums"])
        self._discounted = np.array(state["discounted"])


def ended_episodes(batch: Batch) -> Array:
    """Return, length and success (NaN if not reported) of the episodes that ended in a batch, `[N, 3]`."""
    returns = batch["episode_return"]
    done = returns == returns
    if not np.count_nonzero(done):
        return _NO_EPISODES
    return np.stack([batch[name][done] for name in EPISODE_COLUMNS], axis=-1)


_NO_EPISODES = np.empty((0, len(EPISODE_COLUMNS)), np.float32)
