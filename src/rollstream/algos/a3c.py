"""Asynchronous advantage actor-critic, A3C (Mnih et al., 2016, https://arxiv.org/abs/1602.01783).

Each worker computes gradients on its own rollouts, under the weights it has. The learner applies them as they
arrive and sends the new weights to that worker; no worker waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from rollstream.algos import a2c
from rollstream.flow import Iter
from rollstream.limits import OptionalNonNegativeInt
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import Batch
from rollstream.rl.learner import Learner
from rollstream.rl.operators import (
    ApplyGradients,
    ComputeGradients,
    ParallelRollouts,
    Report,
    ReportMetrics,
    without_stale,
)
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.updates import Metrics
from rollstream.rl.worker import GradientFunction, WorkerSpec
from rollstream.rl.worker_set import WorkerSet


@dataclass(frozen=True)
class Config(a2c.Config):
    """Hyperparameters of A3C: those of A2C, and how old gradients may be."""

    max_staleness: OptionalNonNegativeInt = None
    """Drop gradients that arrive more than this many versions after their weights; None applies all."""


def worker(config: Config, task: Task) -> WorkerSpec:
    """A2C's worker, which also computes gradients."""
    return replace(a2c.worker(config, task), gradients=partial(worker_gradients, config))


def worker_gradients(config: Config, policy: ActorCriticPolicy) -> GradientFunction:
    """Gradients of A2C's loss, sent with the statistics that normalize observations and rewards."""

    def compute(weights: Weights, batch: Batch) -> tuple[Weights, Metrics]:
        grads, metrics = a2c.gradients(policy, config, weights, batch)
        return grads | policy.batch_statistics(batch), metrics

    return compute


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """One optimizer step per gradient."""
    optimizer = a2c.make_optimizer(config)
    return Learner(
        policy, None, optimizer, schedules=config.schedules, seed=task.seed, total_steps=task.steps
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """Gradients are applied as they arrive."""
    gradients = ParallelRollouts(workers).for_each(ComputeGradients()).gather_async()
    fresh = without_stale(gradients, workers, config.max_staleness)
    return ReportMetrics(fresh.for_each(ApplyGradients(workers)), workers, every=config.report_every)


A3C = Algorithm("a3c", Config, worker, learner, plan)
