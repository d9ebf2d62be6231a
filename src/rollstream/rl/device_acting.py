"""Acting on the device: frames are sent as bytes, and what is recorded of a rollout stays there.

A step is one call of a jitted program, which stacks the new frames, acts, and writes the observation, and the
log probability and value if the policy evaluates its steps, into buffers `[T, B, ...]`. The host sends frames
and reads actions; each read of a device array takes 0.3 ms on one H200, so there is no other.

Every argument is put on the device before a call: JAX compiles a program anew for arguments that come from
elsewhere, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollstream.rl.frame_history import NewestFrames
from rollstream.rl.frame_stack import FrameStack
from rollstream.rl.jit import host_memory, jit
from rollstream.rl.params import Weights
from rollstream.rl.policy import State
from rollstream.rl.spaces import Observation
from rollstream.rl.vector import Vector

Array = Any
_ESTIMATES = ("log_prob", "value")


class _Recording(NamedTuple):
    """What has been recorded of a rollout; the program writes into it, so it is donated."""

    columns: dict[str, Any]
    """`observation`, and perhaps `log_prob` and `value`, `[T, B, ...]`."""
    t: Array
    """The number of steps so far."""


def without_stacking(vector: Vector) -> Vector:
    """The vector, whose steps return the newest frames instead of stacks, if it has some."""
    return NewestFrames(vector) if isinstance(vector, FrameStack) else vector


class DeviceActing:
    """Acts, and records what a policy saw and estimated, on JAX's default device.

    Args:
        step: A policy's `step` or `evaluated_step`.
        vector: The environments, `without_stacking`.
        for_replay: Whether the host keeps what the environments return, to store it.
    """

    def __init__(self, step: Callable[..., Any], vector: Vector, *, for_replay: bool = False):
        self._frames = vector if isinstance(vector, NewestFrames) else None
        space = vector.observation_space if self._frames is None else self._frames.frame_space
        self.host_space = space if for_replay else None
        """The space of the frames or observations that the host is to keep; `None` if it keeps none."""
        push = partial(push_frames, axis=self._frames.axis) if self._frames is not None else _without_stacking
        self._step = partial(_step, step, push)
        self._program = jit(self._step, donate=(4,), out_shardings=(host_memory(), None, None, None))
        self._push = jit(push)
        self._put = partial(jax.device_put, device=jax.devices()[0])
        self._none_started = None if self._frames is None else self._put(np.zeros(vector.count, bool))
        self._new_recording: dict[int, Any] = {}
        """Jitted functions that return empty buffers, by the length of the rollout."""
        self._weights: Weights = {}
        self._noise: Any = None
        self._recording: Any = None
        self._stack: Array = None
        """Stacks without the newest frames, which the next step adds."""
        self._newest: tuple[Observation, Observation] | None = None
        """The newest frames on the host and on the device, between two rollouts."""

    # Rollouts ----------------------------------------------------------------------------------

    def start(self, weights: Weights, noise: Any, length: int) -> None:
        """Start a rollout of so many steps, with noise `[T, ...]`."""
        self._weights, self._noise = weights, self._put(noise)
        if self._frames is not None and self._stack is None:
            stack, size = self._frames.stacks(), self._frames.newest().shape[self._frames.axis]
            self._stack = self._put(np.roll(stack, size, self._frames.axis))  # its newest is added later
        self._recording = None
        self._length = length

    def act(self, observation: Observation, state: State, _: Any) -> tuple[Array, State]:
        """Actions for the newest frames or observations of the host, and the new state."""
        inputs = self._put((self._sent(observation), self._started(), state))
        if self._recording is None:
            self._recording = self._empty(inputs)
        action, state, self._stack, self._recording = self._program(
            self._weights, self._noise, self._stack, inputs, self._recording
        )
        return action, state

    def finish(self, observation: Observation) -> tuple[dict[str, Any], Observation]:
        """The columns of the rollout, and the observation after its last step; all on the device."""
        columns, self._recording = self._recording.columns, None
        self._newest = observation, self._put(observation)
        return columns, self._push(self._stack, self._newest[1], self._put(self._started()))

    def _sent(self, observation: Observation) -> Observation:
        """The observation, or its copy on the device if there is one."""
        newest, self._newest = self._newest, None
        return newest[1] if newest is not None and newest[0] is observation else observation

    def _started(self) -> Array | None:
        """Where an episode has started; without frames to stack, nobody asks."""
        if self._frames is None or self._frames.started is None:
            return self._none_started
        return self._frames.started

    def _empty(self, inputs: Any) -> Any:
        """Empty buffers, made on the device."""
        if self._length not in self._new_recording:
            shapes = jax.eval_shape(
                partial(self._step, recording=None),
                self._weights,
                self._noise,
                self._stack,
                inputs,
            )
            length = self._length

            def new() -> _Recording:
                columns = jax.tree.map(lambda own: jnp.zeros((length, *own.shape), own.dtype), shapes)
                return _Recording(columns, jnp.int32(0))

            self._new_recording[length] = jit(new)
        return self._put(self._new_recording[self._length]())

    # State -------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget stacks: the environments were reset, or their state was loaded."""
        self._stack = self._newest = None

    def stacked(self, observation: Observation) -> Observation:
        """The observation that policies see, on the host, given that of the environments."""
        return observation if self._frames is None else self._frames.stacks()

    def unstacked(self, observation: Observation) -> Observation:
        """The newest frames of an observation that policies see, after loading it."""
        return observation if self._frames is None else self._frames.newest()


def push_frames(stack: Array, frames: Array, started: Array, *, axis: int) -> Array:
    """Stacks `[B, ...]` with a new frame at their end; where an episode started, its first frame repeated."""
    size, count = frames.shape[axis], stack.shape[axis] // frames.shape[axis]
    started = started.reshape(-1, *(1 for _ in frames.shape[1:]))
    repeated = jnp.concatenate([frames] * (count - 1), axis)
    before = jnp.where(started, repeated, jnp.split(stack, [size], axis)[1])
    return jnp.concatenate([before, frames], axis)


def _without_stacking(stack: None, frames: Observation, started: None) -> Observation:  # noqa: ARG001
    """The observation of environments whose frames are not stacked."""
    return frames


def _step(
    policy_step: Callable[..., Any],
    push: Callable[..., Any],
    weights: Weights,
    noise: Any,
    stack: Array,
    inputs: tuple[Observation, Array | None, State],
    recording: _Recording | None,
) -> Any:
    """Stack, act and record; without a recording, return what would be recorded."""
    frames, started, state = inputs
    t = jnp.int32(0) if recording is None else recording.t
    observation = push(stack, frames, started)
    noise_t = jax.tree.map(lambda own: lax.dynamic_index_in_dim(own, t, keepdims=False), noise)
    action, state, *estimates = policy_step(weights, observation, state, noise_t)
    recorded = {"observation": observation} | dict(zip(_ESTIMATES, estimates, strict=False))
    if recording is None:
        return recorded
    columns = jax.tree.map(
        lambda column, new: lax.dynamic_update_index_in_dim(column, new, t, 0), recording.columns, recorded
    )
    new_stack = None if stack is None else observation
    return action, state, new_stack, _Recording(columns, t + 1)
