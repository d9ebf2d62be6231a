"""Twin delayed DDPG (Fujimoto et al., 2018, https://arxiv.org/abs/1802.09477).

A deterministic actor follows two critics, of which the lower counts; it is updated less often than they are,
and their targets are smoothed by noise. Without all that it is `ddpg`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces

from rollstream import flow
from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, PositiveInt
from rollstream.rl.action_distributions import ActorPolicy, Steady
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.learner import Learner, Metrics, descended, trained
from rollstream.rl.networks import network_head
from rollstream.rl.off_policy import Critics, OffPolicyConfig, polyak, returns
from rollstream.rl.operators import ParallelRollouts, Report, ReportMetrics, TrainOneStep
from rollstream.rl.params import Weights
from rollstream.rl.replay_operators import Replay, StoreToBuffer
from rollstream.rl.spaces import require_actions
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(OffPolicyConfig):
    """Settings of TD3."""

    algorithm: ClassVar[str] = "td3"

    learning_rate: NonNegativeFloat = 1e-3
    target_rate: Fraction = 0.005
    """Tau: how far target networks move to the others, whenever the actor is updated."""
    exploration_noise: NonNegativeFloat = 0.1
    """The deviation of what is added to actions while learning, where actions are between -1 and 1."""
    critics: PositiveInt = 2
    """Of which the lowest counts."""
    policy_delay: PositiveInt = 2
    """Updates of the critics for one of the actor."""
    target_noise: NonNegativeFloat = 0.2
    """The deviation of what is added to the actions that targets are computed for."""
    target_noise_clip: NonNegativeFloat = 0.5
    """The most that is added."""

    def policy(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> ActorPolicy:
        """The policy for an environment's spaces."""
        require_actions(actions, (spaces.Box,), self.algorithm)
        assert isinstance(actions, spaces.Box)
        network = partial(network_head, hidden=self.hidden, activation=self.activation, gain=0.01)
        return ActorPolicy(observations, actions, Steady(actions, self.exploration_noise), network)


def action_of(policy: ActorPolicy, actor: Weights, observation: Any) -> Array:
    """What the actor does, between -1 and 1."""
    return jnp.tanh(policy.outputs(actor, observation))


def critic_loss(
    policy: ActorPolicy, critics: Critics, target: Array, critic: Weights, rows: Any
) -> tuple[Array, Metrics]:
    r"""How far the critics are from their target.

    $$L_Q = \sum_i \mathbb{E}\big[(Q_i(s, a) - y)^2\big]$$
    """
    behaviour = policy.behaviour
    assert isinstance(behaviour, Steady)
    values = critics(critic, rows["observation"], behaviour.unscaled(rows["action"]))[..., 0]
    loss = jnp.sum(jnp.mean((values - target) ** 2, axis=-1))
    return loss, {"critic_loss": loss, "value": jnp.mean(values)}


def actor_loss(policy: ActorPolicy, critics: Critics, critic: Weights, actor: Weights, rows: Any) -> Array:
    r"""Minus what the actor is worth to the first critic.

    $$L_\pi = -\mathbb{E}\big[Q_1(s, \pi(s))\big]$$
    """
    observation = rows["observation"]
    return -jnp.mean(critics(critic, observation, action_of(policy, actor, observation))[0])


def learner(config: Config, task: Task, policy: ActorPolicy) -> Learner:
    """The actor is what is published; critics and targets are kept beside it."""
    size = policy.behaviour.outputs
    critics = Critics(
        policy,
        outputs=1,
        actions=size,
        count=config.critics,
        hidden=config.hidden,
        activation=config.activation,
    )
    adam = optax.scale_by_adam()

    def begin(actor: Weights) -> dict[str, Any]:
        critic = critics.init(task.seed)
        return {
            "critic": critic,
            "targets": {"actor": actor, "critic": critic},
            "adam": {"actor": adam.init(actor), "critic": adam.init(critic)},
            "updates": jnp.int32(0),
            "actor_loss": jnp.float32(0),
        }

    def update(weights: Weights, state: Any, rows: Any, normal: Array, settings: Any) -> Any:
        rate, targets, beyond = settings["learning_rate"], state["targets"], rows["next_observation"]
        noise = jnp.clip(config.target_noise * normal, -config.target_noise_clip, config.target_noise_clip)
        action = jnp.clip(action_of(policy, targets["actor"], beyond) + noise, -1, 1)
        reward, goes_on = returns(rows, config.discount)
        target = reward + goes_on * jnp.min(critics(targets["critic"], beyond, action), axis=0)[:, 0]

        slopes, metrics = jax.grad(lambda own: critic_loss(policy, critics, target, own, rows), has_aux=True)(
            state["critic"]
        )
        critic, critic_adam = descended(adam, rate, slopes, state["adam"]["critic"], state["critic"])

        def improved() -> tuple[Any, ...]:
            loss, slopes = jax.value_and_grad(lambda own: actor_loss(policy, critics, critic, own, rows))(
                trained(weights)
            )
            actor, actor_adam = descended(adam, rate, slopes, state["adam"]["actor"], trained(weights))
            moved = {"actor": actor, "critic": critic}
            followed = {name: polyak(targets[name], own, config.target_rate) for name, own in moved.items()}
            return actor, actor_adam, followed, loss

        def left() -> tuple[Any, ...]:
            return trained(weights), state["adam"]["actor"], targets, state["actor_loss"]

        updates = state["updates"] + 1
        actor, actor_adam, targets, loss = jax.lax.cond(updates % config.policy_delay == 0, improved, left)
        state = {
            "critic": critic,
            "targets": targets,
            "adam": {"actor": actor_adam, "critic": critic_adam},
            "updates": updates,
            "actor_loss": loss,
        }
        return actor | {"epsilon": jnp.float32(0.0)}, state, metrics | {"actor_loss": loss}

    return Learner(
        policy,
        update,
        adam,
        begin=begin,
        noise=lambda random: random.standard_normal((config.batch_size, size), np.float32),
        settings=config.settings,
        seed=task.seed,
        total_steps=task.steps,
        side_by_side=True,
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """A step is stored, then a batch is learned from, in turn."""
    buffer = config.buffer(workers)
    stored = ParallelRollouts(workers).gather_sync().for_each(StoreToBuffer(buffer))
    learned = Replay(buffer).for_each(TrainOneStep(workers))
    both = flow.union([stored, learned], weights=[1, config.updates])
    return ReportMetrics(both, workers, every=config.rounds_reported)


TD3 = Algorithm("td3", Config, Config.worker, learner, plan)
