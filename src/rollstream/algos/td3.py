"""Twin delayed DDPG, TD3 (Fujimoto et al., 2018, https://arxiv.org/abs/1802.09477).

A deterministic actor maximizes the first of two critics, whose targets use the lower of both and smoothing
noise on the target action. The actor is updated less often than the critics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import gymnasium
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces

from rollstream import flow
from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, NonNegativeInt, OptionalSizes, PositiveInt, Ratio
from rollstream.replay.buffer import ReplayBuffer
from rollstream.rl.action_distributions import NoisyDeterministic
from rollstream.rl.actor_policy import ActorPolicy
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.critics import Critics
from rollstream.rl.device_replay import DeviceReplay
from rollstream.rl.learner import Learner
from rollstream.rl.networks import head_network
from rollstream.rl.off_policy import AlternatingConfig, replay_buffer, updates_per_call
from rollstream.rl.operators import ParallelRollouts, Report, ReportMetrics, TrainOneStep
from rollstream.rl.params import Weights, trainable
from rollstream.rl.policy import require_policy
from rollstream.rl.replay_operators import Replay, StoreToBuffer
from rollstream.rl.rollout import rollout_for_replay
from rollstream.rl.spaces import require_action_space
from rollstream.rl.updates import Metrics, compute_grads, n_step_returns, optimizer_step, polyak_update
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(AlternatingConfig):
    """Hyperparameters of TD3."""

    algorithm: ClassVar[str] = "td3"

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
    """Number of transitions in the replay buffer before the first update; actions are uniform until then."""
    learning_rate: NonNegativeFloat = 1e-3
    """Learning rate of Adam, for actor and critics."""
    gamma: Fraction = 0.99
    """Discount factor (gamma)."""
    tau: Fraction = 0.005
    """Soft update coefficient of the target networks (tau, Polyak averaging)."""
    n_step: PositiveInt = 1
    """n of n-step returns."""
    exploration_noise: NonNegativeFloat = 0.1
    """Standard deviation of the Gaussian exploration noise, for actions scaled to [-1, 1]."""
    num_critics: PositiveInt = 2
    """Number of critics; targets use the lowest."""
    policy_delay: PositiveInt = 2
    """Number of critic updates per actor update."""
    target_policy_noise: NonNegativeFloat = 0.2
    """Standard deviation of the smoothing noise on target actions (target policy smoothing)."""
    target_noise_clip: NonNegativeFloat = 0.5
    """Maximum absolute value of the smoothing noise."""
    hidden: OptionalSizes = None
    """Hidden layer sizes of the actor and of each critic; by default (256, 256), and none after the CNN of an
    actor of images."""
    activation: Literal["tanh", "relu", "silu"] = "relu"
    """Activation function of the hidden layers."""
    clip_rewards: bool = False
    """Clip rewards to their sign (-1, 0 or 1)."""
    report_every: PositiveInt = 1_000
    """Number of environment steps per report."""

    def schedules(self, progress: float) -> dict[str, float]:  # noqa: ARG002
        """Scheduled values, given the fraction of training completed."""
        return {"learning_rate": self.learning_rate}


def make_policy(
    config: Config, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> ActorPolicy:
    """The deterministic actor for the spaces of an environment."""
    require_action_space(action_space, (spaces.Box,), config.algorithm)
    distribution = NoisyDeterministic(action_space, config.exploration_noise)
    network = partial(head_network, hidden=config.hidden, activation=config.activation, gain=0.01)
    return ActorPolicy(observation_space, action_space, distribution, network)


def worker(config: Config, task: Task) -> WorkerSpec:
    """Workers act with exploration noise and send rollouts to the replay buffer."""
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


def actor_action(policy: ActorPolicy, actor: Weights, observation: Any) -> Array:
    """The actor's action, scaled to [-1, 1]."""
    return jnp.tanh(policy.outputs(actor, observation))


def critic_loss(
    policy: ActorPolicy, critics: Critics, td_target: Array, batch: Any, critic_params: Weights
) -> tuple[Array, Metrics]:
    r"""The mean squared error between the critics and the TD target y, computed with the target networks.

    $$L_Q = \sum_i \mathbb{E}\big[(Q_i(s, a) - y)^2\big], \qquad
    y = R + \gamma^n \min_i \bar Q_i(s', \bar\pi(s') + \mathrm{clip}(\epsilon, -c, c))$$
    """
    assert isinstance(policy.distribution, NoisyDeterministic)
    action = policy.distribution.to_unit_range(batch["action"])
    q_values = critics(critic_params, batch["observation"], action)[..., 0]
    loss = jnp.sum(jnp.mean((q_values - td_target) ** 2, axis=-1))
    return loss, {"critic_loss": loss, "q_value": jnp.mean(q_values)}


def actor_loss(
    policy: ActorPolicy, critics: Critics, critic_params: Weights, batch: Any, actor: Weights
) -> tuple[Array, Metrics]:
    r"""Minus the first critic's value of the actor's action.

    $$L_\pi = -\mathbb{E}\big[Q_1(s, \pi(s))\big]$$
    """
    observation = batch["observation"]
    action = actor_action(policy, actor, observation)
    loss = -jnp.mean(critics.first(critic_params, observation, action))
    return loss, {"actor_loss": loss}


def learner(config: Config, task: Task, policy: ActorPolicy) -> Learner:
    """Adam for actor and critics, with target networks of both. The workers receive the actor's weights."""
    require_policy(policy, ActorPolicy, config.algorithm)
    action_size = policy.distribution.output_size
    critics = Critics(
        policy.observation_space,
        action_size=action_size,
        count=config.num_critics,
        hidden=config.hidden,
        activation=config.activation,
    )
    adam = optax.scale_by_adam()

    def init_state(actor: Weights) -> dict[str, Any]:
        critic_params = critics.init(task.seed)
        return {
            "critic": critic_params,
            "targets": {"actor": actor, "critic": critic_params},
            "adam": {"actor": adam.init(actor), "critic": adam.init(critic_params)},
            "actor_loss": jnp.float32(0),
        }

    def update_critics(weights: Weights, state: Any, batch: Any, normal: Array, schedules: Any) -> Any:
        learning_rate, targets = schedules["learning_rate"], state["targets"]

        noise_clip = config.target_noise_clip
        noise = jnp.clip(config.target_policy_noise * normal, -noise_clip, noise_clip)
        next_observation = batch["next_observation"]
        action_t = jnp.clip(actor_action(policy, targets["actor"], next_observation) + noise, -1, 1)
        q_value_t = jnp.min(critics(targets["critic"], next_observation, action_t), axis=0)[:, 0]
        return_t, discount_t = n_step_returns(batch, config.gamma)
        td_target = return_t + discount_t * q_value_t
        grads, metrics = compute_grads(
            partial(critic_loss, policy, critics, td_target, batch), state["critic"]
        )
        critic_params, critic_opt = optimizer_step(
            adam, learning_rate, grads, state["adam"]["critic"], state["critic"]
        )
        state = state | {"critic": critic_params, "adam": state["adam"] | {"critic": critic_opt}}
        weights = weights | {"epsilon": jnp.float32(0.0)}  # until the first update, actions were uniform
        return weights, state, metrics | {"actor_loss": state["actor_loss"]}

    def update_all(weights: Weights, state: Any, batch: Any, normal: Array, schedules: Any) -> Any:
        weights, state, metrics = update_critics(weights, state, batch, normal, schedules)
        grads, actor_metrics = compute_grads(
            partial(actor_loss, policy, critics, state["critic"], batch), trainable(weights)
        )
        weights, actor_opt = optimizer_step(
            adam, schedules["learning_rate"], grads, state["adam"]["actor"], weights
        )
        online = {"actor": trainable(weights), "critic": state["critic"]}
        targets = {
            name: polyak_update(state["targets"][name], params, config.tau) for name, params in online.items()
        }
        state = state | {"targets": targets, "adam": state["adam"] | {"actor": actor_opt}} | actor_metrics
        return weights, state, metrics | actor_metrics

    noise_shape = (config.batch_size, action_size)
    return Learner(
        policy,
        [update_critics] * (config.policy_delay - 1) + [update_all],
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


TD3 = Algorithm("td3", Config, worker, learner, plan)
