"""Returns and lengths of episodes, which may begin in one rollout and end in a later one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Episodes:
    """What the episodes under way have come to so far, in each of some environments.

    Args:
        count: how many environments.
        discount: if given, returns discounted by it are recorded, too.
    """

    def __init__(self, count: int, discount: float | None = None):
        self._discount = discount
        self._returns = np.zeros(count)
        self._lengths = np.zeros(count)
        self._discounted = np.zeros(count, np.float32)

    def columns(
        self, reward: Array, ended: Array, real: Array | None = None, learned: Array | None = None
    ) -> dict[str, Array]:
        """What is to be known of rewards `[T, B]`: `episode_return` and `episode_length` where one ended.

        Rows that are not real were no steps, and have no reward. Discounted returns are of the rewards that
        are learned from, where those are others.

        >>> reward, ended = np.array([[1.0], [2.0], [3.0]]), np.array([[False], [True], [False]])
        >>> Episodes(1).columns(reward, ended)["episode_return"].ravel()
        array([nan,  3., nan], dtype=float32)
        """
        returns = np.cumsum(reward, axis=0, dtype=np.float64) + self._returns
        steps = np.ones_like(reward) if real is None else real
        lengths = np.cumsum(steps, axis=0, dtype=np.float64) + self._lengths
        columns = {
            "episode_return": _since_the_last(returns, ended),
            "episode_length": _since_the_last(lengths, ended),
        }
        self._returns, self._lengths = _left(returns, ended), _left(lengths, ended)
        if self._discount is not None:
            counted = reward if learned is None else learned
            columns["discounted_return"] = self._discounted_returns(self._discount, counted, ended)
        return columns

    def _discounted_returns(self, discount: float, reward: Array, ended: Array) -> Array:
        column = np.empty(reward.shape, np.float32)
        for t, now in enumerate(reward):
            column[t] = self._discounted = self._discounted * discount + now
            self._discounted = np.where(ended[t], np.float32(0), self._discounted)
        return column

    def state_dict(self) -> dict[str, Any]:
        """What the episodes have come to."""
        return {"returns": self._returns, "lengths": self._lengths, "discounted": self._discounted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"])
        self._discounted = np.array(state["discounted"])


def _since_the_last(sums: Array, ended: Array) -> Array:
    """Sums at the end of episodes, from the end before on; not a number elsewhere."""
    column = np.full(sums.shape, np.nan, np.float32)
    if not ended.any():
        return column
    for index in np.flatnonzero(ended.any(axis=0)):
        rows = np.flatnonzero(ended[:, index])
        column[rows, index] = np.diff(sums[rows, index], prepend=0)
    return column


def _left(sums: Array, ended: Array) -> Array:
    """What has come together since the last end."""
    if not ended.any():
        return sums[-1]
    before = np.where(ended, sums, 0)
    last = sums.shape[0] - 1 - np.argmax(ended[::-1], axis=0)
    return sums[-1] - before[last, np.arange(sums.shape[1])]
