"""Asynchronous advantage actor-critic (Mnih et al., 2016, https://arxiv.org/abs/1602.01783).

Gradients are computed where the experience is, under whatever weights are there, and applied as they come.
Whoever sent one gets the new weights; nobody waits for anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rollstream.algos import a2c
from rollstream.flow import Iter
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import Batch
from rollstream.rl.learner import Learner, Metrics
from rollstream.rl.on_policy import statistics_of
from rollstream.rl.operators import (
    ApplyGradients,
    ComputeGradients,
    ParallelRollouts,
    Report,
    ReportMetrics,
)
from rollstream.rl.policy import ActorCriticPolicy, Weights
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet


@dataclass(frozen=True)
class Config(a2c.Config):
    """Settings of A3C: those of A2C."""


def worker(config: Config, task: Task) -> WorkerSpec:
    """A worker that also computes gradients."""
    return config.worker(task, gradients=partial(_gradients, config))


def _gradients(config: Config, policy: ActorCriticPolicy) -> Any:
    def compute(weights: Weights, batch: Batch) -> tuple[Weights, Metrics]:
        slopes, metrics = a2c.gradients(policy, config, weights, batch)
        return slopes | statistics_of(policy, batch), metrics

    return compute


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """One step a gradient."""
    chain = a2c.optimizer(config)
    return Learner(policy, None, chain, settings=config.settings, seed=task.seed, total_steps=task.steps)


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """Gradients as they come, each applied at once."""
    gradients = ParallelRollouts(workers).for_each(ComputeGradients()).gather_async()
    return ReportMetrics(gradients.for_each(ApplyGradients(workers)), workers, every=config.report_every)


A3C = Algorithm("a3c", Config, worker, learner, plan)
