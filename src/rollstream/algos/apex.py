"""Ape-X: distributed prioritized experience replay (Horgan et al., 2018, https://arxiv.org/abs/1803.00933).

Workers explore, each with its own epsilon, and compute initial priorities. Replay shards store their
rollouts, and one DQN learner trains on prioritized batches from them. All run at their own pace; a rate
limiter fixes how often a transition is sampled.
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
from rollstream.replay.priorities import PRIORITY_EPSILON
from rollstream.replay.service import ReplayShards
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import Batch
from rollstream.rl.gae import bootstrap_values, final_values
from rollstream.rl.jit import jit
from rollstream.rl.off_policy import replay_buffers
from rollstream.rl.operators import ParallelRollouts, Report, ReportMetrics, TrainOneStep, UpdateWeights
from rollstream.rl.params import Weights
from rollstream.rl.q_policy import QPolicy
from rollstream.rl.replay_operators import (
    NormalizeProbabilities,
    ParallelReplay,
    StoreToBuffer,
    UpdatePriorities,
)
from rollstream.rl.rollout import Postprocess, Rollout, newest_frames
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(dqn.QLearningConfig):
    """Hyperparameters of Ape-X: those of DQN with other defaults, and how it is distributed."""

    algorithm: ClassVar[str] = "apex"

    num_envs: PositiveInt = 8
    """Number of environments, divided evenly among the workers."""
    rollout_length: PositiveInt = 50
    """Number of steps per environment in a rollout."""
    batch_size: PositiveInt = 512
    """Number of transitions per gradient step."""
    n_step: PositiveInt = 3
    """n of n-step returns."""
    dueling: bool = True
    """Dueling network: separate outputs for the state value and the advantages of actions."""
    priority_exponent: NonNegativeFloat = 0.6
    """Priority exponent (alpha) of prioritized replay; 0 for uniform replay."""
    replay_shards: PositiveInt = 1
    """Number of replay actors; each stores the rollouts of some workers."""
    samples_per_insert: NonNegativeFloat = 8.0
    """Average number of times a transition is sampled."""
    epsilon_base: Fraction = 0.4
    """Epsilon of the environment that explores most."""
    epsilon_alpha: NonNegativeFloat = 7.0
    """Environment i of N explores with epsilon_base ** (1 + epsilon_alpha * i / (N - 1))."""

    @property
    def epsilons(self) -> np.ndarray[Any, Any]:
        """The constant epsilon of each environment."""
        exponent = 1 + self.epsilon_alpha * np.arange(self.num_envs) / max(1, self.num_envs - 1)
        return (self.epsilon_base**exponent).astype(np.float32)

    def epsilon(self, progress: float) -> float:  # noqa: ARG002
        """Exploration rate: the mean over the environments, for reports."""
        return float(self.epsilons.mean())

    def steps_per_round(self, workers: int) -> int:
        """Environment steps of one worker's rollout: rollouts reach the replay one by one."""
        return max(1, self.num_envs // max(1, workers)) * self.rollout_length

    def steps_before_learning(self, workers: int) -> int:
        """Environment steps before the first update: the next rollout comes before replay's first batch."""
        return (self.rollouts_before_learning(workers) + 1) * self.steps_per_round(workers)

    def rollouts_before_learning(self, workers: int) -> int:
        """Rollouts that complete `learning_starts` transitions, of `n_step` steps each."""
        steps = max(1, self.learning_starts) + self.num_envs * (self.n_step - 1)
        return math.ceil(steps / self.steps_per_round(workers))


def worker(config: Config, task: Task) -> WorkerSpec:
    """DQN's worker with an epsilon of its own, which sends rollouts with initial priorities."""
    workers = max(1, task.workers)
    if config.replay_shards > workers:
        raise RollstreamError(
            f"{config.replay_shards} replay shards cannot be filled by {workers} "
            f"worker{'s' * (workers > 1)}: set replay_shards to at most {workers}"
        )
    return replace(
        dqn.worker(config, task),
        exploration=partial(set_epsilon, config, workers),
        postprocess=partial(add_priorities, config, task.environment.frame_stack),
    )


def set_epsilon(config: Config, workers: int, weights: Weights, index: int) -> Weights:
    """The weights of a worker: each of its environments has its own epsilon."""
    num_envs = config.num_envs // workers
    return weights | {"epsilon": config.epsilons[index * num_envs : (index + 1) * num_envs, None]}


def add_priorities(config: Config, frame_stack: int, policy: QPolicy) -> Postprocess:
    """Postprocessing that adds `priority` to a rollout: the absolute n-step TD error from each step on."""
    compute = jit(partial(td_errors, policy, config.gamma, config.n_step))
    value = jit(partial(max_q, policy))

    def postprocess(weights: Weights, rollout: Rollout) -> Rollout:
        inputs = {name: rollout.columns[name] for name in _TD_COLUMNS}
        final_value = final_values(policy.observation_space, value, weights, rollout)
        errors = compute(weights, inputs, rollout.last_observation, final_value)
        priority = np.asarray(errors) + PRIORITY_EPSILON
        prioritized = replace(rollout, columns=Batch(rollout.columns | {"priority": priority}))
        return newest_frames(prioritized, policy.observation_space, frame_stack)

    return postprocess


_TD_COLUMNS = ("observation", "action", "reward", "terminated", "truncated")


def max_q(policy: QPolicy, weights: Weights, observation: Any) -> Array:
    """The largest Q value of observations."""
    return policy.q_values(weights, observation).max(axis=-1)


def td_errors(
    policy: QPolicy,
    gamma: float,
    n_step: int,
    weights: Weights,
    columns: Any,
    last_observation: Any,
    final_value: Array,
) -> Array:
    """Absolute n-step TD errors `[T, B]`, with fewer steps before the end of an episode or of the rollout."""
    q_values = policy.q_values(weights, columns["observation"])
    action = columns["action"][..., None].astype(jnp.int32)
    q_tm1 = jnp.take_along_axis(q_values, action, axis=-1)[..., 0]
    last_value = max_q(policy, weights, last_observation)
    next_value = bootstrap_values(q_values.max(axis=-1), last_value, final_value, columns["terminated"])
    ends = (columns["terminated"] | columns["truncated"]).at[-1].set(True)
    target = columns["reward"] + gamma * next_value
    for _ in range(n_step - 1):
        target_t = jnp.concatenate([target[1:], target[-1:]])
        target = columns["reward"] + gamma * jnp.where(ends, next_value, target_t)
    return jnp.abs(target - q_tm1)


def replay(workers: WorkerSet, config: Config) -> ReplayShards:
    """Prioritized replay shards, which share `buffer_size`."""
    buffers = replay_buffers(
        workers,
        buffer_size=config.buffer_size,
        batch_size=config.batch_size,
        n_step=config.n_step,
        priority_exponent=config.priority_exponent,
        shards=config.replay_shards,
    )
    return ReplayShards(workers.engine, buffers, config.replay_shards)


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """Rollouts are stored, and batches trained on, as they arrive; a rate limiter couples the two."""
    count, shards = len(workers.actors), workers.replay
    rollouts, batches = flow.limit_ratio(
        ParallelRollouts(workers).gather_async(num_async=2),
        ParallelReplay(shards).gather_async(num_async=2),
        samples_per_insert=config.samples_per_insert * config.steps_per_round(count) / config.batch_size,
        min_size=config.rollouts_before_learning(count),
    )
    store = rollouts.for_each(StoreToBuffer(shards)).for_each(UpdateWeights(workers))
    train = (
        batches.for_each(NormalizeProbabilities())
        .for_each(TrainOneStep(workers, send_weights=False))
        .for_each(UpdatePriorities(shards))
    )
    reports = flow.union_async([store, train])
    return ReportMetrics(reports, workers, every=config.rounds_per_report(count))


APEX = Algorithm("apex", Config, worker, dqn.learner, plan, replay)
