"""Building blocks of updates: gradients, optimizer steps, minibatches, target networks. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rollstream.rl.params import Weights, trainable

Array = Any
Metrics: TypeAlias = dict[str, Any]
"""Scalars by name. Metrics named after Stable-Baselines3's are reported under `train/`."""


def compute_grads(
    loss: Callable[[Weights], tuple[Array, Metrics]], weights: Weights
) -> tuple[Weights, Metrics]:
    """Gradients of `loss(weights)` with respect to the parameters, and its metrics."""
    return jax.grad(lambda params: loss(weights | params), has_aux=True)(trainable(weights))


def optimizer_step(
    optimizer: optax.GradientTransformation,
    learning_rate: Array,
    grads: Weights,
    opt_state: Any,
    weights: Weights,
) -> tuple[Weights, Any]:
    """One step of the optimizer: the new weights and the new optimizer state."""
    updates: Any
    updates, opt_state = optimizer.update(grads, opt_state, trainable(weights))
    new = {name: weights[name] - learning_rate * update for name, update in updates.items()}
    return weights | new, opt_state


def minibatch_permutations(
    random: np.random.Generator, count: int, *, epochs: int, minibatch_size: int
) -> np.ndarray[Any, Any]:
    """Row indices of minibatches, `[epochs * minibatches, minibatch_size]`: a permutation per epoch."""
    size = count // minibatch_size * minibatch_size
    permutations = [random.permutation(count)[:size] for _ in range(epochs)]
    return np.concatenate(permutations).reshape(-1, minibatch_size).astype(np.int32)


def scan_minibatches(
    step: Callable[[Any, Any], tuple[Any, Metrics]],
    carry: Any,
    rows: Any,
    permutations: Array,
    *,
    axis: int = 0,
) -> tuple[Any, Metrics]:
    """Apply `step(carry, minibatch)` to all minibatches of rows `[N, ...]`; return the mean of the metrics.

    If one is NaN or infinite, return the metrics of the first such minibatch: all after it are, too.

    Args:
        step: Trains on a minibatch.
        carry: What `step` is given first.
        rows: Columns to take minibatches of.
        permutations: Indices of the rows of each minibatch.
        axis: The axis of the rows; 1 takes whole sequences of columns `[T, B, ...]`.
    """
    before = (slice(None),) * axis

    def one(carry: Any, indices: Array) -> tuple[Any, Metrics]:
        return step(carry, jax.tree.map(lambda column: column[(*before, indices)], rows))

    carry, metrics = jax.lax.scan(one, carry, permutations)
    bad = ~jnp.stack([jnp.isfinite(each) for each in metrics.values()]).all(axis=0)
    first = jnp.argmax(bad)
    return carry, {name: jnp.where(bad[first], each[first], jnp.mean(each)) for name, each in metrics.items()}


def explained_variance(value: Array, target: Array, mask: Array | None = None) -> Array:
    """Fraction of the targets' variance that the values explain: 1 is perfect, 0 or less useless."""
    variance = jnp.var(target, where=mask)
    return jnp.where(variance > 0, 1 - jnp.var(target - value, where=mask) / variance, jnp.nan)


def masked_mean(values: Array, mask: Array | None) -> Array:
    """The mean of the values where `mask` is True, or of all; 0 if it is True nowhere."""
    if mask is None:
        return jnp.mean(values)
    return jnp.sum(values, where=mask) / jnp.maximum(jnp.sum(mask), 1)


def standardized(values: Array, mask: Array | None) -> Array:
    """The values with mean 0 and standard deviation 1 where `mask` is True, or over all."""
    centred = values - masked_mean(values, mask)
    return centred / jnp.maximum(1e-8, jnp.sqrt(masked_mean(centred**2, mask)))


def n_step_returns(batch: Any, gamma: float) -> tuple[Array, Array]:
    """Discounted sums of the rewards `[N, n]` of transitions, and the discount of the value that follows.

    The discount is 0 where the episode terminated, and else gamma to the power of the number of steps.
    """
    powers = gamma ** jnp.arange(batch["reward"].shape[1])
    terminated = batch["terminated"].any(axis=1)
    return batch["reward"] @ powers, jnp.where(terminated, 0.0, gamma ** batch["length"])


def n_step_targets(reward: Array, next_value: Array, ends: Array, *, gamma: float, n_step: int) -> Array:
    """n-step returns of steps `[T, B]`, each with the value that follows.

    Args:
        reward: Reward of each step.
        next_value: Value of the observation each step led to: 0 where the episode terminated.
        ends: After which steps nothing follows in the same sequence, such as the last: returns from steps
            before them are over fewer than n steps.
        gamma: Discount factor.
        n_step: n.
    """
    ends = ends.at[-1].set(True)
    target = reward + gamma * next_value
    for _ in range(n_step - 1):
        target_t = jnp.concatenate([target[1:], target[-1:]])
        target = reward + gamma * jnp.where(ends, next_value, target_t)
    return target


def polyak_update(target: Weights, params: Weights, tau: float) -> Weights:
    """The target network moved towards the parameters by a fraction tau."""
    return {name: own + tau * (params[name] - own) for name, own in target.items()}
