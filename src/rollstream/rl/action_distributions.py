"""Action distributions: pure functions from the outputs of a network to actions.

Noise is an argument, drawn by NumPy outside: a step is then about 30 us faster than with random keys split
inside the jitted function. Functions that act take `xp`, JAX's NumPy or NumPy itself, so that small networks
can act without JAX (see `Policy`). All arrays may have any leading axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.rl.spaces import SpaceError, require_action_space

Array = Any
LOG_2PI = float(np.log(2 * np.pi))
MASKED_LOGIT = -1e9
"""The logit of an action that is not legal."""
LOG_STD_RANGE = (np.array(-20.0, np.float32), np.array(2.0, np.float32))
"""`TanhNormal` clips the log standard deviation to it. NumPy takes 250 ns to make an array of a number."""

_UNIT_RANGE = (np.array(-1.0, np.float32), np.array(1.0, np.float32))


class ActionDistribution(ABC):
    """A distribution over the actions of one space."""

    output_size: int
    """Number of network outputs that parametrize it."""

    @abstractmethod
    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Draw the noise that `sample` takes."""

    @abstractmethod
    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """A random action."""

    @abstractmethod
    def mode(self, outputs: Array) -> Array:
        """The most likely action."""


class LogProbDistribution(ActionDistribution):
    """A distribution with log probabilities of given actions, as policy gradients need."""

    @abstractmethod
    def log_prob(self, outputs: Array, action: Array) -> Array:
        """Log probability of an action."""

    @abstractmethod
    def entropy(self, outputs: Array) -> Array:
        """Entropy."""

    def masked(self, outputs: Array, mask: Array) -> Array:
        """Outputs that exclude actions with mask 0."""
        return jnp.where(mask.astype(bool), outputs, MASKED_LOGIT)


# Discrete actions --------------------------------------------------------------------------------


class Categorical(LogProbDistribution):
    """One of `n` actions; the outputs are logits.

    >>> actions = Categorical(3)
    >>> probabilities = jnp.exp(actions.log_prob(jnp.array([0.0, 1.0, 2.0]), jnp.arange(3)[:, None]))[:, 0]
    >>> round(float(probabilities.sum()), 3)
    1.0
    """

    def __init__(self, n: int):
        self.output_size = self.uniform_size = n

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Gumbel noise: the argmax of logits plus noise is a sample (the Gumbel-max trick)."""
        return generator.gumbel(size=(*leading, self.output_size)).astype(np.float32)

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """The argmax of logits plus noise."""
        return xp.argmax(outputs + noise, axis=-1)

    def uniform(self, outputs: Array, random: Array, xp: Any = jnp) -> Array:
        """A legal action, each with the same probability, given a random number for each action."""
        return xp.argmax(xp.where(outputs > MASKED_LOGIT, random, -1.0), axis=-1)

    def mode(self, outputs: Array) -> Array:
        """The argmax of the logits."""
        return jnp.argmax(outputs, axis=-1)

    def log_prob(self, outputs: Array, action: Array) -> Array:
        """Log softmax of the action's logit."""
        logits = jnp.broadcast_to(jax.nn.log_softmax(outputs), (*action.shape, self.output_size))
        return jnp.take_along_axis(logits, action[..., None].astype(jnp.int32), axis=-1)[..., 0]

    def entropy(self, outputs: Array) -> Array:
        """Entropy; actions that are not legal add 0."""
        logits = jax.nn.log_softmax(outputs)
        return -jnp.sum(jnp.exp(logits) * jnp.maximum(logits, MASKED_LOGIT / 2), axis=-1)


class MultiCategorical(LogProbDistribution):
    """Several independent categorical actions."""

    def __init__(self, sizes: list[int]):
        self._parts = [Categorical(size) for size in sizes]
        self._ends = np.cumsum(sizes)[:-1].tolist()
        self.output_size = sum(sizes)

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Gumbel noise."""
        return generator.gumbel(size=(*leading, self.output_size)).astype(np.float32)

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """The argmax of logits plus noise, of each part."""
        parts = xp.split(outputs + noise, self._ends, axis=-1)
        return xp.stack([xp.argmax(part, axis=-1) for part in parts], axis=-1)

    def mode(self, outputs: Array) -> Array:
        """The argmax of the logits of each part."""
        return jnp.stack([part.mode(own) for part, own in self._split(outputs)], axis=-1)

    def log_prob(self, outputs: Array, action: Array) -> Array:
        """The sum over parts."""
        return sum(part.log_prob(own, action[..., i]) for i, (part, own) in enumerate(self._split(outputs)))

    def entropy(self, outputs: Array) -> Array:
        """The sum over parts."""
        return sum(part.entropy(own) for part, own in self._split(outputs))

    def _split(self, outputs: Array) -> list[tuple[Categorical, Array]]:
        return list(zip(self._parts, jnp.split(outputs, self._ends, axis=-1), strict=True))


class Bernoulli(LogProbDistribution):
    """Several independent choices of 0 or 1; the outputs are the logits of 1.

    >>> actions = Bernoulli((2,))
    >>> actions.mode(jnp.array([3.0, -3.0])).tolist()
    [1, 0]
    """

    def __init__(self, shape: tuple[int, ...]):
        self._shape = shape
        self.output_size = int(np.prod(shape))

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Logistic noise: logits plus noise are positive with the probability of 1."""
        return generator.logistic(size=(*leading, self.output_size)).astype(np.float32)

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:  # noqa: ARG002
        """1 where logits plus noise are positive."""
        return self._shaped(outputs + noise > 0)

    def mode(self, outputs: Array) -> Array:
        """1 where the logits are positive."""
        return self._shaped(outputs > 0)

    def log_prob(self, outputs: Array, action: Array) -> Array:
        """The sum over choices."""
        logits = jnp.where(action.reshape(outputs.shape) > 0, outputs, -outputs)
        return jnp.sum(jax.nn.log_sigmoid(logits), axis=-1)

    def entropy(self, outputs: Array) -> Array:
        """The sum over choices."""
        log_prob = jax.nn.log_sigmoid(outputs), jax.nn.log_sigmoid(-outputs)
        return -sum(jnp.sum(jnp.exp(own) * own, axis=-1) for own in log_prob)

    def _shaped(self, flat: Array) -> Array:
        return flat.reshape(*flat.shape[:-1], *self._shape).astype(np.int8)


# Continuous actions ------------------------------------------------------------------------------


class DiagGaussian(LogProbDistribution):
    """Independent normal distributions; the outputs are means, then log standard deviations.

    Actions are clipped to their bounds. Where 0 is out of bounds, means are relative to the center of the
    bounds, and both are in units of half their distance.
    """

    def __init__(self, space: spaces.Box):
        self._shape = space.shape
        self._size = int(np.prod(space.shape))
        self.output_size = 2 * self._size
        low, high = _bounds(space)
        shifted = ((low > 0) | (high < 0)) & np.isfinite(low) & np.isfinite(high) & (low < high)
        low, high = np.where(shifted, low, -1), np.where(shifted, high, 1)
        self._center, self._scale = (own.astype(np.float32) for own in ((low + high) / 2, (high - low) / 2))

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Standard normal noise."""
        return generator.standard_normal((*leading, self._size), np.float32)

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """The mean plus scaled noise."""
        mean, log_std = xp.split(outputs, 2, axis=-1)
        return self._action(mean + xp.exp(log_std) * noise)

    def mode(self, outputs: Array) -> Array:
        """The mean."""
        return self._action(jnp.split(outputs, 2, axis=-1)[0])

    def log_prob(self, outputs: Array, action: Array) -> Array:
        """Log probability of the action before it is clipped to the bounds of its space."""
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        action = (action.reshape(mean.shape) - self._center) / self._scale
        deviation = (action - mean) * jnp.exp(-log_std)
        return -0.5 * jnp.sum(deviation**2 + 2 * log_std + LOG_2PI, axis=-1)

    def entropy(self, outputs: Array) -> Array:
        """Entropy, which depends on the standard deviations only."""
        log_std = jnp.split(outputs, 2, axis=-1)[1]
        return jnp.sum(log_std + 0.5 * (LOG_2PI + 1), axis=-1)

    def masked(self, outputs: Array, mask: Array) -> Array:  # noqa: ARG002
        """Continuous actions have no mask."""
        return outputs

    def _action(self, flat: Array) -> Array:
        return (self._center + self._scale * flat).reshape(*flat.shape[:-1], *self._shape)


class BoundedDistribution(ActionDistribution):
    """Actions of a bounded Box; networks see them scaled to [-1, 1]."""

    def __init__(self, space: gymnasium.Space[Any]):
        assert isinstance(space, spaces.Box)
        low, high = _bounds(space)
        with np.errstate(over="ignore", invalid="ignore"):
            center, full_range = ((low + high) / 2).astype(np.float32), (high - low).astype(np.float32)
        if not np.isfinite(full_range).all():
            raise SpaceError(
                f"the action space has no bounds ({space}); use ppo or a2c, or set bounds with "
                f"gymnasium.wrappers.TransformAction(env, lambda action: action, "
                f"gymnasium.spaces.Box(-1, 1, {space.shape}))"
            )
        self.shape = space.shape
        self.size = self.uniform_size = int(np.prod(space.shape))
        self._center = center
        self._half_range = full_range / 2
        # As a row: NumPy takes five times as long to add or multiply small arrays of different shapes.
        self._row = center[None], self._half_range[None]
        self._divisor = np.where(self._half_range > 0, self._half_range, np.float32(1))

    def from_unit_range(self, flat: Array) -> Array:
        """From [-1, 1] to actions of the space."""
        center, half_range = self._row
        return (center + half_range * flat).reshape(*flat.shape[:-1], *self.shape)

    def to_unit_range(self, action: Array) -> Array:
        """From actions of the space to [-1, 1]."""
        flat = action.reshape(*action.shape[: action.ndim - len(self.shape)], self.size)
        return (flat - self._center) / self._divisor

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Standard normal noise."""
        return generator.standard_normal((*leading, self.size), np.float32)

    def uniform(self, outputs: Array, random: Array, xp: Any = jnp) -> Array:  # noqa: ARG002
        """An action drawn uniformly from the space, given random numbers from 0 to 1."""
        return self.from_unit_range(2 * random - 1)


class TanhNormal(BoundedDistribution):
    """A normal distribution squashed by tanh; the outputs are means, then log standard deviations."""

    def __init__(self, space: gymnasium.Space[Any]):
        super().__init__(space)
        self.output_size = 2 * self.size

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """The mean plus scaled noise, squashed."""
        mean, log_std = outputs[..., : self.size], _clip(outputs[..., self.size :], *LOG_STD_RANGE, xp)
        return self.from_unit_range(xp.tanh(mean + xp.exp(log_std) * noise))

    def sample_and_log_prob(self, outputs: Array, noise: Array) -> tuple[Array, Array]:
        """A random action scaled to [-1, 1], and its log probability."""
        mean, log_std = outputs[..., : self.size], jnp.clip(outputs[..., self.size :], *LOG_STD_RANGE)
        normal = mean + jnp.exp(log_std) * noise
        log_prob = -0.5 * (noise**2 + LOG_2PI) - log_std
        log_det = 2 * (jnp.log(2.0) - normal - jax.nn.softplus(-2 * normal))  # log(1 - tanh^2)
        return jnp.tanh(normal), jnp.sum(log_prob - log_det, axis=-1)

    def mode(self, outputs: Array) -> Array:
        """The mean, squashed."""
        return self.from_unit_range(jnp.tanh(outputs[..., : self.size]))


class NoisyDeterministic(BoundedDistribution):
    """A deterministic action, squashed by tanh, plus Gaussian exploration noise."""

    def __init__(self, space: gymnasium.Space[Any], noise_std: float):
        super().__init__(space)
        self.output_size = self.size
        self.noise_std = noise_std
        self._noise_std = np.array(noise_std, np.float32)

    def sample(self, outputs: Array, noise: Array, xp: Any = jnp) -> Array:
        """The action plus noise, clipped to the bounds."""
        return self.from_unit_range(_clip(xp.tanh(outputs) + self._noise_std * noise, *_UNIT_RANGE, xp))

    def mode(self, outputs: Array) -> Array:
        """The action without noise."""
        return self.from_unit_range(jnp.tanh(outputs))


def distribution_for(space: gymnasium.Space[Any], algorithm: str = "this policy") -> LogProbDistribution:
    """The distribution that policy gradients use for an action space."""
    kinds = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)
    require_action_space(space, kinds, algorithm)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space.nvec.ravel().tolist())
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(space.shape)
    assert isinstance(space, spaces.Box)
    return DiagGaussian(space)


def _clip(values: Array, low: Array, high: Array, xp: Any) -> Array:
    """`clip`, which NumPy takes 5 us for however few the values are."""
    return xp.minimum(xp.maximum(values, low), high)


def _bounds(space: spaces.Box) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The bounds as flat floats: sums of integer bounds would overflow."""
    low, high = (bound.astype(np.float64).reshape(-1) for bound in (space.low, space.high))
    return low, high
