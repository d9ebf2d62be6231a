"""What algorithms share that learn from what they remember: their settings, workers and tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import gymnasium
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.engine import RollstreamError
from rollstream.limits import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Sizes
from rollstream.replay import ArraySpec, infer_signature
from rollstream.replay.buffer import ReplayBuffer, transition_buffer
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Batch
from rollstream.rl.networks import network_head
from rollstream.rl.params import Named, Weights
from rollstream.rl.policy import applied
from rollstream.rl.spaces import Observation, channel_axis, zeros
from rollstream.rl.worker import Finish, Rollout, WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class OffPolicyConfig:
    """Settings of every algorithm here that learns from replay."""

    environments: PositiveInt = 1
    """Environments in all, shared out among the workers."""
    rollout_length: PositiveInt = 1
    """Steps of each environment between one round of learning and the next."""
    updates: PositiveInt = 1
    """Updates in a round."""
    batch_size: PositiveInt = 256
    """Remembered transitions an update learns from."""
    buffer_size: PositiveInt = 1_000_000
    """Transitions remembered; the oldest are forgotten."""
    learning_starts: NonNegativeInt = 100
    """Transitions remembered before the first update; actions are random until then."""
    n_step: PositiveInt = 1
    """Rewards that are added up before the rest is estimated."""
    discount: Fraction = 0.99
    """Gamma: how much the next step's value counts."""
    learning_rate: NonNegativeFloat = 3e-4
    hidden: Sizes = (256, 256)
    """Sizes of the hidden layers; after the convolutions, for images."""
    activation: Literal["tanh", "relu", "silu"] = "relu"
    clip_rewards: bool = False
    """Whether only the sign of a reward counts."""
    report_every: PositiveInt = 1_000
    """Environment steps in a report."""

    algorithm: ClassVar[str] = "this algorithm"
    """Its name, for what is said when spaces are wrong."""

    def __post_init__(self) -> None:
        if self.learning_starts > self.buffer_size:
            raise RollstreamError(
                f"learning_starts={self.learning_starts} is more than buffer_size={self.buffer_size} can "
                f"hold, so nothing would be learned; set buffer_size to {self.learning_starts} or more"
            )

    def steps_at_once(self, workers: int) -> int:  # noqa: ARG002
        """Environment steps that are learned from at once, with so many workers: those of a round."""
        return self.environments * self.rollout_length

    def before_learning(self, workers: int) -> int:
        """Environment steps before the first update, with so many workers; windows need some more steps."""
        steps = self.learning_starts + self.environments * (self.n_step - 1)
        each = self.steps_at_once(workers)
        return math.ceil(steps / each) * each

    @property
    def rounds_reported(self) -> int:
        """Rounds in a report."""
        return max(1, self.report_every // (self.environments * self.rollout_length))

    def settings(self, progress: float) -> dict[str, float]:  # noqa: ARG002
        """What changes in the course of the training."""
        return {"learning_rate": self.learning_rate}

    def policy(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> Any:
        """The policy for an environment's spaces."""
        raise NotImplementedError

    def worker(self, task: Task, **more: Any) -> WorkerSpec:
        """What a worker is made from."""
        return WorkerSpec(
            environment=task.environment,
            environments=task.share(self.environments),
            length=self.rollout_length,
            policy=task.policy or self.policy,
            finish=partial(unfinished, frames=task.environment.frame_stack),
            seed=task.seed,
            clip_reward=self.clip_rewards,
            **more,
        )

    def buffer(self, workers: WorkerSet) -> ReplayBuffer:
        """What remembers transitions, for the spaces of these workers."""
        return self.buffers(workers, min_size=max(1, self.learning_starts))(0)

    def buffers(
        self, workers: WorkerSet, count: int = 1, *, min_size: int = 1
    ) -> Callable[[int], ReplayBuffer]:
        """Makes, of its number, one of several that remember the transitions of these workers.

        Each gives samples once it has `min_size` transitions.
        """
        policy: Any = workers.learner.policy
        frames, space = workers.spec.environment.frame_stack, policy.observation_space
        return partial(
            transition_buffer,
            transition_signature(space, policy.action_space, frames),
            frame_stack=frames,
            frame_axis=channel_axis(space.shape) if frames > 1 else -1,
            max_size=math.ceil(self.buffer_size / count),
            min_size=min_size,
            batch_size=self.batch_size,
            n_step=self.n_step,
            priority_exponent=getattr(self, "priority_exponent", 0.0),
            seed=workers.spec.seed,
        )


def transition_signature(
    observations: gymnasium.Space[Any], actions: gymnasium.Space[Any], frames: int = 1
) -> dict[str, ArraySpec]:
    """What is stored of a step, whose observation may be several frames of which the newest is stored."""
    seen = zeros(observations, 1, 1)
    if frames > 1:
        seen = np.split(seen, frames, channel_axis(observations.shape or ()))[0]
    kind = np.int32 if isinstance(actions, spaces.Discrete) else np.float32
    return infer_signature(
        {
            "observation": seen,
            "action": np.zeros((1, 1, *(actions.shape or ())), kind),
            "reward": np.zeros((1, 1), np.float32),
            "terminated": np.zeros((1, 1), bool),
        }
    )


def unfinished(policy: Any, frames: int = 1) -> Finish:
    """Rollouts are remembered as they are; of stacked frames the newest, since the others are, too."""

    def finish(_: Weights, rollout: Rollout) -> Rollout:
        return newest_frames(rollout, policy.observation_space, frames)

    return finish


def newest_frames(rollout: Rollout, space: gymnasium.Space[Any], frames: int) -> Rollout:
    """A rollout with one frame an observation, where it has several."""
    if frames == 1:
        return rollout
    axis = channel_axis(space.shape or ())

    def newest(stack: Array) -> Array:
        return np.split(stack, frames, axis)[-1]

    columns = Batch(rollout.columns | {"observation": newest(rollout.columns["observation"])})
    final = [(t, i, newest(last)) for t, i, last in rollout.final]
    return replace(rollout, columns=columns, last=newest(rollout.last), final=final)


def returns(rows: Any, discount: float) -> tuple[Array, Array]:
    """Rewards of windows `[N, n]` added up, and how much what comes after them counts: 0 after the end."""
    powers = discount ** jnp.arange(rows["reward"].shape[1])
    ended = rows["terminated"].any(axis=1)
    return rows["reward"] @ powers, jnp.where(ended, 0.0, discount ** rows["length"])


class Critics:
    """Networks that value observations, and actions if they are given numbers of them.

    Called with weights, observations `[N, ...]` and actions `[N, ...]`, they give `[critics, N, outputs]`.
    """

    def __init__(self, policy: Any, *, outputs: int, actions: int, count: int = 2, **network: Any):
        self._space = policy.observation_space
        make = partial(network_head, self._space, outputs, actions=actions, **network)
        self._named = Named(lambda random: [make(random) for _ in range(count)])

    def init(self, seed: int) -> Weights:
        """Fresh weights, other than those an actor has from the same seed."""
        return self._named.init(np.random.SeedSequence([seed, 1]).generate_state(1)[0])

    def __call__(self, weights: Weights, observation: Observation, *action: Array) -> Array:
        """What each of them says."""
        return jnp.stack(
            [applied(own, self._space, observation, *action) for own in self._named.module(weights)]
        )


def polyak(target: Weights, weights: Weights, rate: float) -> Weights:
    """Targets that follow weights slowly."""
    return {name: own + rate * (weights[name] - own) for name, own in target.items()}
