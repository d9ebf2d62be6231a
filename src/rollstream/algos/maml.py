"""Model-agnostic meta-learning, MAML (Finn et al., 2017, https://arxiv.org/abs/1703.03400).

The policy learns to adapt, so that a few policy gradient steps on data of a new task suffice. Every worker
samples some tasks, adapts the weights to each of them with its own data, and samples again. The learner then
changes the weights from before the adaptation, by the gradient through it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

from rollstream.engine import ActorContext, RollstreamError
from rollstream.flow import Context, Iter
from rollstream.limits import Fraction, NonNegativeFloat, PositiveInt, Sizes
from rollstream.rl.adapting_operators import InnerAdapt, MetaUpdate
from rollstream.rl.algorithm import Algorithm, AlgorithmConfig, Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner
from rollstream.rl.linear_baseline import add_task_advantages
from rollstream.rl.networks import actor_critic
from rollstream.rl.operators import ParallelRollouts, Report, ReportMetrics
from rollstream.rl.params import Weights
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.task_worker import TaskWorker, steps_by_task
from rollstream.rl.updates import Metrics, compute_grads, optimizer_step
from rollstream.rl.worker_set import WorkerSet
from rollstream.rl.worker_spec import PolicyMaker, WorkerSpec

Array = Any


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """Hyperparameters of MAML."""

    tasks: PositiveInt = 20
    """Number of tasks per meta-update, divided evenly among the workers."""
    num_envs: PositiveInt = 400
    """Number of environments, divided evenly among the tasks."""
    rollout_length: PositiveInt = 100
    """Number of steps per environment before each adaptation, and after the last one; at least those of an
    episode, since episodes start anew after each adaptation."""
    inner_steps: PositiveInt = 1
    """Number of adaptations: policy gradient steps on a task, each with rollouts of its own."""
    inner_learning_rate: NonNegativeFloat = 0.1
    """Learning rate of the adaptation (alpha)."""
    first_order: bool = False
    """Treat the gradients of adaptations as constants (first-order MAML)."""
    epochs: PositiveInt = 5
    """Number of meta-gradient steps per meta-update."""
    learning_rate: NonNegativeFloat = 1e-3
    """Adam learning rate of the meta-update (beta)."""
    clip_range: NonNegativeFloat = 0.2
    """Clipping range (epsilon) of the probability ratio between the new and the old adapted policy."""
    gamma: Fraction = 0.99
    """Discount factor (gamma)."""
    max_grad_norm: NonNegativeFloat = 0.5
    """Maximum global norm of meta-gradients; larger ones are clipped."""
    hidden: Sizes = (64, 64)
    """Hidden layer sizes of the policy."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Activation function of the hidden layers."""
    initial_log_std: float = -0.5
    """Initial log standard deviation of continuous actions."""

    def __post_init__(self) -> None:
        if self.num_envs % self.tasks:
            raise RollstreamError(
                f"{self.num_envs} environments cannot be divided evenly among {self.tasks} tasks: set "
                f"num_envs to a multiple of tasks"
            )

    def steps_per_round(self, workers: int) -> int:  # noqa: ARG002
        """Environment steps per meta-update."""
        return self.num_envs * self.rollout_length * (self.inner_steps + 1)

    def for_workers(self, workers: int) -> Config:
        """These settings, which have to fit: the number of environments cannot be rounded up."""
        self.tasks_per_worker(workers)
        return self

    def tasks_per_worker(self, workers: int) -> int:
        """How many of the tasks each worker has."""
        workers = max(1, workers)
        if self.tasks % workers:
            raise RollstreamError(
                f"{self.tasks} tasks cannot be divided evenly among {workers} workers: set tasks to a "
                f"multiple of the workers"
            )
        return self.tasks // workers


def make_policy(
    config: Config, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> ActorCriticPolicy:
    """The policy for the spaces of an environment; its critic is not trained."""
    options: dict[str, Any] = {"activation": config.activation, "log_std": config.initial_log_std}
    network = partial(actor_critic, hidden=config.hidden, **options)
    return ActorCriticPolicy(observation_space, action_space, network)


def worker(config: Config, task: Task) -> WorkerSpec:
    """Workers of several tasks each, which adapt to them."""
    tasks = config.tasks_per_worker(task.workers)
    return WorkerSpec(
        environment=replace(task.environment, vectorization="sync"),
        num_envs=task.envs_per_worker(config.num_envs),
        rollout_length=config.rollout_length,
        policy=task.policy or partial(make_policy, config),
        postprocess=partial(add_task_advantages, tasks=tasks, gamma=config.gamma),
        evaluates_steps=True,
        seed=task.seed,
        tasks=tasks,
        adapt=partial(adaptation, config=config),
        acting="host",
    )


def inner_loss(policy: ActorCriticPolicy, steps: Any, weights: Weights) -> tuple[Array, Metrics]:
    r"""The policy gradient loss of an adaptation.

    $$L_\mathrm{inner}(\theta; D) = -\mathbb{E}_D\big[\pi_\theta(a | s) / \pi_\mathrm{old}(a | s) A\big],
    \qquad \theta' = \theta - \alpha \nabla L_\mathrm{inner}(\theta; D)$$

    The derivative of the ratio's gradient is the low-variance curvature estimate of Rothfuss et al. (2019,
    https://arxiv.org/abs/1810.06784); that of the log probability's gradient lacks a term.
    """
    log_prob, _, _ = policy.evaluate_actions(weights, steps["observation"], steps["action"])
    return -jnp.mean(jnp.exp(log_prob - steps["log_prob"]) * steps["advantage"]), {}


def adaptation(policy: ActorCriticPolicy, config: Config) -> Any:
    """What adapts weights to the steps of a task: one gradient step."""

    def adapt(weights: Weights, steps: Any) -> Weights:
        grads, _ = compute_grads(partial(inner_loss, policy, steps), weights)
        if config.first_order:
            grads = jax.lax.stop_gradient(grads)
        return weights | {
            name: weights[name] - config.inner_learning_rate * own for name, own in grads.items()
        }

    return adapt


def task_loss(
    policy: ActorCriticPolicy, config: Config, weights: Weights, rows: Any
) -> tuple[Array, Metrics]:
    r"""The clipped surrogate objective of the adapted weights on the steps D' sampled with them.

    $$L = -\mathbb{E}_{D'}\big[\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A)\big],
    \qquad \rho = \pi_{\theta'}(a | s) / \pi_\mathrm{old}(a | s)$$

    Its gradient is with respect to the weights before the adaptation, and averaged over tasks. `rows` has
    columns `[R, N]`: the steps before each adaptation, and those after the last.
    """
    adapt = adaptation(policy, config)
    for index in range(config.inner_steps):
        weights = adapt(weights, jax.tree.map(lambda own, index=index: own[index], rows))
    last = jax.tree.map(lambda own: own[-1], rows)
    log_prob, entropy, _ = policy.evaluate_actions(weights, last["observation"], last["action"])
    log_ratio = log_prob - last["log_prob"]
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - config.clip_range, 1 + config.clip_range)
    loss = -jnp.mean(jnp.minimum(ratio * last["advantage"], clipped_ratio * last["advantage"]))
    return loss, {"approx_kl": jnp.mean(ratio - 1 - log_ratio), "entropy_loss": -jnp.mean(entropy)}


def meta_loss(
    policy: ActorCriticPolicy, config: Config, rows: Any, weights: Weights
) -> tuple[Array, Metrics]:
    """The mean loss of all tasks, of whose steps `rows` has columns `[tasks, R, N]`."""
    losses, metrics = jax.vmap(partial(task_loss, policy, config, weights))(rows)
    return jnp.mean(losses), {"loss": jnp.mean(losses)} | jax.tree.map(jnp.mean, metrics)


def learner(config: Config, task: Task, policy: ActorCriticPolicy) -> Learner:
    """Adam; all epochs of a meta-update are one jitted call."""
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))

    def update(weights: Weights, opt_state: Any, rows: Any, _: Array, schedules: Any) -> Any:
        count = rows["advantage"].shape[2] // (config.num_envs // config.tasks)
        by_task = jax.vmap(partial(steps_by_task, count=count), out_axes=1)(rows)

        def step(carry: Any, _: None) -> tuple[Any, Metrics]:
            weights, opt_state = carry
            grads, metrics = compute_grads(partial(meta_loss, policy, config, by_task), weights)
            metrics["grad_norm"] = optax.tree.norm(grads)
            return optimizer_step(optimizer, schedules["learning_rate"], grads, opt_state, weights), metrics

        (weights, opt_state), metrics = jax.lax.scan(step, (weights, opt_state), length=config.epochs)
        return weights, opt_state, jax.tree.map(jnp.mean, metrics)

    return Learner(
        policy,
        update,
        optimizer,
        schedules=lambda _: {"learning_rate": config.learning_rate},
        updates_per_batch=config.epochs,
        seed=task.seed,
        total_steps=task.steps,
        concurrent=True,
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """Workers sample and adapt in turn, each to its own data; the learner then trains on the data of all."""
    rollouts = ParallelRollouts(workers).gather_sync()
    adapted = rollouts.combine(InnerAdapt(workers, steps=config.inner_steps))
    trained = adapted.for_each(MetaUpdate(workers))
    return ReportMetrics(trained, workers)


MAML = Algorithm("maml", Config, worker, learner, plan, environment="rollstream.envs:PointNavigation-v0")


def adaptation_returns(
    config: Config,
    environment: EnvSpec,
    weights: Weights,
    *,
    tasks: int = 20,
    seed: int = 1_000,
    policy: PolicyMaker | None = None,
) -> Array:
    """Mean returns on new tasks before adaptation and after each step of it, `[inner_steps + 1, tasks]`.

    Args:
        config: With the number of environments per task and of steps.
        environment: With a task distribution.
        weights: From before the adaptation.
        tasks: Number of tasks.
        seed: Of the tasks, and of everything else.
        policy: Creates the policy, if it is one of your own.
    """
    each = config.num_envs // config.tasks
    config = replace(config, tasks=tasks, num_envs=tasks * each)
    spec = worker(config, Task(environment, 0, seed, policy=policy))
    with closing(TaskWorker(spec, context=ActorContext("evaluation", 0, 1))) as adapting:
        adapting.set_weights(0, dict(weights))
        returns: list[Array] = []
        while True:
            batch = adapting.sample(Context("evaluation", ("evaluation", "sample", 0), None, {})).batch
            episodes = np.asarray(batch["episode_return"]).reshape(config.rollout_length, tasks, each)
            if np.isnan(episodes).all(axis=(0, 2)).any():
                raise RollstreamError(
                    f"no episode of {environment.name} ended within rollout_length={config.rollout_length} "
                    f"steps: set it to at least the length of an episode"
                )
            returns.append(np.nanmean(episodes, axis=(0, 2)))
            if len(returns) > config.inner_steps:
                return np.array(returns)
            adapting.adapt()
