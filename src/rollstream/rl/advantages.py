"""Advantages and value targets of a rollout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def generalized_advantages(
    reward: Array, value: Array, next_value: Array, ended: Array, *, discount: float, trace: float
) -> Array:
    r"""Generalized advantage estimation (Schulman et al., 2016, arXiv:1506.02438), for arrays `[T, B]`.

    $$\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t), \qquad A_t = \delta_t + \gamma \lambda (1 - e_t) A_{t+1}$$

    Args:
        reward: of each step.
        value: of the state a step was taken in.
        next_value: of the state it led to: 0 where the episode terminated; where it was truncated, that of
            its final observation.
        ended: whether the episode ended with this step, one way or the other.
        discount: gamma.
        trace: lambda.
    """
    delta = reward + discount * next_value - value

    def step(advantage: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        delta_t, ended_t = now
        advantage = delta_t + discount * trace * jnp.where(ended_t, 0.0, advantage)
        return advantage, advantage

    _, advantages = jax.lax.scan(step, jnp.zeros_like(value[0]), (delta, ended), reverse=True)
    return advantages
