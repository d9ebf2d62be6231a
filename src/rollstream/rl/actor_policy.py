"""Actors that learn from replay: a network and an action distribution, with uniform actions at first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np

from rollstream.rl.action_distributions import MASKED_LOGIT, BoundedDistribution, Categorical
from rollstream.rl.networks import HeadNetwork, acts_in_numpy, head_network
from rollstream.rl.numpy_forward import NumpyForward
from rollstream.rl.params import ModuleParams, Weights
from rollstream.rl.policy import Act, State, apply_network, has_action_mask, overridden
from rollstream.rl.spaces import Observation

Array = Any
HeadMaker = Callable[[gymnasium.Space[Any], int, np.random.Generator], Any]
"""Creates a module that maps one observation to a number of outputs."""


class ActorPolicy:
    """Acts by its distribution, or with probability `epsilon`, which is among the weights, uniformly.

    The critics belong to the learner.

    Args:
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        distribution: The action distribution.
        network: Creates the network.
    """

    jit = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        distribution: Categorical | BoundedDistribution,
        network: HeadMaker = head_network,
    ):
        self.observation_space = observation_space
        self.action_space = action_space
        self.distribution = distribution
        self.params = ModuleParams(partial(network, observation_space, distribution.output_size))
        self._forward: NumpyForward | None = None

    def init(self, seed: int) -> Weights:
        """Initial parameters, and an epsilon of 1: actions are uniform until the first update."""
        return self.params.init(seed) | {"epsilon": np.float32(1.0)}

    def initial_state(self, size: int) -> State:  # noqa: ARG002
        """No state."""
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        """Noise of the distribution, then of a uniform action, and whether to take the uniform one."""
        noise = self.distribution.noise(generator, *leading)
        uniform = generator.random((*leading, self.distribution.uniform_size + 1), np.float32)
        return np.concatenate([noise, uniform], axis=-1)

    def step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State]:
        """Sampled actions; without noise the most likely ones."""
        outputs = self.outputs(weights, observation)
        if noise is None:
            return self.distribution.mode(outputs), state
        return self._sample(outputs, noise, weights["epsilon"], jnp), state

    def acts_in_numpy(self, num_envs: int) -> bool:
        """Whether the network is small enough, and one of ours, and no subclass acts in its own way."""
        if overridden(self, ActorPolicy, ("step", "outputs"), unless="numpy_step"):
            return False
        network = self.params.module(self.params.init(0))
        return acts_in_numpy(self.observation_space, network, HeadNetwork, num_envs)

    def numpy_step(self, weights: Weights, num_envs: int) -> Act:
        """`step` with NumPy."""
        if self._forward is None:
            names = self.params.names_module()
            self._forward = NumpyForward(names.body, [names.head])
        forward, epsilon = self._forward.bind(weights, num_envs), float(np.asarray(weights["epsilon"]))

        def act(observation: Array, state: State, noise: Array) -> tuple[Array, State]:
            [outputs] = forward(observation.reshape(len(observation), -1))
            return self._sample(outputs, noise, epsilon, np), state

        return act

    def _sample(self, outputs: Array, noise: Array, epsilon: Array, xp: Any) -> Array:
        distribution, size = self.distribution, self.distribution.uniform_size
        action = distribution.sample(outputs, noise[..., : -size - 1], xp)
        if xp is np and not epsilon:
            return action
        explore = noise[..., -1] < epsilon
        uniform = distribution.uniform(outputs, noise[..., -size - 1 : -1], xp)
        return xp.where(explore.reshape(explore.shape + (1,) * (action.ndim - explore.ndim)), uniform, action)

    def outputs(self, weights: Weights, observation: Observation) -> Array:
        """Outputs of the network; logits of actions that are not legal are very low."""
        outputs = apply_network(self.params.module(weights), self.observation_space, observation)
        if has_action_mask(self.observation_space) and isinstance(self.distribution, Categorical):
            return jnp.where(observation["action_mask"].astype(bool), outputs, MASKED_LOGIT)
        return outputs
