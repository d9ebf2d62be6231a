"""Soft actor-critic (Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905).

The actor is to be as good as two critics say and as undecided as it can; how much the second counts, the
temperature, is learned. For discrete actions as in Christodoulou (2019, https://arxiv.org/abs/1910.07207).
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
from rollstream.limits import Fraction, NonNegativeFloat
from rollstream.rl.action_distributions import ActorPolicy, Categories, Squashed
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
    """Settings of SAC."""

    algorithm: ClassVar[str] = "sac"

    target_rate: Fraction = 0.005
    """Tau: how far target networks move to the critics in an update."""
    initial_temperature: NonNegativeFloat = 1.0
    learn_temperature: bool = True
    target_entropy: float | None = None
    """What the actor's entropy is kept at; left out, minus how many numbers an action has, or for discrete
    actions 0.6 of the most there can be."""

    def policy(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> ActorPolicy:
        """The policy for an environment's spaces."""
        require_actions(actions, (spaces.Box, spaces.Discrete), self.algorithm)
        behaviour = Categories(actions) if isinstance(actions, spaces.Discrete) else Squashed(actions)
        network = partial(network_head, hidden=self.hidden, activation=self.activation)
        return ActorPolicy(observations, actions, behaviour, network)

    def wanted_entropy(self, policy: ActorPolicy) -> float:
        """What the actor's entropy is kept at."""
        if self.target_entropy is not None:
            return self.target_entropy
        if isinstance(policy.behaviour, Squashed):
            return -float(policy.behaviour.size)
        return 0.6 * float(np.log(policy.behaviour.outputs))


def soft(
    policy: ActorPolicy, critics: Critics, actor: Weights, critic: Weights, observation: Any, normal: Array
) -> tuple[Array, Array]:
    """What the lower of two critics expects of the actor, and how decided that is: minus its entropy."""
    outputs = policy.outputs(actor, observation)
    if isinstance(policy.behaviour, Squashed):
        action, log_prob = policy.behaviour.sample(outputs, normal)
        return jnp.min(critics(critic, observation, action), axis=0)[:, 0], log_prob
    log_prob, probability = jax.nn.log_softmax(outputs), jax.nn.softmax(outputs)
    value = jnp.min(critics(critic, observation), axis=0)
    return jnp.sum(probability * value, axis=-1), jnp.sum(probability * log_prob, axis=-1)


def critic_loss(
    policy: ActorPolicy, critics: Critics, critic: Weights, target: Array, rows: Any
) -> tuple[Array, Metrics]:
    r"""How far the critics are from their target.

    $$L_Q = \frac{1}{2} \sum_i \mathbb{E}\big[(Q_i(s, a) - y)^2\big]$$
    """
    if isinstance(policy.behaviour, Squashed):
        values = critics(critic, rows["observation"], policy.behaviour.unscaled(rows["action"]))[..., 0]
    else:
        action = rows["action"].astype(jnp.int32)[None, :, None]
        values = jnp.take_along_axis(critics(critic, rows["observation"]), action, axis=-1)[..., 0]
    loss = 0.5 * jnp.sum(jnp.mean((values - target) ** 2, axis=-1))
    return loss, {"critic_loss": loss, "value": jnp.mean(values)}


def actor_loss(
    policy: ActorPolicy,
    critics: Critics,
    critic: Weights,
    temperature: Array,
    normal: Array,
    actor: Weights,
    rows: Any,
) -> tuple[Array, Metrics]:
    r"""How decided the actor is, less what it is worth.

    $$L_\pi = \mathbb{E}\big[\alpha \log \pi(a | s) - \min_i Q_i(s, a)\big], \qquad a \sim \pi$$
    """
    value, log_prob = soft(policy, critics, actor, critic, rows["observation"], normal)
    loss = jnp.mean(temperature * log_prob - value)
    return loss, {"actor_loss": loss, "entropy": -jnp.mean(log_prob)}


def learner(config: Config, task: Task, policy: ActorPolicy) -> Learner:
    """The actor is what is published; critics, targets and temperature are kept beside it."""
    behaviour = policy.behaviour
    size = behaviour.size if isinstance(behaviour, Squashed) else 0
    critics = Critics(
        policy,
        outputs=1 if size else behaviour.outputs,
        actions=size,
        hidden=config.hidden,
        activation=config.activation,
    )
    adam, wanted = optax.scale_by_adam(), config.wanted_entropy(policy)

    def begin(actor: Weights) -> dict[str, Any]:
        critic = critics.init(task.seed)
        log_temperature = jnp.log(jnp.float32(config.initial_temperature))
        parts = {"actor": actor, "critic": critic, "temperature": log_temperature}
        moments = {name: adam.init(own) for name, own in parts.items()}
        return {"critic": critic, "target": critic, "log_temperature": log_temperature, "adam": moments}

    def update(weights: Weights, state: Any, rows: Any, noise: Array, settings: Any) -> Any:
        rate, adams = settings["learning_rate"], state["adam"]
        temperature = jnp.exp(state["log_temperature"])
        reward, goes_on = returns(rows, config.discount)
        value, log_prob = soft(policy, critics, weights, state["target"], rows["next_observation"], noise[0])
        target = reward + goes_on * (value - temperature * log_prob)

        slopes, metrics = jax.grad(lambda own: critic_loss(policy, critics, own, target, rows), has_aux=True)(
            state["critic"]
        )
        critic, critic_adam = descended(adam, rate, slopes, adams["critic"], state["critic"])

        slopes, more = jax.grad(
            lambda own: actor_loss(policy, critics, critic, temperature, noise[1], own, rows), has_aux=True
        )(trained(weights))
        changed, actor_adam = descended(adam, rate, slopes, adams["actor"], weights)

        surplus = more["entropy"] - wanted
        step, temperature_adam = adam.update(surplus, adams["temperature"])
        log_temperature = state["log_temperature"] - rate * step * config.learn_temperature
        state = {
            "critic": critic,
            "target": polyak(state["target"], critic, config.target_rate),
            "log_temperature": log_temperature,
            "adam": {"actor": actor_adam, "critic": critic_adam, "temperature": temperature_adam},
        }
        metrics |= more | {"ent_coef": temperature}
        return changed | {"epsilon": jnp.float32(0.0)}, state, metrics

    shape = (2, config.batch_size, size)
    return Learner(
        policy,
        update,
        adam,
        begin=begin,
        noise=lambda random: random.standard_normal(shape, np.float32),
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


SAC = Algorithm("sac", Config, Config.worker, learner, plan)
