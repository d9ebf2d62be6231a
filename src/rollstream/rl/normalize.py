"""Statistics that bring observations and rewards to a common scale.

They are weights like others: saved and published. The learner updates them from what it trains on, so every
worker uses the same ones, and a batch is learned from under those it was sampled with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box

from rollstream.rl.spaces import Observation, is_image, leaves, replaced, values

Array = Any
LIMIT = 10.0
"""What normalized observations are clipped to."""
_EPSILON = 1e-8


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of what has been seen (Chan et al., 1979)."""

    count: Any
    mean: Any
    deviation: Any

    @staticmethod
    def empty(size: int | None = None) -> Moments:
        """Of nothing yet: for vectors, or for single numbers."""
        zero = np.zeros(() if size is None else size, np.float32)
        return Moments(np.zeros((), np.float32), zero, zero)

    @staticmethod
    def of(weights: dict[str, Any], what: str) -> Moments:
        """Those among weights."""
        return Moments(*(weights[f"{what}.{part}"] for part in Moments._fields))

    def named(self, what: str) -> dict[str, Any]:
        """As weights."""
        return {f"{what}.{part}": value for part, value in zip(self._fields, self, strict=True)}

    @property
    def scale(self) -> Any:
        """The standard deviation; 1 before anything was seen."""
        variance = self.deviation / jnp.maximum(self.count, 1.0)
        return jnp.where(self.count > 1, jnp.sqrt(variance + _EPSILON), 1.0)


def moments_of(values: Array, real: Array | None = None) -> Moments:
    """Moments of values `[N, ...]`; of those rows that were steps, where some were not."""
    where = jnp.ones(values.shape[:1], bool) if real is None else real
    count = jnp.sum(where, dtype=jnp.float32)
    where = where.reshape(-1, *(1 for _ in values.shape[1:]))
    mean = jnp.sum(values, axis=0, where=where) / jnp.maximum(count, 1)
    return Moments(count, mean, jnp.sum((values - mean) ** 2, axis=0, where=where))


def combined(first: Moments, second: Moments) -> Moments:
    """Moments of what both have seen."""
    total = first.count + second.count
    share = second.count / jnp.maximum(total, 1)
    shift = second.mean - first.mean
    return Moments(
        total,
        first.mean + shift * share,
        first.deviation + second.deviation + shift**2 * first.count * share,
    )


def with_seen(weights: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Weights whose statistics have also seen what others have; both by name."""
    for what in ("observation", "return"):
        if f"{what}.count" in seen:
            weights = weights | combined(Moments.of(weights, what), Moments.of(seen, what)).named(what)
    return weights


def numbers(space: Space[Any], observation: Observation) -> Array:
    """The parts of observations that are numbers on a scale, as one vector `[..., F]`."""
    parts = [
        own.reshape(*own.shape[: own.ndim - len(part.shape or ())], -1)
        for (_, part), own in zip(leaves(space), values(space, observation), strict=True)
        if _on_a_scale(part)
    ]
    return jnp.concatenate(parts, axis=-1)


def count_numbers(space: Space[Any]) -> int:
    """How many numbers on a scale there are in one observation."""
    return sum(int(np.prod(part.shape or (1,))) for _, part in leaves(space) if _on_a_scale(part))


def normalized(space: Space[Any], observation: Observation, moments: Moments) -> Observation:
    """Observations whose numbers have mean 0 and variance 1, within limits."""
    start, new = 0, []
    for (_, part), own in zip(leaves(space), values(space, observation), strict=True):
        if _on_a_scale(part):
            shape = part.shape or ()
            end = start + int(np.prod(shape))
            mean, scale = (both[start:end].reshape(shape) for both in (moments.mean, moments.scale))
            own, start = jnp.clip((own - mean) / scale, -LIMIT, LIMIT), end
        new.append(own)
    return replaced(space, observation, iter(new))


def _on_a_scale(space: Space[Any]) -> bool:
    return isinstance(space, Box) and not is_image(space)
