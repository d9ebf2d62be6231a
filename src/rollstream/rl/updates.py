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
    step: Callable[[Any, Any], tuple[Any, Metrics]], carry: Any, rows: Any, permutations: Array
) -> tuple[Any, Metrics]:
    """Apply `step(carry, minibatch)` to all minibatches of rows `[N, ...]`; return the mean of the metrics.

    If one is NaN or infinite, return the metrics of the first such minibatch: all after it are, too.
    """

    def one(carry: Any, indices: Array) -> tuple[Any, Metrics]:
        return step(carry, jax.tree.map(lambda column: column[indices], rows))

    carry, metrics = jax.lax.scan(one, carry, permutations)
    bad = ~jnp.stack([jnp.isfinite(each) for each in metrics.values()]).all(axis=0)
    first = jnp.argmax(bad)
    return carry, {name: jnp.where(bad[first], each[first], jnp.mean(each)) for name, each in metrics.items()}


def explained_variance(value: Array, target: Array) -> Array:
    """Fraction of the targets' variance that the values explain: 1 is perfect, 0 or less useless."""
    variance = jnp.var(target)
    return jnp.where(variance > 0, 1 - jnp.var(target - value) / variance, jnp.nan)


def n_step_returns(batch: Any, gamma: float) -> tuple[Array, Array]:
    """Discounted sums of the rewards `[N, n]` of transitions, and the discount of the value that follows.

    The discount is 0 where the episode terminated, and else gamma to the power of the number of steps.
    """
    powers = gamma ** jnp.arange(batch["reward"].shape[1])
    terminated = batch["terminated"].any(axis=1)
    return batch["reward"] @ powers, jnp.where(terminated, 0.0, gamma ** batch["length"])


def polyak_update(target: Weights, params: Weights, tau: float) -> Weights:
    """The target network moved towards the parameters by a fraction tau."""
    return {name: own + tau * (params[name] - own) for name, own in target.items()}
