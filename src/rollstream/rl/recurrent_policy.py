"""Recurrent policies: an LSTM or a GRU remembers what an observation alone does not tell.

A worker acts one step at a time (`step`), and records the state before the first step of a rollout and where
episodes start in it. From there a learner evaluates the rollout again (`evaluate_sequences`): gradients go
back through time up to the first step, or to the start of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import gymnasium
import jax
import numpy as np

from rollstream.engine import RollstreamError
from rollstream.rl.batch import FIRST_STATE
from rollstream.rl.networks import actor_critic
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy, EvaluatedActions, State, apply_network, overridden
from rollstream.rl.recurrent_networks import Memory, recurrent_actor_critic
from rollstream.rl.spaces import Observation
from rollstream.rl.unrolling import unroll

Array = Any


class SequenceOutputs(NamedTuple):
    """What a recurrent policy computes for the observations `[T, B, ...]` of sequences."""

    outputs: Array
    """Of the action distribution."""
    value: Array
    """Of the observations."""
    state: State
    """After each step, before a reset, `[T, B, ...]`: with it, `value` evaluates what a step led to."""


class RecurrentPolicy(ActorCriticPolicy):
    """An action distribution and a value function that depend on all observations of the episode so far.

    Args:
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        network: Creates the network, which has the methods of `RecurrentActorCritic`.
        normalize_observations: Normalize observations by running statistics among the weights.
        normalize_rewards: Keep running statistics of discounted returns among the weights, to scale rewards.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        network: Callable[..., Any] = recurrent_actor_critic,
        *,
        normalize_observations: bool = False,
        normalize_rewards: bool = False,
    ):
        super().__init__(
            observation_space,
            action_space,
            network,
            normalize_observations=normalize_observations,
            normalize_rewards=normalize_rewards,
        )
        self._initial_state = self.params.module(self.params.init(0)).initial_state()

    def overrides(self, *methods: str) -> bool:
        """Whether a subclass of one's own has one of these methods."""
        return overridden(self, RecurrentPolicy, methods)

    def initial_state(self, size: int) -> State:
        """The network's state at the start of an episode."""
        return jax.tree.map(lambda own: np.repeat(own[None], size, axis=0), self._initial_state)

    def step_outputs(
        self, weights: Weights, observation: Observation, state: State
    ) -> tuple[Array, Array, State]:
        """Distribution outputs and values of B observations, and the new state."""
        network, observation = self.params.module(weights), self.normalized(weights, observation)
        inputs = apply_network(network.inputs, self.observation_space, observation)
        output, state = jax.vmap(network.step)(inputs, state)
        outputs, value = jax.vmap(network.heads)(output)
        return self.masked(outputs, observation), value, state

    def sequence_outputs(
        self, weights: Weights, observation: Observation, state: State, episode_start: Array
    ) -> SequenceOutputs:
        """Outputs for sequences: only the recurrent layer is computed step by step.

        Args:
            weights: The weights.
            observation: `[T, B, ...]`.
            state: Before the first step, `[B, ...]`.
            episode_start: Where the state is reset before a step, `[T, B]`.
        """
        network, observation = self.params.module(weights), self.normalized(weights, observation)
        inputs = apply_network(network.inputs, self.observation_space, observation)
        initial = self.initial_state(episode_start.shape[1])
        (outputs, value), states = unroll(network, inputs, state, initial, episode_start)
        return SequenceOutputs(self.masked(outputs, observation), value, states)

    def evaluate_sequences(self, weights: Weights, batch: Mapping[str, Any]) -> EvaluatedActions:
        """Log probabilities, entropies and values of sequences `[T, B, ...]`."""
        first = jax.tree.map(lambda own: own[0], batch[FIRST_STATE])
        outputs, value, _ = self.sequence_outputs(
            weights, batch["observation"], first, batch["episode_start"]
        )
        log_prob = self.distribution.log_prob(outputs, batch["action"])
        return EvaluatedActions(log_prob, self.distribution.entropy(outputs), value)

    def value(self, weights: Weights, observation: Observation, state: State = ()) -> Array:
        """Values of B observations, given the state before them."""
        return self.step_outputs(weights, observation, state)[1]

    def outputs(self, weights: Weights, observation: Observation) -> tuple[Array, Array]:  # noqa: ARG002
        """There are none without a state."""
        raise RollstreamError(
            "a recurrent policy evaluates observations together with its state: use evaluate_batch, "
            "sequence_outputs or step_outputs"
        )


class PolicyConfig(Protocol):
    """The settings of an actor-critic algorithm that its policy depends on."""

    @property
    def hidden(self) -> tuple[int, ...] | None: ...
    @property
    def activation(self) -> str: ...
    @property
    def initial_log_std(self) -> float: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def memory_size(self) -> int: ...
    @property
    def normalize_observations(self) -> bool: ...
    @property
    def normalize_rewards(self) -> bool: ...


def make_actor_critic_policy(
    config: PolicyConfig, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> ActorCriticPolicy:
    """The actor-critic policy for the spaces of an environment: recurrent if the config has a memory."""
    options: dict[str, Any] = {
        "hidden": config.hidden,
        "activation": config.activation,
        "log_std": config.initial_log_std,
    }
    kind, network = ActorCriticPolicy, partial(actor_critic, **options)
    if config.memory != "none":
        options |= {"memory": config.memory, "memory_size": config.memory_size}
        kind, network = RecurrentPolicy, partial(recurrent_actor_critic, **options)
    return kind(
        observation_space,
        action_space,
        network,
        normalize_observations=config.normalize_observations,
        normalize_rewards=config.normalize_rewards,
    )
