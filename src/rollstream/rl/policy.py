"""Policies: pure functions of weights, where weights are arrays by name.

`Policy` is the interface that workers and plans need. It is independent of the framework: a policy in PyTorch
trains through the same plans (see `examples/torch_policy.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.engine import RollstreamError
from rollstream.rl.action_distributions import ActionDistribution, distribution_for
from rollstream.rl.networks import ActorCritic, actor_critic, acts_in_numpy, with_log_std
from rollstream.rl.normalize import CLIP, Moments, batch_statistics, flat_box_size, normalize_observation
from rollstream.rl.numpy_forward import NumpyForward
from rollstream.rl.params import ModuleParams, Weights
from rollstream.rl.spaces import Observation

Array = Any
State: TypeAlias = Any
"""Recurrent state `[B, ...]`; `()` for policies without one."""
Act: TypeAlias = Callable[[Observation, State, Any], tuple[Any, State]]
"""Actions and the new state, given observations, the state and noise."""
Network: TypeAlias = Callable[[gymnasium.Space[Any], ActionDistribution, np.random.Generator], eqx.Module]
"""Creates a module that maps one observation to distribution outputs and a value."""


class Policy(Protocol):
    """The interface that workers need."""

    jit: bool
    """Whether `step` is JAX code to be jitted; if not, it is called with NumPy arrays."""

    def init(self, seed: int) -> Weights:
        """Initial weights."""
        ...

    def initial_state(self, size: int) -> State:
        """Recurrent state at the start of an episode, for `size` environments."""
        ...

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        """Draw the noise that `step` takes, with leading axes."""
        ...

    def step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State]:
        """Actions for B observations, and the new state; with `noise=None`, the most likely actions."""
        ...


@runtime_checkable
class NumpyPolicy(Protocol):
    """A policy that can also act without JAX, which is faster for small networks."""

    def acts_in_numpy(self, num_envs: int) -> bool:
        """Whether `numpy_step` is available and faster for this many observations."""
        ...

    def numpy_step(self, weights: Weights, num_envs: int) -> Act:
        """The policy's `step` with these weights, computed by NumPy."""
        ...


@runtime_checkable
class EvaluatingPolicy(Protocol):
    """A policy that can also estimate log probabilities and values while it acts, in one forward pass."""

    def evaluates_steps(self) -> bool:
        """Whether `evaluated_step` acts like `step`."""
        ...

    def evaluated_step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State, Array, Array]:
        """What `step` returns, the log probabilities of the actions, and the values of the observations."""
        ...


class EvaluatedActions(NamedTuple):
    """Log probabilities of actions, entropies of their distributions, and values of the observations."""

    log_prob: Array
    entropy: Array
    value: Array


@runtime_checkable
class SequencePolicy(Protocol):
    """A recurrent policy. Learners evaluate whole sequences, so workers record the states they start with."""

    def evaluate_sequences(self, weights: Weights, batch: Mapping[str, Any]) -> EvaluatedActions:
        """Evaluate the actions of a batch `[T, B, ...]`, given its `first_state` and `episode_start`."""
        ...


@runtime_checkable
class SequenceQPolicy(Protocol):
    """A recurrent policy over Q values; workers record states for it, too."""

    def sequence_q_values(
        self, weights: Weights, observation: Observation, state: State, episode_start: Array
    ) -> tuple[Array, State]:
        """Q values of sequences, `[T, B, actions]`, and the states after each step, before a reset."""
        ...


def evaluate_batch(policy: Any, weights: Weights, batch: Mapping[str, Any]) -> EvaluatedActions:
    """Evaluate the actions of a batch: each step by itself, or sequences `[T, B, ...]` if it is recurrent."""
    if isinstance(policy, SequencePolicy):
        return policy.evaluate_sequences(weights, batch)
    return policy.evaluate_actions(weights, batch["observation"], batch["action"])


class ActorCriticPolicy:
    """An action distribution and a value function. Its methods are pure functions of the weights.

    Args:
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        network: Creates the network.
        normalize_observations: Normalize observations by running statistics among the weights.
        normalize_rewards: Keep running statistics of discounted returns among the weights, to scale rewards.
    """

    jit = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        network: Network = actor_critic,
        *,
        normalize_observations: bool = False,
        normalize_rewards: bool = False,
    ):
        self.observation_space = observation_space
        self.action_space = action_space
        self.distribution = distribution_for(action_space)
        self.normalize_observations = normalize_observations and flat_box_size(observation_space) > 0
        self.normalize_rewards = normalize_rewards
        self.params = ModuleParams(lambda random: network(observation_space, self.distribution, random))
        self._forward: NumpyForward | None = None
        self._names: Any = None

    def init(self, seed: int) -> Weights:
        """Initial parameters and empty statistics."""
        weights = self.params.init(seed)
        if self.normalize_rewards:
            weights |= Moments.empty().as_weights("return")
        if self.normalize_observations:
            weights |= Moments.empty(flat_box_size(self.observation_space)).as_weights("observation")
        return weights

    def batch_statistics(self, batch: Any) -> Weights:
        """Statistics of a batch, to combine with the running ones."""
        return batch_statistics(
            self.observation_space, batch, normalize_observations=self.normalize_observations
        )

    # Acting ------------------------------------------------------------------------------------

    def initial_state(self, size: int) -> State:  # noqa: ARG002
        """No state."""
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        """Noise of the action distribution."""
        return self.distribution.noise(generator, *leading)

    def step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State]:
        """Sampled actions; without noise the most likely ones."""
        outputs, _, state = self.step_outputs(weights, observation, state)
        if noise is None:
            return self.distribution.mode(outputs), state
        return self.distribution.sample(outputs, noise), state

    def step_outputs(
        self, weights: Weights, observation: Observation, state: State
    ) -> tuple[Array, Array, State]:
        """Distribution outputs and values of B observations, and the new state."""
        return *self.outputs(weights, observation), state

    def evaluates_steps(self) -> bool:
        """Unless a subclass acts or evaluates in its own way."""
        return not self.overrides(*_OUTPUTS)

    def overrides(self, *methods: str) -> bool:
        """Whether a subclass of one's own has one of these methods."""
        return overridden(self, ActorCriticPolicy, methods)

    def evaluated_step(
        self, weights: Weights, observation: Observation, state: State, noise: Any
    ) -> tuple[Array, State, Array, Array]:
        """Sampled actions, the state, log probabilities and values."""
        outputs, value, state = self.step_outputs(weights, observation, state)
        action = self.distribution.sample(outputs, noise)
        return action, state, self.distribution.log_prob(outputs, action), value

    def acts_in_numpy(self, num_envs: int) -> bool:
        """Whether the network is small enough, and one of ours, and no subclass acts in its own way."""
        if overridden(self, ActorCriticPolicy, ("step", "outputs"), unless="numpy_step"):
            return False
        network = self.params.module(self.params.init(0))
        return acts_in_numpy(self.observation_space, network, ActorCritic, num_envs)

    def numpy_step(self, weights: Weights, num_envs: int) -> Act:
        """`step` with NumPy."""
        if self._forward is None:
            self._names = self.params.names_module()
            self._forward = NumpyForward(self._names.actor, [self._names.actor_head])
        forward, distribution = self._forward.bind(weights, num_envs), self.distribution
        log_std = None if self._names.log_std is None else np.asarray(weights[self._names.log_std])
        normalized = None
        if self.normalize_observations:
            moments = Moments.from_weights(weights, "observation")
            normalized = np.asarray(moments.mean), np.asarray(moments.std)

        def act(observation: Array, state: State, noise: Array) -> tuple[Array, State]:
            x = observation.reshape(len(observation), -1)
            if normalized is not None:
                mean, std = normalized
                x = np.clip((x - mean) / std, -CLIP, CLIP)
            [outputs] = forward(x)
            if log_std is not None:
                outputs = with_log_std(outputs, log_std, np)
            return distribution.sample(outputs, noise, np), state

        return act

    # Evaluating --------------------------------------------------------------------------------

    def outputs(self, weights: Weights, observation: Observation) -> tuple[Array, Array]:
        """Distribution outputs and values, for observations with any leading axes."""
        observation = self.normalized(weights, observation)
        outputs, value = apply_network(self.params.module(weights), self.observation_space, observation)
        return self.masked(outputs, observation), value

    def normalized(self, weights: Weights, observation: Observation) -> Observation:
        """Observations as the network sees them."""
        if not self.normalize_observations:
            return observation
        moments = Moments.from_weights(weights, "observation")
        return normalize_observation(self.observation_space, observation, moments)

    def masked(self, outputs: Array, observation: Observation) -> Array:
        """Distribution outputs that allow legal actions only, if observations include a mask."""
        if not has_action_mask(self.observation_space):
            return outputs
        return self.distribution.masked(outputs, observation["action_mask"])

    def evaluate_actions(self, weights: Weights, observation: Observation, action: Array) -> EvaluatedActions:
        """Log probabilities, entropies and values."""
        outputs, value = self.outputs(weights, observation)
        log_prob = self.distribution.log_prob(outputs, action)
        return EvaluatedActions(log_prob, self.distribution.entropy(outputs), value)

    def value(self, weights: Weights, observation: Observation) -> Array:
        """Values of observations."""
        return self.outputs(weights, observation)[1]


_OUTPUTS = ("step", "step_outputs", "outputs", "evaluate_actions", "value")
"""A policy with one of these methods of its own acts or evaluates in its own way."""


class _Normalization(Protocol):
    @property
    def normalize_observations(self) -> bool: ...
    @property
    def normalize_rewards(self) -> bool: ...


def custom_policy(
    make: Callable[[gymnasium.Space[Any], gymnasium.Space[Any]], Any],
    config: _Normalization,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> Any:
    """A policy of one's own, which normalizes what the config says; an error if it cannot."""
    policy = make(observation_space, action_space)
    memory = getattr(config, "memory", "none")
    if memory != "none" and not isinstance(policy, SequencePolicy):
        raise RollstreamError(
            f"memory is {memory}, but {type(policy).__name__} is not recurrent: set memory to none, or "
            f"derive the policy from RecurrentPolicy"
        )
    normalizes = isinstance(policy, ActorCriticPolicy) and not policy.overrides(*_OUTPUTS, "numpy_step")
    for name in ("normalize_observations", "normalize_rewards"):
        if not getattr(config, name) or getattr(policy, name, False):
            continue
        if not normalizes:
            raise RollstreamError(
                f"{name} is on, but {type(policy).__name__} does not normalize: it computes its outputs "
                f"itself. Turn {name} off, or normalize in the policy and set its attribute {name} to True, "
                f"after super().__init__()"
            )
        setattr(policy, name, name == "normalize_rewards" or flat_box_size(observation_space) > 0)
    return policy


def overridden(policy: Any, kind: type, methods: tuple[str, ...], unless: str | None = None) -> bool:
    """Whether a policy's class has one of these methods of its own, and not also the one of `unless`."""
    names = methods if unless is None else (*methods, unless)
    own = {name for name in names if getattr(type(policy), name) is not getattr(kind, name)}
    return bool(own) and unless not in own


def require_policy(policy: Any, kind: type, algorithm: str) -> None:
    """Raise unless a policy is of the kind that an algorithm learns."""
    if not isinstance(policy, kind):
        raise RollstreamError(
            f"{algorithm} needs a policy of class {kind.__name__}, not {type(policy).__name__}"
        )


def has_action_mask(space: gymnasium.Space[Any]) -> bool:
    """Whether observations include a mask of the legal actions."""
    return isinstance(space, spaces.Dict) and "action_mask" in space.spaces


def apply_network(module: Any, space: gymnasium.Space[Any], observation: Observation, *inputs: Array) -> Any:
    """Apply a module for one observation to observations, and further inputs, with any leading axes."""
    leading = _leading_shape(space, observation)
    if len(leading) == 1:
        return jax.vmap(module)(observation, *inputs)
    count = len(leading)
    flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[count:]), (observation, *inputs))
    return jax.tree.map(lambda array: array.reshape(*leading, *array.shape[1:]), jax.vmap(module)(*flat))


def _leading_shape(space: gymnasium.Space[Any], observation: Observation) -> tuple[int, ...]:
    """The axes of an observation before those of its space."""
    if isinstance(space, spaces.Dict):
        name = next(iter(space.spaces))
        return _leading_shape(space.spaces[name], observation[name])
    if isinstance(space, spaces.Tuple):
        return _leading_shape(space.spaces[0], observation[0])
    shape = jnp.shape(observation)
    return tuple(shape[: len(shape) - len(space.shape or ())])
