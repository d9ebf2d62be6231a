"""What algorithms share that learn from what they have just done: their settings, workers and networks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium
import jax.numpy as jnp

from rollstream.limits import Fraction, NonNegativeFloat, PositiveInt, Sizes
from rollstream.rl.actor_critic import with_advantages
from rollstream.rl.algorithm import Task
from rollstream.rl.networks import actor_critic
from rollstream.rl.normalize import Moments, moments_of, numbers
from rollstream.rl.policy import ActorCriticPolicy, Weights
from rollstream.rl.worker import WorkerSpec

Array = Any


@dataclass(frozen=True)
class OnPolicyConfig:
    """Settings of every actor-critic algorithm here."""

    environments: PositiveInt = 8
    """Environments in all, shared out among the workers."""
    rollout_length: PositiveInt = 128
    """Steps of each environment in a batch."""
    discount: Fraction = 0.99
    """Gamma: how much the next step's value counts."""
    gae_lambda: Fraction = 0.95
    """How far advantages look ahead: 0 one step, 1 to the end."""
    learning_rate: NonNegativeFloat = 3e-4
    learning_rate_decay: bool = False
    """Whether the learning rate falls to 0 until the end of the training."""
    entropy_coefficient: float = 0.0
    value_coefficient: NonNegativeFloat = 0.5
    max_gradient_norm: NonNegativeFloat = 0.5
    hidden: Sizes = (64, 64)
    """Sizes of the hidden layers of actor and critic; after the convolutions, for images."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    initial_log_std: float = 0.0
    """Of actions that are numbers: the logarithm of their deviation at the beginning."""
    normalize_observations: bool = False
    normalize_rewards: bool = False
    clip_rewards: bool = False
    """Whether only the sign of a reward counts."""

    @property
    def batch_size(self) -> int:
        """Environment steps of a batch."""
        return self.environments * self.rollout_length

    def settings(self, progress: float) -> dict[str, float]:
        """What changes in the course of the training."""
        left = 1.0 - progress if self.learning_rate_decay else 1.0
        return {"learning_rate": self.learning_rate * left}

    # What is built from them -------------------------------------------------------------------

    def policy(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> ActorCriticPolicy:
        """The policy for an environment's spaces."""
        network = partial(
            actor_critic, hidden=self.hidden, activation=self.activation, log_std=self.initial_log_std
        )
        scaled = Moments.empty().named("return") if self.normalize_rewards else {}
        return ActorCriticPolicy(
            observations, actions, network, normalize=self.normalize_observations, statistics=scaled
        )

    def worker(self, task: Task, **more: Any) -> WorkerSpec:
        """What a worker is made from."""
        return WorkerSpec(
            environment=task.environment,
            environments=task.share(self.environments),
            length=self.rollout_length,
            policy=task.policy or self.policy,
            finish=partial(
                with_advantages,
                discount=self.discount,
                trace=self.gae_lambda,
                scale_rewards=self.normalize_rewards,
            ),
            seed=task.seed,
            clip_reward=self.clip_rewards,
            discount=self.discount if self.normalize_rewards else None,
            **more,
        )


def statistics_of(policy: ActorCriticPolicy, batch: Any) -> Weights:
    """What the statistics among the weights are to learn from a batch."""
    real = batch["real"].reshape(-1) if "real" in batch else None
    seen: Weights = {}
    if policy.normalize:
        rows = numbers(policy.observation_space, batch["observation"])
        seen |= moments_of(rows.reshape(-1, rows.shape[-1]), real).named("observation")
    if "discounted_return" in batch:
        seen |= moments_of(batch["discounted_return"].reshape(-1), real).named("return")
    return seen


def mean_of(values: Array, rows: Any) -> Array:
    """The mean over rows that were steps."""
    if "real" not in rows:
        return jnp.mean(values)
    return jnp.sum(values * rows["real"]) / jnp.maximum(1, jnp.sum(rows["real"]))


def explained_variance(batch: Any) -> Array:
    """How much of the variance of the targets the values explain, over steps: 1 is all, 0 none."""
    target, value, real = batch["value_target"], batch["value"], batch.get("real")
    variance = jnp.var(target, where=real)
    return jnp.where(variance > 0, 1 - jnp.var(target - value, where=real) / variance, jnp.nan)
