"""Unrolling of recurrent networks over sequences: only the cells go through time step by step.

A network has the methods of `RecurrentActorCritic` or `RecurrentQNetwork`: `inputs`, `step` and `heads`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rollstream.rl.policy import State

Array = Any


def unroll(
    network: Any, inputs: Any, state: State, initial: State, episode_start: Array
) -> tuple[Any, State]:
    """Outputs of the heads for each step, and the states after each, before a reset; both `[T, B, ...]`.

    Args:
        network: The network.
        inputs: What its cells take of each step, `[T, B, ...]`.
        state: Before the first step, `[B, ...]`.
        initial: At the start of an episode, `[B, ...]`.
        episode_start: Where the state is reset before a step, `[T, B]`.
    """

    def step(state_tm1: State, inputs_t: tuple[Any, Array]) -> tuple[State, tuple[Any, State]]:
        inputs_t, start_t = inputs_t
        output_t, state_t = jax.vmap(network.step)(inputs_t, where(start_t, initial, state_tm1))
        return state_t, (output_t, state_t)

    _, (output, states) = lax.scan(step, state, (inputs, episode_start))
    flat = jax.tree.map(lambda own: own.reshape(-1, *own.shape[2:]), output)
    outputs = jax.vmap(network.heads)(flat)
    return jax.tree.map(lambda own: own.reshape(*episode_start.shape, *own.shape[1:]), outputs), states


def last_state(network: Any, inputs: Any, state: State, taken: Array) -> State:
    """The state after all steps, `[B, ...]`; steps that are not `taken`, `[T, B]`, leave it as it is."""

    def step(state_tm1: State, inputs_t: tuple[Any, Array]) -> tuple[State, None]:
        inputs_t, taken_t = inputs_t
        _, state_t = jax.vmap(network.step)(inputs_t, state_tm1)
        return where(taken_t, state_t, state_tm1), None

    return lax.scan(step, state, (inputs, taken))[0]


def where(condition: Array, chosen: Any, other: Any) -> Any:
    """Rows of `chosen` where a condition is true, whose shape is that of the leading axes."""

    def select(own: Array, rest: Array) -> Array:
        extra = max(jnp.ndim(own), jnp.ndim(rest)) - jnp.ndim(condition)
        return jnp.where(condition.reshape(*condition.shape, *(1,) * extra), own, rest)

    return jax.tree.map(select, chosen, other)
