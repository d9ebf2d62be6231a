"""Recurrent epsilon-greedy policies: Q values that depend on all observations of the episode so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import jax
import numpy as np

from rollstream.engine import RollstreamError
from rollstream.rl.params import Weights
from rollstream.rl.policy import State, apply_network
from rollstream.rl.q_policy import QNetworkMaker, QPolicy
from rollstream.rl.recurrent_networks import recurrent_q_network
from rollstream.rl.spaces import Observation
from rollstream.rl.unrolling import last_state, unroll

Array = Any


class RecurrentQPolicy(QPolicy):
    """Acts greedily, or with probability `epsilon` uniformly at random, and remembers with an LSTM or a GRU.

    Args:
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        network: Creates the network, which has the methods of `RecurrentQNetwork`.
        algorithm: Name of the algorithm, for errors about the action space.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        network: QNetworkMaker = recurrent_q_network,
        *,
        algorithm: str = "this policy",
    ):
        super().__init__(observation_space, action_space, network, algorithm=algorithm)
        self._initial_state = self.params.module(self.params.init(0)).initial_state()

    # Acting ------------------------------------------------------------------------------------

    def initial_state(self, size: int) -> State:
        """The network's state at the start of an episode."""
        return jax.tree.map(lambda own: np.repeat(own[None], size, axis=0), self._initial_state)

    def step_q_values(self, weights: Weights, observation: Observation, state: State) -> tuple[Array, State]:
        """Q values of B observations, and the new state."""
        network = self.params.module(weights)
        inputs = apply_network(network.inputs, self.observation_space, observation)
        output, state = jax.vmap(network.step)(inputs, state)
        return self.masked(jax.vmap(network.heads)(output), observation), state

    # Evaluating --------------------------------------------------------------------------------

    def sequence_q_values(
        self, weights: Weights, observation: Observation, state: State, episode_start: Array
    ) -> tuple[Array, State]:
        """Q values of sequences, `[T, B, actions]`, and the states after each step, before a reset.

        Args:
            weights: The weights.
            observation: `[T, B, ...]`.
            state: Before the first step, `[B, ...]`.
            episode_start: Where the state is reset before a step, `[T, B]`.
        """
        network = self.params.module(weights)
        inputs = apply_network(network.inputs, self.observation_space, observation)
        initial = self.initial_state(episode_start.shape[1])
        q_values, states = unroll(network, inputs, state, initial, episode_start)
        return self.masked(q_values, observation), states

    def last_state(self, weights: Weights, observation: Observation, state: State, taken: Array) -> State:
        """The state after sequences `[T, B, ...]`, of which some steps are `taken`, `[T, B]`."""
        network = self.params.module(weights)
        inputs = apply_network(network.inputs, self.observation_space, observation)
        return last_state(network, inputs, state, taken)

    def state_of(self, leaves: Sequence[Array]) -> State:
        """A state, given its arrays, as replay stores them."""
        return jax.tree.unflatten(jax.tree.structure(self._initial_state), leaves)

    def outputs(self, weights: Weights, observation: Observation) -> Array:  # noqa: ARG002
        """There are none without a state."""
        raise RollstreamError(
            "a recurrent policy evaluates observations together with its state: train it with r2d2, and use "
            "sequence_q_values or step_q_values"
        )
