"""Epsilon-greedy policies over Q values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.rl.action_distributions import MASKED_LOGIT, Categorical
from rollstream.rl.networks import QNetwork, acts_in_numpy, q_network, q_outputs
from rollstream.rl.numpy_forward import NumpyForward
from rollstream.rl.params import ModuleParams, Weights
from rollstream.rl.policy import Act, State, apply_network, has_action_mask, overridden
from rollstream.rl.spaces import Observation, require_action_space

Array = Any
QNetworkMaker = Callable[[gymnasium.Space[Any], int, np.random.Generator], Any]
"""Creates a module that maps one observation to the Q values of all actions."""


class QPolicy:
    """Acts greedily, or with probability `epsilon`, which is among the weights, uniformly at random.

    Args:
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        network: Creates the network.
        num_atoms: If more than 1, Q values are distributions over so many atoms (C51).
        value_range: The smallest and the largest atom.
        algorithm: Name of the algorithm, for errors about the action space.
    """

    jit = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        network: QNetworkMaker = q_network,
        *,
        num_atoms: int = 1,
        value_range: tuple[float, float] = (0.0, 1.0),
        algorithm: str = "this policy",
    ):
        require_action_space(action_space, (spaces.Discrete,), algorithm)
        assert isinstance(action_space, spaces.Discrete)
        self.observation_space = observation_space
        self.action_space = action_space
        self.num_actions = int(action_space.n)
        self.atoms = np.linspace(*value_range, num_atoms, dtype=np.float32) if num_atoms > 1 else None
        self.params = ModuleParams(lambda random: network(observation_space, self.num_actions, random))
        self._actions = Categorical(self.num_actions)
        self._forward: NumpyForward | None = None

    def init(self, seed: int) -> Weights:
        """Initial parameters, and an epsilon of 1."""
        return self.params.init(seed) | {"epsilon": np.float32(1.0)}

    # Acting ------------------------------------------------------------------------------------

    def initial_state(self, size: int) -> State:  # noqa: ARG002
        """No state."""
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        """A random number for each action, and one that decides whether to explore."""
        return generator.random((*leading, self.num_actions + 1), np.float32)

    def step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State]:
        """Epsilon-greedy actions; without noise the greedy ones."""
        q_values, state = self.step_q_values(weights, observation, state)
        if noise is None:
            return jnp.argmax(q_values, axis=-1), state
        return self._epsilon_greedy(q_values, noise, _per_row(weights["epsilon"]), jnp), state

    def step_q_values(self, weights: Weights, observation: Observation, state: State) -> tuple[Array, State]:
        """Q values of B observations, and the new state."""
        return self.q_values(weights, observation), state

    def acts_in_numpy(self, num_envs: int) -> bool:
        """Whether the network is small enough, and one of ours, and no subclass acts in its own way."""
        if overridden(self, QPolicy, ("step", "step_q_values", "outputs", "q_values"), unless="numpy_step"):
            return False
        network = self.params.module(self.params.init(0))
        return acts_in_numpy(self.observation_space, network, QNetwork, num_envs)

    def numpy_step(self, weights: Weights, num_envs: int) -> Act:
        """`step` with NumPy."""
        if self._forward is None:
            names = self.params.names_module()
            heads = [names.head] if names.value_head is None else [names.head, names.value_head]
            self._forward = NumpyForward(names.body, heads)
        forward, epsilon = self._forward.bind(weights, num_envs), _per_row(np.asarray(weights["epsilon"]))
        num_atoms = 1 if self.atoms is None else len(self.atoms)

        def act(observation: Array, state: State, noise: Array) -> tuple[Array, State]:
            outputs = forward(observation.reshape(len(observation), -1))
            q_values = outputs[0]
            if num_atoms > 1 or len(outputs) > 1:
                q_values = expected_values(q_outputs(num_atoms, *outputs), self.atoms, np)
            return self._epsilon_greedy(q_values, noise, epsilon, np), state

        return act

    def _epsilon_greedy(self, q_values: Array, noise: Array, epsilon: Array, xp: Any) -> Array:
        """Actions; epsilon is a number, or one per row."""
        greedy, explore = q_values.argmax(axis=-1), noise[..., -1] < epsilon
        if xp is np and not np.count_nonzero(explore):
            return greedy
        return xp.where(explore, self._actions.uniform(q_values, noise[..., :-1], xp), greedy)

    # Evaluating --------------------------------------------------------------------------------

    def outputs(self, weights: Weights, observation: Observation) -> Array:
        """Outputs of the network: Q values, or with atoms the logits of their distributions."""
        return apply_network(self.params.module(weights), self.observation_space, observation)

    def q_values(self, weights: Weights, observation: Observation) -> Array:
        """Q values of all actions; very low for actions that are not legal."""
        return self.masked(expected_values(self.outputs(weights, observation), self.atoms, jnp), observation)

    def masked(self, q_values: Array, observation: Observation) -> Array:
        """Q values, very low for illegal actions if observations include a mask."""
        if not has_action_mask(self.observation_space):
            return q_values
        legal = observation["action_mask"].astype(bool)
        legal |= ~legal.any(axis=-1, keepdims=True)  # after the last step, no action may be legal
        return jnp.where(legal, q_values, MASKED_LOGIT)

    def value(self, weights: Weights, observation: Observation, state: State = ()) -> Array:
        """The largest Q value of each observation, given the state before it."""
        return self.step_q_values(weights, observation, state)[0].max(axis=-1)


def _per_row(epsilon: Array) -> Array:
    """Epsilon, a number or `[B, 1]`, as a number or `[B]`."""
    return epsilon[..., 0] if epsilon.ndim else epsilon


def expected_values(outputs: Array, atoms: Array | None, xp: Any) -> Array:
    """Q values `[..., actions]`; with atoms, the expectations of distributions with logits `outputs`."""
    if atoms is None:
        return outputs
    unnormalized = xp.exp(outputs - outputs.max(axis=-1, keepdims=True))
    return (unnormalized @ atoms) / unnormalized.sum(axis=-1)


def select_action(q_values: Array, action: Array) -> Array:
    """The Q values `[...]`, or outputs `[..., atoms]`, of one action each, out of those of all actions."""
    extra = q_values.ndim - action.ndim
    index = action.reshape(*action.shape, *(1,) * extra).astype(jnp.int32)
    return jnp.squeeze(jnp.take_along_axis(q_values, index, axis=action.ndim), action.ndim)
