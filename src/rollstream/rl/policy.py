"""Policies: pure functions over weights, where weights are arrays by name.

`Policy` is all that workers and plans need to know, and it names no framework: a policy in PyTorch, written
elsewhere, trains through the same plans (see `examples/torch_policy.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.rl.distributions import Distribution, distribution_for
from rollstream.rl.networks import actor_critic
from rollstream.rl.normalize import Moments, count_numbers, normalized
from rollstream.rl.params import Named, Weights
from rollstream.rl.quick import Act, quick_actor
from rollstream.rl.spaces import Observation

Array = Any
State: TypeAlias = Any
"""What a recurrent policy remembers, `[B, ...]`; `()` for others."""
Network: TypeAlias = Callable[[gymnasium.Space[Any], Distribution, np.random.Generator], eqx.Module]
"""Makes a module that turns one observation into a distribution's outputs and a value."""


class Policy(Protocol):
    """What acts."""

    compiled: bool
    """Whether `step` is for JAX to compile; if not, it is called as it is, with numpy arrays."""

    def init(self, seed: int) -> Weights:
        """Fresh weights."""
        ...

    def initial_state(self, size: int) -> State:
        """What is remembered at the beginning of an episode, for so many environments."""
        ...

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        """What `step` needs to be random, with leading axes."""
        ...

    def step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State]:
        """An action for each of B observations; without noise, the likeliest one."""
        ...


class Evaluation(NamedTuple):
    """What a policy thinks of actions."""

    log_prob: Array
    entropy: Array
    value: Array


class ActorCriticPolicy:
    """A policy that also says how good things are. Its methods are pure functions, compiled by who uses them.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        network: makes the network; `actor_critic` if left out.
        normalize: whether observations are brought to mean 0 and variance 1 by statistics among the weights.
        statistics: more weights that gradients do not change.
    """

    compiled = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        network: Network = actor_critic,
        *,
        normalize: bool = False,
        statistics: Weights | None = None,
    ):
        self.observation_space = observation_space
        self.action_space = action_space
        self.distribution = distribution_for(action_space)
        self.normalize = normalize and count_numbers(observation_space) > 0
        self._statistics = statistics or {}
        self.named = Named(lambda random: network(observation_space, self.distribution, random))

    # Weights -----------------------------------------------------------------------------------

    def init(self, seed: int) -> Weights:
        """Fresh weights, and empty statistics."""
        weights = self.named.init(seed) | self._statistics
        if self.normalize:
            weights |= Moments.empty(count_numbers(self.observation_space)).named("observation")
        return weights

    # Acting ------------------------------------------------------------------------------------

    def initial_state(self, size: int) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        """What the distribution over actions needs."""
        return self.distribution.noise(generator, *leading)

    def step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State]:
        """Actions, likeliest without noise."""
        outputs, _ = self.outputs(weights, observation)
        if noise is None:
            return self.distribution.mode(outputs), state
        return self.distribution.sample(outputs, noise), state

    def quick(self, count: int) -> Callable[[Weights], Act] | None:
        """Makes, of weights, what acts as `step` does for so many observations, if the network is small."""
        return quick_actor(self, count)

    # Thinking ----------------------------------------------------------------------------------

    def outputs(self, weights: Weights, observation: Observation) -> tuple[Array, Array]:
        """The distribution's outputs and the value, for observations with any leading axes."""
        if self.normalize:
            moments = Moments.of(weights, "observation")
            observation = normalized(self.observation_space, observation, moments)
        outputs, value = applied(self.named.module(weights), self.observation_space, observation)
        if has_mask(self.observation_space):
            outputs = self.distribution.masked(outputs, observation["action_mask"])
        return outputs, value

    def evaluate(self, weights: Weights, observation: Observation, action: Array) -> Evaluation:
        """How likely actions were, how undecided the policy is, how good things are."""
        outputs, value = self.outputs(weights, observation)
        log_prob = self.distribution.log_prob(outputs, action)
        return Evaluation(log_prob, self.distribution.entropy(outputs), value)

    def value(self, weights: Weights, observation: Observation) -> Array:
        """How good things are."""
        return self.outputs(weights, observation)[1]


def has_mask(space: gymnasium.Space[Any]) -> bool:
    """Whether observations come with a mask of the actions that are legal."""
    return isinstance(space, spaces.Dict) and "action_mask" in space.spaces


def applied(module: Any, space: gymnasium.Space[Any], observation: Observation, *more: Array) -> Any:
    """What a module for one observation gives for observations, and more arrays, with any leading axes."""
    leading = _leading(space, observation)
    if len(leading) == 1:
        return jax.vmap(module)(observation, *more)
    count = len(leading)
    flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[count:]), (observation, *more))
    return jax.tree.map(lambda array: array.reshape(*leading, *array.shape[1:]), jax.vmap(module)(*flat))


def _leading(space: gymnasium.Space[Any], observation: Observation) -> tuple[int, ...]:
    """The axes of an observation before those of its space."""
    if isinstance(space, spaces.Dict):
        name = next(iter(space.spaces))
        return _leading(space.spaces[name], observation[name])
    if isinstance(space, spaces.Tuple):
        return _leading(space.spaces[0], observation[0])
    shape = jnp.shape(observation)
    return tuple(shape[: len(shape) - len(space.shape or ())])
