"""Distributions over actions, as pure functions of what a network gives. Noise comes from outside.

So a policy's step is a function of its arguments alone, and its noise is drawn where that is cheap: with
numpy's generators a step takes about 30 us less than with keys split inside the compiled function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.rl.spaces import require_actions

Array = Any
LOG_2PI = float(np.log(2 * np.pi))
NEVER = -1e9
"""The logit of an action that is not legal."""


class Distribution(ABC):
    """Actions of one space. Arrays may have any leading axes."""

    outputs: int
    """How many numbers of a network describe it."""

    @abstractmethod
    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """What `sample` needs to be random."""

    @abstractmethod
    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """An action; `xp` is what computes it, JAX's numpy or numpy itself."""

    @abstractmethod
    def mode(self, outputs: Array) -> Array:
        """The likeliest action."""

    @abstractmethod
    def log_prob(self, outputs: Array, action: Array) -> Array:
        """How likely an action was."""

    @abstractmethod
    def entropy(self, outputs: Array) -> Array:
        """How undecided it is."""

    def masked(self, outputs: Array, mask: Array) -> Array:
        """The same, without actions that are not legal (mask 0)."""
        return jnp.where(mask.astype(bool), outputs, NEVER)


class Categorical(Distribution):
    """One of `n` actions; the outputs are logits.

    >>> actions = Categorical(3)
    >>> probabilities = jnp.exp(actions.log_prob(jnp.array([0.0, 1.0, 2.0]), jnp.arange(3)[:, None]))[:, 0]
    >>> round(float(probabilities.sum()), 3)
    1.0
    """

    def __init__(self, n: int):
        self.outputs = n

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Gumbel noise: the largest logit with its noise is a draw from the distribution."""
        return generator.gumbel(size=(*leading, self.outputs)).astype(np.float32)

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """The largest with its noise."""
        return xp.argmax(outputs + noise, axis=-1)

    def mode(self, outputs: Array) -> Array:
        """The largest."""
        return jnp.argmax(outputs, axis=-1)

    def log_prob(self, outputs: Array, action: Array) -> Array:
        """By the logarithm of the softmax."""
        logits = jnp.broadcast_to(jax.nn.log_softmax(outputs), (*action.shape, self.outputs))
        return jnp.take_along_axis(logits, action[..., None].astype(jnp.int32), axis=-1)[..., 0]

    def entropy(self, outputs: Array) -> Array:
        """0 log 0 is 0 for actions that are not legal."""
        logits = jax.nn.log_softmax(outputs)
        return -jnp.sum(jnp.exp(logits) * jnp.maximum(logits, NEVER / 2), axis=-1)


class MultiCategorical(Distribution):
    """Several choices at once, each of its own size."""

    def __init__(self, sizes: list[int]):
        self._parts = [Categorical(size) for size in sizes]
        self._ends = np.cumsum(sizes)[:-1].tolist()
        self.outputs = sum(sizes)

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """As of one."""
        return generator.gumbel(size=(*leading, self.outputs)).astype(np.float32)

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """Each by itself."""
        parts = xp.split(outputs + noise, self._ends, axis=-1)
        return xp.stack([xp.argmax(part, axis=-1) for part in parts], axis=-1)

    def mode(self, outputs: Array) -> Array:
        """Each by itself."""
        return jnp.stack([part.mode(own) for part, own in self._split(outputs)], axis=-1)

    def log_prob(self, outputs: Array, action: Array) -> Array:
        """Independent choices: the sum."""
        return sum(part.log_prob(own, action[..., i]) for i, (part, own) in enumerate(self._split(outputs)))

    def entropy(self, outputs: Array) -> Array:
        """Independent choices: the sum."""
        return sum(part.entropy(own) for part, own in self._split(outputs))

    def _split(self, outputs: Array) -> list[tuple[Categorical, Array]]:
        return list(zip(self._parts, jnp.split(outputs, self._ends, axis=-1), strict=True))


class Gaussian(Distribution):
    """Independent normal numbers; the outputs are means, then logarithms of standard deviations."""

    def __init__(self, shape: tuple[int, ...]):
        self._shape = shape
        self._size = int(np.prod(shape))
        self.outputs = 2 * self._size

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Standard normal."""
        return generator.standard_normal((*leading, self._size), np.float32)

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """The mean and some of the deviation."""
        mean, log_std = xp.split(outputs, 2, axis=-1)
        return self._shaped(mean + xp.exp(log_std) * noise)

    def mode(self, outputs: Array) -> Array:
        """The mean."""
        return self._shaped(jnp.split(outputs, 2, axis=-1)[0])

    def log_prob(self, outputs: Array, action: Array) -> Array:
        """Of the action before it is clipped to what the environment takes."""
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        action = action.reshape(mean.shape)
        deviation = (action - mean) * jnp.exp(-log_std)
        return -0.5 * jnp.sum(deviation**2 + 2 * log_std + LOG_2PI, axis=-1)

    def entropy(self, outputs: Array) -> Array:
        """Of the deviations alone."""
        log_std = jnp.split(outputs, 2, axis=-1)[1]
        return jnp.sum(log_std + 0.5 * (LOG_2PI + 1), axis=-1)

    def masked(self, outputs: Array, mask: Array) -> Array:  # noqa: ARG002
        """Numbers are not masked."""
        return outputs

    def _shaped(self, flat: Array) -> Array:
        return flat.reshape(*flat.shape[:-1], *self._shape)


def distribution_for(space: gymnasium.Space[Any], who: str = "this policy") -> Distribution:
    """The distribution over actions of a space."""
    require_actions(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.Box), who)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space.nvec.ravel().tolist())
    assert isinstance(space, spaces.Box)
    return Gaussian(space.shape)
