"""Inference with a trained policy, on observations as the environment returns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from rollstream.rl.acting import Acting, choose_acting
from rollstream.rl.action_masks import allows_action, join_masks, mask_sizes
from rollstream.rl.env_checks import INTERFACE_ERRORS, space_mismatch
from rollstream.rl.frame_stack import first_stack, push_frame
from rollstream.rl.jit import cpu_device, jit
from rollstream.rl.policy import Policy, State, Weights
from rollstream.rl.spaces import (
    Observation,
    SpaceError,
    channel_axis,
    leaf_values,
    leaves,
    put,
    reset_rows,
    take,
    zeros,
)
from rollstream.rl.vector import actions_for


def stochastic_step(policy: Policy) -> Callable[..., tuple[Any, State]]:
    """The policy's step with noise, jitted if the policy supports it."""
    return jit(policy.step) if policy.jit else policy.step


def deterministic_step(policy: Policy) -> Callable[..., tuple[Any, State]]:
    """The policy's step without exploration noise, jitted if the policy supports it."""

    def step(weights: Weights, observation: Observation, state: State) -> tuple[Any, State]:
        return policy.step(weights, observation, state, None)

    return jit(step) if policy.jit else step


def acting_device(policy: Policy, weights: Weights, num_envs: int = 1, acting: Acting = "auto") -> Any:
    """The device that computes actions, by the rule for workers in the driver's process, if JAX does."""
    if not policy.jit:
        return None
    acting = choose_acting(
        "auto" if acting == "central" else acting, policy, weights, num_envs, own_process=False
    )
    return jax.devices()[0] if acting == "device" else cpu_device()


def moved_to(device: Any, weights: Weights) -> Weights:
    """Weights on a device; as they are without one."""
    return weights if device is None else jax.device_put(weights, device)


class TrainedPolicy:
    """Selects actions in one environment, or in several at once.

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
        self._frame_shape = list(observation_space.shape or ())
        self._channels = channel_axis(tuple(self._frame_shape))
        if frame_stack > 1:
            self._frame_shape[self._channels] //= frame_stack
        self._convert = actions_for(action_space, whole=True)
        self._generator = np.random.default_rng([seed, 0, 0, 6])
        self._device_weights = moved_to(acting_device(policy, weights), weights)
        self._stochastic_step = stochastic_step(policy)
        self._deterministic_step = deterministic_step(policy)
        self._has_memory = frame_stack > 1 or bool(jax.tree.leaves(policy.initial_state(1)))
        self.reset()

    def reset(self, done: Any = None) -> None:
        """Clear stacked frames and recurrent state at the start of an episode.

        Args:
            done: for a batch, in which environments an episode starts; by default in all.
        """
        if done is not None and self._size is not None:
            self._starts = np.asarray(done, bool)
            initial = self.policy.initial_state(self._size)
            self._state = reset_rows(self._state, initial, np.flatnonzero(self._starts).tolist())
            return
        self._size: int | None = None
        self._stack: Any = None
        self._starts: Any = None
        self._state: State = ()

    def act(self, observation: Any, deterministic: bool = True, *, action_mask: Any = None) -> Any:
        """Select an action for one observation, or an array of actions for a batch `[N, ...]`.

        Args:
            observation: as the environment returns it, or as a vector environment does.
            deterministic: take the mode of the action distribution instead of a sample.
            action_mask: the environment's `info["action_mask"]`, if it has one; of a batch `[N, ...]`.
        """
        size = self._batch_size(observation)
        batch = self._batch(observation, action_mask, size)
        self._remember(size or 1)
        if self._frame_stack > 1:
            batch = self._stacked(batch)
        if deterministic:
            action, self._state = self._deterministic_step(self._device_weights, batch, self._state)
        else:
            noise = self.policy.noise(self._generator, size or 1)
            action, self._state = self._stochastic_step(self._device_weights, batch, self._state, noise)
        actions = self._convert(np.asarray(action))
        return actions[0] if size is None else actions

    def _batch_size(self, observation: Any) -> int | None:
        """Number of observations; `None` for one that is not in a batch."""
        space = self.observation_space
        if isinstance(space, spaces.Dict) and self._in_info(observation, space):
            space = space["observation"]
        try:
            part, value = leaves(space)[0][1], leaf_values(space, observation)[0]
        except INTERFACE_ERRORS:
            return None
        own = tuple(self._frame_shape) if self._frame_stack > 1 else part.shape or ()
        shape = _shape(value)
        if shape is None or shape == own or not shape:
            return None
        if shape[1:] == own:
            return shape[0]
        size, count = int(np.prod(own)), int(np.prod(shape))
        is_batch = self._frame_stack > 1 and count != size and count == shape[0] * size
        return shape[0] if is_batch else None  # grey images may have no axis for their channel

    def _in_info(self, observation: Any, space: spaces.Dict) -> bool:
        """Whether an observation lacks the mask of its space, which is an argument of its own."""
        if space.spaces.keys() != {"observation", "action_mask"}:
            return False
        return not isinstance(observation, Mapping) or observation.keys() != space.spaces.keys()

    def _batch(self, observation: Any, mask: Any, size: int | None) -> Observation:
        """Observations `[N, ...]`, checked; of stacked frames the newest."""
        space = self.observation_space
        if self._frame_stack > 1:
            if np.size(observation) != np.prod(self._frame_shape) * (size or 1):
                raise _misfit(f"has shape {np.shape(observation)} instead of {tuple(self._frame_shape)}")
            return np.asarray(observation).reshape(-1, *self._frame_shape)
        if isinstance(space, spaces.Dict) and self._in_info(observation, space):
            observation = {"observation": observation, "action_mask": self._mask(mask, size)}
        batch = zeros(space, size or 1)
        try:
            one = observation if size is None else take(observation, 0)
            if (reason := space_mismatch(space, one)) is not None:
                raise _misfit(reason)
            put(batch, 0 if size is None else slice(None), observation)
        except INTERFACE_ERRORS as error:
            raise _misfit(f"cannot be converted ({error})") from None
        self._require_legal(batch)
        return batch

    def _mask(self, mask: Any, size: int | None) -> Any:
        shape = (*(() if size is None else (size,)), sum(mask_sizes(self.action_space)))
        if mask is None:
            return np.ones(shape, np.int8)
        return mask if _shape(mask) == shape else join_masks(mask)

    def _require_legal(self, batch: Observation) -> None:
        mask = batch.get("action_mask") if isinstance(batch, dict) else None
        if mask is not None and not allows_action(mask, mask_sizes(self.action_space)).all():
            raise SpaceError("act was given an action mask that allows no action; allow at least one")

    def _remember(self, size: int) -> None:
        """Keep frames and recurrent state for as many environments as there were before."""
        if self._size not in (None, size) and self._has_memory:
            raise SpaceError(
                f"act was called with {size} observations after {self._size}, and this policy keeps frames "
                f"or a state of each environment; call reset() first"
            )
        if self._size != size:
            self._size, self._state = size, self.policy.initial_state(size)

    def _stacked(self, frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        first = first_stack(frames, self._frame_stack, self._channels)
        if self._stack is None:
            self._stack = first
        else:
            self._stack = push_frame(self._stack, frames, self._channels)
            if self._starts is not None:
                self._stack[self._starts] = first[self._starts]
        self._starts = None
        return self._stack


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array; `None` if it has none."""
    try:
        return np.shape(value)
    except ValueError:
        return None


def _misfit(reason: str) -> SpaceError:
    return SpaceError(
        f"act takes one observation, as the environment returns it, or a batch of them, and this one {reason}"
    )
