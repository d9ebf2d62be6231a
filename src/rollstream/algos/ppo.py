"""Proximal policy optimization (Schulman et al., 2017, https://arxiv.org/abs/1707.06347).

Every worker samples some steps; all batches are joined, and the learner goes through them several times in
minibatches. The probability of an action may move only so far from what it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.limits import NonNegativeFloat, PositiveInt
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import Batch
from rollstream.rl.learner import Learner, Metrics, descended, in_minibatches, shuffled, trained
from rollstream.rl.normalize import with_seen
from rollstream.rl.on_policy import OnPolicyConfig, explained_variance, mean_of, statistics_of
from rollstream.rl.operators import (
    ConcatBatches,
    ParallelRollouts,
    Report,
    ReportMetrics,
    StandardizeFields,
    TrainOneStep,
)
from rollstream.rl.policy import ActorCriticPolicy, Weights
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Settings of PPO."""

    rollout_length: PositiveInt = 256
    epochs: PositiveInt = 10
    """How often a batch is gone through."""
    minibatch_size: PositiveInt = 64
    clip_range: NonNegativeFloat = 0.2
    """How far, as a ratio, the probability of an action may move."""
    clip_range_decay: bool = False
    overlap: bool = False
    """Whether workers sample the next batch while this one is learned from: faster, one version behind."""

    def __post_init__(self) -> None:
        if self.batch_size % self.minibatch_size:
            raise RollstreamError(
                f"a batch of {self.environments} environments x {self.rollout_length} steps is not a whole "
                f"number of minibatches of {self.minibatch_size}; set minibatch_size to a divisor of "
                f"{self.batch_size}"
            )

    def settings(self, progress: float) -> dict[str, float]:
        """What changes in the course of the training."""
        left = 1.0 - progress if self.clip_range_decay else 1.0
        return super().settings(progress) | {"clip_range": self.clip_range * left}


def loss(
    policy: ActorCriticPolicy, config: Config, clip_range: Array, weights: Weights, rows: Any
) -> tuple[Array, Metrics]:
    r"""The clipped surrogate, the value's error and the entropy.

    $$L = -\mathbb{E}\big[\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A)\big]
    + c_v \mathbb{E}\big[(V - R)^2\big] - c_e \mathbb{E}\big[H\big],
    \qquad \rho = \pi(a | s) / \pi_\mathrm{old}(a | s)$$
    """
    log_prob, entropy, value = policy.evaluate(weights, rows["observation"], rows["action"])
    log_ratio = log_prob - rows["log_prob"]
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - clip_range, 1 + clip_range)
    mean = partial(mean_of, rows=rows)
    policy_loss = -mean(jnp.minimum(ratio * rows["advantage"], clipped * rows["advantage"]))
    value_loss = mean((value - rows["value_target"]) ** 2)
    entropy_loss = -mean(entropy)
    total = policy_loss + config.value_coefficient * value_loss + config.entropy_coefficient * entropy_loss
    return total, {
        "loss": total,
        "policy_gradient_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": entropy_loss,
        "approx_kl": mean(ratio - 1 - log_ratio),
        "clip_fraction": mean(jnp.abs(ratio - 1) > clip_range),
    }


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """Adam, and all epochs and minibatches of a batch in one dispatch."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm), optax.scale_by_adam(eps=1e-5)
    )

    def update(weights: Weights, state: Any, batch: Batch, order: Array, settings: Any) -> Any:
        def step(carry: Any, rows: Any) -> tuple[Any, Metrics]:
            weights, state = carry
            objective = partial(loss, policy, config, settings["clip_range"])
            gradients, metrics = jax.grad(lambda own: objective(weights | own, rows), has_aux=True)(
                trained(weights)
            )
            metrics["gradient_norm"] = optax.tree.norm(gradients)
            return descended(optimizer, settings["learning_rate"], gradients, state, weights), metrics

        rows = Batch({name: batch[name] for name in _LEARNED if name in batch}).flattened()
        carry, metrics = in_minibatches(step, (weights, state), rows, order)
        metrics["explained_variance"] = explained_variance(batch)
        return with_seen(carry[0], statistics_of(policy, batch)), carry[1], metrics

    return Learner(
        policy,
        update,
        optimizer,
        noise=partial(shuffled, count=config.batch_size, epochs=config.epochs, size=config.minibatch_size),
        settings=config.settings,
        seed=task.seed,
        total_steps=task.steps,
    )


_LEARNED = ("observation", "action", "log_prob", "advantage", "value_target", "real")


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """All workers sample under the same weights, then the learner trains, then all have new ones."""
    rollouts = ParallelRollouts(workers).gather_sync()
    if config.overlap:
        rollouts = rollouts.prefetch(1)
    batches = rollouts.flatten().combine(ConcatBatches(config.batch_size))
    standardized = batches.for_each(StandardizeFields(["advantage"]))
    return ReportMetrics(standardized.for_each(TrainOneStep(workers)), workers)


PPO = Algorithm("ppo", Config, Config.worker, learner, plan)
