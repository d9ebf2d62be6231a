"""What actor-critic algorithms say of a rollout: values, how likely the actions were, advantages, targets."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollstream.rl.advantages import generalized_advantages
from rollstream.rl.batch import Batch
from rollstream.rl.jit import compiled
from rollstream.rl.normalize import LIMIT, Moments
from rollstream.rl.policy import ActorCriticPolicy, Weights
from rollstream.rl.spaces import put, zeros
from rollstream.rl.worker import Finish, Rollout

Array = Any


def with_advantages(
    policy: ActorCriticPolicy, *, discount: float, trace: float, scale_rewards: bool = False
) -> Finish:
    """Adds `log_prob`, `value`, `advantage` and `value_target` to rollouts.

    An episode that was truncated goes on beyond its end with the value of its final observation; one that
    terminated does not.
    """
    estimate = compiled(partial(_estimated, policy, discount, trace, scale_rewards))
    value = compiled(policy.value)

    def finish(weights: Weights, rollout: Rollout) -> Batch:
        columns = rollout.columns
        beyond = np.full(columns["reward"].shape, np.nan, np.float32)
        width = columns.shape[1]
        for start in range(0, len(rollout.final), width):  # so many at once, whatever their number
            some = rollout.final[start : start + width]
            observations = zeros(policy.observation_space, width)
            for row, (_, _, last) in enumerate(some):
                put(observations, row, last)
            for (t, i, _), own in zip(some, np.asarray(value(weights, observations)), strict=False):
                beyond[t, i] = own
        used = {name: columns[name] for name in _USED if name in columns}
        more = estimate(weights, used, rollout.last, beyond)
        return Batch(columns | jax.tree.map(np.asarray, more))

    return finish


_USED = ("observation", "action", "reward", "terminated", "truncated")


def _estimated(
    policy: ActorCriticPolicy,
    discount: float,
    trace: float,
    scale_rewards: bool,
    weights: Weights,
    columns: dict[str, Any],
    last: Any,
    beyond: Array,
) -> dict[str, Array]:
    evaluation = policy.evaluate(weights, columns["observation"], columns["action"])
    value, reward = evaluation.value, columns["reward"]
    if scale_rewards:
        reward = jnp.clip(reward / Moments.of(weights, "return").scale, -LIMIT, LIMIT)
    next_value = jnp.concatenate([value[1:], policy.value(weights, last)[None]])
    next_value = jnp.where(jnp.isnan(beyond), next_value, beyond)
    next_value = jnp.where(columns["terminated"], 0.0, next_value)
    ended = columns["terminated"] | columns["truncated"]
    advantage = generalized_advantages(reward, value, next_value, ended, discount=discount, trace=trace)
    return {
        "log_prob": evaluation.log_prob,
        "value": value,
        "advantage": advantage,
        "value_target": advantage + value,
    }
