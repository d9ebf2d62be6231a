"""Running statistics that normalize observations and rewards.

The statistics are weights like the parameters: saved, and sent to the workers. The learner updates them with
each batch after training on it, so all workers use the same statistics, and the learner trains on a batch
with those it was sampled with. Nothing is sampled or trained on before there are statistics: a worker first
takes some steps to estimate its own, and the learner trains on the first batch, for which there are no
common ones yet, with those of the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box

from rollstream.rl.spaces import Observation, is_image, leaf_values, leaves, replace_leaves

Array = Any
CLIP = 10.0
"""Normalized observations and rewards are clipped to [-CLIP, CLIP]."""
_EPSILON = 1e-8


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations, updated in batches (Chan et al., 1979)."""

    count: Any
    mean: Any
    deviation: Any

    @staticmethod
    def empty(size: int | None = None) -> Moments:
        """No samples yet: of vectors of a size, or of scalars."""
        zero = np.zeros(() if size is None else size, np.float32)
        return Moments(np.zeros((), np.float32), zero, zero)

    @staticmethod
    def from_weights(weights: dict[str, Any], name: str) -> Moments:
        """The moments stored under a name."""
        return Moments(*(weights[f"{name}.{part}"] for part in Moments._fields))

    def as_weights(self, name: str) -> dict[str, Any]:
        """The moments to store under a name."""
        return {f"{name}.{part}": value for part, value in zip(self._fields, self, strict=True)}

    @property
    def std(self) -> Any:
        """The standard deviation; 1 with fewer than two samples."""
        variance = self.deviation / jnp.maximum(self.count, 1.0)
        return jnp.where(self.count > 1, jnp.sqrt(variance + _EPSILON), 1.0)


def compute_moments(values: Array, mask: Array | None = None) -> Moments:
    """Moments of values `[N, ...]`; of those where `mask` is True, if there is one."""
    count = jnp.float32(values.shape[0]) if mask is None else jnp.sum(mask, dtype=jnp.float32)
    where = None if mask is None else mask.reshape(-1, *(1 for _ in values.shape[1:]))
    shifted = values - values[:1]  # a sum of large values loses the digits that tell them apart
    mean = jnp.sum(shifted, axis=0, where=where) / jnp.maximum(count, 1)
    first = jnp.sum(values[:1], axis=0)  # 0 if there is none
    return Moments(count, first + mean, jnp.sum((shifted - mean) ** 2, axis=0, where=where))


def combine_moments(first: Moments, second: Moments) -> Moments:
    """Moments of the samples of both."""
    total = first.count + second.count
    share = second.count / jnp.maximum(total, 1)
    shift = second.mean - first.mean
    return Moments(
        total,
        first.mean + shift * share,
        first.deviation + second.deviation + shift**2 * first.count * share,
    )


def batch_statistics(space: Space[Any], batch: Any, *, normalize_observations: bool) -> dict[str, Any]:
    """Moments of a batch: of observations, and of `discounted_return` if it is a column.

    Steps that only reset an environment do not count, if they are in the batch, with their `mask`.
    """
    statistics: dict[str, Any] = {}
    mask = batch["mask"].reshape(-1) if "mask" in batch else None
    if normalize_observations:
        values = flatten_boxes(space, batch["observation"])
        statistics |= compute_moments(values.reshape(-1, values.shape[-1]), mask).as_weights("observation")
    if "discounted_return" in batch:
        statistics |= compute_moments(batch["discounted_return"].reshape(-1), mask).as_weights("return")
    return statistics


def lacks_statistics(weights: dict[str, Any]) -> bool:
    """Whether weights have running statistics of observations or returns that are still empty."""
    if _COUNTS.isdisjoint(weights):
        return False
    return any(not weights[count] for count in _COUNTS if count in weights)


def statistics_of(weights: dict[str, Any]) -> dict[str, Any]:
    """The running statistics among weights, as NumPy arrays."""
    prefixes = tuple(f"{name}." for name in _NAMES)
    return {name: np.asarray(value) for name, value in weights.items() if name.startswith(prefixes)}


def first_statistics(weights: dict[str, Any], statistics: dict[str, Any]) -> dict[str, Any]:
    """The running statistics to train on a batch with: those of the batch as long as there are no others."""
    return {
        name: jnp.where(weights[f"{name.partition('.')[0]}.count"] == 0, value, weights[name])
        for name, value in statistics.items()
    }


def combined_statistics(weights: dict[str, Any], statistics: dict[str, Any]) -> dict[str, Any]:
    """The running statistics with those of a batch included."""
    combined: dict[str, Any] = {}
    for name in _NAMES:
        if f"{name}.count" in statistics:
            moments = (Moments.from_weights(own, name) for own in (weights, statistics))
            combined |= combine_moments(*moments).as_weights(name)
    return combined


_NAMES = ("observation", "return")
_COUNTS = frozenset(f"{name}.count" for name in _NAMES)


def normalize_rewards(reward: Array, weights: dict[str, Any]) -> Array:
    """Rewards divided by the standard deviation of discounted returns, clipped."""
    return jnp.clip(reward / Moments.from_weights(weights, "return").std, -CLIP, CLIP)


def normalize_observation(space: Space[Any], observation: Observation, moments: Moments) -> Observation:
    """Observations whose Box parts, except images, have mean 0 and variance 1, clipped."""
    start, new = 0, []
    for (_, part), own in zip(leaves(space), leaf_values(space, observation), strict=True):
        if _is_normalized(part):
            shape = part.shape or ()
            end = start + int(np.prod(shape))
            mean, std = (both[start:end].reshape(shape) for both in (moments.mean, moments.std))
            own, start = jnp.clip((own - mean) / std, -CLIP, CLIP), end
        new.append(own)
    return replace_leaves(space, observation, iter(new))


def flatten_boxes(space: Space[Any], observation: Observation) -> Array:
    """The Box parts of observations, except images, as one vector `[..., F]`."""
    parts = [
        own.reshape(*own.shape[: own.ndim - len(part.shape or ())], -1)
        for (_, part), own in zip(leaves(space), leaf_values(space, observation), strict=True)
        if _is_normalized(part)
    ]
    return jnp.concatenate(parts, axis=-1)


def flat_box_size(space: Space[Any]) -> int:
    """The length of that vector."""
    return sum(int(np.prod(part.shape or (1,))) for _, part in leaves(space) if _is_normalized(part))


def _is_normalized(space: Space[Any]) -> bool:
    return isinstance(space, Box) and not is_image(space)
