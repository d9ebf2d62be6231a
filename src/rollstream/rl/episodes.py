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
        self._sums = np.zeros((2, count))  # returns and lengths
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
        each = np.empty((2, *reward.shape))
        each[0] = reward
        each[1] = 1.0 if real is None else real
        sums = each.cumsum(axis=1)
        sums += self._sums[:, None]
        column = np.full(each.shape, np.nan, np.float32)
        if ended.any():
            for index in np.flatnonzero(ended.any(axis=0)):
                rows = np.flatnonzero(ended[:, index])
                column[:, rows, index] = np.diff(sums[:, rows, index], prepend=0)
                sums[:, -1, index] -= sums[:, rows[-1], index]
        self._sums = sums[:, -1].copy()
        columns = {"episode_return": column[0], "episode_length": column[1]}
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
        return {"sums": self._sums, "discounted": self._discounted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._sums = np.array(state["sums"])
        self._discounted = np.array(state["discounted"])
