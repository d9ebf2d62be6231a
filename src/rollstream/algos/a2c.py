"""Advantage actor-critic, the synchronous variant of A3C (Mnih et al., 2016, https://arxiv.org/abs/1602.01783).

All workers take a few steps under the same weights; then one step down the gradient of all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, PositiveInt
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import Batch
from rollstream.rl.learner import Learner, Metrics, descended, trained
from rollstream.rl.normalize import with_seen
from rollstream.rl.on_policy import OnPolicyConfig, explained_variance, mean_of, statistics_of
from rollstream.rl.operators import ConcatBatches, ParallelRollouts, Report, ReportMetrics, TrainOneStep
from rollstream.rl.policy import ActorCriticPolicy, Weights
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Settings of A2C and A3C."""

    rollout_length: PositiveInt = 5
    gae_lambda: Fraction = 1.0
    learning_rate: NonNegativeFloat = 7e-4
    report_every: PositiveInt = 100
    """Updates in a report."""


def loss(policy: ActorCriticPolicy, config: Config, weights: Weights, rows: Any) -> tuple[Array, Metrics]:
    r"""The policy gradient, the value's error and the entropy.

    $$L = -\mathbb{E}[\log \pi(a | s) A] + c_v \mathbb{E}[(V - R)^2] - c_e \mathbb{E}[H]$$
    """
    log_prob, entropy, value = policy.evaluate(weights, rows["observation"], rows["action"])
    mean = partial(mean_of, rows=rows)
    policy_loss = -mean(log_prob * rows["advantage"])
    value_loss = mean((value - rows["value_target"]) ** 2)
    entropy_loss = -mean(entropy)
    total = policy_loss + config.value_coefficient * value_loss + config.entropy_coefficient * entropy_loss
    return total, {
        "loss": total,
        "policy_gradient_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": entropy_loss,
    }


def gradients(
    policy: ActorCriticPolicy, config: Config, weights: Weights, batch: Batch
) -> tuple[Weights, Metrics]:
    """The gradient of the loss on a batch, and what is to be known of it."""
    slopes, metrics = jax.grad(lambda own: loss(policy, config, weights | own, batch), has_aux=True)(
        trained(weights)
    )
    metrics["gradient_norm"] = optax.tree.norm(slopes)
    metrics["explained_variance"] = explained_variance(batch)
    return slopes, metrics


def optimizer(config: Config) -> optax.GradientTransformation:
    """RMSProp as TensorFlow has it, which the results of A2C rest on."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.scale_by_rms(decay=0.99, eps=1e-5, initial_scale=1.0, eps_in_sqrt=True),
    )


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """One step a batch."""
    chain = optimizer(config)

    def update(weights: Weights, state: Any, batch: Batch, _: Array, settings: Any) -> Any:
        slopes, metrics = gradients(policy, config, weights, batch)
        changed, state = descended(chain, settings["learning_rate"], slopes, state, weights)
        return with_seen(changed, statistics_of(policy, batch)), state, metrics

    return Learner(policy, update, chain, settings=config.settings, seed=task.seed, total_steps=task.steps)


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """All workers sample under the same weights, then the learner trains, then all have new ones."""
    rollouts = ParallelRollouts(workers).gather_sync().flatten()
    trained_on = rollouts.combine(ConcatBatches(config.batch_size)).for_each(TrainOneStep(workers))
    return ReportMetrics(trained_on, workers, every=config.report_every)


A2C = Algorithm("a2c", Config, Config.worker, learner, plan)
