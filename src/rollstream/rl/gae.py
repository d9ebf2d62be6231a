"""Generalized advantage estimation, GAE (Schulman et al., 2016, https://arxiv.org/abs/1506.02438)."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from rollstream.rl.batch import Batch
from rollstream.rl.jit import jit
from rollstream.rl.normalize import normalize_rewards
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.rollout import Postprocess, Rollout
from rollstream.rl.spaces import put, zeros

Array = Any


def compute_gae(
    reward: Array, value: Array, next_value: Array, done: Array, *, gamma: float, gae_lambda: float
) -> Array:
    r"""Advantages of steps `[T, B]`.

    $$\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t), \qquad A_t = \delta_t + \gamma \lambda (1 - d_t) A_{t+1}$$

    Args:
        reward: Reward of each step.
        value: Value of the observation each step was taken in.
        next_value: Value of the observation each step led to: 0 where the episode terminated, that of the
            final observation where it was truncated. See `bootstrap_values`.
        done: Whether the episode ended with the step, by termination or truncation.
        gamma: Discount factor.
        gae_lambda: 0 for the one-step TD error, 1 for Monte Carlo returns.
    """
    td_error = reward + gamma * next_value - value

    def step(advantage_t: Array, inputs_tm1: tuple[Array, Array]) -> tuple[Array, Array]:
        td_error_tm1, done_tm1 = inputs_tm1
        advantage_tm1 = td_error_tm1 + gamma * gae_lambda * jnp.where(done_tm1, 0.0, advantage_t)
        return advantage_tm1, advantage_tm1

    _, advantages = jax.lax.scan(step, jnp.zeros_like(value[0]), (td_error, done), reverse=True)
    return advantages


def bootstrap_values(value: Array, last_value: Array, final_value: Array, terminated: Array) -> Array:
    """The value of the observation each step led to, `[T, B]`.

    Args:
        value: Value of the observation each step was taken in.
        last_value: Value of the observation after the last step, `[B]`.
        final_value: Value of the final observation of truncated episodes, NaN elsewhere.
        terminated: Where an episode terminated: the value there is 0.
    """
    next_value = jnp.concatenate([value[1:], last_value[None]])
    next_value = jnp.where(jnp.isnan(final_value), next_value, final_value)
    return jnp.where(terminated, 0.0, next_value)


def add_gae(policy: ActorCriticPolicy, *, gamma: float, gae_lambda: float) -> Postprocess:
    """Postprocessing that adds `log_prob`, `value`, `advantage` and `value_target` to a rollout.

    They stay on the device if the observations are there.
    """
    estimate = jit(partial(_estimate, policy, gamma, gae_lambda))
    value = jit(policy.value)

    def postprocess(weights: Weights, rollout: Rollout) -> Batch:
        columns = rollout.columns
        inputs = {name: columns[name] for name in _INPUTS if name in columns}
        final_value = final_values(policy.observation_space, value, weights, rollout)
        estimates = estimate(weights, inputs, rollout.last_observation, final_value)
        on_device = isinstance(jax.tree.leaves(columns["observation"])[0], jax.Array)
        return Batch(columns | (estimates if on_device else jax.tree.map(np.asarray, estimates)))

    return postprocess


_INPUTS = ("observation", "action", "reward", "terminated", "truncated", "log_prob", "value")


def _estimate(
    policy: ActorCriticPolicy,
    gamma: float,
    gae_lambda: float,
    weights: Weights,
    columns: dict[str, Any],
    last_observation: Any,
    final_value: Array,
) -> dict[str, Array]:
    if "value" in columns:  # the policy has evaluated its steps
        log_prob, value = columns["log_prob"], columns["value"]
    else:
        log_prob, _, value = policy.evaluate_actions(weights, columns["observation"], columns["action"])
    reward, terminated = columns["reward"], columns["terminated"]
    if policy.normalize_rewards:
        reward = normalize_rewards(reward, weights)
    next_value = bootstrap_values(value, policy.value(weights, last_observation), final_value, terminated)
    done = terminated | columns["truncated"]
    advantage = compute_gae(reward, value, next_value, done, gamma=gamma, gae_lambda=gae_lambda)
    return {"log_prob": log_prob, "value": value, "advantage": advantage, "value_target": advantage + value}


def final_values(space: gymnasium.Space[Any], value: Any, weights: Weights, rollout: Rollout) -> Array:
    """Values of final observations, B at a time so that one compilation does; NaN elsewhere."""
    length, width = rollout.columns.shape
    final_value = np.full((length, width), np.nan, np.float32)
    for start in range(0, len(rollout.final_observations), width):
        chunk = rollout.final_observations[start : start + width]
        observations = zeros(space, width)
        for row, (_, _, observation) in enumerate(chunk):
            put(observations, row, observation)
        for (t, i, _), own in zip(chunk, np.asarray(value(weights, observations)), strict=False):
            final_value[t, i] = own
    return final_value
