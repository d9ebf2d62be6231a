"""Policies that do what is worth most, and now and then anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.rl.distributions import NEVER
from rollstream.rl.networks import QNetwork, q_network
from rollstream.rl.params import Named, Weights
from rollstream.rl.policy import State, applied, has_mask
from rollstream.rl.quick import Act, is_usual, quick_layers
from rollstream.rl.spaces import Observation, require_actions

Array = Any
QNetworkMaker = Callable[[gymnasium.Space[Any], int, np.random.Generator], Any]
"""Makes a module that turns one observation into the value of every action."""


class QPolicy:
    """Values of actions; with probability `epsilon`, which is among the weights, an action at random.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        network: makes the network; `q_network` if left out.
        atoms: if more than one, values are distributions over so many (Bellemare et al., 2017).
        bounds: the least and the largest value such a distribution can have.
        name: of the algorithm, for what is said when the spaces are wrong.
    """

    compiled = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        network: QNetworkMaker = q_network,
        *,
        atoms: int = 1,
        bounds: tuple[float, float] = (0.0, 1.0),
        name: str = "this policy",
    ):
        require_actions(action_space, (spaces.Discrete,), name)
        assert isinstance(action_space, spaces.Discrete)
        self.observation_space = observation_space
        self.action_space = action_space
        self.actions = int(action_space.n)
        self.atoms = np.linspace(*bounds, atoms, dtype=np.float32) if atoms > 1 else None
        self.named = Named(lambda random: network(observation_space, self.actions, random))

    def init(self, seed: int) -> Weights:
        """Fresh weights, which act at random."""
        return self.named.init(seed) | {"epsilon": np.float32(1.0)}

    # Acting ------------------------------------------------------------------------------------

    def initial_state(self, size: int) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        """For each action, how much it would be preferred at random; and whether to act at random."""
        return generator.random((*leading, self.actions + 1), np.float32)

    def step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State]:
        """Actions; without noise those that are worth most, else now and then any of the legal ones."""
        values = self.values(weights, observation)
        if noise is None:
            return jnp.argmax(values, axis=-1), state
        at_random = jnp.where(values > NEVER, noise[..., :-1], -1.0)
        explores = noise[..., -1:] < weights["epsilon"]
        return jnp.argmax(jnp.where(explores, at_random, values), axis=-1), state

    def quick(self, count: int) -> Callable[[Weights], Act] | None:
        """Makes, of weights, what acts as `step` does for so many observations, if the network is small."""
        network = self.named.template()
        if not is_usual(network, QNetwork):
            return None
        made = quick_layers(self.observation_space, network.body, network.head, self.init(0), count)
        if made is None or (self.atoms is not None and network.value_head is not None):
            return None

        def under(weights: Weights) -> Act:
            compute, epsilon, atoms = made(weights), np.asarray(weights["epsilon"]), self.atoms

            def act(observation: Array, state: State, noise: Array) -> tuple[Array, State]:
                # What all actions have in common, the value of a dueling network, decides nothing.
                outputs = compute(observation.reshape(count, -1))
                if atoms is not None:
                    outputs = outputs.reshape(count, -1, len(atoms))
                values = expected(outputs, atoms, np)
                greedy = values.argmax(axis=-1)
                explores = noise[:, -1:] < epsilon
                if explores.any():
                    greedy = np.where(explores[:, 0], noise[:, :-1].argmax(axis=-1), greedy)
                return greedy, state

            return act

        return under

    # Thinking ----------------------------------------------------------------------------------

    def outputs(self, weights: Weights, observation: Observation) -> Array:
        """What the network gives: the value of every action, or the logits of its distribution."""
        return applied(self.named.module(weights), self.observation_space, observation)

    def values(self, weights: Weights, observation: Observation) -> Array:
        """The value of every action; of those that are not legal, less than any."""
        values = expected(self.outputs(weights, observation), self.atoms, jnp)
        if has_mask(self.observation_space):
            return jnp.where(observation["action_mask"].astype(bool), values, NEVER)
        return values


def expected(outputs: Array, atoms: Array | None, xp: Any) -> Array:
    """Values `[..., actions]`, of what a network gives; `[..., actions, atoms]` are logits."""
    if atoms is None:
        return outputs
    likely = xp.exp(outputs - outputs.max(axis=-1, keepdims=True))
    return (likely @ atoms) / likely.sum(axis=-1)
