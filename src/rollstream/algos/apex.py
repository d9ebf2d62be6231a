"""Ape-X: distributed prioritized experience replay (Horgan et al., 2018, https://arxiv.org/abs/1803.00933).

Workers explore, each with its own epsilon, and compute initial priorities. Replay shards store their
rollouts, and one DQN learner trains on prioritized batches from them. All run at their own pace; a rate
limiter fixes how often a transition is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rollstream import flow
from rollstream.algos import dqn
from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, OptionalNonNegativeInt, PositiveInt
from rollstream.replay.priorities import PRIORITY_EPSILON
from rollstream.replay.service import ReplayShards
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import FIRST_STATE, Batch
from rollstream.rl.episode_statistics import ended_episodes
from rollstream.rl.gae import bootstrap_values, final_values
from rollstream.rl.jit import jit
from rollstream.rl.off_policy import replay_buffers
from rollstream.rl.operators import (
    ParallelRollouts,
    ReceiveWeights,
    Report,
    ReportMetrics,
    UpdateWeights,
    without_stale,
)
from rollstream.rl.params import Weights
from rollstream.rl.q_policy import QPolicy, select_action
from rollstream.rl.replay_operators import (
    NormalizeProbabilities,
    ParallelReplay,
    StoreToShards,
    UpdatePriorities,
    rollout_chunk,
)
from rollstream.rl.rollout import Postprocess, Rollout, newest_frames
from rollstream.rl.updates import n_step_targets
from rollstream.rl.worker import PolicyMaker, WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any
Estimate: TypeAlias = Callable[..., dict[str, Array]]
"""Columns for replay, given the policy, weights, columns `[T, B, ...]`, the observation after them with its
state if there is one, and the values of final observations."""


@dataclass(frozen=True)
class DistributedConfig(dqn.QLearningConfig):
    """How Q-learning is distributed over workers and replay shards: settings that Ape-X and R2D2 share."""

    num_envs: PositiveInt = 8
    """Number of environments, divided evenly among the workers."""
    dueling: bool = True
    """Dueling network: separate outputs for the state value and the advantages of actions."""
    replay_shards: PositiveInt = 1
    """Number of replay actors; each stores the rollouts of some workers."""
    samples_per_insert: NonNegativeFloat = 8.0
    """Average number of times a transition is sampled."""
    max_staleness: OptionalNonNegativeInt = None
    """Drop rollouts that arrive more than this many versions after their weights; None stores all."""
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
        """Rollouts that complete `learning_starts` items."""
        steps = max(1, self.learning_starts) + self.num_envs * (self.steps_per_item - 1)
        return math.ceil(steps / self.steps_per_round(workers))

    def batches_per_rollout(self, workers: int) -> float:
        """Batches per rollout of one worker, given how often an item is to be sampled."""
        items = self.steps_per_round(workers) / self.steps_between_items
        return self.samples_per_insert * items / self.batch_size


@dataclass(frozen=True)
class Config(DistributedConfig, dqn.DistributionalConfig):
    """Hyperparameters of Ape-X: those of DQN with other defaults, and how it is distributed."""

    algorithm: ClassVar[str] = "apex"

    rollout_length: PositiveInt = 50
    """Number of steps per environment in a rollout."""
    batch_size: PositiveInt = 512
    """Number of transitions per gradient step."""
    n_step: PositiveInt = 3
    """n of n-step returns."""
    priority_exponent: NonNegativeFloat = 0.6
    """Priority exponent (alpha) of prioritized replay; 0 for uniform replay."""


def worker(config: Config, task: Task) -> WorkerSpec:
    """DQN's worker with an epsilon of its own, which sends rollouts with initial priorities."""
    return make_worker(config, task, partial(dqn.make_policy, config), partial(td_errors, config))


def make_worker(config: DistributedConfig, task: Task, policy: PolicyMaker, estimate: Estimate) -> WorkerSpec:
    """Workers that explore, each environment with its own epsilon, and estimate what replay stores."""
    workers = max(1, task.workers)
    if config.replay_shards > workers:
        raise RollstreamError(
            f"{config.replay_shards} replay shards cannot be filled by {workers} "
            f"worker{'s' * (workers > 1)}: set replay_shards to at most {workers}"
        )
    return replace(
        dqn.make_worker(config, task, policy),
        exploration=partial(set_epsilon, config, workers),
        bootstrap_values=None,
        postprocess=partial(add_estimates, estimate, task.environment.frame_stack),
    )


def set_epsilon(config: DistributedConfig, workers: int, weights: Weights, index: int) -> Weights:
    """The weights of a worker: each of its environments has its own epsilon."""
    num_envs = config.num_envs // workers
    return weights | {"epsilon": config.epsilons[index * num_envs : (index + 1) * num_envs, None]}


def add_estimates(estimate: Estimate, frame_stack: int, policy: QPolicy) -> Postprocess:
    """Postprocessing that adds what `estimate` computes to a rollout: `priority`, for instance."""
    compute, value = jit(partial(estimate, policy)), jit(policy.value)

    def postprocess(weights: Weights, rollout: Rollout) -> Rollout:
        inputs = {name: rollout.columns[name] for name in _ESTIMATED if name in rollout.columns}
        last_state = () if rollout.last_state is None else (rollout.last_state,)
        final_value = final_values(policy.observation_space, value, weights, rollout)
        added = compute(weights, inputs, (rollout.last_observation, *last_state), final_value)
        estimated = replace(rollout, columns=Batch(rollout.columns | jax.tree.map(np.asarray, added)))
        return newest_frames(estimated, policy.observation_space, frame_stack)

    return postprocess


_ESTIMATED = ("observation", "action", "reward", "terminated", "truncated", FIRST_STATE, "episode_start")


def td_errors(
    config: Config,
    policy: QPolicy,
    weights: Weights,
    columns: Any,
    last: tuple[Any, ...],
    final_value: Array,
) -> dict[str, Array]:
    """Initial priorities: absolute n-step TD errors, `[T, B]`, with fewer steps before the rollout's end."""
    q_values = policy.q_values(weights, columns["observation"])
    next_value = bootstrap_values(
        q_values.max(axis=-1), policy.value(weights, *last), final_value, columns["terminated"]
    )
    ends = columns["terminated"] | columns["truncated"]
    target = n_step_targets(columns["reward"], next_value, ends, gamma=config.gamma, n_step=config.n_step)
    error = target - select_action(q_values, columns["action"])
    return {"priority": jnp.abs(error) + PRIORITY_EPSILON}


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


def plan(workers: WorkerSet, config: DistributedConfig) -> Iter[Report]:
    """Rollouts are stored, and batches trained on, as they arrive; a rate limiter couples the two.

    Data goes from actor to actor: the driver passes on references to it.
    """
    count, shards = len(workers.actors), workers.replay
    sampled = ParallelRollouts(workers).put(rollout_chunk, metadata=ended_episodes).gather_async(num_async=2)
    rollouts, batches = flow.limit_ratio(
        without_stale(sampled, workers, config.max_staleness),
        ParallelReplay(shards).put(metadata=attrgetter("min_probability")).gather_async(num_async=2),
        samples_per_insert=config.batches_per_rollout(count),
        min_size=config.rollouts_before_learning(count),
    )
    store = rollouts.for_each(StoreToShards(shards)).for_each(UpdateWeights(workers))
    train = (
        batches.for_each(NormalizeProbabilities())
        .via(workers.learner_actor, "train", in_flight=2)
        .for_each(ReceiveWeights(workers))
        .for_each(UpdatePriorities(shards))
    )
    reports = flow.union_async([store, train])
    return ReportMetrics(reports, workers, every=config.rounds_per_report(count))


APEX = Algorithm("apex", Config, worker, dqn.learner, plan, replay, learner_on_actor=True)
