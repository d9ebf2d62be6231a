"""Proximal policy optimization, PPO (Schulman et al., 2017, https://arxiv.org/abs/1707.06347).

The workers sample rollouts under the same weights and compute advantages with GAE, which are standardized
over the whole batch. The learner trains on it for several epochs of minibatches with the clipped surrogate
objective, then sends the new weights to every worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import gymnasium
import jax.numpy as jnp
import optax

from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, OptionalSizes, PositiveInt
from rollstream.rl.algorithm import Algorithm, AlgorithmConfig, Task
from rollstream.rl.batch import Batch
from rollstream.rl.gae import add_gae
from rollstream.rl.learner import Learner
from rollstream.rl.networks import actor_critic
from rollstream.rl.normalize import combined_statistics, first_statistics
from rollstream.rl.operators import (
    ConcatBatches,
    ParallelRollouts,
    Report,
    ReportMetrics,
    StandardizeFields,
    TrainOneStep,
)
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy, custom_policy
from rollstream.rl.updates import (
    Metrics,
    compute_grads,
    explained_variance,
    minibatch_permutations,
    optimizer_step,
    scan_minibatches,
)
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """Hyperparameters of PPO."""

    num_envs: PositiveInt = 8
    """Number of environments, divided evenly among the workers."""
    rollout_length: PositiveInt = 256
    """Number of steps per environment in a batch (n_steps)."""
    epochs: PositiveInt = 10
    """Number of epochs per batch (n_epochs)."""
    minibatch_size: PositiveInt = 64
    """Number of steps per minibatch (batch_size in Stable-Baselines3)."""
    learning_rate: NonNegativeFloat = 3e-4
    """Adam learning rate."""
    learning_rate_decay: bool = False
    """Decay the learning rate linearly to 0 over training."""
    gamma: Fraction = 0.99
    """Discount factor (gamma)."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation (GAE): 0 for TD errors, 1 for Monte Carlo returns."""
    clip_range: NonNegativeFloat = 0.2
    """Clipping range (epsilon) of the probability ratio between the new and the old policy."""
    clip_range_decay: bool = False
    """Decay the clipping range linearly to 0 over training."""
    entropy_coefficient: float = 0.0
    """Coefficient of the entropy bonus in the loss (ent_coef)."""
    value_coefficient: NonNegativeFloat = 0.5
    """Coefficient of the value loss (vf_coef)."""
    max_grad_norm: NonNegativeFloat = 0.5
    """Maximum global norm of gradients; larger ones are clipped."""
    hidden: OptionalSizes = None
    """Hidden layer sizes of actor and critic (net_arch); by default (64, 64), and none after the CNN if
    observations are images."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Activation function of the hidden layers."""
    initial_log_std: float = 0.0
    """Initial log standard deviation of continuous actions (log_std_init)."""
    normalize_observations: bool = False
    """Normalize observations by their running mean and standard deviation."""
    normalize_rewards: bool = False
    """Scale rewards by the running standard deviation of discounted returns."""
    clip_rewards: bool = False
    """Clip rewards to their sign (-1, 0 or 1)."""
    overlap: bool = False
    """Sample the next batch while the learner trains on this one: faster, with weights one version old."""

    def __post_init__(self) -> None:
        if self.batch_size % self.minibatch_size:
            raise RollstreamError(
                f"a batch of {self.num_envs} environments x {self.rollout_length} steps cannot be divided "
                f"into minibatches of {self.minibatch_size}; set minibatch_size to a divisor of "
                f"{self.batch_size}"
            )

    @property
    def batch_size(self) -> int:
        """Environment steps per batch."""
        return self.num_envs * self.rollout_length

    def with_num_envs(self, num_envs: int) -> Config:
        """With as many minibatches as before, if minibatches of the same size do not fit."""
        batch, minibatches = num_envs * self.rollout_length, self.batch_size // self.minibatch_size
        size = self.minibatch_size
        if batch % size:
            size = math.gcd(batch, size) if batch % minibatches else batch // minibatches
        return replace(self, num_envs=num_envs, minibatch_size=size)

    def schedules(self, progress: float) -> dict[str, float]:
        """Scheduled values, given the fraction of training completed."""
        remaining = 1.0 - progress
        return {
            "learning_rate": self.learning_rate * (remaining if self.learning_rate_decay else 1.0),
            "clip_range": self.clip_range * (remaining if self.clip_range_decay else 1.0),
        }


def make_policy(
    config: Config, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> ActorCriticPolicy:
    """The actor-critic policy for the spaces of an environment."""
    network = partial(
        actor_critic, hidden=config.hidden, activation=config.activation, log_std=config.initial_log_std
    )
    return ActorCriticPolicy(
        observation_space,
        action_space,
        network,
        normalize_observations=config.normalize_observations,
        normalize_rewards=config.normalize_rewards,
    )


def worker(config: Config, task: Task) -> WorkerSpec:
    """Workers sample `rollout_length` steps per environment and add advantages with GAE."""
    return WorkerSpec(
        environment=task.environment,
        num_envs=task.envs_per_worker(config.num_envs),
        rollout_length=config.rollout_length,
        policy=partial(custom_policy, task.policy, config) if task.policy else partial(make_policy, config),
        postprocess=partial(add_gae, gamma=config.gamma, gae_lambda=config.gae_lambda),
        evaluates_steps=True,
        seed=task.seed,
        clip_rewards=config.clip_rewards,
        reward_norm_gamma=config.gamma if config.normalize_rewards else None,
    )


def loss(
    policy: ActorCriticPolicy, config: Config, clip_range: Array, batch: Any, weights: Weights
) -> tuple[Array, Metrics]:
    r"""The clipped surrogate objective, the value loss and the entropy bonus.

    $$L = -\mathbb{E}\big[\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A)\big]
    + c_v \mathbb{E}\big[(V - R)^2\big] - c_e \mathbb{E}\big[H\big],
    \qquad \rho = \pi(a | s) / \pi_\mathrm{old}(a | s)$$
    """
    log_prob, entropy, value = policy.evaluate_actions(weights, batch["observation"], batch["action"])
    log_ratio = log_prob - batch["log_prob"]
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - clip_range, 1 + clip_range)
    policy_loss = -jnp.mean(jnp.minimum(ratio * batch["advantage"], clipped_ratio * batch["advantage"]))
    value_loss = jnp.mean((value - batch["value_target"]) ** 2)
    entropy_loss = -jnp.mean(entropy)
    total = policy_loss + config.value_coefficient * value_loss + config.entropy_coefficient * entropy_loss
    return total, {
        "loss": total,
        "policy_gradient_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": entropy_loss,
        "approx_kl": jnp.mean(ratio - 1 - log_ratio),
        "clip_fraction": jnp.mean(jnp.abs(ratio - 1) > clip_range),
    }


_LOSS_COLUMNS = ("observation", "action", "log_prob", "advantage", "value_target")


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """Adam; all epochs and minibatches of a batch are one jitted call."""
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))

    def update(weights: Weights, opt_state: Any, batch: Batch, permutations: Array, schedules: Any) -> Any:
        def step(carry: Any, minibatch: Any) -> tuple[Any, Metrics]:
            weights, opt_state = carry
            minibatch_loss = partial(loss, policy, config, schedules["clip_range"], minibatch)
            grads, metrics = compute_grads(minibatch_loss, weights)
            metrics["grad_norm"] = optax.tree.norm(grads)
            return optimizer_step(optimizer, schedules["learning_rate"], grads, opt_state, weights), metrics

        statistics = policy.batch_statistics(batch)
        combined = combined_statistics(weights, statistics)
        weights = weights | first_statistics(weights, statistics)
        rows = batch.select(_LOSS_COLUMNS).flattened()
        (weights, opt_state), metrics = scan_minibatches(step, (weights, opt_state), rows, permutations)
        metrics["explained_variance"] = explained_variance(batch["value"], batch["value_target"])
        return weights | combined, opt_state, metrics

    return Learner(
        policy,
        update,
        optimizer,
        random_inputs=partial(
            minibatch_permutations,
            count=config.batch_size,
            epochs=config.epochs,
            minibatch_size=config.minibatch_size,
        ),
        schedules=config.schedules,
        updates_per_batch=config.epochs,
        seed=task.seed,
        total_steps=task.steps,
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """All workers sample under the same weights; the learner trains and sends them the new ones."""
    rollouts = ParallelRollouts(workers).gather_sync()
    if config.overlap:
        rollouts = rollouts.prefetch(1)
    batches = rollouts.flatten().combine(ConcatBatches(config.batch_size))
    standardized = batches.for_each(StandardizeFields(["advantage"]))
    return ReportMetrics(standardized.for_each(TrainOneStep(workers)), workers)


PPO = Algorithm("ppo", Config, worker, learner, plan)
