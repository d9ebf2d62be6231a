"""What algorithms with replay share: checks of their settings, and replay buffers of transitions."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any, Literal, Protocol

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from rollstream.engine import RollstreamError
from rollstream.replay import ArraySpec, infer_signature
from rollstream.replay.buffer import ReplayBuffer, transition_buffer
from rollstream.replay.sequence_buffer import sequence_buffer
from rollstream.rl.algorithm import AlgorithmConfig
from rollstream.rl.device_replay import DeviceReplay
from rollstream.rl.frame_stack import newest_frame
from rollstream.rl.spaces import channel_axis, zeros
from rollstream.rl.worker_set import WorkerSet

MAX_DRAW = 1 << 26
"""Bytes of the rows that are drawn at once, for several updates in one compiled program."""


class OffPolicyConfig(AlgorithmConfig, Protocol):
    """Base of the settings of an algorithm with replay."""

    buffer_size: int
    learning_starts: int
    n_step: int
    report_every: int

    def __post_init__(self) -> None:
        if self.learning_starts > self.buffer_size:
            raise RollstreamError(
                f"learning_starts={self.learning_starts} is more than buffer_size={self.buffer_size}, so "
                f"training would never start; set buffer_size to {self.learning_starts} or more"
            )

    @property
    def steps_per_item(self) -> int:
        """Steps until an item of replay is complete: those of its n-step return."""
        return self.n_step

    @property
    def steps_between_items(self) -> int:
        """Steps from the start of one item to the start of the next."""
        return 1

    def steps_per_rollout(self) -> int:
        """Steps per environment in a rollout."""
        return self.rollout_length

    def steps_before_learning(self, workers: int) -> int:
        """Environment steps before the first update: n-step transitions take n - 1 further steps."""
        steps = self.learning_starts + self.num_envs * (self.steps_per_item - 1)
        per_round = self.steps_per_round(workers)
        return math.ceil(steps / per_round) * per_round

    def rounds_per_report(self, workers: int) -> int:
        """How many rounds, of one rollout per worker, make `report_every` environment steps."""
        return max(1, self.report_every // self.steps_per_round(workers))


class AlternatingConfig(OffPolicyConfig, Protocol):
    """Base of the settings of an algorithm that alternates between rollouts and updates."""

    batch_size: int
    utd_ratio: float
    replay: Literal["host", "device"] = "host"

    def steps_per_rollout(self) -> int:
        """Steps per environment in a rollout: as many as it takes for a whole number of updates."""
        return self.rollout_length * self._updates().denominator

    def updates_per_rollout(self) -> int:
        """Updates after each rollout of all workers."""
        return self._updates().numerator

    def steps_per_round(self, workers: int) -> int:  # noqa: ARG002
        """Environment steps between updates."""
        return self.num_envs * self.steps_per_rollout()

    def _updates(self) -> Fraction:
        """Updates per `rollout_length` steps of every environment."""
        ratio = Fraction(self.utd_ratio).limit_denominator(100)
        return max(ratio, Fraction(1, 100)) * self.num_envs * self.rollout_length


def updates_per_call(workers: WorkerSet, config: AlternatingConfig) -> int:
    """How many of the updates after a rollout are one compiled program: all, if their rows are not too many.

    They divide the updates evenly, so that one program is enough; each that takes turns comes as often. With
    replay on the device no rows are drawn.
    """
    frame_stack = workers.spec.environment.frame_stack
    signature = _stored_signature(workers)
    row = 2 * sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in signature.values())
    row *= frame_stack if config.replay == "host" else 0
    updates, turns = config.updates_per_rollout(), len(workers.local_learner.cycle)
    fitting = [n for n in range(turns, updates + 1, turns) if n * config.batch_size * row <= MAX_DRAW]
    return max((n for n in fitting if updates % n == 0), default=1)


def replay_buffers(
    workers: WorkerSet,
    *,
    buffer_size: int,
    batch_size: int,
    min_size: int = 1,
    n_step: int = 1,
    priority_exponent: float = 0.0,
    shards: int = 1,
) -> partial[ReplayBuffer]:
    """Returns a function that creates the replay buffer of a shard, for the spaces of these workers.

    Args:
        workers: The workers whose transitions are stored.
        buffer_size: Maximum number of transitions in all shards together.
        batch_size: Transitions per batch.
        min_size: Transitions of a shard before its first batch.
        n_step: Steps per transition.
        priority_exponent: alpha of prioritized replay; 0 for uniform sampling.
        shards: Number of shards.
    """
    return partial(
        transition_buffer,
        _stored_signature(workers),
        **_stored_frames(workers),
        max_size=math.ceil(buffer_size / shards),
        min_size=min_size,
        batch_size=batch_size,
        n_step=n_step,
        priority_exponent=priority_exponent,
        seed=workers.spec.seed,
    )


def sequence_buffers(
    workers: WorkerSet,
    *,
    buffer_size: int,
    shards: int = 1,
    **options: Any,
) -> partial[ReplayBuffer]:
    """As `replay_buffers`, of sequences with states of a recurrent policy.

    Args:
        workers: The workers whose steps are stored.
        buffer_size: Number of steps to keep in all shards together.
        shards: Number of shards.
        options: Further arguments of `sequence_buffer`.
    """
    policy: Any = workers.learner.policy
    state = tuple(np.asarray(own)[None] for own in jax.tree.leaves(policy.initial_state(1)))
    return partial(
        sequence_buffer,
        _stored_signature(workers) | infer_signature({"state": state}),
        **_stored_frames(workers),
        num_steps=math.ceil(buffer_size / shards),
        seed=workers.spec.seed,
        **options,
    )


def _stored_signature(workers: WorkerSet) -> dict[str, ArraySpec]:
    """Columns that replay stores of a step of these workers."""
    policy: Any = workers.learner.policy
    frame_stack = workers.spec.environment.frame_stack
    return transition_signature(policy.observation_space, policy.action_space, frame_stack)


def _stored_frames(workers: WorkerSet) -> dict[str, int]:
    """How frames of these workers are stacked."""
    policy: Any = workers.learner.policy
    frame_stack = workers.spec.environment.frame_stack
    axis = channel_axis(policy.observation_space.shape) if frame_stack > 1 else -1
    return {"frame_stack": frame_stack, "frame_axis": axis}


def replay_buffer(
    workers: WorkerSet,
    *,
    buffer_size: int,
    batch_size: int,
    learning_starts: int,
    replay: Literal["host", "device"] = "host",
    **options: Any,
) -> ReplayBuffer | DeviceReplay:
    """A replay buffer of all workers, sampled from `learning_starts` transitions on; see `replay_buffers`.

    Args:
        workers: The workers whose transitions are stored.
        buffer_size: Maximum number of transitions.
        batch_size: Transitions per batch.
        learning_starts: Transitions before the first batch.
        replay: `host` for the driver's memory, `device` for that of the learner's device.
        options: Further arguments of `replay_buffers`.
    """
    make = replay_buffers(
        workers, buffer_size=buffer_size, batch_size=batch_size, min_size=max(1, learning_starts), **options
    )
    if replay == "host":
        return make(0)
    [signature], spec = make.args, workers.spec
    num_envs = spec.num_envs * len(workers.actors)
    return DeviceReplay(signature, num_envs=num_envs, rollout_length=spec.rollout_length, **make.keywords)


def transition_signature(
    observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], frame_stack: int = 1
) -> dict[str, ArraySpec]:
    """Columns that replay stores of a step; of stacked frames only the newest."""
    observation = zeros(observation_space, 1, 1)
    if frame_stack > 1:
        observation = newest_frame(observation, observation_space, frame_stack)
    dtype = np.int32 if isinstance(action_space, spaces.Discrete) else np.float32
    return infer_signature(
        {
            "observation": observation,
            "action": np.zeros((1, 1, *(action_space.shape or ())), dtype),
            "reward": np.zeros((1, 1), np.float32),
            "terminated": np.zeros((1, 1), bool),
        }
    )
