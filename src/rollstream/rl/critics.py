"""Ensembles of Q functions: the critics of SAC, TD3 and DDPG."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np

from rollstream.rl.networks import head_network
from rollstream.rl.params import ModuleParams, Weights
from rollstream.rl.policy import apply_network
from rollstream.rl.spaces import Observation

Array = Any


class Critics:
    """Several Q functions of observations and continuous actions, or of observations alone.

    Args:
        observation_space: Observation space of one environment.
        action_size: Size of continuous actions; 0 for discrete ones.
        outputs: Outputs of each critic: 1, or the number of discrete actions.
        count: Number of critics.
        network: Further arguments of `head_network`.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        *,
        action_size: int,
        outputs: int = 1,
        count: int = 2,
        **network: Any,
    ):
        self._space = observation_space
        make = partial(head_network, observation_space, outputs, action_size=action_size, **network)
        self._params = ModuleParams(lambda random: [make(random) for _ in range(count)])

    def init(self, seed: int) -> Weights:
        """Initial parameters, independent of an actor's with the same seed."""
        return self._params.init(np.random.SeedSequence([seed, 1]).generate_state(1)[0])

    def __call__(self, params: Weights, observation: Observation, *action: Array) -> Array:
        """Q values `[critics, N, outputs]`."""
        critics = self._params.module(params)
        return jnp.stack([apply_network(own, self._space, observation, *action) for own in critics])

    def first(self, params: Weights, observation: Observation, *action: Array) -> Array:
        """Q values `[N, outputs]` of the first critic: a slice of all would have gradients of all."""
        return apply_network(self._params.module(params)[0], self._space, observation, *action)
