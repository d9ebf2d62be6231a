"""Generalized advantage estimation, GAE (Schulman et al., 2016, https://arxiv.org/abs/1506.02438)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from rollstream.rl.batch import FIRST_STATE, Batch
from rollstream.rl.jit import jit
from rollstream.rl.normalize import normalize_rewards
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy, evaluate_batch
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
        if rollout.last_value is None:
            last_state = () if rollout.last_state is None else (rollout.last_state,)
            last = {"inputs": (rollout.last_observation, *last_state)}
        else:
            last = {"value": rollout.last_value}
        estimates = estimate(weights, inputs, last, final_value)
        on_device = isinstance(jax.tree.leaves(columns["observation"])[0], jax.Array)
        return Batch(columns | (estimates if on_device else jax.tree.map(np.asarray, estimates)))

    return postprocess


_INPUTS = ("observation", "action", "reward", "terminated", "truncated", "log_prob", "value")
_INPUTS += (FIRST_STATE, "episode_start")


def _estimate(
    policy: ActorCriticPolicy,
    gamma: float,
    gae_lambda: float,
    weights: Weights,
    columns: dict[str, Any],
    last: dict[str, Any],
    final_value: Array,
) -> dict[str, Array]:
    if "value" in columns:  # the policy has evaluated its steps
        log_prob, value = columns["log_prob"], columns["value"]
    else:
        log_prob, _, value = evaluate_batch(policy, weights, columns)
    reward, terminated = columns["reward"], columns["terminated"]
    if policy.normalize_rewards:
        reward = normalize_rewards(reward, weights)
    last_value = last["value"] if "value" in last else policy.value(weights, *last["inputs"])
    next_value = bootstrap_values(value, last_value, final_value, terminated)
    done = terminated | columns["truncated"]
    advantage = compute_gae(reward, value, next_value, done, gamma=gamma, gae_lambda=gae_lambda)
    return {"log_prob": log_prob, "value": value, "advantage": advantage, "value_target": advantage + value}


def final_values(space: gymnasium.Space[Any], value: Any, weights: Weights, rollout: Rollout) -> Array:
    """Values of final observations, NaN elsewhere."""
    if rollout.final_value is not None:
        return rollout.final_value
    final_value = np.full(rollout.columns.shape, np.nan, np.float32)
    for rows, observations, *states in final_inputs(space, rollout):
        final_value[rows] = np.asarray(value(weights, observations, *states))[: len(rows[0])]
    return final_value


def final_inputs(space: gymnasium.Space[Any], rollout: Rollout) -> Iterator[tuple[Any, ...]]:
    """Final observations, B at a time so that one compilation does: indices, observations, and states if any.

    Of the last B, those without an index are zeros.
    """
    width = rollout.columns.shape[1]
    for start in range(0, len(rollout.final_observations), width):
        chunk = rollout.final_observations[start : start + width]
        observations = zeros(space, width)
        for row, (_, _, observation) in enumerate(chunk):
            put(observations, row, observation)
        states = [] if rollout.last_state is None else [_final_states(rollout, start)]
        rows = np.array([own[0] for own in chunk]), np.array([own[1] for own in chunk])
        yield rows, observations, *states


def _final_states(rollout: Rollout, start: int) -> Any:
    """B final states from one on, `[B, ...]`; zeros after the last."""
    states = jax.tree.map(lambda own: np.zeros(own.shape, own.dtype), rollout.last_state)
    for row, state in enumerate(rollout.final_states[start : start + rollout.columns.shape[1]]):
        put(states, row, state)
    return states
