"""Ape-X: distributed prioritized replay (Horgan et al., 2018, https://arxiv.org/abs/1803.00933).

Many workers explore, each more or less boldly, and say how surprising what they saw is; shards of replay
remember it; one learner learns from what surprises it most. Each goes at its own pace, coupled by how often a
transition is to be learned from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from rollstream import flow
from rollstream.algos import dqn
from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, PositiveInt
from rollstream.replay.service import ReplayShards
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import Batch
from rollstream.rl.jit import compiled
from rollstream.rl.off_policy import newest_frames
from rollstream.rl.operators import ParallelRollouts, Report, ReportMetrics, TrainOneStep, UpdateWeights
from rollstream.rl.params import Weights
from rollstream.rl.q_policy import QPolicy
from rollstream.rl.replay_operators import (
    LEAST,
    ParallelReplay,
    StoreToBuffer,
    UpdatePriorities,
    UpdateTarget,
    WeighShards,
    is_given,
)
from rollstream.rl.worker import Finish, Rollout, WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(dqn.Config):
    """Settings of Ape-X: those of DQN, with most of what Rainbow adds, and how it is distributed."""

    algorithm: ClassVar[str] = "apex"

    environments: PositiveInt = 8
    rollout_length: PositiveInt = 50
    batch_size: PositiveInt = 512
    n_step: PositiveInt = 3
    dueling: bool = True
    priority_exponent: NonNegativeFloat = 0.6
    shards: PositiveInt = 1
    """Actors that remember; each remembers for some of the workers."""
    samples_per_insert: NonNegativeFloat = 8.0
    """How often a transition is learned from, on average."""
    boldest: Fraction = 0.4
    """How often the boldest environment acts at random, after the exploration that all begin with."""
    boldness_exponent: NonNegativeFloat = 7.0
    """How much less bold the others are."""

    def steps_at_once(self, workers: int) -> int:
        """Environment steps that come at once, from one worker."""
        return max(1, self.environments // max(1, workers)) * self.rollout_length

    def before_learning(self, workers: int) -> int:
        """Environment steps before the first update: those of whole chunks."""
        return self.first_chunks(workers) * self.steps_at_once(workers)

    def first_chunks(self, workers: int) -> int:
        """Chunks that have as many transitions as learning starts with; the last steps only begin some."""
        steps = max(1, self.learning_starts) + self.environments * (self.n_step - 1)
        return math.ceil(steps / self.steps_at_once(workers))


def worker(config: Config, task: Task) -> WorkerSpec:
    """A worker that explores in its own way and tells how surprising things are."""
    count = max(1, task.workers)
    if not 1 <= config.shards <= count:
        raise RollstreamError(
            f"{config.shards} shards cannot remember for {count} workers: set shards to at least 1 and at "
            f"most {count}"
        )
    spec = config.worker(task, vary=partial(explored, config, count))
    return replace(spec, finish=partial(with_priorities, config, task.environment.frame_stack))


def explored(config: Config, workers: int, weights: Weights, index: int) -> Weights:
    """The weights of a worker, whose environments act at random less and less often."""
    each = config.environments // workers
    number = index * each + np.arange(each, dtype=np.float32)
    boldness = config.boldest ** (1 + config.boldness_exponent * number / max(1, config.environments - 1))
    epsilon = np.maximum(np.float32(weights["epsilon"]), boldness.astype(np.float32))
    return weights | {"epsilon": epsilon[:, None]}


def with_priorities(config: Config, frames: int, policy: QPolicy) -> Finish:
    """Adds `priority` to rollouts: how far values are from what followed, as far as that is known yet."""
    surprise = compiled(partial(surprises, policy, config.discount))

    def finish(weights: Weights, rollout: Rollout) -> Rollout:
        columns = rollout.columns
        seen = {name: columns[name] for name in _JUDGED}
        priority = np.asarray(surprise(weights, seen, rollout.last)) + LEAST
        judged = replace(rollout, columns=Batch(columns | {"priority": priority}))
        return newest_frames(judged, policy.observation_space, frames)

    return finish


_JUDGED = ("observation", "action", "reward", "terminated", "truncated")


def surprises(policy: QPolicy, discount: float, weights: Weights, columns: Any, last: Any) -> Array:
    """Errors of one step, `[T, B]`."""
    values = policy.values(weights, columns["observation"])
    taken = jnp.take_along_axis(values, columns["action"][..., None].astype(jnp.int32), axis=-1)[..., 0]
    after = jnp.concatenate([values[1:], policy.values(weights, last)[None]]).max(axis=-1)
    after = jnp.where(columns["terminated"], 0.0, after)
    error = jnp.abs(columns["reward"] + discount * after - taken)
    return jnp.where(columns["truncated"], 1.0, error)


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """Rollouts are stored and samples are learned from, each when it comes; a limiter keeps them in step."""
    count = len(workers.actors)
    replay = ReplayShards(workers.engine, config.buffers(workers, config.shards), config.shards)
    rollouts, samples = flow.limit_ratio(
        ParallelRollouts(workers).gather_async(num_async=2),
        ParallelReplay(replay).gather_async(num_async=2),
        samples_per_insert=config.samples_per_insert * config.steps_at_once(count) / config.batch_size,
        min_size=config.first_chunks(count),
    )
    stored = rollouts.for_each(StoreToBuffer(replay)).for_each(UpdateWeights(workers))
    learned = (
        samples.filter(is_given)
        .for_each(WeighShards())
        .for_each(TrainOneStep(workers, publish=False))
        .for_each(UpdatePriorities(replay))
        .for_each(UpdateTarget(workers, config.target_every))
    )
    both = flow.union_async([stored, learned])
    return ReportMetrics(both, workers, every=max(1, config.report_every // config.steps_at_once(count)))


APEX = Algorithm("apex", Config, worker, dqn.learner, plan)
