"""Deep Q-networks (Mnih et al., 2015, doi:10.1038/nature14236), and what Rainbow adds to them.

One loss, whose options are double (arXiv:1509.06461), dueling (arXiv:1511.06581), several steps, prioritized
(arXiv:1511.05952) and distributional (C51, arXiv:1707.06887). With all of them on it is Rainbow
(arXiv:1710.02298) less its noisy networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import optax

from rollstream import flow
from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Sizes
from rollstream.replay import importance_weights
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.learner import Learner, Metrics, descended, trained
from rollstream.rl.networks import q_network
from rollstream.rl.off_policy import OffPolicyConfig, returns
from rollstream.rl.operators import ParallelRollouts, Report, ReportMetrics, TrainOneStep
from rollstream.rl.params import Weights
from rollstream.rl.q_policy import QPolicy
from rollstream.rl.replay_operators import Replay, StoreToBuffer, UpdatePriorities, UpdateTarget
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(OffPolicyConfig):
    """Settings of DQN."""

    algorithm: ClassVar[str] = "dqn"

    rollout_length: PositiveInt = 4
    batch_size: PositiveInt = 32
    buffer_size: PositiveInt = 100_000
    learning_starts: NonNegativeInt = 1_000
    learning_rate: NonNegativeFloat = 1e-4
    hidden: Sizes = (64, 64)
    max_gradient_norm: NonNegativeFloat = 10.0
    target_every: PositiveInt = 250
    """Updates from one target network to the next."""
    exploration_fraction: Fraction = 0.1
    """Part of the training in which random actions become as rare as they will be."""
    final_epsilon: Fraction = 0.05
    """How often actions are random after that."""
    double: bool = True
    """Whether the action is chosen by the network and valued by the target network."""
    dueling: bool = False
    """Whether the network tells the value of a state and how actions compare apart."""
    priority_exponent: NonNegativeFloat = 0.0
    """How much more often surprising transitions are learned from; 0 is all alike."""
    importance_exponent: NonNegativeFloat = 0.4
    """How much is made up for that at the beginning; all of it at the end."""
    atoms: PositiveInt = 1
    """If more than 1, how many values a distribution of values is over; 51 is usual."""
    value_range: tuple[float, float] = (-10.0, 10.0)
    """The least and the largest of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.atoms > 1 and not self.value_range[0] < self.value_range[1]:
            raise RollstreamError(
                f"value_range={self.value_range}: give the least value first, then the largest"
            )

    def settings(self, progress: float) -> dict[str, float]:
        """What changes in the course of the training."""
        explored = min(1.0, progress / self.exploration_fraction) if self.exploration_fraction else 1.0
        return super().settings(progress) | {
            "epsilon": 1.0 + explored * (self.final_epsilon - 1.0),
            "beta": self.importance_exponent + progress * (1.0 - self.importance_exponent),
        }

    def policy(self, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> QPolicy:
        """The policy for an environment's spaces."""
        network = partial(
            q_network,
            hidden=self.hidden,
            activation=self.activation,
            dueling=self.dueling,
            atoms=self.atoms,
        )
        return QPolicy(
            observations,
            actions,
            network,
            atoms=self.atoms,
            bounds=self.value_range,
            name=self.algorithm,
        )


def loss(
    policy: QPolicy, config: Config, target: Weights, beta: Array, weights: Weights, rows: Any
) -> tuple[Array, Metrics]:
    r"""How far values are from what was seen and is expected after it.

    $$L = \mathbb{E}\big[w \, \mathrm{huber}(R + \gamma^n \bar Q(s', a') - Q(s, a))\big],
    \qquad a' = \arg\max_a Q(s', a)$$

    or, with atoms, the cross entropy to the distribution of the same sum. The surprise is its priority.
    """
    outputs = policy.outputs(weights, rows["observation"])
    chosen = jnp.take_along_axis(outputs, _one(rows["action"], outputs), axis=1)[:, 0]
    after = jax.lax.stop_gradient(policy.outputs(target, rows["next_observation"]))
    judge = jax.lax.stop_gradient(weights) if config.double else target
    best = jnp.argmax(policy.values(judge, rows["next_observation"]), axis=-1)
    after = jnp.take_along_axis(after, _one(best, after), axis=1)[:, 0]
    reward, goes_on = returns(rows, config.discount)
    if policy.atoms is None:
        surprise = jnp.abs(reward + goes_on * after - chosen)
        each, value = optax.huber_loss(surprise), chosen
    else:
        wanted = projected(policy.atoms, reward, goes_on, jax.nn.softmax(after))
        each = surprise = -jnp.sum(wanted * jax.nn.log_softmax(chosen), axis=-1)
        value = jax.nn.softmax(chosen) @ policy.atoms
    metrics = {"value": jnp.mean(value)}
    if config.priority_exponent:
        each, metrics["surprise"] = (
            each * importance_weights(rows["relative_probability"], beta, 1.0),
            surprise,
        )
    total = jnp.mean(each)
    return total, metrics | {"loss": total}


def projected(atoms: Array, reward: Array, goes_on: Array, probabilities: Array) -> Array:
    """The distribution of `reward + goes_on * atoms`, on the atoms: each shares with its two neighbours."""
    step = atoms[1] - atoms[0]
    moved = jnp.clip(reward[:, None] + goes_on[:, None] * atoms, atoms[0], atoms[-1])
    near = jnp.clip(1 - jnp.abs(moved[:, None, :] - atoms[:, None]) / step, 0, 1)
    return jnp.einsum("nij,nj->ni", near, probabilities)


def _one(index: Array, outputs: Array) -> Array:
    """An index along the second axis, for `take_along_axis`."""
    return index.reshape(-1, *(1 for _ in outputs.shape[1:])).astype(jnp.int32)


def learner(config: Config, task: Task, policy: QPolicy) -> Learner:
    """Adam, and a target network beside it."""
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_gradient_norm), optax.scale_by_adam())

    def begin(weights: Weights) -> dict[str, Any]:
        return {"optimizer": optimizer.init(weights), "target": weights}

    def update(weights: Weights, state: Any, rows: Any, _: Array, settings: Any) -> Any:
        objective = partial(loss, policy, config, state["target"], settings["beta"])
        slopes, metrics = jax.grad(lambda own: objective(own, rows), has_aux=True)(trained(weights))
        changed, moments = descended(
            optimizer, settings["learning_rate"], slopes, state["optimizer"], weights
        )
        return changed | {"epsilon": settings["epsilon"]}, state | {"optimizer": moments}, metrics

    return Learner(
        policy,
        update,
        optimizer,
        begin=begin,
        settings=config.settings,
        seed=task.seed,
        total_steps=task.steps,
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """A few steps are stored, then a few batches are learned from, in turn."""
    buffer = config.buffer(workers)
    stored = ParallelRollouts(workers).gather_sync().for_each(StoreToBuffer(buffer))
    learned = (
        Replay(buffer)
        .for_each(TrainOneStep(workers))
        .for_each(UpdatePriorities(buffer))
        .for_each(UpdateTarget(workers, config.target_every))
    )
    both = flow.union([stored, learned], weights=[1, config.updates])
    return ReportMetrics(both, workers, every=config.rounds_reported)


DQN = Algorithm("dqn", Config, Config.worker, learner, plan)
