"""A baseline for policy gradients that is fitted to each batch, so that it needs no network.

Duan et al. (2016, https://arxiv.org/abs/1604.06778) fit returns by least squares to observations, their
squares, and powers of the time in the episode. It suits batches of one task each; a value network would have
to be told which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollstream.rl.batch import Batch
from rollstream.rl.params import Weights
from rollstream.rl.rollout import Postprocess, Rollout

Array = np.ndarray[Any, Any]
_RIDGE = 1e-5
_LIMIT = 10.0
"""Larger observations are clipped."""
_MAX_SIZE = 256
"""Observations of more numbers, such as images, are left out."""


def add_task_advantages(_policy: Any, *, tasks: int, gamma: float) -> Postprocess:
    """Postprocessing that adds `advantage` to rollouts of so many tasks, one after the other.

    An advantage is the discounted return, less a baseline fitted to all steps of the task, standardized over
    these. An episode that the rollout cuts off counts as if it ended there.
    """

    def postprocess(_weights: Weights, rollout: Rollout) -> Batch:
        columns = rollout.columns
        ends = columns["terminated"] | columns["truncated"]
        returns = discounted_returns(columns["reward"], ends, gamma)
        features = baseline_features(columns["observation"], ends)
        advantage = np.empty_like(columns["reward"])
        for group in np.split(np.arange(returns.shape[1]), tasks):
            target = returns[:, group].reshape(-1)
            rest = target - fitted(features[:, group].reshape(target.size, -1), target)
            advantage[:, group] = ((rest - rest.mean()) / max(1e-8, rest.std())).reshape(len(returns), -1)
        return Batch(columns, advantage=advantage)

    return postprocess


def discounted_returns(reward: Array, ends: Array, gamma: float) -> Array:
    """Sums of the rewards from each step on `[T, B]`, to the end of the episode or of the rollout.

    >>> discounted_returns(np.array([[1.0], [2.0], [4.0]]), np.array([[False], [True], [False]]), 0.5).ravel()
    array([2., 2., 4.])
    """
    returns = np.array(reward, float)
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += gamma * np.where(ends[t], 0, returns[t + 1])
    return returns


def baseline_features(observation: Any, ends: Array) -> Array:
    """Features of each step, `[T, B, F]`: powers of time, and the numbers of vectors and their squares."""
    time = np.zeros(ends.shape)
    for t in range(1, len(time)):
        time[t] = np.where(ends[t - 1], 0, time[t - 1] + 0.01)
    columns = [time, time**2, time**3, np.ones_like(time)]
    features = np.stack(columns, axis=-1)
    if isinstance(observation, Mapping | tuple) or not np.issubdtype(observation.dtype, np.floating):
        return features
    flat = np.clip(observation.reshape(*ends.shape, -1), -_LIMIT, _LIMIT)
    if flat.shape[-1] > _MAX_SIZE:
        return features
    return np.concatenate([flat, flat**2, features], axis=-1)


def fitted(features: Array, target: Array) -> Array:
    """The linear function of features `[N, F]` that is nearest to a target `[N]`, with a little ridge."""
    square = features.T @ features + _RIDGE * np.eye(features.shape[1])
    return features @ np.linalg.solve(square, features.T @ target)
