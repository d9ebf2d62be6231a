"""Inference with a trained policy, on observations as the environment returns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from rollstream.rl.env_checks import space_mismatch
from rollstream.rl.frame_stack import first_stack, push_frame
from rollstream.rl.jit import jit
from rollstream.rl.policy import Policy, State, Weights
from rollstream.rl.spaces import Observation, SpaceError, channel_axis, put, zeros
from rollstream.rl.vector import actions_for, join_masks
from rollstream.rl.worker import cpu_device


def stochastic_step(policy: Policy) -> Callable[..., tuple[Any, State]]:
    """The policy's step with noise, jitted if the policy supports it."""
    return jit(policy.step) if policy.jit else policy.step


def deterministic_step(policy: Policy) -> Callable[..., tuple[Any, State]]:
    """The policy's step without exploration noise, jitted if the policy supports it."""

    def step(weights: Weights, observation: Observation, state: State) -> tuple[Any, State]:
        return policy.step(weights, observation, state, None)

    return jit(step) if policy.jit else step


def to_actor_device(policy: Policy, weights: Weights) -> Weights:
    """Move weights to the device that computes actions."""
    return jax.device_put(weights, cpu_device()) if policy.jit else weights


class TrainedPolicy:
    """Selects actions in one environment at a time.

    A policy with stacked frames or a recurrent state keeps both between calls: call `reset` at the start of
    each episode.

    Args:
        policy: computes the actions.
        weights: its trained parameters.
        observation_space: as the policy sees it, with stacked frames and the action mask.
        action_space: of the environment.
        frame_stack: number of stacked observations.
        seed: of stochastic actions.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Weights,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        frame_stack: int = 1,
        seed: int = 0,
    ):
        self.policy = policy
        self.weights = weights
        self.observation_space = observation_space
        self.action_space = action_space
        self._frame_stack = frame_stack
        self._convert = actions_for(action_space)
        self._generator = np.random.default_rng([seed, 0, 0, 6])
        self._device_weights = to_actor_device(policy, weights)
        self._stochastic_step = stochastic_step(policy)
        self._deterministic_step = deterministic_step(policy)
        self.reset()

    def reset(self) -> None:
        """Clear stacked frames and recurrent state at the start of an episode."""
        self._stack: np.ndarray[Any, Any] | None = None
        self._state = self.policy.initial_state(1)

    def act(self, observation: Any, deterministic: bool = True, *, action_mask: Any = None) -> Any:
        """Select an action for one observation.

        Args:
            observation: as the environment returns it.
            deterministic: take the mode of the action distribution instead of a sample.
            action_mask: the environment's `info["action_mask"]`, if it has one.
        """
        stacked = self._stack_frames(self._with_mask(observation, action_mask))
        if (reason := space_mismatch(self.observation_space, stacked)) is not None:
            raise _misfit_error(reason)
        batch = zeros(self.observation_space, 1)
        put(batch, 0, stacked)
        if deterministic:
            action, self._state = self._deterministic_step(self._device_weights, batch, self._state)
        else:
            noise = self.policy.noise(self._generator, 1)
            action, self._state = self._stochastic_step(self._device_weights, batch, self._state, noise)
        return self._convert(np.asarray(action))[0]

    def _stack_frames(self, observation: Observation) -> Observation:
        if self._frame_stack == 1:
            return observation
        shape = list(self.observation_space.shape or ())
        axis = channel_axis(tuple(shape))
        shape[axis] //= self._frame_stack
        if np.size(observation) != np.prod(shape):
            raise _misfit_error(f"has shape {np.shape(observation)} instead of {tuple(shape)}")
        new = np.asarray(observation).reshape(shape)
        if self._stack is None:
            self._stack = first_stack(new, self._frame_stack, axis)
        else:
            self._stack = push_frame(self._stack, new, axis)
        return self._stack

    def _with_mask(self, observation: Any, mask: Any) -> Observation:
        space = self.observation_space
        if not isinstance(space, spaces.Dict) or "action_mask" not in space.spaces:
            return observation
        if isinstance(observation, dict) and observation.keys() == space.spaces.keys():
            return observation
        if mask is None:
            mask = np.ones(space["action_mask"].shape or (), np.int8)
        return {"observation": observation, "action_mask": join_masks(mask)}


def _misfit_error(reason: str) -> SpaceError:
    return SpaceError(
        f"act takes one observation, as the environment returns it, and this one {reason}; for a batch, "
        f"call act for each"
    )
