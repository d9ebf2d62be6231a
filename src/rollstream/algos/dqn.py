"""Deep Q-networks, DQN (Mnih et al., 2015, doi:10.1038/nature14236), with the extensions of Rainbow.

Double Q-learning (arXiv:1509.06461) is on by default; dueling networks (arXiv:1511.06581), n-step returns,
prioritized replay (arXiv:1511.05952) and distributional RL (C51, arXiv:1707.06887) are options. All of them
together are Rainbow (arXiv:1710.02298) without noisy networks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import gymnasium
import jax
import jax.numpy as jnp
import optax

from rollstream import flow
from rollstream.engine import RollstreamError
from rollstream.flow import Iter
from rollstream.limits import Fraction, NonNegativeFloat, NonNegativeInt, OptionalSizes, PositiveInt, Ratio
from rollstream.replay import importance_weights
from rollstream.replay.buffer import ReplayBuffer
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.device_replay import DeviceReplay
from rollstream.rl.learner import Learner
from rollstream.rl.networks import q_network
from rollstream.rl.off_policy import AlternatingConfig, OffPolicyConfig, replay_buffer, updates_per_call
from rollstream.rl.operators import ParallelRollouts, Report, ReportMetrics, TrainOneStep
from rollstream.rl.params import Weights, trainable
from rollstream.rl.policy import require_policy
from rollstream.rl.q_policy import QPolicy, select_action
from rollstream.rl.replay_operators import Replay, StoreToBuffer, UpdatePriorities
from rollstream.rl.rollout import rollout_for_replay
from rollstream.rl.updates import Metrics, compute_grads, n_step_returns, optimizer_step
from rollstream.rl.worker import PolicyMaker, WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class QLearningConfig(OffPolicyConfig):
    """Hyperparameters that DQN, Ape-X and R2D2 share."""

    algorithm: ClassVar[str]

    num_envs: PositiveInt = 1
    """Number of environments, divided evenly among the workers."""
    rollout_length: PositiveInt = 4
    """Number of steps per environment between updates (train_freq)."""
    batch_size: PositiveInt = 32
    """Number of transitions per gradient step."""
    buffer_size: PositiveInt = 100_000
    """Replay buffer size in transitions; the oldest are removed."""
    learning_starts: NonNegativeInt = 1_000
    """Number of transitions in the replay buffer before the first update."""
    learning_rate: NonNegativeFloat = 2.5e-4
    """Adam learning rate."""
    gamma: Fraction = 0.99
    """Discount factor (gamma)."""
    target_update_interval: PositiveInt = 250
    """Number of gradient steps (not environment steps) between updates of the target network."""
    double: bool = True
    """Double Q-learning: the online network selects the next action, the target network evaluates it."""
    dueling: bool = False
    """Dueling network: separate outputs for the state value and the advantages of actions."""
    n_step: PositiveInt = 1
    """n of n-step returns."""
    priority_exponent: NonNegativeFloat = 0.0
    """Priority exponent (alpha) of prioritized replay; 0 for uniform replay."""
    importance_exponent: NonNegativeFloat = 0.4
    """Initial importance-sampling exponent (beta) of prioritized replay, annealed to 1."""
    max_grad_norm: NonNegativeFloat = 10.0
    """Maximum global norm of gradients; larger ones are clipped."""
    hidden: OptionalSizes = None
    """Hidden layer sizes; by default (64, 64), and none after the CNN if observations are images."""
    activation: Literal["tanh", "relu", "silu"] = "relu"
    """Activation function of the hidden layers."""
    clip_rewards: bool = False
    """Clip rewards to their sign (-1, 0 or 1)."""
    report_every: PositiveInt = 1_000
    """Number of environment steps per report."""

    def schedules(self, progress: float) -> dict[str, float]:
        """Scheduled values, given the fraction of training completed."""
        return {
            "learning_rate": self.learning_rate,
            "epsilon": self.epsilon(progress),
            "beta": self.importance_exponent + progress * (1.0 - self.importance_exponent),
        }

    @abstractmethod
    def epsilon(self, progress: float) -> float:
        """Exploration rate: the probability of a random action."""


@dataclass(frozen=True)
class DistributionalConfig(QLearningConfig):
    """Hyperparameters of distributional Q-learning."""

    num_atoms: PositiveInt = 1
    """Number of atoms of distributional values (C51, usually 51); 1 for scalar Q values."""
    value_range: tuple[float, float] = (-10.0, 10.0)
    """Smallest and largest atom (v_min and v_max)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_atoms > 1 and not self.value_range[0] < self.value_range[1]:
            raise RollstreamError(
                f"value_range={self.value_range}: give the smallest value, then the largest"
            )


@dataclass(frozen=True)
class Config(DistributionalConfig, AlternatingConfig):
    """Hyperparameters of DQN."""

    algorithm: ClassVar[str] = "dqn"

    utd_ratio: Ratio = 0.25
    """Gradient steps per environment step (update-to-data ratio); rollouts are long enough for a whole number
    of them."""
    replay: Literal["host", "device"] = "host"
    """Where the replay buffer is: in the driver's memory (host), or on the learner's device (device), where
    sampling and the updates after a rollout are one compiled program."""
    exploration_fraction: Fraction = 0.1
    """Fraction of training over which epsilon decays linearly from 1 to final_epsilon."""
    final_epsilon: Fraction = 0.05
    """Final exploration rate, the probability of a random action (exploration_final_eps)."""

    def epsilon(self, progress: float) -> float:
        """Exploration rate: it decays linearly from 1, then stays at `final_epsilon`."""
        decayed = min(1.0, progress / self.exploration_fraction) if self.exploration_fraction else 1.0
        return 1.0 + decayed * (self.final_epsilon - 1.0)


def make_policy(
    config: DistributionalConfig, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> QPolicy:
    """The epsilon-greedy policy for the spaces of an environment."""
    network = partial(
        q_network,
        hidden=config.hidden,
        activation=config.activation,
        dueling=config.dueling,
        num_atoms=config.num_atoms,
    )
    return QPolicy(
        observation_space,
        action_space,
        network,
        num_atoms=config.num_atoms,
        value_range=config.value_range,
        algorithm=config.algorithm,
    )


def worker(config: DistributionalConfig, task: Task) -> WorkerSpec:
    """Workers act epsilon-greedily and send rollouts to the replay buffer."""
    return make_worker(config, task, partial(make_policy, config))


def make_worker(config: QLearningConfig, task: Task, policy: PolicyMaker) -> WorkerSpec:
    """Workers with a policy over Q values, unless the task has a policy."""
    return WorkerSpec(
        environment=task.environment,
        num_envs=task.envs_per_worker(config.num_envs),
        rollout_length=config.steps_per_rollout(),
        policy=task.policy or policy,
        postprocess=partial(rollout_for_replay, frame_stack=task.environment.frame_stack),
        bootstrap_values=(),
        for_replay=True,
        seed=task.seed,
        clip_rewards=config.clip_rewards,
    )


def loss(
    policy: QPolicy,
    config: QLearningConfig,
    target_params: Weights,
    beta: Array,
    batch: Any,
    weights: Weights,
) -> tuple[Array, Metrics]:
    r"""The Huber loss of the TD error; with prioritized replay, weighted by importance sampling (w).

    $$L = \mathbb{E}\big[w \, \mathrm{huber}(R + \gamma^n \bar Q(s', a') - Q(s, a))\big],
    \qquad a' = \arg\max_a Q(s', a)$$

    Without double Q-learning, a' is the best action of the target network. The discount is 0 where the
    episode terminated. With atoms, the loss is the cross entropy to the projected distribution of
    $R + \gamma^n \bar Z(s', a')$ (C51). The new priority of a transition is its absolute TD error, or its
    cross entropy.
    """
    outputs_tm1 = policy.outputs(weights, batch["observation"])
    q_tm1 = select_action(outputs_tm1, batch["action"])
    selector = jax.lax.stop_gradient(weights) if config.double else target_params
    action_t = jnp.argmax(policy.q_values(selector, batch["next_observation"]), axis=-1)
    outputs_t = jax.lax.stop_gradient(policy.outputs(target_params, batch["next_observation"]))
    q_t = select_action(outputs_t, action_t)
    return_t, discount_t = n_step_returns(batch, config.gamma)
    if policy.atoms is None:
        priority = jnp.abs(return_t + discount_t * q_t - q_tm1)
        losses, q_value = optax.huber_loss(priority), q_tm1
    else:
        probabilities = project_distribution(policy.atoms, return_t, discount_t, jax.nn.softmax(q_t))
        losses = priority = -jnp.sum(probabilities * jax.nn.log_softmax(q_tm1), axis=-1)
        q_value = jax.nn.softmax(q_tm1) @ policy.atoms
    metrics = {"q_value": jnp.mean(q_value)}
    if config.priority_exponent:
        # Relative to the least probable transition, whose weight is the largest: 1.
        losses = losses * importance_weights(batch["relative_probability"], beta, 1.0)
        metrics["priority"] = priority
    total = jnp.mean(losses)
    return total, metrics | {"loss": total}


def project_distribution(atoms: Array, return_t: Array, discount_t: Array, probabilities: Array) -> Array:
    """The distribution of `return_t + discount_t * atoms`, projected onto the atoms."""
    spacing = atoms[1] - atoms[0]
    shifted = jnp.clip(return_t[:, None] + discount_t[:, None] * atoms, atoms[0], atoms[-1])
    overlap = jnp.clip(1 - jnp.abs(shifted[:, None, :] - atoms[:, None]) / spacing, 0, 1)
    return jnp.einsum("nij,nj->ni", overlap, probabilities)


def learner(config: QLearningConfig, task: Task, policy: QPolicy) -> Learner:
    """Adam, and a target network."""
    require_policy(policy, QPolicy, config.algorithm)
    return make_learner(config, task, policy, partial(loss, policy, config))


def make_learner(
    config: QLearningConfig, task: Task, policy: QPolicy, loss: Callable[..., tuple[Array, Metrics]]
) -> Learner:
    """A learner with a loss of the target network's parameters, beta, a batch and the weights."""
    optimizer = optax.flatten(
        optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam())
    )

    def init_state(params: Weights) -> dict[str, Any]:
        return {"optimizer": optimizer.init(params), "target": params, "updates": jnp.int32(0)}

    def update(weights: Weights, state: Any, batch: Any, _: Array, schedules: Any) -> Any:
        batch_loss = partial(loss, state["target"], schedules["beta"], batch)
        grads, metrics = compute_grads(batch_loss, weights)
        weights, opt_state = optimizer_step(
            optimizer, schedules["learning_rate"], grads, state["optimizer"], weights
        )
        updates, params = state["updates"] + 1, trainable(weights)
        target = optax.periodic_update(params, state["target"], updates, config.target_update_interval)
        state = {"optimizer": opt_state, "target": target, "updates": updates}
        return weights | {"epsilon": schedules["epsilon"]}, state, metrics

    return Learner(
        policy,
        update,
        optimizer,
        init_state=init_state,
        schedules=config.schedules,
        seed=task.seed,
        total_steps=task.steps,
    )


def make_buffer(workers: WorkerSet, config: Config, batch_size: int) -> ReplayBuffer | DeviceReplay:
    """A replay buffer of transitions, prioritized if `priority_exponent` is positive."""
    return replay_buffer(
        workers,
        buffer_size=config.buffer_size,
        batch_size=batch_size,
        learning_starts=config.learning_starts,
        n_step=config.n_step,
        priority_exponent=config.priority_exponent,
        replay=config.replay,
    )


def plan(workers: WorkerSet, config: Config) -> Iter[Report]:
    """Alternates between storing a rollout per worker and updates on replayed batches, several per call."""
    updates = updates_per_call(workers, config)
    buffer = make_buffer(workers, config, config.batch_size * updates)
    store = ParallelRollouts(workers).gather_sync().for_each(StoreToBuffer(buffer))
    train = Replay(buffer).for_each(TrainOneStep(workers, updates=updates)).for_each(UpdatePriorities(buffer))
    calls = config.updates_per_rollout() // updates
    reports = flow.union([store, train], weights=[1, calls])
    every = config.rounds_per_report(len(workers.actors))
    return ReportMetrics(reports, workers, every, calls_per_rollout=calls)


DQN = Algorithm("dqn", Config, worker, learner, plan)
