"""IMPALA and APPO: losses, gradients and updates against versions in numpy, and their plans."""

import pickle
from dataclasses import replace
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from learning_runs import SMALL, fingerprint, training
from small_envs import Signals, Target
from test_losses import ACTIONS, OBSERVATIONS, clipped, in_double, log_prob_entropy_value, task

import rollstream as rs
from rollstream.algos import ALGORITHMS, appo, impala
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.normalize import Moments
from rollstream.rl.operators import ParallelRollouts, TrainOneStep
from rollstream.rl.policy import ActorCriticPolicy, evaluate_batch
from rollstream.rl.rollout import Rollout
from rollstream.rl.rollout_batches import JoinRollouts, join_rollouts, steps_of
from rollstream.rl.update_metrics import Diverged
from rollstream.rl.updates import compute_grads, optimizer_step
from rollstream.rl.vtrace import evaluate_rollouts
from rollstream.training.checkpointing import without_workers

Weights = dict[str, Any]
T, B = 4, 3


def moved(weights: Weights, seed: int) -> Weights:
    """Weights with some spread, so that nothing is 0 or small by chance."""
    random = np.random.default_rng(seed)
    return {
        name: (value + random.normal(0, 0.5, np.shape(value))).astype(np.float32)
        if name.startswith("network")
        else value
        for name, value in weights.items()
    }


def example(
    algorithm: ModuleType, kind: str = "discrete", **more: Any
) -> tuple[Any, ActorCriticPolicy, Weights, Batch]:
    """Settings, a policy, its weights, and a batch `[T + 1, B]` in which one step only resets."""
    settings = {
        "hidden": (3,),
        "num_envs": B,
        "rollout_length": T,
        "entropy_coefficient": 0.3,
        "value_coefficient": 0.7,
        "max_grad_norm": 0.1,
        "learning_rate": 0.01,
        **more,
    }
    if algorithm is appo:
        settings = {"clip_target_ratio": 1.3, "epochs": 1, **settings}
    config = algorithm.Config(**settings)
    policy = impala.make_policy(config, OBSERVATIONS, ACTIONS[kind])
    random, shape = np.random.default_rng(1), (T + 1, B)
    weights = moved(policy.init(0), 2)
    action = random.integers(0, 3, shape) if kind == "discrete" else random.normal(size=(*shape, 2))
    observation = random.normal(size=(*shape, 2))
    log_ratio = random.normal(0, 0.4, shape)
    final_value = np.full(shape, np.nan)
    final_value[1, 0] = 2.0
    batch = Batch(
        observation=observation,
        action=action,
        reward=random.normal(size=shape),
        terminated=np.zeros(shape, bool),
        truncated=~np.isnan(final_value),
        final_value=final_value,
        mask=np.ones(shape, bool),
    )
    batch["terminated"][1, 2], batch["mask"][2, 2] = True, False
    batch = batch.map(lambda own: own.astype(np.float32) if own.dtype == float else own)
    if config.memory != "none":
        batch |= random_states(policy)
    acted = np.asarray(evaluate_batch(policy, weights, batch).log_prob)
    return config, policy, weights, Batch(batch, log_prob=acted + log_ratio.astype(np.float32))


def random_states(policy: Any) -> dict[str, Any]:
    """States before the first step; episodes start after those that end, also in the last row."""
    random = np.random.default_rng(4)
    first = jax.tree.map(lambda own: random.normal(size=(1, *own.shape)), policy.initial_state(B))
    starts = np.zeros((T + 1, B), bool)
    starts[2, 0] = starts[3, 2] = starts[T, 1] = True
    first = jax.tree.map(lambda own: own.astype(np.float32), first)
    return {"first_state": first, "episode_start": starts}


def loss_of(algorithm: ModuleType, config: Any, kind: str, weights: Weights, rows: Any) -> dict[str, float]:
    """Both losses, as their papers have them, over the steps that are no resets."""
    log_prob, entropy, value = log_prob_entropy_value(weights, rows["observation"], rows["action"], kind)
    if algorithm is appo:
        acted_to_target = np.exp(rows["log_prob"] - rows["target_log_prob"])
        ratio = np.exp(log_prob - rows["log_prob"]) * np.minimum(acted_to_target, config.clip_target_ratio)
        low, high = 1 - config.clip_range, 1 + config.clip_range
        gain = np.minimum(ratio * rows["advantage"], np.clip(ratio, low, high) * rows["advantage"])
    else:
        ratio = np.exp(log_prob - rows["log_prob"])
        gain = log_prob * rows["advantage"]
    mask, name = rows["mask"], "policy_gradient_loss" if algorithm is appo else "policy_loss"
    parts = {
        name: -gain[mask].mean(),
        "value_loss": ((value - rows["value_target"]) ** 2)[mask].mean(),
        "entropy_loss": -entropy[mask].mean(),
    }
    parts["loss"] = (
        parts[name]
        + config.value_coefficient * parts["value_loss"]
        + config.entropy_coefficient * parts["entropy_loss"]
    )
    if algorithm is appo:
        parts["clip_fraction"] = (np.abs(ratio - 1) > config.clip_range)[mask].mean()
    else:
        parts["approx_kl"] = (ratio - 1 - np.log(ratio))[mask].mean()
    return parts


def gradients_of(algorithm: ModuleType, config: Any, kind: str, weights: Weights, rows: Any) -> Weights:
    """The gradient of the loss, by small differences; targets and advantages stay as they are."""
    grads = {}
    for name, value in weights.items():
        grads[name] = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            sides = []
            for change in (1e-6, -1e-6):
                other = value.copy()
                other[index] += change
                sides.append(loss_of(algorithm, config, kind, weights | {name: other}, rows)["loss"])
            grads[name][index] = (sides[0] - sides[1]) / 2e-6
    return grads


def rows_of(algorithm: ModuleType, config: Any, policy: Any, target: Weights, batch: Batch) -> Any:
    """The steps of a batch with V-trace, which has tests of its own, in double precision."""
    if algorithm is appo:
        return in_double(dict(appo.with_targets(policy, config, batch, target)))
    _, vtrace = evaluate_rollouts(policy, target, batch, **config.vtrace)
    return in_double(dict(steps_of(batch)) | vtrace._asdict())


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("algorithm", [impala, appo], ids=["impala", "appo"])
@pytest.mark.slow
def test_losses_gradients_and_updates(algorithm: ModuleType, kind: str) -> None:
    config, policy, weights, batch = example(algorithm, kind)
    target = moved(policy.init(0), 3) if algorithm is appo else weights
    rows = rows_of(algorithm, config, policy, target, batch)
    expected = loss_of(algorithm, config, kind, in_double(weights), rows)
    given = appo.with_targets(policy, config, batch, target) if algorithm is appo else batch

    @jax.jit
    def both(weights: Weights, batch: Batch) -> Any:
        return jax.grad(partial(algorithm.loss, policy, config, batch), has_aux=True)(weights)

    grads, metrics = both(weights, given)
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-4), name
    if algorithm is appo:
        assert 0 < expected["clip_fraction"] < 1, "nothing is clipped, or everything"
        clips = np.exp(rows["log_prob"] - rows["target_log_prob"]) > config.clip_target_ratio
        assert clips.any()
        assert not clips.all()
    numeric = gradients_of(algorithm, config, kind, in_double(weights), rows)
    for name in weights:
        np.testing.assert_allclose(grads[name], numeric[name], rtol=1e-3, atol=1e-5, err_msg=name)

    learner = algorithm.learner(config, task(), policy)
    learner.weights = weights
    if algorithm is appo:
        learner.state = learner.state | {"target": target}
    known = learner.train(batch, T * B - 1)
    limited = clipped(numeric, config.max_grad_norm)
    for name in weights:
        change = limited[name] / (np.abs(limited[name]) + 1e-5)  # Adam's first step
        expected_weights = in_double(weights[name]) - config.learning_rate * change
        np.testing.assert_allclose(
            learner.weights[name], expected_weights, rtol=1e-4, atol=3e-5, err_msg=name
        )
    norm = np.sqrt(sum((grad**2).sum() for grad in numeric.values()))
    assert known["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert (learner.version, learner.steps) == (1, T * B - 1)


@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("algorithm", [impala, appo], ids=["impala", "appo"])
@pytest.mark.slow
def test_what_reset_steps_and_the_last_row_have_besides_observations_changes_nothing(
    algorithm: ModuleType, memory: str
) -> None:
    config, policy, weights, batch = example(algorithm, memory=memory)
    changed = batch.map(np.array)
    for place in ((2, 2), (T,)):
        changed["reward"][place] = 100
        changed["log_prob"][place] = -3
        changed["action"][place] = 1 - changed["action"][place] % 2
    one, other = (algorithm.learner(config, task(), policy) for _ in range(2))
    one.weights = other.weights = weights
    one.train(batch)
    other.train(changed)
    for name in weights:
        np.testing.assert_array_equal(one.weights[name], other.weights[name])


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_one_step_of_appo_right_after_its_target_network_is_one_of_impala(memory: str) -> None:
    """The ratio is 1, and so is its gradient that of the log probability."""
    config, policy, weights, batch = example(impala, memory=memory, memory_size=4)
    same = appo.Config(**vars(config), epochs=1, minibatches=1, target_update_interval=1)
    one, other = impala.learner(config, task(), policy), appo.learner(same, task(), policy)
    one.weights = other.weights = weights
    other.state = other.state | {"target": weights}
    for _ in range(3):
        one.train(batch)
        other.train(batch)
    for name in weights:
        np.testing.assert_allclose(one.weights[name], other.weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_target_network_follows_every_few_batches() -> None:
    config, policy, weights, batch = example(appo, target_update_interval=3, epochs=2, minibatches=3)
    learner = appo.learner(config, task(), policy)
    expected, learner.weights = learner.state["target"], weights
    for update in range(1, 8):
        learner.train(batch)
        target = learner.state["target"]
        if update % 3 == 0:
            expected = learner.weights
        for name, value in target.items():
            np.testing.assert_array_equal(value, expected[name])
    assert learner.n_updates == 7 * 2, "epochs"


def test_minibatches_are_random_steps() -> None:
    """Each is one step of the optimizer, with advantages and targets of before the first of them."""
    settings = {"minibatches": 6, "epochs": 2, "standardize_advantages": True}
    config, policy, weights, batch = example(appo, **settings)
    learner = appo.learner(config, task(), policy)
    learner.weights = weights
    rows = appo.with_targets(policy, config, batch, learner.state["target"]).flattened()
    learner.train(batch)
    generator, optimizer = np.random.default_rng([0, 0, 4]), impala.make_optimizer(config)
    orders = np.concatenate([generator.permutation(T * B) for _ in range(2)])
    state, learning_rate = optimizer.init(weights), np.float32(config.learning_rate)

    @jax.jit
    def step(minibatch: Any, weights: Weights, state: Any) -> Any:
        grads, _ = compute_grads(partial(appo.loss, policy, config, minibatch), weights)
        return optimizer_step(optimizer, learning_rate, grads, state, weights)

    for chosen in orders.reshape(12, -1):
        weights, state = step({name: column[chosen] for name, column in rows.items()}, weights, state)
    for name, value in weights.items():
        np.testing.assert_allclose(learner.weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_standardized_advantages_have_mean_0_and_deviation_1(masked: bool) -> None:
    config, policy, weights, batch = example(appo, standardize_advantages=True)
    if not masked:
        del batch["mask"]
    rows = appo.with_targets(policy, config, batch, weights)
    mask = rows.get("mask", np.ones((T, B), bool))
    plain = appo.with_targets(policy, replace(config, standardize_advantages=False), batch, weights)
    expected = np.asarray(plain["advantage"])[mask]
    expected = (expected - expected.mean()) / expected.std()
    np.testing.assert_allclose(np.asarray(rows["advantage"])[mask], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_minibatches_of_a_recurrent_policy_are_all_steps_of_some_environments() -> None:
    """Three minibatches of an environment each are three batches, in an order that the seed chooses."""
    config, policy, weights, batch = example(
        appo, memory="lstm", memory_size=4, minibatches=3, target_update_interval=100
    )
    del batch["mask"]  # every environment counts alike
    learner = appo.learner(config, task(), policy)
    order = np.random.default_rng([0, 0, 4]).permutation(B)
    single = appo.learner(appo.Config(**vars(config) | {"num_envs": 1, "minibatches": 1}), task(), policy)
    learner.weights = single.weights = weights
    learner.train(batch)
    for index in order:
        single.train(batch.map(lambda column, index=index: column[:, index : index + 1]))
    for name in weights:
        np.testing.assert_allclose(learner.weights[name], single.weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [impala, appo], ids=["impala", "appo"])
def test_statistics_count_every_step_once(algorithm: ModuleType) -> None:
    config, policy, weights, batch = example(algorithm, normalize_observations=True, normalize_rewards=True)
    returns = np.random.default_rng(5).normal(2, 4, (T + 1, B)).astype(np.float32)
    batch = Batch(batch, discounted_return=returns)
    learner = algorithm.learner(config, task(), policy)
    learner.weights = weights
    learner.train(batch)
    learner.train(batch)
    mask = batch["mask"][:-1]
    for name, column in (("observation", batch["observation"]), ("return", returns)):
        moments, values = Moments.from_weights(learner.weights, name), column[:-1][mask]
        assert float(moments.count) == 2 * (T * B - 1)
        np.testing.assert_allclose(moments.mean, values.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(moments.std, values.std(0), rtol=1e-4)


@pytest.mark.parametrize("algorithm", [impala, appo], ids=["impala", "appo"])
def test_nan_stops_the_update(algorithm: ModuleType) -> None:
    config, policy, weights, batch = example(algorithm)
    learner = algorithm.learner(config, task(), policy)
    learner.weights = weights
    with pytest.raises(Diverged, match="value_loss"):
        learner.train(Batch(batch | {"reward": np.full_like(batch["reward"], np.nan)}))
    assert learner.weights is weights


# Plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "workers", "steps"),
    [
        ({}, 0, 8 * 20),
        ({}, 4, 8 * 20),
        ({"rollouts_per_batch": 3}, 4, 3 * 2 * 20),
        ({"rollouts_per_batch": 3, "replay_ratio": 2}, 4, 3 * 2 * 20),
    ],
)
def test_a_batch_has_as_many_new_steps(settings: dict[str, Any], workers: int, steps: int) -> None:
    assert impala.Config(**settings).steps_per_round(workers) == steps
    config, count = appo.Config(**settings), steps * (1 + settings.get("replay_ratio", 0))
    a_task = Task(EnvSpec("CartPole-v1"), 1, workers=workers)
    assert config.batch_and_minibatch_rows(a_task, recurrent=False) == (count, count)
    assert config.batch_and_minibatch_rows(a_task, recurrent=True) == (count // 20, count // 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["impala", "appo"])
@pytest.mark.parametrize("replay", [{}, {"replay_ratio": 2, "replay_batches": 3}], ids=["", "replay"])
def test_reports_count_new_steps_and_episodes_only(name: str, replay: dict[str, Any]) -> None:
    with training(name, "inline", **replay) as (plan, workers):
        reports = [next(plan) for _ in range(20)]
        assert workers.learner_actor.call("state_dict").result()["steps"] in (
            400,
            420,
        )  # one may be in flight
    each = SMALL[name].get("epochs", 1)
    assert [report["time/total_timesteps"] for report in reports] == [20 * i for i in range(1, 21)]
    assert [report["train/n_updates"] for report in reports] == [each * i for i in range(1, 21)]
    lengths = reports[-1]["rollout/ep_len_mean"] * reports[-1]["rollout/episodes"]
    assert 0 <= 400 - lengths < 4 * reports[-1]["rollout/ep_len_mean"] * 3, "all but unfinished episodes"
    assert {"train/approx_kl", "train/explained_variance", "train/grad_norm"} <= reports[-1].keys()


@pytest.mark.slow
def test_weights_reach_the_workers_of_a_batch() -> None:
    """On one thread two workers take turns, so a rollout is as old as the items in flight before it."""
    settings: dict[str, Any] = {"num_async": 1, "rollouts_per_batch": 1}
    for batches, oldest in ((1, 1), (2, 3)):  # a batch more is an own rollout more, of two workers
        with training("impala", "inline", batches_in_flight=batches, **settings) as (plan, _):
            stale = [report["weights/staleness"] for report in islice(plan, 8)]
        assert stale == [*range(oldest), *[oldest] * (8 - oldest)]
    with training("impala", "inline") as (plan, _):
        stale = [report["weights/staleness"] for report in islice(plan, 40)]
    assert max(stale[:20]) == max(stale[20:]) <= 3


def test_weights_can_be_sent_to_all_workers() -> None:
    settings: dict[str, Any] = {"num_async": 1, "rollouts_per_batch": 1, "batches_in_flight": 1}
    for broadcast in (False, True):
        with training("impala", "inline", broadcast_weights=broadcast, **settings) as (plan, workers):
            for _ in range(4):
                next(plan)
            versions = sorted(actor.apply(_version).result() for actor in workers.actors)
            assert versions == ([3, 4], [4, 4])[broadcast]


def _version(worker: Any) -> int:
    return worker.version


def test_stale_rollouts_are_dropped_and_training_goes_on() -> None:
    settings: dict[str, Any] = {"num_async": 3, "rollouts_per_batch": 1, "max_staleness": 1}
    settings["batches_in_flight"] = 1
    with training("impala", "inline", **settings) as (plan, _):
        stale = [report["weights/staleness"] for report in islice(plan, 30)]
        dropped = plan.statistics()["max_staleness"].dropped
    assert max(stale) == 1
    assert dropped > 0
    settings["max_staleness"] = None
    with training("impala", "inline", **settings) as (plan, _):
        assert max(report["weights/staleness"] for report in islice(plan, 30)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"rollouts_per_batch": 3, "replay_ratio": 1}], ids=["", "replay"])
@pytest.mark.parametrize("name", ["impala", "appo"])
def test_a_saved_plan_goes_on_exactly(name: str, settings: dict[str, Any]) -> None:
    """Its workers, too, sample with the weights they had, not with the newest ones."""
    with training(name, "inline", **settings) as (plan, workers):
        for _ in range(3):
            next(plan)
        state = pickle.dumps(plan.state_dict())
        for _ in range(8):
            next(plan)
        straight = fingerprint(workers.learner)
    with training(name, "inline", **settings) as (plan, workers):
        plan.load_state_dict(pickle.loads(state))
        for _ in range(8):
            next(plan)
        assert fingerprint(workers.learner) == straight


def test_a_reference_before_train_one_step_is_an_error() -> None:
    def plan(workers: Any, _: Any) -> Any:
        references: Any = ParallelRollouts(workers).put().gather_sync().flatten()
        return references.for_each(TrainOneStep(workers))

    algorithm = replace(ALGORITHMS["a2c"], plan=plan)
    with pytest.raises(rs.RollstreamError, match=r"TrainOneStep got a reference: leave out put\(\)"):
        rs.train(algorithm, env="CartPole-v1", steps=100, quiet=True)


def test_rollouts_of_other_lengths_are_an_error() -> None:
    one, other = (Rollout(Batch(reward=np.zeros((steps, 2))), np.zeros((2, 3)), []) for steps in (4, 5))
    with pytest.raises(rs.RollstreamError, match=r"rollouts of 4 and of 5 steps .* same rollout_length"):
        join_rollouts([one, other])


def test_batches_of_another_number_of_workers_are_not_replayed() -> None:
    join = JoinRollouts(replay_batches=4, replay_ratio=1)
    for width in (2, 2, 3):
        columns = Batch(reward=np.zeros((4, width)), observation=np.zeros((4, width, 3)))
        rollout = Rollout(columns, np.zeros((width, 3)), [])
        assert join([rollout]).shape == (5, 2 * width)
    [kept] = join.state_dict()["pool"]
    assert kept["reward"].shape == (5, 3)


@pytest.mark.parametrize(("name", "missing"), [("impala", "ReceiveWeights"), ("apex", "UpdatePriorities")])
def test_a_plan_that_lacks_an_operator_is_told_which(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = ALGORITHMS[name].plan.__module__
    monkeypatch.setattr(f"{algorithm}.{missing}", lambda _: lambda report: report)
    with training(name, "inline") as (plan, _), pytest.raises(rs.RollstreamError, match=f"put .*{missing}"):
        list(islice(plan, 20))


@pytest.mark.parametrize(("memory", "count", "rows"), [("none", 20, "steps"), ("gru", 4, "environments")])
def test_minibatches_that_do_not_fit_are_an_error(memory: str, count: int, rows: str) -> None:
    with (
        pytest.raises(
            rs.RollstreamError, match=rf"{count} {rows} cannot be divided into 3 .* a divisor of {count}\b"
        ),
        training("appo", "inline", minibatches=3, memory=memory),
    ):
        pass


@pytest.mark.slow
def test_a_batch_that_is_not_full_does_not_outlive_a_change_of_workers() -> None:
    """Its rollouts have another number of environments; and the next batch may need fewer of them."""
    with training("impala", "inline", rollouts_per_batch=3) as (plan, _):
        next(plan)
        state = plan.state_dict()
    _batch_stage(state)["partial"] = ["a rollout"] * 2
    changed = without_workers(state, 0.5)
    [after] = [
        own["stages"]["batch"] for own in changed["nodes"].values() if "batch" in own.get("stages", {})
    ]
    assert after["partial"] == []
    with training("impala", "inline", rollouts_per_batch=2) as (plan, workers):
        plan.load_state_dict(changed, renewed=workers.actors)
        assert next(plan)["time/total_timesteps"] > 0


def _batch_stage(state: dict[str, Any]) -> dict[str, Any]:
    [batch] = [own["stages"]["batch"] for own in state["nodes"].values() if "batch" in own.get("stages", {})]
    return batch


# Learning ----------------------------------------------------------------------------------------

QUICK = {
    "num_envs": 8,
    "rollout_length": 16,
    "learning_rate": 3e-3,
    "value_coefficient": 0.1,
    "report_every": 20,
}


@pytest.mark.parametrize(
    ("name", "environment", "steps", "least", "settings"),
    [
        ("impala", "CartPole-v1", 20_000, 60, QUICK),
        ("appo", "CartPole-v1", 20_000, 60, QUICK),
        pytest.param(
            "impala", Target, 8_000, -0.4, QUICK | {"initial_log_std": -0.5}, marks=pytest.mark.slow
        ),
        pytest.param("appo", Signals, 8_000, 14, QUICK, marks=pytest.mark.slow),
        pytest.param(
            "impala", "CartPole-v1", 20_000, 60, QUICK | {"replay_ratio": 1}, marks=pytest.mark.slow
        ),
    ],
    ids=["impala", "appo", "impala with Box actions", "appo with a mask", "impala with replay"],
)
def test_returns_rise(
    name: str, environment: Any, steps: int, least: float, settings: dict[str, Any]
) -> None:
    """Above what a wrong sign anywhere would reach: at random they are 22, -0.8 and 10."""
    with training(name, "inline", environment, seed=1, steps=steps, **settings) as (plan, _):
        report = next(report for report in plan if report["time/total_timesteps"] >= steps)
    assert report["rollout/ep_rew_mean"] > least
