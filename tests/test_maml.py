"""MAML: its gradient, workers that adapt to tasks by themselves, its plan, and families of tasks."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from learning_runs import fingerprint

import rollstream as rs
from rollstream.algos import supporting
from rollstream.algos.maml import (
    MAML,
    Config,
    adaptation,
    adaptation_returns,
    inner_loss,
    learner,
    make_policy,
    meta_loss,
    worker,
)
from rollstream.engine import ActorContext
from rollstream.envs import PointNavigation, VaryingPendulum
from rollstream.flow import Context
from rollstream.rl.adapting_operators import InnerAdapt
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.linear_baseline import add_task_advantages, baseline_features, fitted
from rollstream.rl.params import trainable
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.recurrent_networks import recurrent_actor_critic
from rollstream.rl.recurrent_policy import RecurrentPolicy
from rollstream.rl.rollout import Rollout
from rollstream.rl.task_worker import TaskRollouts, TaskWorker, steps_by_task

POINTS = "rollstream.envs:PointNavigation-v0"
SMALL: dict[str, Any] = {"tasks": 4, "num_envs": 8, "rollout_length": 10, "hidden": (8,)}
PLANES = spaces.Box(-1, 1, (2,))


def task_worker(workers: int = 0, index: int = 0, restarts: int = 0, **settings: Any) -> TaskWorker:
    config = Config(**(SMALL | settings))
    spec = worker(config, Task(EnvSpec(POINTS), 1000, workers=workers))
    made = TaskWorker(spec, context=ActorContext("worker", index, max(1, workers), restarts))
    made.set_weights(0, made.policy.init(0))
    return made


def sampled(made: TaskWorker) -> TaskRollouts:
    return made.sample(Context("sample", ("worker", "sample", 0), None, {}))


# The gradient ------------------------------------------------------------------------------------


def toy(**settings: Any) -> tuple[Any, Config, dict[str, Any], dict[str, Any]]:
    """A policy, settings, weights, and steps `[tasks, R, N]` of two tasks, in double precision."""
    config = Config(tasks=2, num_envs=2, hidden=(3,), clip_range=1e9, **settings)
    policy = make_policy(config, PLANES, PLANES)
    random, shape = np.random.default_rng(0), (2, config.inner_steps + 1, 6)
    weights = {name: random.normal(0, 0.5, np.shape(own)) for name, own in policy.init(0).items()}
    observation, action = random.normal(size=(2, *shape, 2))
    log_prob = np.asarray(policy.evaluate_actions(weights, observation, action).log_prob)
    rows = {"observation": observation, "action": action, "advantage": random.normal(size=shape)}
    return policy, config, weights, rows | {"log_prob": log_prob + random.normal(0, 0.1, shape)}


@pytest.mark.parametrize("inner_steps", [1, 2])
@pytest.mark.parametrize("first_order", [False, True])
def test_the_meta_gradient_is_that_of_finite_differences(inner_steps: int, first_order: bool) -> None:
    with jax.enable_x64(True):
        policy, config, weights, rows = toy(inner_steps=inner_steps, first_order=first_order)

        @jax.jit
        def loss(params: dict[str, Any]) -> Any:
            return meta_loss(policy, config, rows, weights | params)[0]

        gradient = jax.grad(loss)(trainable(weights))
        random, step = np.random.default_rng(1), 1e-5
        errors = []
        for _ in range(5):
            direction = {name: random.normal(size=np.shape(own)) for name, own in gradient.items()}
            ahead, behind = (
                loss({name: weights[name] + sign * step * own for name, own in direction.items()})
                for sign in (1, -1)
            )
            product = sum(float(np.vdot(gradient[name], own)) for name, own in direction.items())
            difference = float(ahead - behind) / (2 * step)
            errors.append(abs(product - difference) / abs(difference))
    if first_order:
        assert max(errors) > 1e-3, "without second derivatives it is another"
    else:
        assert max(errors) < 1e-5


@pytest.mark.slow
def test_the_first_order_gradient_is_that_of_the_adapted_weights() -> None:
    with jax.enable_x64(True):
        policy, config, weights, rows = toy(first_order=True)
        gradient = jax.grad(lambda own: meta_loss(policy, config, rows, weights | own)[0])(trainable(weights))
        expected = []
        for index in range(2):
            first, last = ({name: own[index, r] for name, own in rows.items()} for r in (0, 1))
            adapted = adaptation(policy, config)(weights, first)
            expected.append(
                jax.grad(lambda own, last=last: inner_loss(policy, last, own)[0])(trainable(adapted))
            )
        for name, value in gradient.items():
            np.testing.assert_allclose(
                value, (expected[0][name] + expected[1][name]) / 2, rtol=1e-9, atol=1e-12
            )


def test_an_adaptation_makes_good_actions_more_likely() -> None:
    policy, config, weights, rows = toy(inner_learning_rate=0.01)
    steps = {name: np.asarray(own[0, 0], np.float32) for name, own in rows.items()}
    loss = jax.jit(lambda own: inner_loss(policy, steps, own)[0])
    assert loss(jax.jit(adaptation(policy, config))(weights, steps)) < loss(weights)


@pytest.mark.slow
def test_an_update_trains_on_each_task_by_itself() -> None:
    """What is of one task may be shuffled within it, and not between tasks."""
    config = Config(**SMALL, epochs=2)
    policy = make_policy(config, PLANES, PLANES)
    random, shape = np.random.default_rng(0), (2, 10, 8)
    columns = {
        "observation": random.normal(size=(*shape, 2)),
        "action": random.normal(size=(*shape, 2)),
        "advantage": random.normal(size=shape),
        "log_prob": random.normal(-2, 0.1, shape),
    }
    columns = {name: own.astype(np.float32) for name, own in columns.items()}

    def weights_after(order: list[int]) -> Any:
        made = learner(config, Task(EnvSpec(POINTS), 1000), policy)
        made.train({name: own[:, :, order] for name, own in columns.items()}, 1)
        return np.concatenate([np.ravel(own) for own in made.get_weights().values()])

    expected = weights_after([0, 1, 2, 3, 4, 5, 6, 7])
    np.testing.assert_allclose(weights_after([1, 0, 2, 3, 5, 4, 6, 7]), expected, rtol=1e-4, atol=1e-6)
    assert np.abs(weights_after([0, 2, 1, 3, 4, 5, 6, 7]) - expected).max() > 1e-4


# Workers -----------------------------------------------------------------------------------------


def test_a_worker_adapts_to_each_task_with_what_it_sampled_there() -> None:
    made = task_worker(inner_learning_rate=0.5)
    config, weights = Config(**SMALL, inner_learning_rate=0.5), made.policy.init(0)
    policy: Any = made.policy
    rollouts = sampled(made)
    steps, adapt = steps_by_task(rollouts.batch, 4), jax.jit(adaptation(policy, config))
    made.adapt()
    for index in range(4):
        own = {name: column[index] for name, column in steps.items()}
        expected = adapt(weights, own)
        for name, value in expected.items():
            np.testing.assert_allclose(made._adapted[name][index], value, rtol=1e-4, atol=1e-6)
    after = sampled(made)
    log_prob = [
        policy.evaluate_actions(
            {name: own[index] for name, own in made._adapted.items()},
            *(steps_by_task(after.batch, 4)[name][index] for name in ("observation", "action")),
        ).log_prob
        for index in range(4)
    ]
    np.testing.assert_allclose(steps_by_task(after.batch, 4)["log_prob"], log_prob, rtol=1e-4, atol=1e-5)
    assert (rollouts.adaptations, after.adaptations, after.task_set) == (0, 1, rollouts.task_set)


def test_episodes_after_an_adaptation_are_new_ones_of_the_same_tasks() -> None:
    made = task_worker()
    goals = [environment.unwrapped._goal for environment in made.vector._environments]  # pyright: ignore
    assert len({tuple(goal) for goal in goals}) == 4
    np.testing.assert_array_equal(goals[::2], goals[1::2])
    sampled(made)
    made.adapt()
    assert not sampled(made).batch["observation"][0].any(), "all points are at the origin"
    np.testing.assert_array_equal(
        goals,
        [environment.unwrapped._goal for environment in made.vector._environments],  # pyright: ignore
    )
    made.next_tasks()
    others = [environment.unwrapped._goal for environment in made.vector._environments]  # pyright: ignore
    assert not {tuple(goal) for goal in goals} & {tuple(goal) for goal in others}
    assert sampled(made).adaptations == 0
    np.testing.assert_array_equal(made._adapted["network.log_std"][0], made.policy.init(0)["network.log_std"])


def test_a_worker_goes_on_from_its_state() -> None:
    made, other = task_worker(), task_worker()
    for one in (made, other):
        sampled(one)
        one.adapt()
        one.next_tasks()
    other.next_tasks()
    sampled(other)
    other.load_state_dict(made.state_dict())
    for _ in range(2):
        expected, found = sampled(made).batch, sampled(other).batch
        for name, column in expected.items():
            np.testing.assert_array_equal(found[name], column)
        made.adapt()
        other.adapt()


def test_a_worker_acts_on_the_host_with_one_program() -> None:
    made = task_worker()
    for _ in range(2):
        sampled(made)
        made.adapt()
    sampled(made)
    for value in made._adapted.values():
        assert (value.devices(), value.committed) == ({made._jax_device}, True)
    assert made._step_tasks._cache_size() == 1


def test_a_worker_that_was_restarted_has_nothing_to_adapt_to() -> None:
    made = task_worker(restarts=1)
    made.adapt()
    rollouts = sampled(made)
    assert (rollouts.adaptations, rollouts.task_set) == (0, 1 << 32)


def test_advantages_are_returns_less_a_baseline_by_task() -> None:
    random = np.random.default_rng(0)
    reward = random.normal(size=(6, 4)).astype(np.float32)
    ends = np.zeros((6, 4), bool)
    ends[2] = True
    observation = random.normal(size=(6, 4, 2)).astype(np.float32)
    columns = Batch(observation=observation, reward=reward, terminated=ends, truncated=np.zeros_like(ends))
    batch = add_task_advantages(None, tasks=2, gamma=0.5)({}, Rollout(columns, observation[0], [], 0))
    returns = reward.astype(float)
    for t in (4, 3, 1, 0):
        returns[t] += 0.5 * returns[t + 1]
    features = baseline_features(observation, ends)
    for group in ([0, 1], [2, 3]):
        target = returns[:, group].ravel()
        rest = target - fitted(features[:, group].reshape(12, -1), target)
        expected = (rest - rest.mean()) / rest.std()
        np.testing.assert_allclose(batch["advantage"][:, group].ravel(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(features[:, 0, -4].ravel(), [0, 0.01, 0.02, 0, 0.01, 0.02])


# The plan ----------------------------------------------------------------------------------------


class Told:
    """Workers that note what they are told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.actors = [self]

    def send(self, message: str) -> None:
        self.messages.append(message)

    def send_weights(self) -> None:
        self.messages.append("weights")


def rollouts_of(worker: int, attempt: int, adaptations: int) -> TaskRollouts:
    return TaskRollouts(Batch(reward=np.full((2, 1), worker, np.float32)), worker, attempt, adaptations)


def test_workers_adapt_between_two_rows() -> None:
    told = Told()
    adapt = InnerAdapt(told, steps=2)  # pyright: ignore[reportArgumentType]
    for index in range(2):
        assert adapt([rollouts_of(0, 7, index), rollouts_of(1, 3, index)]) == []
    [rows] = adapt([rollouts_of(0, 7, 2), rollouts_of(1, 3, 2)])
    assert [row["reward"][0].tolist() for row in rows] == [[0, 1]] * 3
    assert told.messages == ["adapt", "adapt"]


def test_a_worker_that_was_restarted_on_the_way_is_left_out() -> None:
    told = Told()
    adapt = InnerAdapt(told)  # pyright: ignore[reportArgumentType]
    assert adapt([rollouts_of(0, 0, 0), rollouts_of(1, 0, 0)]) == []
    [rows] = adapt([rollouts_of(0, 1 << 32, 0), rollouts_of(1, 0, 1)])
    assert [row["reward"][0].tolist() for row in rows] == [[1], [1]]
    assert adapt([rollouts_of(0, 0, 0)]) == []
    assert adapt([rollouts_of(0, 1 << 32, 0)]) == [], "nobody is left"
    assert told.messages == ["adapt", "adapt", "weights", "next_tasks"]


def weights_after(engine: str, workers: int = 2, state: Any = None, iterations: int = 3) -> tuple[str, Any]:
    config, task = (
        Config(**SMALL, epochs=2, learning_rate=0.01),
        Task(EnvSpec(POINTS), 10_000, workers=workers),
    )
    with rs.engine(engine) as opened:
        made = MAML.workers(opened, config, task)
        with MAML.build(made, config) as plan:
            if state is not None:
                plan.load_state_dict(state)
            reports = [next(plan) for _ in range(iterations)]
            assert reports[-1]["time/total_timesteps"] % 160 == 0
            return fingerprint(made.learner), plan.state_dict()


class Counting(gymnasium.Env[Any, Any]):
    """Pays 1 in every step of a worker's first rollout, and 2 in those after it; episodes have 5 steps."""

    action_space = spaces.Discrete(3)

    def __init__(self, observation_space: Any = PLANES):
        self.observation_space = observation_space
        self._resets = self._step = 0
        self._generator = np.random.default_rng(0)

    def sample_task(self, generator: Any) -> dict[str, float]:
        return {"size": generator.random()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._resets += options is not None
        self._step = 0
        return self._observed()

    def step(self, action: Any) -> Any:
        assert self._observed()[1]["action_mask"][action]
        self._step += 1
        return self._observed()[0], float(self._resets), self._step == 5, False, self._observed()[1]

    def _observed(self) -> Any:
        self.observation_space.seed(self._step)
        return self.observation_space.sample(), {"action_mask": np.array([1, 1, self._step % 2], np.int8)}


OBSERVED: dict[str, spaces.Space[Any]] = {
    "vector": PLANES,
    "number": spaces.Discrete(4),
    "dict": spaces.Dict(one=PLANES, other=spaces.Discrete(3)),
}


def test_the_mean_return_is_of_all_tasks() -> None:
    """Not of those whose episodes come last."""
    settings: dict[str, Any] = {
        "tasks": 10,
        "num_envs": 200,
        "rollout_length": 5,
        "hidden": (8,),
        "epochs": 1,
    }
    short: Any = {"env": POINTS, "env_kwargs": {"max_episode_steps": 5}, "steps": 2000}
    [row] = rs.train("maml", **short, config=settings, quiet=True).metrics
    after = float(row["adaptation/return_after"])
    assert float(row["rollout/ep_rew_mean"]) == pytest.approx(after, rel=0.1)
    assert row["rollout/episodes"] == 200


@pytest.mark.parametrize(
    "kind", [kind if kind == "dict" else pytest.param(kind, marks=pytest.mark.slow) for kind in OBSERVED]
)
def test_returns_with_masks_and_all_kinds_of_observations(kind: str, tmp_path: Path) -> None:
    """And tasks, which are dicts, are saved."""
    environment, out = partial(Counting, OBSERVED[kind]), tmp_path / "run"
    run = rs.train("maml", env=environment, steps=160, config=SMALL | {"epochs": 1}, out=out, quiet=True)
    [row] = run.metrics
    assert (row["adaptation/return_before"], row["adaptation/return_after"]) == (5, 10)
    assert row["rollout/ep_rew_mean"] == 10
    assert np.isfinite(float(row["train/loss"]))


class Dying(TaskWorker):
    """Its process ends between its first rollout and the adaptation to it."""

    def adapt(self) -> None:
        if self._task_set == 0 and self._identity[1] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().adapt()


@pytest.mark.slow
def test_a_worker_may_die_before_it_adapts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.rl.worker_set.TaskWorker", Dying)
    config, task = Config(**SMALL, epochs=1), Task(EnvSpec(POINTS), 10_000, workers=2)
    with rs.engine("processes") as engine:
        made = MAML.workers(engine, config, task)
        with MAML.build(made, config) as plan:
            reports = [next(plan) for _ in range(4)]
            [event] = plan.statistics().events
    assert (event.actor, event.outcome) == ("worker[1]", "restarted")
    steps = [report["time/total_timesteps"] for report in reports]
    assert np.isfinite([report["train/loss"] for report in reports]).all()
    assert np.diff(steps).max() <= 160


@pytest.mark.parametrize("engine", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_every_engine_makes_the_same_weights(engine: str) -> None:
    assert weights_after(engine)[0] == weights_after("inline")[0]


def test_a_plan_goes_on_exactly() -> None:
    whole, _ = weights_after("inline", iterations=4)
    _, state = weights_after("inline", iterations=2)
    assert weights_after("inline", state=state, iterations=2)[0] == whole


def test_the_graph_shows_who_adapts() -> None:
    config, task = Config(**SMALL), Task(EnvSpec(POINTS), 10_000, workers=2)
    with rs.engine("inline") as engine:
        made = MAML.workers(engine, config, task)
        with MAML.build(made, config) as plan:
            drawn = rs.flow.graph(plan).text()
    for name in ("InnerAdapt", "MetaUpdate"):
        [line] = [line for line in drawn.splitlines() if name in line]
        assert "⇢ ParallelRollouts" in line


@pytest.mark.slow
def test_points_are_better_after_an_adaptation_to_a_goal() -> None:
    """A wrong sign of either gradient would make them worse."""
    settings: dict[str, Any] = {"tasks": 10, "num_envs": 100, "rollout_length": 50}
    short: Any = {"env": POINTS, "env_kwargs": {"max_episode_steps": 50}, "steps": 1_500_000}
    run = rs.train("maml", **short, seed=1, config=settings, quiet=True)
    spec = EnvSpec(POINTS, {"max_episode_steps": 50})
    config, weights = Config(**settings), dict(run.policy.weights)
    before, after = adaptation_returns(config, spec, weights)
    untrained = adaptation_returns(config, spec, make_policy(config, PLANES, PLANES).init(0))
    assert after.mean() > before.mean() + 3
    assert after.mean() > untrained[1].mean() + 3


# Misuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"env": "CartPole-v1"},
            r"CartPole-v1 has no sample_task\(generator\), so there are no tasks to ada",
        ),
        ({"workers": 3}, r"20 tasks cannot be divided evenly among 3 workers: set tasks to a multiple"),
        ({"config": {"num_envs": 30}}, r"30 environments cannot be divided evenly among 20 tasks"),
        ({"acting": "device"}, r"workers of several tasks act on the host: set acting='host'"),
        ({"acting": "central", "workers": 2}, r"acting='central' leaves the weights with an inference actor"),
        ({"frame_stack": 2}, r"only plain environments without stacked frames can be reset to a task"),
    ],
)
def test_misuse_is_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rs.RollstreamError, match=message):
        rs.train("maml", **({"env": POINTS, "steps": 1000, "quiet": True} | options))


def test_a_policy_that_does_not_evaluate_its_steps_is_an_error() -> None:
    class Plain:
        jit = True

    spec = worker(Config(**SMALL), Task(EnvSpec(POINTS), 1000))
    made = make_policy(Config(**SMALL), PLANES, PLANES)
    made.evaluates_steps = lambda: False  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(rs.RollstreamError, match="adapting to tasks needs a policy that JAX can compile"):
        TaskWorker(replace(spec, policy=lambda *_: made), context=ActorContext("worker", 0, 1))


@pytest.mark.parametrize(
    "policy",
    [
        partial(ActorCriticPolicy, normalize_observations=True),
        partial(RecurrentPolicy, network=partial(recurrent_actor_critic, memory="gru", memory_size=4)),
    ],
    ids=["statistics", "memory"],
)
def test_a_policy_with_memory_or_statistics_is_an_error(policy: Any) -> None:
    spec = worker(Config(**SMALL), Task(EnvSpec(POINTS), 1000))
    with pytest.raises(rs.RollstreamError, match="a policy without memory and without running statistics"):
        TaskWorker(replace(spec, policy=policy), context=ActorContext("worker", 0, 1))


def test_returns_of_adaptations_need_whole_episodes() -> None:
    config = Config(**SMALL)
    weights = make_policy(config, PLANES, PLANES).init(0)
    with pytest.raises(rs.RollstreamError, match="ended within rollout_length=10 steps: set it to at least"):
        adaptation_returns(config, EnvSpec(POINTS), weights)
    short, own = EnvSpec(POINTS, {"max_episode_steps": 5}), partial(make_policy, config)
    returns = adaptation_returns(config, short, weights, tasks=3, policy=own)
    assert (returns.shape, np.isfinite(returns).all()) == ((2, 3), True)


def test_an_error_of_sample_task_names_it() -> None:
    class Bare(Counting):
        def sample_task(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return {}

    with pytest.raises(rs.RollstreamError, match=r"sample_task\(generator\) of Bare failed: TypeError"):
        rs.train("maml", env=Bare, steps=1000, quiet=True)


def test_maml_is_not_suggested_for_environments_it_may_have_no_tasks_of() -> None:
    assert "maml" not in supporting(Task(EnvSpec("Pendulum-v1"), 1))


# Environments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PointNavigation, VaryingPendulum])
def test_families_of_tasks_follow_gymnasium(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unbounded observations, for instance
        check_env(kind(), skip_render_check=True)


@pytest.mark.parametrize("kind", [PointNavigation, VaryingPendulum])
def test_a_task_stays_until_there_is_another(kind: Any) -> None:
    """Without one, each episode is of a task of its own."""

    def rewards(environment: Any, *, seed: int = 0, **options: Any) -> list[float]:
        environment.reset(seed=seed, **options)
        return [float(environment.step(np.ones(environment.action_space.shape))[1]) for _ in range(5)]

    environment, random = kind(), np.random.default_rng(0)
    mixed = {tuple(rewards(environment, seed=seed)) for seed in range(4)}
    assert len(mixed) == 4
    one, other = environment.sample_task(random), environment.sample_task(random)
    first = rewards(environment, options={"task": one})
    assert rewards(environment) == first
    assert rewards(environment, options={"task": other}) != first
    assert rewards(environment, options={"task": one}) == first


def test_the_torque_of_a_pendulum_may_act_the_other_way_round() -> None:
    environment = VaryingPendulum()

    def observed(made: Any, torque: float, **options: Any) -> Any:
        """After ten steps."""
        made.reset(seed=1, **options)
        return [made.step(np.array([torque]))[0] for _ in range(10)][-1]

    one, other = (
        observed(environment, sign * 1.5, options={"task": np.array([0.8, sign])}) for sign in (1.0, -1.0)
    )
    np.testing.assert_array_equal(one, other)
    assert environment.m == pytest.approx(0.8)
    assert not np.array_equal(one, observed(gymnasium.make("Pendulum-v1"), 1.5))
