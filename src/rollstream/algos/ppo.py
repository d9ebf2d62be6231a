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
from rollstream.limits import Fraction, NonNegativeFloat, OptionalPositiveInt, OptionalSizes, PositiveInt
from rollstream.rl.algorithm import Algorithm, AlgorithmConfig, Task
from rollstream.rl.batch import FIRST_STATE, Batch, Columns
from rollstream.rl.gae import add_gae
from rollstream.rl.learner import Learner
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
from rollstream.rl.policy import ActorCriticPolicy, SequencePolicy, custom_policy, evaluate_batch
from rollstream.rl.recurrent_networks import Memory
from rollstream.rl.recurrent_policy import make_actor_critic_policy
from rollstream.rl.updates import (
    Metrics,
    compute_grads,
    explained_variance,
    masked_mean,
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
    minibatch_size: OptionalPositiveInt = None
    """Number of steps per minibatch (batch_size in Stable-Baselines3); by default 64. With memory, a
    minibatch is whole rollouts of some environments, by default a quarter of them."""
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
    memory: Memory = "none"
    """Recurrent layer after the hidden layers of actor and critic: an LSTM, a GRU or none."""
    memory_size: PositiveInt = 64
    """Number of units of the LSTM or GRU of each."""
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
        self.steps_per_minibatch(recurrent=self.memory != "none")

    def steps_per_minibatch(self, *, recurrent: bool) -> int:
        """Environment steps per minibatch: whole sequences if the policy is recurrent. Raises if none fit."""
        size, length = self.minibatch_size, self.rollout_length
        if size is None:
            size = length * math.gcd(self.num_envs, max(1, self.num_envs // 4)) if recurrent else 64
        if recurrent and (size % length or self.batch_size % size):
            sizes = [str(n * length) for n in range(1, self.num_envs + 1) if self.num_envs % n == 0]
            raise RollstreamError(
                f"a minibatch of a recurrent policy has to be whole rollouts of {length} steps, and "
                f"{self.num_envs} environments have to be divided evenly: set minibatch_size to "
                f"{' or '.join(sizes)} instead of {size}, or change rollout_length"
            )
        if self.batch_size % size:
            raise RollstreamError(
                f"a batch of {self.num_envs} environments x {length} steps cannot be divided "
                f"into minibatches of {size}; set minibatch_size to a divisor of {self.batch_size}"
            )
        return size

    @property
    def batch_size(self) -> int:
        """Environment steps per batch."""
        return self.num_envs * self.rollout_length

    def with_num_envs(self, num_envs: int) -> Config:
        """With as many minibatches as before, if minibatches of the same size do not fit."""
        recurrent = self.memory != "none"
        if recurrent and self.minibatch_size is None:
            return replace(self, num_envs=num_envs)
        row = self.rollout_length if recurrent else 1  # what is not divided
        rows, before = num_envs * self.rollout_length // row, self.steps_per_minibatch(recurrent=recurrent)
        minibatches, size = self.batch_size // before, before // row
        if rows % size == 0:
            return replace(self, num_envs=num_envs)
        size = math.gcd(rows, size) if rows % minibatches else rows // minibatches
        return replace(self, num_envs=num_envs, minibatch_size=size * row)

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
    return make_actor_critic_policy(config, observation_space, action_space)


def worker(config: Config, task: Task) -> WorkerSpec:
    """Workers sample `rollout_length` steps per environment and add advantages with GAE."""
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


def loss(
    policy: ActorCriticPolicy, config: Config, clip_range: Array, batch: Any, weights: Weights
) -> tuple[Array, Metrics]:
    r"""The clipped surrogate objective, the value loss and the entropy bonus.

    $$L = -\mathbb{E}\big[\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A)\big]
    + c_v \mathbb{E}\big[(V - R)^2\big] - c_e \mathbb{E}\big[H\big],
    \qquad \rho = \pi(a | s) / \pi_\mathrm{old}(a | s)$$
    """
    log_prob, entropy, value = evaluate_batch(policy, weights, batch)
    mean = partial(masked_mean, mask=batch.get("mask"))
    log_ratio = log_prob - batch["log_prob"]
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - clip_range, 1 + clip_range)
    policy_loss = -mean(jnp.minimum(ratio * batch["advantage"], clipped_ratio * batch["advantage"]))
    value_loss = mean((value - batch["value_target"]) ** 2)
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


_LOSS_COLUMNS = ("observation", "action", "log_prob", "advantage", "value_target")
_SEQUENCE_COLUMNS = (FIRST_STATE, "episode_start", "mask")


def loss_columns(batch: Batch, *, recurrent: bool) -> Columns:
    """What the loss needs: steps `[T * B, ...]`, or the sequences `[T, B, ...]` of a recurrent policy."""
    if not recurrent:
        return batch.select(_LOSS_COLUMNS).flattened()
    return batch.select([*_LOSS_COLUMNS, *(name for name in _SEQUENCE_COLUMNS if name in batch)])


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """Adam; all epochs and minibatches of a batch are one jitted call."""
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
    recurrent = isinstance(policy, SequencePolicy)
    row = config.rollout_length if recurrent else 1
    """Number of steps that stay together in a minibatch."""

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
        rows = loss_columns(batch, recurrent=recurrent)
        (weights, opt_state), metrics = scan_minibatches(
            step, (weights, opt_state), rows, permutations, axis=int(recurrent)
        )
        metrics["explained_variance"] = explained_variance(
            batch["value"], batch["value_target"], batch.get("mask")
        )
        return weights | combined, opt_state, metrics

    return Learner(
        policy,
        update,
        optimizer,
        random_inputs=partial(
            minibatch_permutations,
            count=config.batch_size // row,
            epochs=config.epochs,
            minibatch_size=config.steps_per_minibatch(recurrent=recurrent) // row,
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
