"""Frame stacking: observations of the last few frames, along the channels of images or the last axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rollstream.rl.spaces import Observation, SpaceError, channel_axis, zeros
from rollstream.rl.vector import Vector, VectorStep

Array = np.ndarray[Any, Any]


def first_stack(frame: Array, frame_stack: int, axis: int) -> Array:
    """The stack at the start of an episode: its first frame, repeated."""
    return np.concatenate([frame] * frame_stack, axis)


def push_frame(stack: Array, frame: Array, axis: int) -> Array:
    """The stack with a new frame at its end, without the oldest."""
    _, newer = np.split(stack, [frame.shape[axis]], axis)
    return np.concatenate([newer, frame], axis)


def newest_frame(stack: Array, space: gymnasium.Space[Any], frame_stack: int) -> Array:
    """A view of the newest frame of stacks with any leading axes."""
    return np.split(stack, frame_stack, channel_axis(space.shape or ()))[-1]


def _frame_shape(space: spaces.Box) -> tuple[int, ...]:
    """The shape of a frame: images have channels, and no axis for the frames (as ALE's in color do)."""
    shape = space.shape
    if space.dtype == np.uint8 and len(shape) == 2:
        return (*shape, 1)
    return shape[1:] if space.dtype == np.uint8 and len(shape) == 4 and shape[0] == 1 else shape


class FrameStack(Vector):
    """Environments whose observations are the last few frames."""

    def __init__(self, inner: Vector, frame_stack: int):
        self.inner = inner
        """The environments, whose observations are frames."""
        self.frame_stack = frame_stack
        """Number of frames of a stack."""
        self.count, self.action_space, self.has_reset_steps = (
            inner.count,
            inner.action_space,
            inner.has_reset_steps,
        )
        space = inner.observation_space
        assert isinstance(space, spaces.Box)
        self.frame_shape = _frame_shape(space)
        self.axis = channel_axis(self.frame_shape)
        """The axis along which frames are stacked, counted from the end."""
        low, high = (
            first_stack(own.reshape(self.frame_shape), frame_stack, self.axis)
            for own in (space.low, space.high)
        )
        if channel_axis(low.shape) != self.axis:
            raise SpaceError(
                f"frame_stack={frame_stack}: that many images of shape {self.frame_shape} have more channels "
                f"than rows, so the channel axis would be ambiguous; stack fewer"
            )
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)
        self._stack = zeros(self.observation_space, self.count)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Start an episode in each; its first frame is repeated."""
        self._stack = first_stack(self._frames(self.inner.reset(seeds)), self.frame_stack, self.axis)
        return self._stack

    def step(self, actions: Array) -> VectorStep:
        """Act in each; the new frame replaces the oldest."""
        step = self.inner.step(actions)
        frames = self._frames(step.observation)
        final = [
            (index, push_frame(self._stack[index], frame.reshape(self.frame_shape), self.axis))
            for index, frame in step.final_observations
        ]
        stack = push_frame(self._stack, frames, self.axis)
        if started := step.started:
            stack[started] = first_stack(frames[started], self.frame_stack, self.axis)
        self._stack = stack
        return step._replace(observation=stack, final_observations=final)

    def _frames(self, observation: Array) -> Array:
        return observation.reshape(self.count, *self.frame_shape)

    def state_dict(self) -> dict[str, Any]:
        """State of the environments, and the stack."""
        return {"inner": self.inner.state_dict(), "stack": self._stack}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the environments and the stack."""
        self.inner.load_state_dict(state["inner"])
        self._stack = np.asarray(state["stack"])

    def close(self) -> None:
        """Close the environments."""
        self.inner.close()
