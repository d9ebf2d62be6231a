"""Recurrent policies: what a learner evaluates is what acted, through episodes, resets, batches and files."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from learning_runs import fingerprint, training
from small_envs import Catch, Recall, Scripted, Signals, sampled, worker_of

import rollstream as rs
from rollstream.algos import ALGORITHMS, a2c, ppo
from rollstream.cli import main
from rollstream.flow import Context
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Batch, BatchError
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.gae import add_gae
from rollstream.rl.networks import actor_critic
from rollstream.rl.policy import ActorCriticPolicy, evaluate_batch
from rollstream.rl.recurrent_networks import GRU, LSTM, recurrent_actor_critic
from rollstream.rl.recurrent_policy import RecurrentPolicy
from rollstream.rl.updates import compute_grads
from rollstream.rl.vector import NativeVector
from rollstream.rl.worker import RolloutWorker, WorkerSpec
from rollstream.state_codec import decode_state, encode_state
from rollstream.training import loop
from rollstream.training.config import resolve_config
from rollstream.training.inference import TrainedPolicy

MEMORIES: list[Any] = ["lstm", "gru"]
RECURRENT = ["ppo", "a2c", "a3c", "impala", "appo"]
SMALL: dict[str, Any] = {"hidden": (6,), "memory_size": 5}
GAMMA, LAMBDA = 0.9, 0.8
BOX = spaces.Box(-np.inf, np.inf, (2,), np.float64)


# A plain reference ---------------------------------------------------------------------------------


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def reference_cell(memory: str, own: Any, observation: Any, state: Any) -> tuple[Any, Any]:
    """The output of the actor's or the critic's cell and its new state."""
    x = np.tanh(own["body.layers[0].weight"] @ observation + own["body.layers[0].bias"])
    x = own["cell.input.weight"] @ x + own["cell.input.bias"]
    if memory == "lstm":
        h, c = np.zeros((2, 5)) if state is None else state
        i, f, g, o = np.split(x + own["cell.recurrent"] @ h, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        state = h, c
    else:
        h = np.zeros(5) if state is None else state
        r, z, n = np.split(x, 3)
        hr, hz, hn = np.split(own["cell.recurrent"] @ h, 3)
        n = np.tanh(n + sigmoid(r + hr) * (hn + own["cell.bias"]))
        state = h = (1 - sigmoid(z + hz)) * n + sigmoid(z + hz) * h
    return h, state


def reference_step(memory: str, weights: Any, observation: Any, state: Any) -> tuple[Any, Any, Any]:
    """Logits, value and the new state of one environment, in double precision."""
    outputs, states = [], []
    for number, part in enumerate(("actor", "critic")):
        own, head = (
            {name.removeprefix(start): np.asarray(value, np.float64) for name, value in weights.items()}
            for start in (f"network.{part}.", f"network.{part}_head.")
        )
        h, after = reference_cell(memory, own, observation, None if state is None else state[number])
        outputs.append(head["weight"] @ h + head["bias"])
        states.append(after)
    return outputs[0], float(outputs[1][0]), tuple(states)


def log_prob_of(logits: Any, action: int) -> float:
    return float(logits[action] - np.log(np.exp(logits).sum()))


def reference_rows(memory: str, weights: Any, columns: Any, i: int, state: Any) -> tuple[list[Any], Any]:
    """What one environment's rows should be, by stepping through them, and the state after the last one.

    The second number of a scripted observation counts the steps of its episode: at 0 the state is fresh.
    """
    rows: list[dict[str, Any]] = []
    for t in range(len(columns["reward"])):
        observation = np.asarray(columns["observation"][t, i], np.float64)
        state = None if observation[1] == 0 else state
        logits, value, state = reference_step(memory, weights, observation, state)
        final = reference_step(memory, weights, observation + np.array([0, 1]), state)[1]
        rows.append(
            {
                "log_prob": log_prob_of(logits, columns["action"][t, i]),
                "value": value,
                "final_value": final,
                "mask": bool(columns["mask"][t, i]) if "mask" in columns else True,
            }
        )
    return rows, state


def in_double(array: Any) -> Any:
    array = np.asarray(array)
    return array.astype(np.float64) if array.dtype == np.float32 else array


def add_reference_advantages(rows: list[dict[str, Any]], columns: Any, i: int, last_value: float) -> None:
    """By the definition: discounted TD errors until the end of the episode."""
    for start, row in enumerate(rows):
        advantage, weight = 0.0, 1.0
        for t in range(start, len(rows)):
            following = rows[t + 1]["value"] if t + 1 < len(rows) else last_value
            if columns["truncated"][t, i]:
                following = rows[t]["final_value"]
            if columns["terminated"][t, i]:
                following = 0.0
            advantage += weight * (columns["reward"][t, i] + GAMMA * following - rows[t]["value"])
            weight *= GAMMA * LAMBDA
            if columns["truncated"][t, i] or columns["terminated"][t, i]:
                break
        row["advantage"], row["value_target"] = advantage, advantage + row["value"]


# Rollouts ------------------------------------------------------------------------------------------


def spread(policy: Any, scale: float = 0.4, seed: int = 1) -> Any:
    """Weights with biases that are not 0 and heads that are not small."""
    random = np.random.default_rng(seed)
    return {
        name: (value + random.normal(0, scale, np.shape(value))).astype(np.float32)
        if name.startswith("network")
        else value
        for name, value in policy.init(0).items()
    }


def recurrent_policy(memory: Any, **options: Any) -> Any:
    return partial(
        RecurrentPolicy, network=partial(recurrent_actor_critic, memory=memory, **SMALL), **options
    )


def scripted_worker(
    memory: Any, mode: AutoresetMode | None, *, unfilled: bool = True, **options: Any
) -> RolloutWorker:
    """Of three scripted environments, in rollouts of seven steps; `unfilled` keeps steps that were resets."""

    def add_unfilled_gae(policy: ActorCriticPolicy) -> Any:
        add = add_gae(policy, gamma=GAMMA, gae_lambda=LAMBDA)
        return lambda weights, rollout: [add(weights, rollout)]

    add: Any = add_unfilled_gae if unfilled else partial(add_gae, gamma=GAMMA, gae_lambda=LAMBDA)
    spec = WorkerSpec(EnvSpec(Scripted), 3, 7, recurrent_policy(memory), add, **options)
    return with_autoreset(worker_of(spec), mode)


def with_autoreset(worker: RolloutWorker, mode: AutoresetMode | None, seed: int = 0) -> RolloutWorker:
    """With weights that are spread, and perhaps a vector environment in some mode."""
    worker.set_weights(0, spread(worker.policy))
    if mode is not None:
        worker.vector = NativeVector(SyncVectorEnv([Scripted] * 3, autoreset_mode=mode))
        worker.observation = worker.vector.reset([seed, seed + 1, seed + 2])
    return worker


def unprocessed(worker: RolloutWorker) -> Any:
    """What a worker sends, outside of any flow."""
    return worker.sample(Context("sample", ("worker", "sample", 0), None, {}))


@pytest.mark.parametrize("evaluates_steps", [True, False], ids=["while acting", "afterwards"])
@pytest.mark.parametrize("mode", [None, *AutoresetMode], ids=str)
@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_rollouts_and_sequences_are_what_stepping_gives(
    memory: Any, mode: AutoresetMode | None, evaluates_steps: bool
) -> None:
    """With episodes that are terminated and truncated in the middle of rollouts, and across several."""
    worker = scripted_worker(memory, mode, evaluates_steps=evaluates_steps)
    policy: Any = worker.policy
    states: list[Any] = [None] * 3
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(4):
        [batch] = unprocessed(worker)
        again = jax.jit(partial(evaluate_batch, policy))(worker.weights, batch.validated())
        for i in range(3):
            first = jax.tree.map(lambda own, i=i: own[0, i], batch["first_state"])
            if states[i] is not None and batch["observation"][0, i, 1] != 0:
                jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), first, states[i])
            rows, states[i] = reference_rows(memory, worker.weights, batch, i, states[i])
            last = np.asarray(worker.observation[i], np.float64)
            state = None if last[1] == 0 else states[i]
            last_value = reference_step(memory, worker.weights, last, state)[1]
            add_reference_advantages(rows, batch, i, last_value)
            for name in ("log_prob", "value", "advantage", "value_target"):
                taken = np.array([row["mask"] for row in rows])
                expected = np.array([row[name] for row in rows])
                np.testing.assert_allclose(batch[name][taken, i], expected[taken], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(
                again.value[:, i], [row["value"] for row in rows], rtol=1e-4, atol=1e-5
            )
            expected = [row["log_prob"] for row in rows]
            np.testing.assert_allclose(again.log_prob[:, i], expected, rtol=1e-4, atol=1e-5)
        for name in ends:
            ends[name] += int(batch[name][:-1].sum())
    assert all(ends.values())
    worker.close()


def test_states_are_recorded_once_per_rollout() -> None:
    worker = scripted_worker("lstm", None, unfilled=False)
    batch = sampled(worker)
    states = jax.tree.leaves(batch["first_state"])
    assert [own.shape for own in states] == [(1, 3, 5)] * 4, "output and cell, of actor and critic"
    assert {own.dtype for own in states} == {np.dtype(np.float32)}
    joined = Batch.concatenate([batch, sampled(worker)]).validated()
    assert joined.shape == (7, 6)
    assert {own.shape for own in jax.tree.leaves(joined["first_state"])} == {(1, 6, 5)}
    assert "first_state" not in joined.flattened()
    with pytest.raises(BatchError, match=r"first_state starts with \[1, B\], and B is 6 here"):
        Batch(joined | {"first_state": batch["first_state"]}).validated()
    worker.close()


def test_steps_that_were_resets_stay_in_sequences_and_count_for_nothing() -> None:
    worker, same = (
        scripted_worker("gru", AutoresetMode.NEXT_STEP, unfilled=unfilled) for unfilled in (True, False)
    )
    [steps] = unprocessed(worker)
    batch = sampled(same)
    mask = steps["mask"]
    assert not mask.all()
    for name in ("mask", "observation", "action", "log_prob", "terminated", "truncated", "episode_start"):
        np.testing.assert_array_equal(batch[name], steps[name])
    for name in ("advantage", "value_target", "reward"):
        np.testing.assert_array_equal(batch[name][mask], steps[name][mask])
        assert set(batch[name][~mask]) <= set(steps[name][mask]), "copies of steps that were taken"
    worker.close()
    same.close()


# Gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORIES)
def test_gradients_go_back_to_the_start_of_an_episode_and_no_further(memory: Any) -> None:
    policy: Any = recurrent_policy(memory)(BOX, spaces.Discrete(3))
    weights, random = spread(policy), np.random.default_rng(2)
    observation = random.normal(size=(6, 2, 2)).astype(np.float32)
    state = jax.tree.map(
        lambda own: random.normal(size=own.shape).astype(np.float32), policy.initial_state(2)
    )
    starts = np.zeros((6, 2), bool)
    starts[3, 0] = True

    def last(observation: Any, state: Any) -> Any:
        found = policy.sequence_outputs(weights, observation, state, starts)
        return found.value[-1].sum() + found.outputs[-1, :, 0].sum()

    by_observation, by_state = jax.grad(last, (0, 1))(observation, state)
    reached = np.abs(by_observation).max(axis=-1) > 0
    np.testing.assert_array_equal(reached[:, 0], [False, False, False, True, True, True])
    assert reached[:, 1].all()
    for own in jax.tree.leaves(by_state):
        assert not np.asarray(own[0]).any()
        assert np.abs(own[1]).max() > 0


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("algorithm", [ppo, a2c], ids=["ppo", "a2c"])
@pytest.mark.slow
def test_gradients_of_losses_are_those_of_finite_differences(algorithm: Any, memory: Any) -> None:
    worker = scripted_worker(memory, None, unfilled=False)
    policy: Any = worker.policy
    weights, batch = worker.weights, sampled(worker)
    config = algorithm.Config(**SMALL, memory=memory, num_envs=3, rollout_length=7, entropy_coefficient=0.3)
    loss: Any = partial(algorithm.loss, policy, config, *([0.2] if algorithm is ppo else []))
    batch["log_prob"] = batch["log_prob"] + np.float32(0.01)  # the ratio has a kink at 1
    grads, _ = compute_grads(partial(loss, batch), weights)
    with jax.enable_x64(True):
        double, batch = jax.tree.map(in_double, (dict(weights), batch))
        for name in ("network.actor.cell.recurrent", "network.critic.body.layers[0].weight"):
            direction = np.random.default_rng(3).normal(size=double[name].shape)
            near = (double | {name: double[name] + h * direction} for h in (1e-5, -1e-5))
            high, low = (loss(batch, own)[0] for own in near)
            slope = float((grads[name] * direction).sum())
            assert slope == pytest.approx(float(high - low) / 2e-5, rel=1e-3)
    worker.close()


@pytest.mark.parametrize("algorithm", [ppo, a2c], ids=["ppo", "a2c"])
@pytest.mark.slow
def test_learners_ignore_what_is_in_steps_that_were_resets(algorithm: Any) -> None:
    worker = scripted_worker("lstm", AutoresetMode.NEXT_STEP, unfilled=False)
    batch = sampled(worker)
    reset = ~batch["mask"]
    assert reset.any()
    changed = Batch(batch)
    for name in ("observation", "log_prob", "advantage", "value_target"):
        changed[name] = np.array(batch[name])
        changed[name][reset] += 0.5
    taken = Batch(batch | {"advantage": np.where(reset, batch["advantage"], 2 * batch["advantage"])})
    config = algorithm.Config(**SMALL, memory="lstm", num_envs=3, rollout_length=7)
    weights = []
    for own in (batch, changed, taken):
        learner = algorithm.learner(config, Task(EnvSpec(Scripted), 100), worker.policy)
        learner.train(own)
        weights.append(learner.get_weights()["network.actor.cell.recurrent"])
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])
    worker.close()


# Networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORIES)
def test_recurrent_weights_start_orthogonal(memory: Any) -> None:
    policy: Any = recurrent_policy(memory)(BOX, spaces.Discrete(3))
    weights = policy.init(0)
    actor, critic = (weights[f"network.{part}.cell.recurrent"] for part in ("actor", "critic"))
    for block in np.split(actor, {"lstm": 4, "gru": 3}[memory]):
        np.testing.assert_allclose(block @ block.T, np.eye(5), atol=1e-5)
    bias = weights["network.actor.cell.input.bias"]
    assert bias.sum() == (5 if memory == "lstm" else 0), "an LSTM forgets slowly at first"
    assert not np.array_equal(actor, critic)
    assert not np.array_equal(actor, policy.init(1)["network.actor.cell.recurrent"])


@pytest.mark.parametrize(("memory", "kind"), [("lstm", LSTM), ("gru", GRU)])
@pytest.mark.parametrize("config", [ALGORITHMS[name].config for name in RECURRENT])
def test_the_settings_choose_the_network(memory: Any, kind: type, config: Any) -> None:
    policy: Any = ppo.make_policy(config(memory=memory, memory_size=7, hidden=(3,)), BOX, spaces.Discrete(2))
    network = policy.params.module(policy.init(0))
    assert type(network.actor.cell) is type(network.critic.cell) is kind
    assert network.actor.cell.recurrent.shape[1] == 7
    assert {own.shape for own in jax.tree.leaves(policy.initial_state(4))} == {(4, 7)}
    plain = ppo.make_policy(config(), BOX, spaces.Discrete(2))
    assert type(plain) is ActorCriticPolicy


def test_a_recurrent_policy_has_no_outputs_without_a_state() -> None:
    policy: Any = recurrent_policy("gru")(BOX, spaces.Discrete(3))
    with pytest.raises(rs.RollstreamError, match="together with its state: use evaluate_batch"):
        policy.evaluate_actions(policy.init(0), np.zeros((4, 2)), np.zeros(4, int))


# Policies of one's own -----------------------------------------------------------------------------


def test_memory_needs_a_recurrent_policy() -> None:
    make = partial(ActorCriticPolicy, network=partial(actor_critic, hidden=(3,)))
    spec = ppo.worker(ppo.Config(memory="gru"), Task(EnvSpec("CartPole-v1"), 10, policy=make))
    with pytest.raises(
        rs.RollstreamError, match="memory is gru, but ActorCriticPolicy is not recurrent: set memory to none"
    ):
        spec.policy(BOX, spaces.Discrete(2))


@pytest.mark.slow
def test_a_recurrent_policy_of_ones_own_needs_no_setting() -> None:
    class Own(RecurrentPolicy):
        """Nothing but a name."""

    task = Task(
        EnvSpec("CartPole-v1"), 10, policy=partial(Own, network=recurrent_policy("gru").keywords["network"])
    )
    config = ppo.Config(
        num_envs=4, rollout_length=8, minibatch_size=16, epochs=1, normalize_observations=True
    )
    with rs.engine("inline") as engine:
        workers = ppo.PPO.workers(engine, config, task)
        policy: Any = workers.learner.policy
        assert policy.normalize_observations
        report = next(ppo.PPO.plan(workers, config))
    assert np.isfinite(report["train/loss"])


# Minibatches ---------------------------------------------------------------------------------------


def test_minibatches_are_whole_rollouts() -> None:
    message = (
        r"has to be whole rollouts of 32 steps, and 6 environments have to be divided evenly: set "
        r"minibatch_size to 32 or 64 or 96 or 192 instead of {}, or change rollout_length"
    )
    for size in (48, 128):
        with pytest.raises(rs.RollstreamError, match=message.format(size)):
            ppo.Config(memory="lstm", num_envs=6, rollout_length=32, minibatch_size=size)
    assert ppo.Config(memory="lstm").steps_per_minibatch(recurrent=True) == 2 * 256
    assert ppo.Config(memory="lstm", num_envs=3).steps_per_minibatch(recurrent=True) == 256
    assert ppo.Config().steps_per_minibatch(recurrent=False) == 64


@pytest.mark.parametrize(
    ("size", "num_envs", "expected"), [(None, 12, 96), (64, 12, 64), (64, 9, 32), (128, 6, 96)]
)
def test_another_number_of_environments_keeps_rollouts_whole(size: Any, num_envs: int, expected: int) -> None:
    config = ppo.Config(memory="lstm", num_envs=8, rollout_length=32, minibatch_size=size)
    assert config.with_num_envs(num_envs).steps_per_minibatch(recurrent=True) == expected


@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "Taxi-v4", "Unknown-v0"])
def test_memory_fits_tuned_and_default_settings(env: str) -> None:
    assert resolve_config(ppo.PPO, env, {"memory": "lstm"}).memory == "lstm"


@pytest.mark.slow
def test_an_epoch_trains_on_every_sequence_once() -> None:
    """Two minibatches of two sequences, against updates on each of them by itself."""
    spec = WorkerSpec(
        EnvSpec(Scripted), 4, 7, recurrent_policy("gru"), partial(add_gae, gamma=GAMMA, gae_lambda=LAMBDA)
    )
    worker = worker_of(spec)
    policy: Any = worker.policy
    batch, task = sampled(worker), Task(EnvSpec(Scripted), 1_000_000)
    settings: dict[str, Any] = {**SMALL, "memory": "gru", "rollout_length": 7, "epochs": 1}
    whole = ppo.learner(ppo.Config(**settings, num_envs=4, minibatch_size=14), task, policy)
    order = np.random.default_rng([0, 0, 4]).permutation(4)  # as the learner draws it
    whole.train(batch)
    parts = ppo.learner(ppo.Config(**settings, num_envs=2, minibatch_size=14), task, policy)
    for rows in order.reshape(2, 2):
        parts.train(batch.map(lambda own, rows=rows: own[:, rows]))
    for name, value in parts.get_weights().items():
        np.testing.assert_allclose(whole.get_weights()[name], value, rtol=1e-5, atol=1e-7)
    worker.close()


# Observations --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dict_observations_masks_and_normalization() -> None:
    config = ppo.Config(
        memory="lstm", num_envs=4, rollout_length=25, normalize_observations=True, normalize_rewards=True
    )
    with rs.engine("inline") as engine:
        workers = ppo.PPO.workers(engine, config, Task(EnvSpec(Signals), 1000))  # Signals checks legality
        reports = list(islice(ppo.PPO.plan(workers, config), 3))
        weights = workers.learner.get_weights()
    assert np.isfinite([report["train/loss"] for report in reports]).all()
    assert weights["observation.count"] == 3 * 100
    worker = worker_of(ppo.worker(config, Task(EnvSpec(Signals), 1000)))
    worker.set_weights(1, weights)
    policy: Any = worker.policy
    for _ in range(2):
        batch = sampled(worker)
        log_prob, _, value = jax.jit(partial(evaluate_batch, policy))(worker.weights, batch)
        np.testing.assert_allclose(batch["log_prob"], log_prob, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(batch["value"], value, rtol=1e-4, atol=1e-5)
        scaled = Batch(batch | {"observation": {**batch["observation"]}})
        scaled["observation"]["observation"] = jax.tree.map(
            lambda own: own + 1, batch["observation"]["observation"]
        )
        assert not np.allclose(evaluate_batch(policy, worker.weights, scaled).value, value, atol=1e-3)
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_images_and_frame_stacks(name: str) -> None:
    algorithm = ALGORITHMS[name]
    more = {"report_every": 1} if name != "ppo" else {"epochs": 1}
    config = algorithm.config(memory="gru", memory_size=8, num_envs=2, rollout_length=12, **more)
    with rs.engine("inline") as engine:
        workers = algorithm.workers(engine, config, Task(EnvSpec(Catch, frame_stack=2), 1000))
        before = workers.learner.get_weights()["network.actor.cell.recurrent"].copy()
        reports = list(islice(algorithm.plan(workers, config), 2))
        after = workers.learner.get_weights()["network.actor.cell.recurrent"]
    assert np.isfinite([report["train/loss"] for report in reports]).all()
    assert not np.array_equal(before, after)


# Files ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a2c", "impala", "appo"))]
)
def test_training_goes_on_exactly(name: str) -> None:
    settings: dict[str, Any] = {"memory": "lstm", "memory_size": 8}
    with training(name, "inline", **settings) as (plan, workers):
        for _ in range(2):
            next(plan)
        state = decode_state(*encode_state(plan.state_dict()))
        for _ in range(2):
            next(plan)
        expected = fingerprint(workers.learner)
    with training(name, "inline", **settings) as (plan, workers):
        plan.load_state_dict(state)
        for _ in range(2):
            next(plan)
        assert fingerprint(workers.learner) == expected


@pytest.mark.slow
def test_weights_are_the_same_on_every_engine() -> None:
    settings: dict[str, Any] = {"memory": "gru", "memory_size": 8}
    found = set()
    for engine in ("inline", "processes"):
        with training("ppo", engine, **settings) as (plan, workers):
            for _ in range(3):
                next(plan)
            found.add(fingerprint(workers.learner))
    assert len(found) == 1


@pytest.mark.slow
def test_a_saved_policy_acts_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "draw_curve", lambda _, path, __: path.touch())
    config = {"memory": "lstm", "memory_size": 8, "num_envs": 2, "minibatch_size": 32, "epochs": 1}
    run = rs.train("ppo", env="CartPole-v1", steps=64, config=config, out=tmp_path / "run", quiet=True)
    loaded = rs.load(tmp_path / "run")
    assert loaded.evaluate(episodes=3) == run.evaluate(episodes=3)
    policy: Any = loaded.policy.policy
    observations = np.random.default_rng(0).normal(size=(6, 3, 4)).astype(np.float32)
    state, expected = policy.initial_state(3), []
    for observation in observations:
        action, state = policy.step(run.policy.weights, observation, state, None)
        expected.append(np.asarray(action))
    np.testing.assert_array_equal([loaded.policy.act(own) for own in observations], expected)
    loaded.policy.reset()
    np.testing.assert_array_equal([loaded.policy.act(own) for own in observations], expected)
    loaded.policy.reset()
    assert [loaded.policy.act(own[1]) for own in observations] == [int(own[1]) for own in expected]


@pytest.mark.slow
def test_hidden_velocities_train_resume_and_evaluate_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped and resumed, the weights are those of a run that was not."""
    monkeypatch.setattr(loop, "draw_curve", lambda _, path, __: path.touch())
    env = Path(__file__).parents[1] / "examples" / "hidden_velocities.py"
    sizes = "--config.num-envs 4 --config.rollout-length 16 --config.epochs 1 --config.memory gru --quiet"
    options = [f"--env={env}:HiddenVelocities", *sizes.split()]
    main(["train", "ppo", *options, "--steps", "128", "--out", str(tmp_path / "whole")])
    main(["train", "ppo", *options, "--steps", "64", "--out", str(tmp_path / "parts")])
    main(["train", "ppo", "--resume", "--steps", "128", "--quiet", "--out", str(tmp_path / "parts")])
    whole, parts = (rs.load(tmp_path / name).policy.weights for name in ("whole", "parts"))
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value)
    capsys.readouterr()
    main(["evaluate", str(tmp_path / "parts"), "--episodes", "2"])
    assert "over 2 episodes" in capsys.readouterr().out


def test_acting_starts_anew_where_an_episode_starts() -> None:
    """State of a policy that acts for several environments, some of which start an episode."""
    policy: Any = recurrent_policy("gru")(BOX, spaces.Discrete(3))
    acting = TrainedPolicy(policy, spread(policy, 2.0), BOX, spaces.Discrete(3))
    observations = np.random.default_rng(0).normal(size=(4, 2, 2))
    for observation in observations[:2]:
        acting.act(observation)
    acting.reset([True, False])
    for first, second in acting._state:
        assert not first.any()
        assert second.any()


# Learning ------------------------------------------------------------------------------------------


RECALL: dict[str, Any] = {"num_envs": 16, "rollout_length": 16, "hidden": (16,), "learning_rate": 0.003}


def recalled(name: str, steps: int, **settings: Any) -> float:
    with training(name, "inline", Recall, seed=1, steps=steps, **{**RECALL, **settings}) as (plan, _):
        report = next(report for report in plan if report["time/total_timesteps"] >= steps)
    return report["rollout/ep_rew_mean"]


@pytest.mark.parametrize("memory", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_ppo_remembers(memory: Any) -> None:
    settings = {"memory": memory, "memory_size": 16, "minibatch_size": 64, "epochs": 8}
    assert recalled("ppo", 6_000, **settings) > 0.85


@pytest.mark.slow
def test_without_memory_there_is_nothing_to_learn() -> None:
    assert abs(recalled("ppo", 6_000, minibatch_size=64, epochs=8)) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a2c", "a3c"])
def test_a2c_and_a3c_remember(name: str) -> None:
    settings = {"memory": "gru", "memory_size": 16, "rollout_length": 8, "report_every": 20}
    assert recalled(name, 20_000, **settings) > 0.8


@pytest.mark.parametrize("name", ["impala", pytest.param("appo", marks=pytest.mark.slow)])
def test_impala_and_appo_remember(name: str) -> None:
    """With rollouts that are a few versions old, and start anywhere in episodes."""
    settings = {"memory": "gru", "memory_size": 16, "rollout_length": 6, "report_every": 20}
    assert recalled(name, 12_000, **settings) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["impala", "appo"])
def test_without_memory_impala_and_appo_learn_nothing(name: str) -> None:
    assert abs(recalled(name, 12_000, rollout_length=6, report_every=20)) < 0.3
