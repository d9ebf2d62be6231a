"""The newest frames of environments, for policies that stack them on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rollstream.rl.frame_stack import FrameStack, push_frame
from rollstream.rl.spaces import Observation
from rollstream.rl.vector import Vector, VectorStep

Array = np.ndarray[Any, Any]


class NewestFrames(Vector):
    """The environments of a `FrameStack`, whose steps return the newest frame of each instead of its stack.

    It refers to the last few frames, so that the host can stack them where it has to: final observations, and
    stacks to save. Its state is that of the `FrameStack`.
    """

    def __init__(self, stacked: FrameStack):
        self._inner = stacked.inner
        self._frame_stack = stacked.frame_stack
        self.axis = stacked.axis
        """The axis of frames and stacks along which frames are stacked, counted from the end."""
        self.count, self.action_space, self.has_reset_steps = (
            stacked.count,
            stacked.action_space,
            stacked.has_reset_steps,
        )
        self.observation_space = stacked.observation_space
        space = self._inner.observation_space
        assert isinstance(space, spaces.Box)
        low, high = (own.reshape(stacked.frame_shape) for own in (space.low, space.high))
        self.frame_space = spaces.Box(low, high, dtype=space.dtype.type)
        """The space of one frame."""
        self._history: deque[Array] = deque(maxlen=self._frame_stack)
        self._age = np.zeros(self.count, int)
        """Frames of the current episodes so far."""
        self.started: Array | None = None
        """Where the newest frame is the first of an episode; `None` if nowhere."""

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Start an episode in each; returns its first frame."""
        frames = self._frames(self._inner.reset(seeds))
        self._history.clear()
        self._history.append(frames)
        self._age[:] = 1
        self.started = np.ones(self.count, bool)
        return frames

    def step(self, actions: Array) -> VectorStep:
        """Act in each; returns the new frames, and the stacks of final observations."""
        step = self._inner.step(actions)
        frames = self._frames(step.observation)
        final = [
            (index, push_frame(self.stacks([index])[0], frame.reshape(frames.shape[1:]), self.axis))
            for index, frame in step.final_observations
        ]
        self._history.append(frames)
        self._age += 1
        self.started = None
        if started := step.started:
            self._age[started] = 1
            self.started = np.zeros(self.count, bool)
            self.started[started] = True
        return step._replace(observation=frames, final_observations=final)

    def stacks(self, rows: Sequence[int] | None = None) -> Array:
        """The stacks of some environments, or of all."""
        rows = range(self.count) if rows is None else rows
        parts = [
            np.stack([self._history[-1 - min(back, int(self._age[row]) - 1)][row] for row in rows])
            for back in reversed(range(self._frame_stack))
        ]
        return np.concatenate(parts, self.axis)

    def newest(self) -> Array:
        """The newest frame of each environment."""
        return self._history[-1]

    def _frames(self, observation: Array) -> Array:
        return observation.reshape(self.count, *self.frame_space.shape)

    def state_dict(self) -> dict[str, Any]:
        """State of the environments, and the stack."""
        return {"inner": self._inner.state_dict(), "stack": self.stacks()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the environments and the frames of the stack."""
        self._inner.load_state_dict(state["inner"])
        self._history.extend(np.split(np.asarray(state["stack"]), self._frame_stack, self.axis))
        self._age[:] = self._frame_stack
        self.started = None

    def close(self) -> None:
        """Close the environments."""
        self._inner.close()
