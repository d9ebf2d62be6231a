"""Asynchronous proximal policy optimization, APPO (Luo et al., 2019, https://arxiv.org/abs/1912.00167).

IMPALA with PPO's clipped surrogate objective. V-trace is computed under a target network, and the ratio is
that of the new policy to it. This is IMPACT; RLlib calls it APPO.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import optax

from rollstream.algos import impala
from rollstream.engine import RollstreamError
from rollstream.limits import NonNegativeFloat, PositiveInt
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import FIRST_STATE, Batch
from rollstream.rl.learner import Learner
from rollstream.rl.normalize import combined_statistics, first_statistics
from rollstream.rl.params import Weights, trainable
from rollstream.rl.policy import ActorCriticPolicy, SequencePolicy, evaluate_batch
from rollstream.rl.rollout_batches import JoinRollouts, new_steps_of, steps_of
from rollstream.rl.updates import (
    Metrics,
    compute_grads,
    explained_variance,
    masked_mean,
    minibatch_permutations,
    optimizer_step,
    scan_minibatches,
    standardized,
)
from rollstream.rl.vtrace import evaluate_rollouts

Array = Any


@dataclass(frozen=True)
class Config(impala.Config):
    """Hyperparameters of APPO: those of IMPALA, and of the surrogate objective."""

    clip_range: NonNegativeFloat = 0.2
    """Clipping range (epsilon) of the probability ratio between the new policy and the target network."""
    clip_target_ratio: NonNegativeFloat = 2.0
    """Maximum ratio of the policy that acted to the target network, in the ratio that is clipped (rho of
    IMPACT); inf for none."""
    standardize_advantages: bool = False
    """Standardize the advantages of each batch, as PPO does."""
    target_update_interval: PositiveInt = 2
    """Number of batches between updates of the target network."""
    epochs: PositiveInt = 2
    """Number of epochs per batch (n_epochs)."""
    minibatches: PositiveInt = 1
    """Number of minibatches per epoch, of random steps; with memory, of all steps of some environments."""
    report_every: PositiveInt = 25
    """Number of batches per report."""

    def batch_and_minibatch_rows(self, task: Task, *, recurrent: bool) -> tuple[int, int]:
        """Rows of a batch and of a minibatch: steps, or sequences if the policy is recurrent."""
        rollouts = self.batch_rollouts(task.workers) * (1 + self.replay_ratio)
        count = rollouts * task.envs_per_worker(self.num_envs) * (1 if recurrent else self.rollout_length)
        if count % self.minibatches:
            rows = "environments" if recurrent else "steps"
            raise RollstreamError(
                f"a batch of {count} {rows} cannot be divided into {self.minibatches} minibatches; set "
                f"minibatches to a divisor of {count}"
            )
        return count, count // self.minibatches


def loss(policy: ActorCriticPolicy, config: Config, batch: Any, weights: Weights) -> tuple[Array, Metrics]:
    r"""The clipped surrogate objective with V-trace advantages, the value loss and the entropy bonus.

    $$L = -\mathbb{E}\big[\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A)\big]
    + c_v \mathbb{E}\big[(V - v)^2\big] - c_e \mathbb{E}\big[H\big],
    \qquad \rho = \frac{\pi}{\mu} \min\Big(\frac{\mu}{\bar\pi}, \rho_\mathrm{target}\Big)$$
    """
    mask = batch.get("mask")
    log_prob, entropy, value = evaluate_batch(policy, weights, batch)
    target_ratio = jnp.exp(batch["log_prob"] - batch["target_log_prob"])
    ratio = jnp.exp(log_prob - batch["log_prob"]) * jnp.minimum(target_ratio, config.clip_target_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - config.clip_range, 1 + config.clip_range)
    surrogate = jnp.minimum(ratio * batch["advantage"], clipped_ratio * batch["advantage"])
    policy_loss = -masked_mean(surrogate, mask)
    value_loss = masked_mean((value - batch["value_target"]) ** 2, mask)
    entropy_loss = -masked_mean(entropy, mask)
    total = policy_loss + config.value_coefficient * value_loss + config.entropy_coefficient * entropy_loss
    log_ratio = log_prob - batch["target_log_prob"]
    return total, {
        "loss": total,
        "policy_gradient_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": entropy_loss,
        "approx_kl": masked_mean(jnp.exp(log_ratio) - 1 - log_ratio, mask),
        "clip_fraction": masked_mean(jnp.abs(ratio - 1) > config.clip_range, mask),
    }


_LOSS_COLUMNS = ("observation", "action", "log_prob", "mask", FIRST_STATE, "episode_start")


def with_targets(policy: ActorCriticPolicy, config: Config, batch: Batch, target: Weights) -> Batch:
    """The steps `[T, B]` of a batch with V-trace under the target network, as the loss takes them."""
    evaluated, vtrace = evaluate_rollouts(policy, target, batch, **config.vtrace)
    steps = {name: column for name, column in steps_of(batch).items() if name in _LOSS_COLUMNS}
    advantage = vtrace.advantage
    if config.standardize_advantages:
        advantage = standardized(advantage, steps.get("mask"))
    return Batch(
        steps,
        target_log_prob=evaluated.log_prob,
        target_value=evaluated.value,
        advantage=advantage,
        value_target=vtrace.value_target,
    )


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """Adam, and a target network; all epochs and minibatches of a batch are one jitted call."""
    optimizer = impala.make_optimizer(config)
    recurrent = isinstance(policy, SequencePolicy)
    count, minibatch_size = config.batch_and_minibatch_rows(task, recurrent=recurrent)

    def init_state(params: Weights) -> dict[str, Any]:
        return {"optimizer": optimizer.init(params), "target": params, "updates": jnp.int32(0)}

    def update(weights: Weights, state: Any, batch: Batch, permutations: Array, schedules: Any) -> Any:
        def step(carry: Any, minibatch: Any) -> tuple[Any, Metrics]:
            weights, opt_state = carry
            grads, metrics = compute_grads(partial(loss, policy, config, minibatch), weights)
            metrics["grad_norm"] = optax.tree.norm(grads)
            return optimizer_step(optimizer, schedules["learning_rate"], grads, opt_state, weights), metrics

        statistics = policy.batch_statistics(new_steps_of(batch, config.replay_ratio))
        combined = combined_statistics(weights, statistics)
        weights = weights | first_statistics(weights, statistics)
        steps = with_targets(policy, config, batch, weights | state["target"])
        rows = steps if recurrent else steps.flattened()
        (weights, opt_state), metrics = scan_minibatches(
            step, (weights, state["optimizer"]), rows, permutations, axis=int(recurrent)
        )
        metrics["explained_variance"] = explained_variance(
            steps["target_value"], steps["value_target"], steps.get("mask")
        )
        updates, params = state["updates"] + 1, trainable(weights)
        target = optax.periodic_update(params, state["target"], updates, config.target_update_interval)
        return weights | combined, {"optimizer": opt_state, "target": target, "updates": updates}, metrics

    return Learner(
        policy,
        update,
        optimizer,
        init_state=init_state,
        random_inputs=partial(
            minibatch_permutations,
            count=count,
            epochs=config.epochs,
            minibatch_size=minibatch_size,
        ),
        schedules=config.schedules,
        updates_per_batch=config.epochs,
        collate=JoinRollouts(config.replay_batches, config.replay_ratio, task.seed),
        seed=task.seed,
        total_steps=task.steps,
    )


APPO = Algorithm("appo", Config, impala.worker, learner, impala.plan, learner_on_actor=True)
