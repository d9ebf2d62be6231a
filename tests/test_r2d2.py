"""R2D2: sequences, states, burn-in, targets and priorities, against plain references; learning; refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from learning_runs import SMALL as SMALL_RUNS
from learning_runs import training
from small_envs import Catch, Recall, Signals, worker_of
from test_recurrent import reference_cell, spread

import rollstream as rs
from rollstream import flow
from rollstream.algos import dqn, r2d2
from rollstream.cli import main
from rollstream.flow import Context
from rollstream.replay import infer_signature
from rollstream.replay.buffer import ReplayBuffer
from rollstream.replay.sequence_buffer import sequence_buffer
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.off_policy import transition_signature
from rollstream.rl.q_policy import QPolicy
from rollstream.rl.recurrent_q_policy import RecurrentQPolicy
from rollstream.rl.replay_operators import rollout_chunk
from rollstream.rl.updates import compute_grads
from rollstream.rl.value_rescaling import rescale, undo_rescaling
from rollstream.rl.vector import NativeVector
from rollstream.rl.worker import RolloutWorker
from rollstream.testing import kill
from rollstream.training import loop

GAMMA, ETA = 0.9, 0.7
SMALL: dict[str, Any] = {
    "hidden": (6,),
    "activation": "tanh",
    "memory_size": 5,
    "gamma": GAMMA,
    "priority_eta": ETA,
    "sequence_length": 6,
    "sequence_period": 3,
    "burn_in": 4,
    "n_step": 3,
}
EPISODES = ((7, "terminated"), (3, "truncated"), (1, "truncated"), (12, "terminated"), (10, "truncated"))
"""Lengths and ends of episodes, over and over."""


class Episodes(gymnasium.Env[Any, Any]):
    """Follows `EPISODES` from a place that the seed chooses; observations tell episode and step.

    With `image`, they are the colors of an image's pixels.
    """

    action_space = spaces.Discrete(3)

    def __init__(self, image: bool = False):
        self._image = image
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        if image:
            self.observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        self._episode = self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._episode = self._episode + 1 if seed is None else seed % 5
        self._step = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        length, how = EPISODES[self._episode % len(EPISODES)]
        over = self._step == length
        reward = float(action) - 0.75 * self._step
        return self._observation(), reward, over and how == "terminated", over and how == "truncated", {}

    def _observation(self) -> Any:
        if self._image:
            return np.full((36, 36, 1), 40 * (self._episode % len(EPISODES)) + self._step, np.uint8)
        return np.array([self._episode / 10, self._step])


# Rollouts and what replay makes of them ------------------------------------------------------------


def worker_with(
    config: r2d2.Config, mode: AutoresetMode | None = None, environment: Any = Episodes, **options: Any
) -> RolloutWorker:
    """A worker of `config.num_envs` environments, with weights that are spread."""
    spec = EnvSpec(environment, **options)
    worker = worker_of(r2d2.worker(config, Task(spec, 1_000, workers=1)))
    worker.set_weights(0, spread(worker.policy) | {"epsilon": np.float32(0.3)})
    if mode is not None:
        worker.vector = NativeVector(SyncVectorEnv([environment] * config.num_envs, autoreset_mode=mode))
        worker.observation = worker.vector.reset(list(range(config.num_envs)))
    return worker


def rollouts_of(worker: RolloutWorker, count: int) -> list[Any]:
    return [worker.sample(Context("sample", ("worker", "sample", 0), None, {})) for _ in range(count)]


def buffer_of(config: r2d2.Config, policy: Any, **options: Any) -> ReplayBuffer:
    """A buffer that gives every item once, from the first on: uniform, and read with `all_items`."""
    state = tuple(own[None] for own in jax.tree.leaves(policy.initial_state(1)))
    signature = transition_signature(
        policy.observation_space, policy.action_space, options.get("frame_stack", 1)
    )
    return sequence_buffer(
        signature | infer_signature({"state": state}),
        0,
        num_steps=3_000,
        batch_size=2_000,
        length=config.sequence_length,
        period=config.steps_between_items,
        burn_in=config.burn_in,
        **options,
    )


def all_items(buffer: ReplayBuffer) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Columns of all items, each once, and their priorities."""
    batch = buffer.sample()
    assert batch is not None
    keys, first = np.unique(batch.keys, return_index=True)
    assert len(keys) == buffer.table.size, "every item was drawn"
    items = buffer.table.state_dict()["items"]
    stored = dict(zip(items["keys"].tolist(), items["priorities"].tolist(), strict=True))
    columns = jax.tree.map(lambda own: own[first], batch.columns)
    return columns, np.array([stored[key] for key in keys.tolist()])


def reference_states(weights: Any, memory: str, episode: float, count: int) -> list[Any]:
    """The state before each step of an episode, in double precision."""
    own = double_of(weights, "network.body.")
    states: list[Any] = [None]
    for step in range(count):
        states.append(reference_cell(memory, own, np.array([episode, step]), states[-1])[1])
    return states


def double_of(weights: Any, prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): np.asarray(value, np.float64)
        for name, value in weights.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP], ids=str)
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_items_are_sequences_of_one_episode_with_the_state_the_policy_had(memory: Any, mode: Any) -> None:
    """Whatever rollouts they span: starts, lengths, steps before them, padding and states, one by one."""
    config = r2d2.Config(**SMALL, memory=memory, num_envs=3, rollout_length=5)
    worker = worker_with(config, mode)
    buffer = buffer_of(config, worker.policy)
    seen: dict[tuple[int, float], list[int]] = {}
    for rollout in rollouts_of(worker, 14):
        buffer.insert(rollout_chunk(rollout))
        mask = rollout.columns.get("mask", np.ones((5, 3), bool))
        for t, i in zip(*mask.nonzero(), strict=True):
            episode, step = rollout.columns["observation"][t, i]
            seen.setdefault((int(i), float(episode)), []).append(int(step))
    columns, _ = all_items(buffer)
    found = []
    for n, length in enumerate(columns["length"].astype(int)):
        before, observations = columns["num_before"][n], columns["observation"][n]
        episode, start = observations[config.burn_in]
        real = observations[config.burn_in - before : config.burn_in + length]
        np.testing.assert_array_equal(real[:, 1], np.arange(start - before, start + length))
        np.testing.assert_array_equal(real[:, 0], np.full(before + length, episode))
        assert before == min(start, config.burn_in), "all that the episode has"
        assert not observations[config.burn_in + length + 1 :].any()
        size, how = EPISODES[round(10 * episode) % 5]
        ended = bool(start + length == size and how == "terminated")
        assert columns["terminated"][n].tolist() == [False] * (length - 1) + [ended] + [False] * (6 - length)
        if not ended:
            assert observations[config.burn_in + length].tolist() == pytest.approx([episode, start + length])
        rewards = columns["reward"][n] - columns["action"][n]
        np.testing.assert_allclose(rewards[:length], -0.75 * (start + 1 + np.arange(length)))
        assert not rewards[length:].any()
        assert not columns["action"][n, length:].any()
        expected = reference_states(worker.weights, memory, episode, int(start))[int(start - before)]
        expected = jax.tree.leaves(expected) or [np.zeros(5)] * len(columns["state"])
        for own, other in zip(columns["state"], expected, strict=True):
            np.testing.assert_allclose(own[n], other, atol=1e-5)
        found.append((round(10 * episode), int(start), int(length)))
    windows = []
    for (_, episode), steps in seen.items():
        over = len(steps) == EPISODES[round(10 * episode) % 5][0]
        full = range(0, len(steps) - config.sequence_length + 1, 3)
        windows += [(round(10 * episode), start, 6) for start in full]
        rest = len(full) * 3
        if over and (not full or full[-1] + 6 < len(steps)):
            windows.append((round(10 * episode), rest, len(steps) - rest))
    assert sorted(found) == sorted(windows)
    assert {length for _, _, length in found} >= {1, 3, 4, 6}
    worker.close()


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_recorded_states_are_those_that_acted(memory: Any) -> None:
    """Beside a worker with the same seed that stops after each step."""
    settings = {**SMALL, "memory": memory, "num_envs": 3}
    worker = worker_with(r2d2.Config(**settings, rollout_length=9))
    stopping = worker_with(r2d2.Config(**settings, rollout_length=1))
    for rollout in rollouts_of(worker, 3):
        for t in range(9):
            state = jax.tree.leaves(stopping.state)
            [step] = rollouts_of(stopping, 1)
            np.testing.assert_array_equal(step.columns["action"][0], rollout.columns["action"][t])
            for own, other in zip(rollout.columns["state"], state, strict=True):
                np.testing.assert_allclose(own[t], other, atol=1e-6)
                assert own.dtype == np.float32
    worker.close()
    stopping.close()


def test_stacked_frames_of_sequences_and_of_the_steps_before_them_are_complete() -> None:
    config = r2d2.Config(**SMALL, num_envs=2, rollout_length=5)
    worker = worker_with(config, environment=partial(Episodes, image=True), frame_stack=3)
    buffer = buffer_of(config, worker.policy, frame_stack=3)
    for rollout in rollouts_of(worker, 10):
        assert rollout.columns["observation"].shape[2:] == (36, 36, 1), "only the newest frame is sent"
        buffer.insert(rollout_chunk(rollout))
    columns, _ = all_items(buffer)
    assert columns["observation"].shape[1:] == (4 + 6 + 1, 36, 36, 3)
    for n, length in enumerate(columns["length"].astype(int)):
        before = columns["num_before"][n]
        stacks = columns["observation"][n, 4 - before :, 0, 0]
        episode, start = divmod(int(stacks[before, -1]), 40)
        following = length + (not columns["terminated"][n].any())
        steps = np.arange(start - before, start + following)
        expected = 40 * episode + np.maximum(0, steps[:, None] + [-2, -1, 0])
        np.testing.assert_array_equal(stacks[: len(steps)], expected)
        assert not stacks[before + length + 1 :].any()
    worker.close()


def plain_priorities(errors: Any, ends: Any, length: int) -> Any:
    """By the definition, of every window by itself."""
    found = np.zeros(errors.shape)
    for t, i in np.ndindex(*errors.shape):
        last = next((k for k in range(t, len(errors)) if ends[k, i]), len(errors) - 1)
        window = errors[t : min(last + 1, t + length), i]
        found[t, i] = ETA * window.max() + (1 - ETA) * window.mean()
    return found


@pytest.mark.parametrize("length", [1, 4, 30])
def test_priorities_are_of_the_steps_of_each_sequence(length: int) -> None:
    random = np.random.default_rng(4)
    errors, ends = random.random((20, 3)), random.random((20, 3)) < 0.15
    found = r2d2.window_priorities(jnp.asarray(errors), jnp.asarray(ends), length, ETA)
    np.testing.assert_allclose(found, plain_priorities(errors, ends, length), rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"value_rescaling": False}, {"n_step": 1}], ids=str)
@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP], ids=str)
@pytest.mark.slow
def test_initial_priorities_are_those_that_the_learner_would_set(mode: Any, settings: dict[str, Any]) -> None:
    """Of sequences that a rollout has in full, if the target network has the same weights.

    Returns of several steps that begin before the end of a sequence are only the same if an episode ends
    there, too: the worker knows what comes after it.
    """
    config = r2d2.Config(**SMALL | settings, num_envs=3, rollout_length=40)
    worker = worker_with(config, mode)
    policy: Any = worker.policy
    buffer = buffer_of(config, policy)
    [rollout] = rollouts_of(worker, 1)
    buffer.insert(rollout_chunk(rollout))
    columns, stored = all_items(buffer)
    loss = partial(r2d2.loss, policy, config, worker.weights, np.float32(1))
    _, metrics = loss(columns, worker.weights)
    same = (columns["length"] < 6) | columns["terminated"].any(axis=1) | (config.n_step == 1)
    np.testing.assert_allclose(stored[same], metrics["priority"][same], rtol=1e-4, atol=1e-5)
    assert len(set(columns["length"][same].tolist())) > 3
    worker.close()


# The loss ------------------------------------------------------------------------------------------


def sequences(policy: RecurrentQPolicy, config: r2d2.Config, seed: int = 1) -> dict[str, Any]:
    """Random sequences as a buffer gives them, with states, short ones, and ends of both kinds."""
    random = np.random.default_rng(seed)
    count, longest = 8, config.sequence_length
    length = random.integers(1, longest + 1, count)
    before = np.array([0, config.burn_in, *random.integers(0, config.burn_in + 1, count - 2)])
    length[1:3] = longest
    observation = random.normal(size=(count, config.burn_in + longest + 1, 2))
    reward, terminated = 3 * random.normal(size=(count, longest)), np.zeros((count, longest), bool)
    for n in range(count):
        observation[n, : config.burn_in - before[n]] = observation[n, config.burn_in - before[n]]
        observation[n, config.burn_in + length[n] + 1 :] = reward[n, length[n] :] = 0
        terminated[n, length[n] - 1] = n % 2
    state = [random.normal(size=own.shape) for own in jax.tree.leaves(policy.initial_state(count))]
    return {
        "observation": observation.astype(np.float32),
        "state": tuple(own.astype(np.float32) for own in state),
        "action": random.integers(0, 3, (count, longest)).astype(np.int32),
        "reward": reward.astype(np.float32),
        "terminated": terminated,
        "length": length.astype(np.float32),
        "num_before": before.astype(np.int32),
        "relative_probability": random.uniform(1, 4, count).astype(np.float32),
    }


def plain_h(x: Any) -> Any:
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


def plain_inverse(x: Any) -> Any:
    root = (np.sqrt(1 + 4e-3 * (np.abs(x) + 1 + 1e-3)) - 1) / 2e-3
    return np.sign(x) * (root**2 - 1)


def plain_q_values(config: r2d2.Config, weights: Any, batch: Any, n: int, burn_in_weights: Any) -> Any:
    """Q values of a sequence's steps and of the observation after it, step by step."""
    state = [np.asarray(own[n], np.float64) for own in batch["state"]]
    state = tuple(state) if config.memory == "lstm" else state[0]
    found = []
    first = config.burn_in - batch["num_before"][n]
    for t in range(first, config.burn_in + int(batch["length"][n]) + 1):
        own = burn_in_weights if t < config.burn_in else weights
        observation = np.asarray(batch["observation"][n, t], np.float64)
        cell = {name.removeprefix("network.body."): value for name, value in own.items()}
        output, state = reference_cell(config.memory, cell, observation, state)
        advantage = own["network.head.weight"] @ output + own["network.head.bias"]
        value = 0.0
        if config.dueling:
            value = own["network.value_head.weight"] @ output + own["network.value_head.bias"]
            advantage = advantage - advantage.mean()
        found.append(value + advantage)
    return np.array(found[config.burn_in - first :])


def plain_loss(
    config: r2d2.Config, weights: Any, target: Any, batch: Any, beta: float, burn_in_weights: Any
) -> tuple[float, list[float]]:
    """The loss and the priorities, by a loop over sequences and steps."""
    h, inverse = (plain_h, plain_inverse) if config.value_rescaling else (lambda x: x, lambda x: x)
    total, steps, priorities = 0.0, 0, []
    for n, weight in enumerate(batch["relative_probability"].astype(np.float64) ** -beta):
        length = int(batch["length"][n])
        q_values = plain_q_values(config, weights, batch, n, burn_in_weights)
        target_q_values = plain_q_values(config, target, batch, n, target)
        errors = []
        for t in range(length):
            ahead = min(config.n_step, length - t)
            selector = q_values if config.double else target_q_values
            following = inverse(target_q_values[t + ahead, selector[t + ahead].argmax()])
            if batch["terminated"][n, t + ahead - 1]:
                following = 0.0
            rewards = sum(GAMMA**k * float(batch["reward"][n, t + k]) for k in range(ahead))
            value = h(rewards + GAMMA**ahead * following)
            errors.append(abs(value - q_values[t, batch["action"][n, t]]))
        total += weight * sum(0.5 * error**2 if error <= 1 else error - 0.5 for error in errors)
        steps += length
        priorities.append(ETA * max(errors) + (1 - ETA) * float(np.mean(errors)))
    return total / steps, priorities


def policy_of(config: r2d2.Config) -> RecurrentQPolicy:
    return r2d2.make_policy(config, spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3))


VARIANTS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "gru": {"memory": "gru"},
    "without rescaling": {"value_rescaling": False},
    "without double Q-learning": {"double": False, "dueling": False},
    "one step": {"n_step": 1, "memory": "gru"},
    "without burn-in": {"burn_in": 0},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_loss_and_priorities_are_those_of_a_plain_recursion(variant: dict[str, Any]) -> None:
    config = r2d2.Config(**SMALL | variant)
    policy = policy_of(config)
    weights, target = spread(policy, seed=5), spread(policy, seed=6)
    batch, beta = sequences(policy, config), 0.6
    found, metrics = r2d2.loss(policy, config, target, np.float32(beta), batch, weights)
    double, double_target = double_of(weights, ""), double_of(target, "")
    total, priorities = plain_loss(config, double, double_target, batch, beta, double)
    assert float(found) == pytest.approx(total, rel=1e-4)
    np.testing.assert_allclose(metrics["priority"], priorities, rtol=1e-3)
    assert set(batch["length"].tolist()) > {6.0}


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_gradients_go_through_sequences_and_not_through_the_burn_in(memory: Any) -> None:
    """Against finite differences, with the weights of the burn-in fixed; with all weights they are others."""
    config = r2d2.Config(**SMALL, memory=memory)
    policy = policy_of(config)
    weights, target = spread(policy, seed=5), spread(policy, seed=6)
    batch, beta = sequences(policy, config), 0.6
    loss = partial(r2d2.loss, policy, config, target, np.float32(beta), batch)
    grads, _ = compute_grads(loss, weights)
    double, double_target = double_of(weights, ""), double_of(target, "")
    for name in ("network.body.cell.recurrent", "network.body.body.layers[0].weight"):
        direction = np.random.default_rng(3).normal(size=double[name].shape)

        def slope(*, burn_in_fixed: bool, name: str = name, direction: Any = direction) -> float:
            sides = []
            for step in (1e-6, -1e-6):
                near = double | {name: double[name] + step * direction}
                fixed = double if burn_in_fixed else near
                sides.append(plain_loss(config, near, double_target, batch, beta, fixed)[0])
            return (sides[0] - sides[1]) / 2e-6

        found = float((np.asarray(grads[name], np.float64) * direction).sum())
        assert found == pytest.approx(slope(burn_in_fixed=True), rel=1e-3)
        assert abs(slope(burn_in_fixed=False) - found) > 0.01 * abs(found)


@pytest.mark.slow
def test_states_and_targets_get_no_gradients() -> None:
    config = r2d2.Config(**SMALL)
    policy = policy_of(config)
    weights, batch = spread(policy, seed=5), sequences(policy, config)

    def of_first_observations(observation: Any) -> Any:
        changed = batch | {"observation": observation}
        return r2d2.loss(policy, config, weights, jnp.float32(1), changed, weights)[0]

    by_observation = jax.grad(of_first_observations)(batch["observation"])
    reached = np.abs(by_observation).max(axis=-1) > 0
    for n, length in enumerate(batch["length"].astype(int)):
        assert not reached[n, 4 + length + 1 :].any(), "padding"
        assert reached[n, 4 : 4 + length].all()


def test_what_is_in_padding_has_no_effect() -> None:
    config = r2d2.Config(**SMALL)
    policy = policy_of(config)
    weights, batch = spread(policy, seed=5), sequences(policy, config)
    changed = {name: np.copy(own) for name, own in batch.items() if name != "state"} | {
        "state": batch["state"]
    }
    padded = np.arange(6) >= batch["length"][:, None]
    assert padded.any()
    changed["reward"][padded] = 100
    changed["terminated"][padded] = True
    changed["action"][padded] = 2
    for n, (before, length) in enumerate(zip(batch["num_before"], batch["length"].astype(int), strict=True)):
        changed["observation"][n, : 4 - before] = 7
        changed["observation"][n, 4 + length + 1 :] = 7
        if batch["terminated"][n].any():
            changed["observation"][n, 4 + length] = 7
    results = [
        jax.tree.leaves(r2d2.loss(policy, config, weights, np.float32(1), own, weights))
        for own in (batch, changed)
    ]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("double", [True, False])
def test_values_of_illegal_actions_are_not_bootstrapped_from(double: bool) -> None:
    """The best action of each last observation is masked; where no action is legal, all are."""
    settings = SMALL | {"sequence_length": 1, "sequence_period": 1, "n_step": 1, "value_rescaling": False}
    config = r2d2.Config(**settings, double=double)
    space = spaces.Dict({"seen": spaces.Box(-np.inf, np.inf, (2,)), "action_mask": spaces.MultiBinary(3)})
    policy = r2d2.make_policy(config, space, spaces.Discrete(3))
    weights, target = spread(policy, seed=5), spread(policy, seed=6)
    batch = sequences(policy_of(config), config)
    batch["terminated"][:] = False
    mask = np.ones((*batch["observation"].shape[:2], 3), np.int8)
    batch["observation"] = {"seen": batch["observation"], "action_mask": mask}
    q_values, target_q_values = (
        np.asarray(r2d2.sequence_q_values(policy, config, own, batch)) for own in (weights, target)
    )
    selector, rows = q_values[1] if double else target_q_values[1], np.arange(8)
    mask[rows, -1, selector.argmax(axis=-1)] = 0
    mask[0, -1] = 0
    legal = np.where(mask[:, -1].any(axis=-1, keepdims=True), mask[:, -1], 1)
    best = np.where(legal, selector, -np.inf).argmax(axis=-1)
    expected = batch["reward"][:, 0] + GAMMA * target_q_values[1, rows, best]
    expected -= q_values[0, rows, batch["action"][:, 0]]
    _, metrics = r2d2.loss(policy, config, target, np.float32(1), batch, weights)
    np.testing.assert_allclose(metrics["priority"], np.abs(expected), rtol=1e-4)


def test_rescaling_has_an_inverse_also_in_single_precision() -> None:
    values = np.concatenate([-np.logspace(5, -4, 50), [0], np.logspace(-4, 5, 50)]).astype(np.float32)
    np.testing.assert_allclose(undo_rescaling(rescale(values)), values, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rescale(values), plain_h(values.astype(np.float64)), rtol=1e-4, atol=1e-6)


# Plan and learning ---------------------------------------------------------------------------------


def test_the_plan_is_that_of_apex() -> None:
    graphs = []
    for name in ("apex", "r2d2"):
        with training(name, "inline") as (plan, _):
            graphs.append([(node.name, node.kind) for node in flow.graph(plan).nodes])
    assert graphs[0] == graphs[1]


@pytest.mark.slow
def test_what_the_first_observation_showed_is_remembered() -> None:
    """Without memory, or with a wrong sign anywhere, the mean return is 0 or less."""
    settings: dict[str, Any] = {
        "num_envs": 4,
        "rollout_length": 20,
        "sequence_length": 4,
        "burn_in": 0,
        "n_step": 2,
        "batch_size": 32,
        "hidden": (16,),
        "memory_size": 16,
        "learning_starts": 200,
        "learning_rate": 3e-3,
        "gamma": 0.95,
        "target_update_interval": 50,
        "samples_per_insert": 16.0,
        "epsilon_base": 0.2,
        "report_every": 200,
    }
    with training("r2d2", "inline", Recall, seed=1, steps=8_000, **settings) as (plan, _):
        report = next(report for report in plan if report["time/total_timesteps"] >= 8_000)
    assert report["rollout/ep_rew_mean"] > 0.6


@pytest.mark.slow
def test_masks_and_nested_observations_are_learned_from() -> None:
    """The environment raises if an action is not legal."""
    with training("r2d2", "inline", Signals, n_step=2) as (plan, workers):
        report = list(islice(plan, 15))[-1]
        assert workers.learner.version > 4
    assert np.isfinite(report["train/loss"])


@pytest.mark.slow
def test_images_and_frame_stacks_are_learned_from() -> None:
    config = r2d2.Config(**SMALL_RUNS["r2d2"])
    with rs.engine("inline") as engine:
        workers = r2d2.R2D2.workers(engine, config, Task(EnvSpec(Catch, frame_stack=2), 1_000))
        before = workers.learner.get_weights()["network.body.cell.recurrent"].copy()
        reports = list(islice(r2d2.R2D2.plan(workers, config), 8))
        after = workers.learner.get_weights()["network.body.cell.recurrent"]
    assert np.isfinite(reports[-1]["train/loss"])
    assert not np.array_equal(before, after)


@pytest.mark.slow
def test_an_empty_shard_is_filled_again_with_sequences_that_are_longer_than_rollouts() -> None:
    """Inserts wait for samples, of which there are none, when the only shard dies."""
    settings = {"rollout_length": 2, "sequence_length": 8, "samples_per_insert": 4.0}
    with training("r2d2", "processes", **settings) as (plan, workers):
        trained = (report for report in plan if "train/loss" in report)
        for _ in range(3):
            next(trained)
            kill(workers.engine.actors["replay"])
        version = workers.learner.version
        reports = (report for report in trained if workers.learner.version > version + 8)
        assert np.isfinite(next(reports)["train/loss"])
    assert len(workers.engine.events) >= 1


@pytest.mark.parametrize("engine", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_it_trains_resumes_evaluates_and_acts_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    monkeypatch.setattr(loop, "draw_curve", lambda _, path, __: path.touch())
    env, out = Path(__file__).parents[1] / "examples" / "hidden_velocities.py", str(tmp_path / "run")
    sizes = "".join(f" --config.{name.replace('_', '-')} {value}" for name, value in QUICK.items())
    options = f"--env {env}:HiddenVelocities --steps 400 --workers 2 --engine {engine} --quiet --out {out}"
    main(["train", "r2d2", *options.split(), *sizes.split()])
    main(["train", "r2d2", "--resume", "--steps", "800", "--quiet", "--out", out])
    capsys.readouterr()
    main(["evaluate", out, "--episodes", "2"])
    assert "over 2 episodes" in capsys.readouterr().out
    loaded = rs.load(out)
    assert {name.split(".")[0] for name in loaded.policy.weights} == {"network", "epsilon"}
    policy: Any = loaded.policy.policy
    observations = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    state = policy.initial_state(1)
    for observation in observations:
        action, state = policy.step(loaded.policy.weights, observation[None], state, None)
        assert loaded.policy.act(observation) == int(action[0])


QUICK = {"num_envs": 4, "rollout_length": 10, "sequence_length": 6, "burn_in": 2, "batch_size": 8}
QUICK |= {"learning_starts": 60, "report_every": 40, "hidden": 8, "memory_size": 8}


# What goes wrong -----------------------------------------------------------------------------------


def test_steps_between_sequences_are_not_left_out() -> None:
    with pytest.raises(
        rs.RollstreamError, match="sequence_period=9 is more than sequence_length=8, so steps between"
    ):
        r2d2.Config(sequence_length=8, sequence_period=9)
    assert r2d2.Config(sequence_length=8, sequence_period=8).steps_between_items == 8
    assert r2d2.Config(sequence_length=9).steps_between_items == 4
    assert r2d2.Config(sequence_length=1).steps_between_items == 1


def test_policies_without_memory_are_refused_and_those_with_memory_elsewhere() -> None:
    task = Task(EnvSpec("CartPole-v1"), 1_000)
    with (
        rs.engine("inline") as engine,
        pytest.raises(rs.RollstreamError, match="needs a policy of class RecurrentQPolicy, not QPolicy"),
    ):
        r2d2.R2D2.workers(engine, r2d2.Config(), replace(task, policy=QPolicy))
    config = dqn.Config(learning_starts=8, batch_size=4, report_every=8)
    with rs.engine("inline") as engine:
        workers = dqn.DQN.workers(engine, config, replace(task, policy=RecurrentQPolicy))
        plan = dqn.DQN.plan(workers, config)
        with pytest.raises(rs.RollstreamError, match="together with its state: train it with r2d2"):
            list(islice(plan, 4))
