"""A trained policy that acts on plain observations of its environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from rollstream.rl.env_checks import misfit
from rollstream.rl.jit import compiled
from rollstream.rl.policy import Policy, State, Weights
from rollstream.rl.spaces import Observation, SpaceError, channel_axis, put, zeros
from rollstream.rl.vector import actions_for, joined_mask
from rollstream.rl.worker import processor


def likeliest(policy: Policy) -> Callable[[Weights, Observation, State], tuple[Any, State]]:
    """A policy's step without noise, compiled if it is for that."""

    def step(weights: Weights, observation: Observation, state: State) -> tuple[Any, State]:
        return policy.step(weights, observation, state, None)

    return compiled(step) if policy.compiled else step


def placed(policy: Policy, weights: Weights) -> Weights:
    """Weights where actions are computed."""
    return jax.device_put(weights, processor()) if policy.compiled else weights


class TrainedPolicy:
    """Acts in one environment at a time.

    Where it was trained on several frames at once, or remembers, it keeps them from call to call: call
    `reset` when an episode begins.

    Args:
        policy: what acts.
        weights: what it has learned.
        observation_space: as the policy sees it, with frames stacked and the mask of legal actions in it.
        action_space: of the environment.
        frames: how many observations it sees at once.
        seed: of actions that are not deterministic.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Weights,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        frames: int = 1,
        seed: int = 0,
    ):
        self.policy = policy
        self.weights = weights
        self.observation_space = observation_space
        self.action_space = action_space
        self._frames = frames
        self._convert = actions_for(action_space)
        self._generator = np.random.default_rng([seed, 0, 0, 6])
        self._placed = placed(policy, weights)
        self._step = compiled(policy.step) if policy.compiled else policy.step
        self._likeliest = likeliest(policy)
        self.reset()

    def reset(self) -> None:
        """An episode begins: nothing has been seen yet."""
        self._stack: np.ndarray[Any, Any] | None = None
        self._state = self.policy.initial_state(1)

    def act(self, observation: Any, deterministic: bool = True, *, action_mask: Any = None) -> Any:
        """An action, as the environment takes it.

        Args:
            observation: one, as the environment gives it.
            deterministic: the likeliest action, or a draw.
            action_mask: the environment's `info["action_mask"]`, if it gives one.
        """
        stacked = self._stacked(self._with_mask(observation, action_mask))
        if (reason := misfit(self.observation_space, stacked)) is not None:
            raise _unfit(reason)
        seen = zeros(self.observation_space, 1)
        put(seen, 0, stacked)
        if deterministic:
            action, self._state = self._likeliest(self._placed, seen, self._state)
        else:
            noise = self.policy.noise(self._generator, 1)
            action, self._state = self._step(self._placed, seen, self._state, noise)
        return self._convert(np.asarray(action))[0]

    def _stacked(self, observation: Observation) -> Observation:
        if self._frames == 1:
            return observation
        shape = list(self.observation_space.shape or ())
        axis = channel_axis(tuple(shape))
        shape[axis] //= self._frames
        if np.size(observation) != np.prod(shape):
            raise _unfit(f"has shape {np.shape(observation)} instead of {tuple(shape)}")
        new = np.asarray(observation).reshape(shape)
        if self._stack is None:
            self._stack = np.concatenate([new] * self._frames, axis)
        else:
            _, older = np.split(self._stack, [shape[axis]], axis)
            self._stack = np.concatenate([older, new], axis)
        return self._stack

    def _with_mask(self, observation: Any, mask: Any) -> Observation:
        space = self.observation_space
        if not isinstance(space, spaces.Dict) or "action_mask" not in space.spaces:
            return observation
        if isinstance(observation, dict) and observation.keys() == space.spaces.keys():
            return observation
        if mask is None:
            mask = np.ones(space["action_mask"].shape or (), np.int8)
        return {"observation": observation, "action_mask": joined_mask(mask)}


def _unfit(reason: str) -> SpaceError:
    return SpaceError(
        f"act takes one observation, as the environment gives it, and this one {reason}; for a batch, "
        f"call act for each"
    )
