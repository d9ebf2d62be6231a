"""Advantage actor-critic, A2C: synchronous A3C (Mnih et al., 2016, https://arxiv.org/abs/1602.01783).

The workers sample a few steps under the same weights. The learner takes one gradient step on all of them
together, then sends the new weights to every worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium
import optax

from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, OptionalSizes, PositiveInt
from rollstream.rl.algorithm import Algorithm, AlgorithmConfig, Task
from rollstream.rl.batch import Batch
from rollstream.rl.gae import add_gae
from rollstream.rl.learner import Learner
from rollstream.rl.normalize import combined_statistics, first_statistics
from rollstream.rl.operators import ConcatBatches, ParallelRollouts, Report, ReportMetrics, TrainOneStep
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy, custom_policy, evaluate_batch
from rollstream.rl.recurrent_networks import Memory
from rollstream.rl.recurrent_policy import make_actor_critic_policy
from rollstream.rl.updates import (
    Metrics,
    compute_grads,
    explained_variance,
    masked_mean,
    optimizer_step,
)
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """Hyperparameters of A2C and A3C."""

    num_envs: PositiveInt = 8
    """Number of environments, divided evenly among the workers."""
    rollout_length: PositiveInt = 5
    """Number of steps per environment in a batch (n_steps)."""
    learning_rate: NonNegativeFloat = 7e-4
    """Learning rate of RMSProp."""
    learning_rate_decay: bool = False
    """Decay the learning rate linearly to 0 over the training."""
    gamma: Fraction = 0.99
    """Discount factor (gamma)."""
    gae_lambda: Fraction = 1.0
    """Lambda of generalized advantage estimation (GAE): 0 for TD errors, 1 for Monte Carlo returns."""
    entropy_coefficient: float = 0.0
    """Coefficient of the entropy bonus in the loss (ent_coef)."""
    value_coefficient: NonNegativeFloat = 0.5
    """Coefficient of the value loss (vf_coef)."""
    max_grad_norm: NonNegativeFloat = 0.5
    """Maximum global norm of gradients; larger ones are clipped."""
    rmsprop_tf_like: bool = False
    """RMSProp as in TensorFlow (RMSpropTFLike): the mean square starts at 1 instead of 0, so the first steps
    are small, and epsilon is inside the square root."""
    hidden: OptionalSizes = None
    """Hidden layer sizes of actor and critic; by default (64, 64), and none after the CNN if observations
    are images."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Activation function of the hidden layers."""
    memory: Memory = "none"
    """Recurrent layer after the hidden layers of actor and critic: an LSTM, a GRU or none."""
    memory_size: PositiveInt = 64
    """Number of units of the LSTM or GRU of each."""
    initial_log_std: float = 0.0
    """Initial log standard deviation of continuous actions."""
    normalize_observations: bool = False
    """Normalize observations by their running mean and standard deviation."""
    normalize_rewards: bool = False
    """Scale rewards by the running standard deviation of discounted returns."""
    clip_rewards: bool = False
    """Clip rewards to their sign (-1, 0 or 1)."""
    report_every: PositiveInt = 100
    """Number of updates per report."""

    @property
    def batch_size(self) -> int:
        """Environment steps per batch."""
        return self.num_envs * self.rollout_length

    def schedules(self, progress: float) -> dict[str, float]:
        """Scheduled values, given the fraction of the training that is done."""
        remaining = 1.0 - progress if self.learning_rate_decay else 1.0
        return {"learning_rate": self.learning_rate * remaining}


def make_policy(
    config: Config, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> ActorCriticPolicy:
    """The actor-critic policy for the spaces of an environment."""
    return make_actor_critic_policy(config, observation_space, action_space)


def worker(config: Config, task: Task) -> WorkerSpec:
    """Workers sample `rollout_length` steps per environment and add advantages by GAE."""
    return WorkerSpec(
        environment=task.environment,
        num_envs=task.envs_per_worker(config.num_envs),
        rollout_length=config.rollout_length,
        policy=partial(custom_policy, task.policy, config) if task.policy else partial(make_policy, config),
        postprocess=partial(add_gae, gamma=config.gamma, gae_lambda=config.gae_lambda),
        bootstrap_values=("last", "final"),
        evaluates_steps=True,
        seed=task.seed,
        clip_rewards=config.clip_rewards,
        reward_norm_gamma=config.gamma if config.normalize_rewards else None,
    )


def loss(policy: ActorCriticPolicy, config: Config, batch: Any, weights: Weights) -> tuple[Array, Metrics]:
    r"""The policy gradient loss, the value loss and the entropy bonus.

    $$L = -\mathbb{E}[\log \pi(a | s) A] + c_v \mathbb{E}[(V - R)^2] - c_e \mathbb{E}[H]$$
    """
    log_prob, entropy, value = evaluate_batch(policy, weights, batch)
    mean = partial(masked_mean, mask=batch.get("mask"))
    policy_loss = -mean(log_prob * batch["advantage"])
    value_loss = mean((value - batch["value_target"]) ** 2)
    entropy_loss = -mean(entropy)
    total = policy_loss + config.value_coefficient * value_loss + config.entropy_coefficient * entropy_loss
    return total, {
        "loss": total,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": entropy_loss,
    }


def gradients(
    policy: ActorCriticPolicy, config: Config, weights: Weights, batch: Batch
) -> tuple[Weights, Metrics]:
    """Gradients of the loss on a batch, and metrics."""
    weights = weights | first_statistics(weights, policy.batch_statistics(batch))
    grads, metrics = compute_grads(partial(loss, policy, config, batch), weights)
    metrics["grad_norm"] = optax.tree.norm(grads)
    metrics["explained_variance"] = explained_variance(
        batch["value"], batch["value_target"], batch.get("mask")
    )
    return grads, metrics


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """RMSProp after clipping. Its mean square starts at 0, so the first steps are large, or at 1."""
    tf_like = config.rmsprop_tf_like
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_rms(decay=0.99, eps=1e-5, initial_scale=float(tf_like), eps_in_sqrt=tf_like),
    )


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """One gradient step per batch."""
    optimizer = make_optimizer(config)

    def update(weights: Weights, opt_state: Any, batch: Batch, _: Array, schedules: Any) -> Any:
        grads, metrics = gradients(policy, config, weights, batch)
        weights, opt_state = optimizer_step(optimizer, schedules["learning_rate"], grads, opt_state, weights)
        combined = combined_statistics(weights, policy.batch_statistics(batch))
        return weights | combined, opt_state, metrics

    return Learner(
        policy, update, optimizer, schedules=config.schedules, seed=task.seed, total_steps=task.steps
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """All workers sample under the same weights; the learner trains and sends them the new ones."""
    rollouts = ParallelRollouts(workers).gather_sync().flatten()
    batches = rollouts.combine(ConcatBatches(config.batch_size))
    return ReportMetrics(batches.for_each(TrainOneStep(workers)), workers, every=config.report_every)


A2C = Algorithm("a2c", Config, worker, learner, plan)
