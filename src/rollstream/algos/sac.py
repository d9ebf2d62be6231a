"""Soft actor-critic, SAC (Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905).

The actor maximizes the lower of two critics' values plus its entropy, weighted by a temperature that is
learned. Discrete actions follow Christodoulou (2019, https://arxiv.org/abs/1910.07207), with a lower default
for the target entropy.

With `num_quantiles`, usually 25, this is TQC, truncated quantile critics (Kuznetsov et al., 2020,
https://arxiv.org/abs/2005.04269): each critic estimates quantiles of the return, and the largest are dropped
from the TD target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces

from rollstream import flow
from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, NonNegativeInt, OptionalSizes, PositiveInt, Ratio
from rollstream.replay.buffer import ReplayBuffer
from rollstream.rl.action_distributions import Categorical, TanhNormal
from rollstream.rl.actor_policy import ActorPolicy
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.critics import Critics
from rollstream.rl.device_replay import DeviceReplay
from rollstream.rl.learner import Learner
from rollstream.rl.networks import head_network
from rollstream.rl.off_policy import AlternatingConfig, replay_buffer, updates_per_call
from rollstream.rl.operators import ParallelRollouts, Report, ReportMetrics, TrainOneStep
from rollstream.rl.params import Weights
from rollstream.rl.policy import has_action_mask, require_policy
from rollstream.rl.replay_operators import Replay, StoreToBuffer
from rollstream.rl.rollout import rollout_for_replay
from rollstream.rl.spaces import SpaceError, require_action_space
from rollstream.rl.updates import Metrics, compute_grads, n_step_returns, optimizer_step, polyak_update
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any
Combine: TypeAlias = Callable[[Array], Array]
"""Combines the Q values or quantiles `[critics, N, num_quantiles]` of all critics."""


@dataclass(frozen=True)
class Config(AlternatingConfig):
    """Hyperparameters of SAC."""

    algorithm: ClassVar[str] = "sac"

    num_envs: PositiveInt = 1
    """Number of environments, divided evenly among the workers."""
    rollout_length: PositiveInt = 1
    """Number of steps per environment between updates (train_freq)."""
    utd_ratio: Ratio = 1.0
    """Gradient steps per environment step (update-to-data ratio); rollouts are long enough for a whole number
    of them."""
    batch_size: PositiveInt = 256
    """Number of transitions per gradient step."""
    buffer_size: PositiveInt = 1_000_000
    """Replay buffer size in transitions; the oldest are removed."""
    replay: Literal["host", "device"] = "host"
    """Where the replay buffer is: in the driver's memory (host), or on the learner's device (device), where
    sampling and the updates after a rollout are one compiled program."""
    learning_starts: NonNegativeInt = 100
    """Number of transitions in the replay buffer before the first update; until then, actions are uniform."""
    learning_rate: NonNegativeFloat = 3e-4
    """Adam learning rate of actor, critics and temperature."""
    gamma: Fraction = 0.99
    """Discount factor (gamma)."""
    tau: Fraction = 0.005
    """Soft update coefficient of the target critics (tau, Polyak averaging)."""
    n_step: PositiveInt = 1
    """n of n-step returns."""
    num_quantiles: PositiveInt = 1
    """Number of quantiles per critic (n_quantiles of TQC, usually 25); 1 for scalar Q values."""
    dropped_quantiles: NonNegativeInt = 2
    """Number of the largest target quantiles to drop, per critic (top_quantiles_to_drop_per_net of TQC);
    without effect if num_quantiles is 1."""
    initial_temperature: NonNegativeFloat = 1.0
    """Initial temperature (alpha), the entropy coefficient (ent_coef)."""
    learn_temperature: bool = True
    """Learn the temperature, so that the entropy approaches target_entropy."""
    target_entropy: float | None = None
    """Target entropy; by default minus the action dimensions, or 0.6 log(n) for n legal discrete actions."""
    hidden: OptionalSizes = None
    """Hidden layer sizes of the actor and of each critic; by default (256, 256), and none after the CNN if
    observations are images, except in critics that also take the action."""
    activation: Literal["tanh", "relu", "silu"] = "relu"
    """Activation function of the hidden layers."""
    clip_rewards: bool = False
    """Clip rewards to their sign (-1, 0 or 1)."""
    report_every: PositiveInt = 1_000
    """Number of environment steps per report."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 1 < self.num_quantiles <= self.dropped_quantiles:
            raise RollstreamError(
                f"dropped_quantiles={self.dropped_quantiles} leaves none of num_quantiles="
                f"{self.num_quantiles}; set dropped_quantiles to {self.num_quantiles - 1} or less"
            )

    def schedules(self, progress: float) -> dict[str, float]:  # noqa: ARG002
        """Scheduled values, given the fraction of training completed."""
        return {"learning_rate": self.learning_rate}


def make_policy(
    config: Config, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> ActorPolicy:
    """The actor for the spaces of an environment."""
    require_action_space(action_space, (spaces.Box, spaces.Discrete), config.algorithm)
    discrete = isinstance(action_space, spaces.Discrete)
    distribution = Categorical(int(action_space.n)) if discrete else TanhNormal(action_space)
    network = partial(head_network, hidden=config.hidden, activation=config.activation)
    return ActorPolicy(observation_space, action_space, distribution, network)


def worker(config: Config, task: Task) -> WorkerSpec:
    """Workers sample actions from the policy and send rollouts to the replay buffer."""
    return WorkerSpec(
        environment=task.environment,
        num_envs=task.envs_per_worker(config.num_envs),
        rollout_length=config.steps_per_rollout(),
        policy=task.policy or partial(make_policy, config),
        postprocess=partial(rollout_for_replay, frame_stack=task.environment.frame_stack),
        bootstrap_values=(),
        for_replay=True,
        seed=task.seed,
        clip_rewards=config.clip_rewards,
    )


def value_and_log_prob(
    policy: ActorPolicy,
    critics: Critics,
    combine: Combine,
    critic_params: Weights,
    observation: Any,
    noise: Array,
    actor: Weights,
) -> tuple[Array, Array]:
    """The combined Q values of all critics for a sampled action, and the log probability of the action.

    For discrete actions, both are expectations over the actor's distribution, with the minimum over the
    critics. Continuous actions and their log probabilities are those before rescaling from [-1, 1] to the
    action space.
    """
    outputs = policy.outputs(actor, observation)
    if isinstance(policy.distribution, TanhNormal):
        action, log_prob = policy.distribution.sample_and_log_prob(outputs, noise)
        return combine(critics(critic_params, observation, action)), log_prob
    log_prob, probability = jax.nn.log_softmax(outputs), jax.nn.softmax(outputs)
    q_value = jnp.min(critics(critic_params, observation), axis=0)
    return jnp.sum(probability * q_value, axis=-1), jnp.sum(probability * log_prob, axis=-1)


def min_of_critics(q_values: Array) -> Array:
    """The minimum `[N]` over the critics `[critics, N, 1]`."""
    return jnp.min(q_values, axis=0)[:, 0]


def drop_largest(quantiles: Array, dropped: int) -> Array:
    """The quantiles `[critics, N, M]` of all critics without the largest, `dropped` per critic: `[K, N]`."""
    count, size, each = quantiles.shape
    pooled = jnp.moveaxis(quantiles, 1, -1).reshape(count * each, size)
    return jnp.sort(pooled, axis=0)[: count * (each - dropped)]


def mean_of_quantiles(quantiles: Array) -> Array:
    """The mean `[N]` of the quantiles `[critics, N, M]` of all critics."""
    return jnp.mean(quantiles, axis=(0, 2))


def critic_loss(
    policy: ActorPolicy, critics: Critics, td_target: Array, batch: Any, critic_params: Weights
) -> tuple[Array, Metrics]:
    r"""The mean squared error between the critics and the TD target y, computed with the target critics.

    $$L_Q = \frac{1}{2} \sum_i \mathbb{E}\big[(Q_i(s, a) - y)^2\big], \qquad
    y = R + \gamma^n (\min_i \bar Q_i(s', a') - \alpha \log \pi(a' | s')), \quad a' \sim \pi$$
    """
    if isinstance(policy.distribution, TanhNormal):
        action = policy.distribution.to_unit_range(batch["action"])
        q_values = critics(critic_params, batch["observation"], action)
    else:
        action = batch["action"].astype(jnp.int32)[None, :, None]
        q_values = jnp.take_along_axis(critics(critic_params, batch["observation"]), action, axis=-1)
    if q_values.shape[-1] > 1:
        loss = quantile_huber_loss(q_values, td_target)
    else:
        loss = 0.5 * jnp.sum(jnp.mean((q_values[..., 0] - td_target) ** 2, axis=-1))
    return loss, {"critic_loss": loss, "q_value": jnp.mean(q_values)}


def quantile_huber_loss(quantiles: Array, td_target: Array) -> Array:
    r"""With M quantiles per critic (TQC), the quantile Huber loss, given K targets y.

    $$L_Q = \sum_i \mathbb{E}\Big[\frac{1}{M K} \sum_{m, k}
    \big|\tau_m - \mathbf{1}[y_k < \theta_{i, m}(s, a)]\big| \,
    \mathrm{huber}(y_k - \theta_{i, m}(s, a))\Big], \qquad
    y_k = R + \gamma^n (\bar\theta_k(s', a') - \alpha \log \pi(a' | s'))$$

    The quantile $\theta_{i, m}$ of critic i has the level $\tau_m = (2 m - 1) / 2 M$. The $\bar\theta_k$ are
    the quantiles of both target critics without the largest, `dropped_quantiles` per critic.
    """
    count = quantiles.shape[-1]
    tau = (jnp.arange(count) + 0.5) / count
    td_error = td_target[:, None, :, None] - quantiles  # [K, critics, N, M]
    losses = jnp.abs(tau - (td_error < 0)) * optax.huber_loss(td_error)
    return jnp.sum(jnp.mean(losses, axis=(0, 2, 3)))


def actor_loss(
    policy: ActorPolicy,
    critics: Critics,
    combine: Combine,
    critic_params: Weights,
    temperature: Array,
    noise: Array,
    batch: Any,
    actor: Weights,
) -> tuple[Array, Metrics]:
    r"""The actor's log probability, weighted by the temperature, minus its value.

    $$L_\pi = \mathbb{E}\big[\alpha \log \pi(a | s) - \min_i Q_i(s, a)\big], \qquad a \sim \pi$$

    With quantiles, the mean of all quantiles of both critics replaces the minimum.
    """
    q_value, log_prob = value_and_log_prob(
        policy, critics, combine, critic_params, batch["observation"], noise, actor
    )
    loss = jnp.mean(temperature * log_prob - q_value)
    return loss, {"actor_loss": loss, "entropy": -jnp.mean(log_prob)}


def target_entropy(config: Config, policy: ActorPolicy, observation: Any) -> Array:
    """The setting, or its default, which depends on the number of legal actions: the mean over a batch."""
    if config.target_entropy is not None:
        return config.target_entropy
    if isinstance(policy.distribution, TanhNormal):
        return -float(policy.distribution.size)
    if not has_action_mask(policy.observation_space):
        return 0.6 * float(np.log(policy.distribution.output_size))
    legal = jnp.sum(observation["action_mask"].astype(bool), axis=-1)
    return 0.6 * jnp.mean(jnp.log(jnp.maximum(legal, 1)))


def learner(config: Config, task: Task, policy: ActorPolicy) -> Learner:
    """Adam for actor, critics and temperature. The workers receive the actor's weights."""
    require_policy(policy, ActorPolicy, config.algorithm)
    distribution = policy.distribution
    action_size = distribution.size if isinstance(distribution, TanhNormal) else 0
    if config.num_quantiles > 1 and not action_size:
        raise SpaceError(
            f"num_quantiles={config.num_quantiles} needs a Box action space, and this environment's action "
            f"space is {policy.action_space}; set num_quantiles to 1"
        )
    combine_target = combine_actor = min_of_critics
    if config.num_quantiles > 1:
        combine_target = partial(drop_largest, dropped=config.dropped_quantiles)
        combine_actor = mean_of_quantiles
    critics = Critics(
        policy.observation_space,
        action_size=action_size,
        outputs=config.num_quantiles if action_size else distribution.output_size,
        count=2,
        hidden=config.hidden,
        activation=config.activation,
    )
    adam = optax.scale_by_adam()

    def init_state(actor: Weights) -> dict[str, Any]:
        critic_params = critics.init(task.seed)
        log_temperature = jnp.log(jnp.float32(config.initial_temperature))
        parts = {"actor": actor, "critic": critic_params, "temperature": log_temperature}
        opt_states = {name: adam.init(part) for name, part in parts.items()}
        return {
            "critic": critic_params,
            "target_critic": critic_params,
            "log_temperature": log_temperature,
            "adam": opt_states,
        }

    def update(weights: Weights, state: Any, batch: Any, noise: Array, schedules: Any) -> Any:
        learning_rate, opt_states = schedules["learning_rate"], state["adam"]
        temperature = jnp.exp(state["log_temperature"])

        return_t, discount_t = n_step_returns(batch, config.gamma)
        q_value_t, log_prob_t = value_and_log_prob(
            policy,
            critics,
            combine_target,
            state["target_critic"],
            batch["next_observation"],
            noise[0],
            weights,
        )
        td_target = return_t + discount_t * (q_value_t - temperature * log_prob_t)
        grads, critic_metrics = compute_grads(
            partial(critic_loss, policy, critics, td_target, batch), state["critic"]
        )
        critic_params, critic_opt = optimizer_step(
            adam, learning_rate, grads, opt_states["critic"], state["critic"]
        )

        grads, actor_metrics = compute_grads(
            partial(actor_loss, policy, critics, combine_actor, critic_params, temperature, noise[1], batch),
            weights,
        )
        actor, actor_opt = optimizer_step(adam, learning_rate, grads, opt_states["actor"], weights)

        log_temperature, temperature_opt = state["log_temperature"], opt_states["temperature"]
        if config.learn_temperature:  # the loss is log(alpha) * (entropy - target_entropy)
            excess = actor_metrics["entropy"] - target_entropy(config, policy, batch["observation"])
            actor_metrics["ent_coef_loss"] = log_temperature * excess
            step, temperature_opt = adam.update(excess, temperature_opt)
            log_temperature = log_temperature - learning_rate * step

        state = {
            "critic": critic_params,
            "target_critic": polyak_update(state["target_critic"], critic_params, config.tau),
            "log_temperature": log_temperature,
            "adam": {"actor": actor_opt, "critic": critic_opt, "temperature": temperature_opt},
        }
        metrics = critic_metrics | actor_metrics | {"ent_coef": temperature}
        actor |= {"epsilon": jnp.float32(0.0)}  # until the first update, actions were uniform
        return actor, state, metrics

    noise_shape = (2, config.batch_size, action_size)
    return Learner(
        policy,
        update,
        adam,
        init_state=init_state,
        random_inputs=lambda random, *updates: random.standard_normal((*updates, *noise_shape), np.float32),
        schedules=config.schedules,
        seed=task.seed,
        total_steps=task.steps,
        concurrent=True,  # two critics: XLA computes them in parallel
    )


def make_buffer(workers: WorkerSet, config: Config, batch_size: int) -> ReplayBuffer | DeviceReplay:
    """A replay buffer of transitions, sampled uniformly."""
    return replay_buffer(
        workers,
        buffer_size=config.buffer_size,
        batch_size=batch_size,
        learning_starts=config.learning_starts,
        n_step=config.n_step,
        replay=config.replay,
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """Alternates between storing a rollout per worker and updates on replayed batches, several per call."""
    updates = updates_per_call(workers, config)
    buffer = make_buffer(workers, config, config.batch_size * updates)
    store = ParallelRollouts(workers).gather_sync().for_each(StoreToBuffer(buffer))
    train = Replay(buffer).for_each(TrainOneStep(workers, updates=updates))
    calls = config.updates_per_rollout() // updates
    reports = flow.union([store, train], weights=[1, calls])
    every = config.rounds_per_report(len(workers.actors))
    return ReportMetrics(reports, workers, every, calls_per_rollout=calls)


SAC = Algorithm("sac", Config, worker, learner, plan)
