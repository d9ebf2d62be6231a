"""Importance weighted actor-learner architecture, IMPALA (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

Workers sample without waiting for the learner, so their weights are a few versions old. The learner trains on
batches of their rollouts as they arrive, corrects for the difference by V-trace, and sends the new weights to
the workers that the batch came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium
import jax.numpy as jnp
import optax

from rollstream.flow import Iter
from rollstream.limits import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalNonNegativeInt,
    OptionalPositiveInt,
    OptionalSizes,
    PositiveInt,
)
from rollstream.rl.algorithm import Algorithm, AlgorithmConfig, Task
from rollstream.rl.batch import Batch
from rollstream.rl.learner import Learner
from rollstream.rl.normalize import combined_statistics, first_statistics
from rollstream.rl.operators import (
    ParallelRollouts,
    ReceiveWeights,
    Report,
    ReportMetrics,
    UpdateWeights,
    without_stale,
)
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy, custom_policy
from rollstream.rl.recurrent_networks import Memory
from rollstream.rl.recurrent_policy import make_actor_critic_policy
from rollstream.rl.rollout_batches import JoinRollouts, new_steps_of, steps_of
from rollstream.rl.updates import Metrics, compute_grads, explained_variance, masked_mean, optimizer_step
from rollstream.rl.vtrace import evaluate_rollouts, rollout_for_vtrace
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """Hyperparameters of IMPALA."""

    num_envs: PositiveInt = 8
    """Number of environments, divided evenly among the workers."""
    rollout_length: PositiveInt = 20
    """Number of steps per environment in a rollout (n_steps)."""
    rollouts_per_batch: OptionalPositiveInt = None
    """Number of rollouts per batch, whichever workers they come from; by default as many as there are
    workers, so that a batch has num_envs * rollout_length steps."""
    num_async: PositiveInt = 2
    """Number of rollouts of each worker in flight: requested, and not in a batch yet."""
    batches_in_flight: PositiveInt = 2
    """Number of batches at the learner: the one it trains on, and those that wait."""
    max_staleness: OptionalNonNegativeInt = None
    """Drop rollouts that arrive more than this many versions after their weights; None keeps all. Until the
    learner trains on one, it may become batches_in_flight - 1 versions older."""
    broadcast_weights: bool = False
    """Send new weights to all workers, instead of to those that the batch came from."""
    replay_ratio: NonNegativeInt = 0
    """Number of replayed batches that are trained on together with each new one; 0 for none."""
    replay_batches: PositiveInt = 16
    """Number of the newest batches that replayed ones are chosen from."""
    learning_rate: NonNegativeFloat = 6e-4
    """Adam learning rate."""
    learning_rate_decay: bool = False
    """Decay the learning rate linearly to 0 over the training."""
    gamma: Fraction = 0.99
    """Discount factor (gamma)."""
    vtrace_lambda: Fraction = 1.0
    """Lambda of V-trace: 0 for one-step TD targets, 1 for the paper's n-step targets."""
    clip_rho: NonNegativeFloat = 1.0
    """Maximum importance ratio of TD errors and advantages in V-trace (rho bar)."""
    clip_c: NonNegativeFloat = 1.0
    """Maximum importance ratio of the corrections from later steps in V-trace (c bar)."""
    entropy_coefficient: float = 0.01
    """Coefficient of the entropy bonus in the loss (ent_coef)."""
    value_coefficient: NonNegativeFloat = 0.5
    """Coefficient of the value loss (vf_coef)."""
    max_grad_norm: NonNegativeFloat = 40.0
    """Maximum global norm of gradients; larger ones are clipped."""
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
    report_every: PositiveInt = 25
    """Number of updates per report."""

    def batch_rollouts(self, workers: int) -> int:
        """Number of new rollouts per batch."""
        return self.rollouts_per_batch or max(1, workers)

    def steps_per_round(self, workers: int) -> int:
        """Environment steps of the new rollouts of a batch."""
        return self.num_envs // max(1, workers) * self.rollout_length * self.batch_rollouts(workers)

    @property
    def vtrace(self) -> dict[str, float]:
        """Settings of V-trace."""
        return {
            "gamma": self.gamma,
            "vtrace_lambda": self.vtrace_lambda,
            "clip_rho": self.clip_rho,
            "clip_c": self.clip_c,
        }

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
    """Workers send rollouts with the log probabilities of their actions."""
    return WorkerSpec(
        environment=task.environment,
        num_envs=task.envs_per_worker(config.num_envs),
        rollout_length=config.rollout_length,
        policy=partial(custom_policy, task.policy, config) if task.policy else partial(make_policy, config),
        postprocess=rollout_for_vtrace,
        bootstrap_values=("final",),
        evaluates_steps=True,
        seed=task.seed,
        clip_rewards=config.clip_rewards,
        reward_norm_gamma=config.gamma if config.normalize_rewards else None,
    )


def loss(policy: ActorCriticPolicy, config: Config, batch: Batch, weights: Weights) -> tuple[Array, Metrics]:
    r"""The policy gradient loss with V-trace advantages, the value loss and the entropy bonus.

    $$L = -\mathbb{E}[\log \pi(a | s) A] + c_v \mathbb{E}[(V - v)^2] - c_e \mathbb{E}[H]$$
    """
    steps = steps_of(batch)
    mask = steps.get("mask")
    (log_prob, entropy, value), vtrace = evaluate_rollouts(policy, weights, batch, **config.vtrace)
    policy_loss = -masked_mean(log_prob * vtrace.advantage, mask)
    value_loss = masked_mean((value - vtrace.value_target) ** 2, mask)
    entropy_loss = -masked_mean(entropy, mask)
    total = policy_loss + config.value_coefficient * value_loss + config.entropy_coefficient * entropy_loss
    log_ratio = log_prob - steps["log_prob"]
    return total, {
        "loss": total,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": entropy_loss,
        "approx_kl": masked_mean(jnp.exp(log_ratio) - 1 - log_ratio, mask),
        "explained_variance": explained_variance(value, vtrace.value_target, mask),
    }


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Adam after clipping."""
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """One gradient step per batch."""
    optimizer = make_optimizer(config)

    def update(weights: Weights, opt_state: Any, batch: Batch, _: Array, schedules: Any) -> Any:
        statistics = policy.batch_statistics(new_steps_of(batch, config.replay_ratio))
        combined = combined_statistics(weights, statistics)
        weights = weights | first_statistics(weights, statistics)
        grads, metrics = compute_grads(partial(loss, policy, config, batch), weights)
        metrics["grad_norm"] = optax.tree.norm(grads)
        weights, opt_state = optimizer_step(optimizer, schedules["learning_rate"], grads, opt_state, weights)
        return weights | combined, opt_state, metrics

    return Learner(
        policy,
        update,
        optimizer,
        schedules=config.schedules,
        collate=JoinRollouts(config.replay_batches, config.replay_ratio, task.seed),
        seed=task.seed,
        total_steps=task.steps,
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """The learner trains on rollouts as they arrive; the workers they came from, or all, get the new weights.

    Rollouts go from the workers to the learner, and weights back: the driver passes on references.
    """
    rollouts = ParallelRollouts(workers).put().gather_async(config.num_async)
    fresh = without_stale(rollouts, workers, config.max_staleness)
    batches = fresh.batch(config.batch_rollouts(len(workers.actors)))
    trained = batches.via(workers.learner_actor, "train", in_flight=config.batches_in_flight)
    received = trained.for_each(ReceiveWeights(workers))
    updated = received.for_each(UpdateWeights(workers, broadcast=config.broadcast_weights))
    return ReportMetrics(updated, workers, every=config.report_every)


IMPALA = Algorithm("impala", Config, worker, learner, plan, learner_on_actor=True)
