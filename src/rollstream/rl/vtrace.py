"""V-trace: off-policy corrections of values and advantages (Espeholt et al., 2018, arXiv:1802.01561)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollstream.rl.batch import FIRST_STATE, Batch
from rollstream.rl.episode_statistics import EPISODE_COLUMNS
from rollstream.rl.gae import bootstrap_values, final_values
from rollstream.rl.jit import jit
from rollstream.rl.normalize import normalize_rewards
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy, EvaluatedActions, evaluate_batch
from rollstream.rl.rollout import Postprocess, Rollout
from rollstream.rl.rollout_batches import steps_of

Array = Any


class VTrace(NamedTuple):
    """Targets of the values and advantages of the policy gradient, `[T, B]`. Both are constants."""

    value_target: Array
    advantage: Array


def compute_vtrace(
    reward: Array,
    value: Array,
    next_value: Array,
    done: Array,
    log_ratio: Array,
    *,
    gamma: float,
    vtrace_lambda: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> VTrace:
    r"""V-trace of steps `[T, B]`.

    $$v_t = V(s_t) + \rho_t \delta_t + \gamma c_t (1 - d_t) (v_{t+1} - V(s_{t+1})), \qquad
    \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)$$

    $$A_t = \rho_t \big(r_t + \gamma v_{t+1} - V(s_t)\big), \qquad
    \rho_t = \min(\bar\rho, \pi / \mu), \quad c_t = \lambda \min(\bar c, \pi / \mu)$$

    With lambda below 1, the advantage takes $V(s_{t+1}) + \lambda (v_{t+1} - V(s_{t+1}))$ for $v_{t+1}$.

    Args:
        reward: Reward of each step.
        value: Value of the observation each step was taken in.
        next_value: Value of the observation each step led to: 0 where the episode terminated, that of the
            final observation where it was truncated. See `bootstrap_values`.
        done: Whether the episode ended with the step, by termination or truncation.
        log_ratio: Log of pi / mu, the probability of each action under the policy that is evaluated over that
            under the policy that acted.
        gamma: Discount factor.
        vtrace_lambda: 0 for one-step TD targets, 1 for the paper's.
        clip_rho: Maximum of the ratio that weights TD errors.
        clip_c: Maximum of the ratio that weights how far corrections of later steps reach back.
    """
    ratio = jnp.exp(log_ratio)
    rho, c = jnp.minimum(ratio, clip_rho), jnp.minimum(ratio, clip_c)
    td_error = reward + gamma * next_value - value
    discount = gamma * vtrace_lambda * (1.0 - done)

    def step(correction_t: Array, inputs_tm1: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        rho_tm1, c_tm1, td_error_tm1, discount_tm1 = inputs_tm1
        later = discount_tm1 * correction_t
        correction_tm1 = rho_tm1 * td_error_tm1 + c_tm1 * later
        return correction_tm1, (correction_tm1, rho_tm1 * (td_error_tm1 + later))

    inputs = (rho, c, td_error, discount)
    _, (correction, advantage) = jax.lax.scan(step, jnp.zeros_like(value[0]), inputs, reverse=True)
    return VTrace(*jax.lax.stop_gradient((value + correction, advantage)))


# Workers -----------------------------------------------------------------------------------------


def rollout_for_vtrace(policy: ActorCriticPolicy) -> Postprocess:
    """Postprocessing for V-trace: the rollout, with the `log_prob` of actions under the weights that acted.

    A column `final_value` replaces final observations: the value of those of truncated episodes, estimated by
    the worker, and NaN elsewhere.
    """
    log_probs = jit(partial(_log_probs, policy))
    value = jit(policy.value)

    def postprocess(weights: Weights, rollout: Rollout) -> Rollout:
        columns = rollout.columns
        if "log_prob" not in columns:  # NumPy acted
            inputs = {name: columns[name] for name in _EVALUATED if name in columns}
            columns = columns | {"log_prob": np.asarray(log_probs(weights, inputs))}
        columns = columns | {"final_value": final_values(policy.observation_space, value, weights, rollout)}
        sent = Batch({name: columns[name] for name in _SENT if name in columns})
        evaluated: dict[str, Any] = {"last_state": None, "last_value": None, "final_value": None}
        return replace(rollout, columns=sent, final_observations=[], final_states=[], **evaluated)

    return postprocess


_EVALUATED = ("observation", "action", FIRST_STATE, "episode_start")
"""Columns that the policy is evaluated on."""
_SENT = (
    *(*_EVALUATED, "reward", "terminated", "truncated", "log_prob", "final_value"),
    *("mask", "discounted_return", *EPISODE_COLUMNS),
)
"""Columns that the learner needs."""


def _log_probs(policy: ActorCriticPolicy, weights: Weights, columns: Mapping[str, Any]) -> Array:
    return evaluate_batch(policy, weights, columns).log_prob


# Learner -----------------------------------------------------------------------------------------


def evaluate_rollouts(
    policy: ActorCriticPolicy, weights: Weights, batch: Batch, **settings: float
) -> tuple[EvaluatedActions, VTrace]:
    """Evaluate joined rollouts under some weights in one forward pass: their steps, and V-trace of them.

    Steps that only reset an environment cut the recursion, as the end of an episode does. A recurrent policy
    goes on from the state that each rollout started with, up to the observation after the last step.

    Args:
        policy: The policy.
        weights: The weights that values and log probabilities are of.
        batch: `[T + 1, B]`; see `join_rollouts`.
        settings: Those of `compute_vtrace`.
    """
    evaluated = evaluate_batch(policy, weights, batch)
    steps, own = steps_of(batch), EvaluatedActions(*(column[:-1] for column in evaluated))
    reward, terminated = steps["reward"], steps["terminated"]
    if policy.normalize_rewards:
        reward = normalize_rewards(reward, weights)
    next_value = bootstrap_values(own.value, evaluated.value[-1], steps["final_value"], terminated)
    done = terminated | steps["truncated"]
    if "mask" in steps:
        done |= ~steps["mask"]
    log_ratio = own.log_prob - steps["log_prob"]
    return own, compute_vtrace(reward, own.value, next_value, done, log_ratio, **settings)
