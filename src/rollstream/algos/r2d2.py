"""R2D2: recurrent replay distributed DQN (Kapturowski et al., 2019, https://openreview.net/forum?id=r1lyTjAqYX).

Ape-X with an LSTM or a GRU. Replay stores sequences with the recurrent state that the policy acted with at
their start. Before the learner trains on a sequence, it unrolls the network over the steps before it
(burn-in), so that the state becomes one of the newest weights. Values are rescaled, so rewards need no
clipping.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import optax
from jax import lax

from rollstream.algos import apex, dqn
from rollstream.engine import RollstreamError
from rollstream.limits import Fraction, NonNegativeFloat, NonNegativeInt, OptionalPositiveInt, PositiveInt
from rollstream.replay import importance_weights
from rollstream.replay.priorities import PRIORITY_EPSILON
from rollstream.replay.service import ReplayShards
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.batch import FIRST_STATE
from rollstream.rl.gae import bootstrap_values
from rollstream.rl.learner import Learner
from rollstream.rl.off_policy import sequence_buffers
from rollstream.rl.params import Weights
from rollstream.rl.policy import require_policy
from rollstream.rl.q_policy import select_action
from rollstream.rl.recurrent_networks import RecurrentMemory, recurrent_q_network
from rollstream.rl.recurrent_q_policy import RecurrentQPolicy
from rollstream.rl.unrolling import where
from rollstream.rl.updates import Metrics, masked_mean, n_step_targets
from rollstream.rl.value_rescaling import rescale, undo_rescaling
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

Array = Any


@dataclass(frozen=True)
class Config(apex.DistributedConfig):
    """Hyperparameters of R2D2."""

    algorithm: ClassVar[str] = "r2d2"

    rollout_length: PositiveInt = 80
    """Number of steps per environment in a rollout."""
    batch_size: PositiveInt = 64
    """Number of sequences per gradient step."""
    buffer_size: PositiveInt = 100_000
    """Replay buffer size in environment steps, which make buffer_size / sequence_period sequences; the oldest
    are removed."""
    learning_starts: NonNegativeInt = 1_000
    """Number of environment steps before the first update; sequence_length - 1 more per environment complete
    the sequences."""
    samples_per_insert: NonNegativeFloat = 1.0
    """Average number of times a sequence is sampled, where episodes are longer than sequences."""
    sequence_length: PositiveInt = 80
    """Number of steps of a sequence that are trained on; fewer at the end of an episode."""
    sequence_period: OptionalPositiveInt = None
    """Steps from the start of one sequence to the start of the next; by default half of sequence_length, so
    that adjacent sequences overlap by half."""
    burn_in: NonNegativeInt = 40
    """Number of steps before a sequence over which the network is unrolled, without gradients; fewer at the
    start of an episode."""
    gamma: Fraction = 0.997
    """Discount factor (gamma)."""
    n_step: PositiveInt = 5
    """n of n-step returns."""
    value_rescaling: bool = True
    """Learn rescaled values: h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x."""
    priority_exponent: NonNegativeFloat = 0.9
    """Priority exponent (alpha) of prioritized replay; 0 for uniform replay."""
    importance_exponent: NonNegativeFloat = 0.6
    """Initial importance-sampling exponent (beta) of prioritized replay, annealed to 1."""
    priority_eta: Fraction = 0.9
    """The priority of a sequence is priority_eta times the maximum, plus 1 - priority_eta times the mean, of
    its absolute TD errors."""
    max_grad_norm: NonNegativeFloat = 40.0
    """Maximum global norm of gradients; larger ones are clipped."""
    memory: RecurrentMemory = "lstm"
    """Recurrent layer after the hidden layers: an LSTM or a GRU."""
    memory_size: PositiveInt = 64
    """Number of units of the LSTM or GRU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_between_items > self.sequence_length:
            raise RollstreamError(
                f"sequence_period={self.sequence_period} is more than sequence_length="
                f"{self.sequence_length}, so steps between sequences would never be trained on; set "
                f"sequence_period to at most {self.sequence_length}"
            )

    @property
    def steps_per_item(self) -> int:
        """Steps until a sequence is complete."""
        return self.sequence_length

    @property
    def steps_between_items(self) -> int:
        """Steps from the start of one sequence to the start of the next."""
        return self.sequence_period or max(1, self.sequence_length // 2)


def make_policy(
    config: Config, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> RecurrentQPolicy:
    """The recurrent epsilon-greedy policy for the spaces of an environment."""
    network = partial(
        recurrent_q_network,
        memory=config.memory,
        memory_size=config.memory_size,
        hidden=config.hidden,
        activation=config.activation,
        dueling=config.dueling,
    )
    return RecurrentQPolicy(observation_space, action_space, network, algorithm=config.algorithm)


# Workers -----------------------------------------------------------------------------------------


def worker(config: Config, task: Task) -> WorkerSpec:
    """Ape-X's worker; its rollouts have the state before each step, and priorities of sequences."""
    return apex.make_worker(
        config, task, partial(make_policy, config), partial(states_and_priorities, config)
    )


def states_and_priorities(
    config: Config,
    policy: RecurrentQPolicy,
    weights: Weights,
    columns: Any,
    last: tuple[Any, ...],
    final_value: Array,
) -> dict[str, Any]:
    """The state before each step of a rollout `[T, B]`, and the priority of the sequence from each step on.

    A priority is that of the steps that the rollout has of the sequence.
    """
    first = jax.tree.map(lambda own: own[0], columns[FIRST_STATE])
    q_values, after = policy.sequence_q_values(
        weights, columns["observation"], first, columns["episode_start"]
    )
    next_value = bootstrap_values(
        q_values.max(axis=-1), policy.value(weights, *last), final_value, columns["terminated"]
    )
    ends = columns["terminated"] | columns["truncated"]
    errors = td_errors(
        config, select_action(q_values, columns["action"]), columns["reward"], next_value, ends
    )
    before = jax.tree.map(lambda own, later: jnp.concatenate([own[None], later[:-1]]), first, after)
    state = where(columns["episode_start"], policy.initial_state(1), before)
    priority = window_priorities(jnp.abs(errors), ends, config.sequence_length, config.priority_eta)
    return {"state": tuple(jax.tree.leaves(state)), "priority": priority + PRIORITY_EPSILON}


def td_errors(config: Config, q_tm1: Array, reward: Array, next_value: Array, ends: Array) -> Array:
    """n-step TD errors `[T, B]` of rescaled values, with fewer steps before the end of a sequence.

    Args:
        config: The settings.
        q_tm1: Q value of each step's action.
        reward: Reward of each step.
        next_value: Q value that follows each step: 0 where the episode terminated.
        ends: After which steps nothing follows in the same sequence.
    """
    if config.value_rescaling:
        next_value = undo_rescaling(next_value)
    target = n_step_targets(reward, next_value, ends, gamma=config.gamma, n_step=config.n_step)
    return (rescale(target) if config.value_rescaling else target) - q_tm1


def window_priorities(errors: Array, ends: Array, length: int, eta: float) -> Array:
    """Priorities of the sequences from each step on, `[T, B]`, of their absolute TD errors.

    Sequences are so many steps long, or up to the end of the episode or of the rollout.
    """

    def later(own: Array, filling: Any) -> Array:
        return jnp.concatenate([own[1:], jnp.full_like(own[:1], filling)])

    def add(_: int, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        largest, total, count, within, error_k, end_k = carry
        largest = jnp.maximum(largest, jnp.where(within, error_k, 0))
        total, count = total + jnp.where(within, error_k, 0), count + within
        return largest, total, count, within & ~end_k, later(error_k, 0), later(end_k, True)

    zeros, within = jnp.zeros_like(errors), jnp.ones_like(ends)
    carry = zeros, zeros, zeros, within, errors, ends.at[-1].set(True)
    largest, total, count, *_ = lax.fori_loop(0, min(length, len(errors)), add, carry)
    return eta * largest + (1 - eta) * total / count


# Learner -----------------------------------------------------------------------------------------


def loss(
    policy: RecurrentQPolicy,
    config: Config,
    target_params: Weights,
    beta: Array,
    batch: Any,
    weights: Weights,
) -> tuple[Array, Metrics]:
    r"""The Huber loss of the TD errors of sequences, weighted by importance sampling (w).

    $$L = \mathbb{E}\Big[w \, \mathrm{huber}\Big(h\Big(\sum_{k=0}^{n-1} \gamma^k R_{t+k} +
    \gamma^n h^{-1}\big(\bar Q(s_{t+n}, a')\big)\Big) - Q(s_t, a_t)\Big)\Big],
    \qquad a' = \arg\max_a Q(s_{t+n}, a)$$

    $$h(x) = \operatorname{sign}(x) \big(\sqrt{|x| + 1} - 1\big) + \epsilon x$$

    The mean is over the steps of all sequences. Q and the target network's $\bar Q$ are unrolled from the
    recorded state of the first step, without gradients up to the end of the burn-in. n is smaller before the
    end of a sequence, and the discount is 0 where the episode terminated. Without double Q-learning, a' is
    the best action of the target network. The new priority of a sequence is
    $\eta \max_t |\delta_t| + (1 - \eta) \mathrm{mean}_t |\delta_t|$ of its TD errors $\delta_t$.
    """
    q_values = sequence_q_values(policy, config, weights, batch)
    target_q_values = sequence_q_values(policy, config, target_params, batch)
    action_t = jnp.argmax(q_values if config.double else target_q_values, axis=-1)
    action, reward, terminated = (time_major(batch[name]) for name in ("action", "reward", "terminated"))
    next_value = jnp.where(terminated, 0.0, select_action(target_q_values, action_t)[1:])
    step, length = jnp.arange(config.sequence_length)[:, None], batch["length"]
    ends, mask = terminated | (step == length - 1), step < length
    q_tm1 = select_action(q_values[:-1], action)
    errors = td_errors(config, q_tm1, reward, next_value, ends)
    losses, distance = optax.huber_loss(errors), jnp.abs(errors)
    values = undo_rescaling(q_tm1) if config.value_rescaling else q_tm1
    metrics = {"q_value": masked_mean(values, mask)}
    if config.priority_exponent:
        # Relative to the least probable sequence, whose weight is the largest: 1.
        losses = losses * importance_weights(batch["relative_probability"], beta, 1.0)
        largest = jnp.max(distance, axis=0, where=mask, initial=0.0)
        mean = jnp.mean(distance, axis=0, where=mask)
        metrics["priority"] = config.priority_eta * largest + (1 - config.priority_eta) * mean
    total = masked_mean(losses, mask)
    return total, metrics | {"loss": total}


def sequence_q_values(policy: RecurrentQPolicy, config: Config, weights: Weights, batch: Any) -> Array:
    """Q values of the steps of sequences and of the observation after them, `[T + 1, B, actions]`."""
    observation, state = jax.tree.map(time_major, batch["observation"]), policy.state_of(batch["state"])
    if config.burn_in:
        before = jax.tree.map(lambda own: own[: config.burn_in], observation)
        observation = jax.tree.map(lambda own: own[config.burn_in :], observation)
        missing = config.burn_in - batch["num_before"]
        taken = jnp.arange(config.burn_in)[:, None] >= missing
        state = policy.last_state(lax.stop_gradient(weights), before, state, taken)
    no_start = jnp.zeros((config.sequence_length + 1, len(batch["length"])), bool)
    return policy.sequence_q_values(weights, observation, state, no_start)[0]


def time_major(column: Array) -> Array:
    """A column `[N, T, ...]` as `[T, N, ...]`."""
    return jnp.swapaxes(column, 0, 1)


def learner(config: Config, task: Task, policy: RecurrentQPolicy) -> Learner:
    """DQN's learner with the loss of sequences."""
    require_policy(policy, RecurrentQPolicy, config.algorithm)
    return dqn.make_learner(config, task, policy, partial(loss, policy, config))


# Plan --------------------------------------------------------------------------------------------


def replay(workers: WorkerSet, config: Config) -> ReplayShards:
    """Prioritized replay shards of sequences, which share `buffer_size`."""
    buffers = sequence_buffers(
        workers,
        buffer_size=config.buffer_size,
        batch_size=config.batch_size,
        length=config.sequence_length,
        period=config.steps_between_items,
        burn_in=config.burn_in,
        priority_exponent=config.priority_exponent,
        shards=config.replay_shards,
    )
    return ReplayShards(workers.engine, buffers, config.replay_shards)


R2D2 = Algorithm("r2d2", Config, worker, learner, apex.plan, replay, learner_on_actor=True)
