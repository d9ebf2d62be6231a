"""How the outputs of an actor become actions, while learning from replay: with noise, or at random at first.

As `Distribution`, pure functions whose noise comes from outside; `epsilon`, which is among the weights, is
how likely an action is drawn from the whole space instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.rl.distributions import LOG_2PI, NEVER
from rollstream.rl.networks import Head, network_head
from rollstream.rl.params import Named, Weights
from rollstream.rl.policy import State, applied, has_mask
from rollstream.rl.quick import Act, is_usual, quick_layers
from rollstream.rl.spaces import Observation, SpaceError

Array = Any
LOG_STD = (-20.0, 2.0)
"""Between these, logarithms of deviations are as the network says."""


class Behaviour(ABC):
    """Actions of one space. Arrays may have any leading axes."""

    outputs: int
    """How many numbers of a network it takes."""

    @abstractmethod
    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """What `act` needs to be random."""

    @abstractmethod
    def act(self, outputs: Array, noise: Array, epsilon: Array, xp: Any = jnp) -> Array:
        """An action; `xp` is what computes it, JAX's numpy or numpy itself."""

    @abstractmethod
    def best(self, outputs: Array) -> Array:
        """The action without noise."""


class Categories(Behaviour):
    """One of `n` actions, by logits."""

    def __init__(self, space: spaces.Discrete[Any]):
        self.outputs = int(space.n)

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Gumbel noise, and whether to act at random."""
        noise = generator.gumbel(size=(*leading, self.outputs + 1))
        noise[..., -1] = generator.random(leading)
        return noise.astype(np.float32)

    def act(self, outputs: Array, noise: Array, epsilon: Array, xp: Any = jnp) -> Array:
        """The largest logit with its noise; at random, the largest noise of those that are legal."""
        logits = xp.where((noise[..., -1:] < epsilon) & (outputs > NEVER), 0.0, outputs)
        return xp.argmax(logits + noise[..., :-1], axis=-1)

    def best(self, outputs: Array) -> Array:
        """The largest."""
        return jnp.argmax(outputs, axis=-1)


class Bounded(Behaviour):
    """Numbers between bounds. Networks know them as -1 to 1."""

    def __init__(self, space: gymnasium.Space[Any]):
        assert isinstance(space, spaces.Box)
        with np.errstate(over="ignore"):
            reach = (space.high - space.low).astype(np.float32) / 2
        if not np.isfinite(reach).all():
            raise SpaceError(
                f"its actions have no bounds ({space}); wrap the environment in "
                f"gymnasium.wrappers.RescaleAction or ClipAction so that they have"
            )
        self.shape = space.shape
        self.size = int(np.prod(space.shape))
        self._middle = ((space.high + space.low) / 2).astype(np.float32).reshape(-1)
        self._reach = reach.reshape(-1)
        self._divisor = np.where(self._reach > 0, self._reach, np.float32(1))
        """The same, where there is any."""

    def scaled(self, flat: Array) -> Array:
        """Actions of the space, from numbers between -1 and 1."""
        return (self._middle + self._reach * flat).reshape(*flat.shape[:-1], *self.shape)

    def unscaled(self, action: Array) -> Array:
        """Numbers between -1 and 1, from actions of the space."""
        flat = action.reshape(*action.shape[: action.ndim - len(self.shape)], self.size)
        return (flat - self._middle) / self._divisor

    def noise(self, generator: np.random.Generator, *leading: int) -> np.ndarray[Any, Any]:
        """Standard normal for each number, then uniform for each, and whether to act at random."""
        normal = generator.standard_normal((*leading, self.size), np.float32)
        return np.concatenate([normal, generator.random((*leading, self.size + 1), np.float32)], axis=-1)

    def _explored(self, own: Array, noise: Array, epsilon: Array, xp: Any) -> Array:
        anything = 2 * noise[..., self.size : -1] - 1
        return self.scaled(xp.where(noise[..., -1:] < epsilon, anything, own))


class Squashed(Bounded):
    """Normal numbers, squashed by tanh; outputs are means, then logarithms of deviations."""

    def __init__(self, space: gymnasium.Space[Any]):
        super().__init__(space)
        self.outputs = 2 * self.size

    def act(self, outputs: Array, noise: Array, epsilon: Array, xp: Any = jnp) -> Array:
        """Squashed, the mean and some of the deviation."""
        mean, deviation = outputs[..., : self.size], xp.exp(xp.clip(outputs[..., self.size :], *LOG_STD))
        return self._explored(xp.tanh(mean + deviation * noise[..., : self.size]), noise, epsilon, xp)

    def best(self, outputs: Array) -> Array:
        """Squashed, the mean."""
        return self.scaled(jnp.tanh(outputs[..., : self.size]))

    def sample(self, outputs: Array, normal: Array) -> tuple[Array, Array]:
        """Numbers between -1 and 1, and how likely they are."""
        mean, log_std = outputs[..., : self.size], jnp.clip(outputs[..., self.size :], *LOG_STD)
        before = mean + jnp.exp(log_std) * normal
        log_prob = -0.5 * (normal**2 + LOG_2PI) - log_std
        squashing = 2 * (jnp.log(2.0) - before - jax.nn.softplus(-2 * before))  # log(1 - tanh^2)
        return jnp.tanh(before), jnp.sum(log_prob - squashing, axis=-1)


class Steady(Bounded):
    """Numbers squashed by tanh; noise of some deviation is added while learning."""

    def __init__(self, space: gymnasium.Space[Any], deviation: float):
        super().__init__(space)
        self.outputs = self.size
        self.deviation = deviation

    def act(self, outputs: Array, noise: Array, epsilon: Array, xp: Any = jnp) -> Array:
        """Squashed, with noise."""
        noisy = xp.tanh(outputs) + self.deviation * noise[..., : self.size]
        return self._explored(xp.clip(noisy, -1.0, 1.0), noise, epsilon, xp)

    def best(self, outputs: Array) -> Array:
        """Squashed."""
        return self.scaled(jnp.tanh(outputs))


HeadMaker = Callable[[gymnasium.Space[Any], int, np.random.Generator], Any]
"""Makes a module that turns one observation into so many outputs."""


class ActorPolicy:
    """An actor by itself: a network and a behaviour. Its critics are the learner's own."""

    compiled = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        behaviour: Behaviour,
        network: HeadMaker = network_head,
    ):
        self.observation_space = observation_space
        self.action_space = action_space
        self.behaviour = behaviour
        self.named = Named(partial(network, observation_space, behaviour.outputs))

    def init(self, seed: int) -> Weights:
        """Fresh weights, which act at random."""
        return self.named.init(seed) | {"epsilon": np.float32(1.0)}

    def initial_state(self, size: int) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        """What the behaviour needs."""
        return self.behaviour.noise(generator, *leading)

    def step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State]:
        """Actions; without noise, the best."""
        outputs = self.outputs(weights, observation)
        if noise is None:
            return self.behaviour.best(outputs), state
        return self.behaviour.act(outputs, noise, weights["epsilon"]), state

    def quick(self, count: int) -> Callable[[Weights], Act] | None:
        """Makes, of weights, what acts as `step` does for so many observations, if the network is small."""
        network = self.named.template()
        if not is_usual(network, Head):
            return None
        made = quick_layers(self.observation_space, network.body, network.head, self.init(0), count)
        if made is None:
            return None

        def under(weights: Weights) -> Act:
            compute, epsilon = made(weights), float(weights["epsilon"])

            def act(observation: Array, state: State, noise: Array) -> tuple[Array, State]:
                outputs = compute(observation.reshape(count, -1))
                return self.behaviour.act(outputs, noise, epsilon, np), state

            return act

        return under

    def outputs(self, weights: Weights, observation: Observation) -> Array:
        """What the behaviour makes actions of; logits of actions that are not legal are lower than any."""
        outputs = applied(self.named.module(weights), self.observation_space, observation)
        if has_mask(self.observation_space) and isinstance(self.behaviour, Categories):
            return jnp.where(observation["action_mask"].astype(bool), outputs, NEVER)
        return outputs
