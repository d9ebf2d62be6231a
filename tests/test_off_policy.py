"""Algorithms that learn from replay learn, report, go on exactly, and look at observations of any kind."""

import pickle
from dataclasses import fields
from functools import cache
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from learning_runs import SMALL, fingerprint, trained, training
from small_envs import Samples, Scripted, Signals, worker_of

import rollstream as rs
from rollstream.algos import ALGORITHMS, apex, dqn
from rollstream.flow import Context
from rollstream.replay.buffer import transition_buffer
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.off_policy import transition_signature
from rollstream.rl.replay_operators import rollout_chunk
from rollstream.rl.spaces import SpaceError

HOMES = {
    "dqn": "CartPole-v1",
    "apex": "CartPole-v1",
    "r2d2": "CartPole-v1",
    "sac": "Pendulum-v1",
    "td3": "Pendulum-v1",
    "ddpg": "Pendulum-v1",
}
"""Where each can act."""
SHARDED = ("apex", "r2d2")
"""Those with replay on actors."""


# Environments ------------------------------------------------------------------------------------


class Home(gymnasium.Env[Any, Any]):
    """A number that is to become 0 soon; a reward tells of the step before, so that only foresight pays.

    Actions are not around 0. Episodes last ten steps and are then cut off: at random they give about -10.
    """

    observation_space = spaces.Box(-2, 2, (1,), np.float32)
    action_space = spaces.Box(-1, 3, (1,), np.float32)

    def __init__(self) -> None:
        self._place, self._step = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._place, self._step = float(self.np_random.choice([-1.0, 1.0])), 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        reward = -(self._place**2)
        self._place = float(np.clip(self._place + 0.25 * (float(action[0]) - 1), -2, 2))
        self._step += 1
        return self._seen(), reward, False, self._step == 10, {}

    def _seen(self) -> Any:
        return np.array([self._place], np.float32)


class Catch(gymnasium.Env[Any, Any]):
    """A ball falls in one of three columns, and who is below it after three steps has caught it."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self._ball = self._place = self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._ball, self._place, self._step = int(self.np_random.integers(3)), 1, 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._place = min(2, max(0, self._place + int(action) - 1))
        self._step += 1
        over = self._step == 3
        reward = (1.0 if self._place == self._ball else -1.0) if over else 0.0
        return self._seen(), reward, over, False, {}

    def _seen(self) -> Any:
        image = np.zeros((36, 36, 1), np.uint8)
        image[8 * self._step : 8 * self._step + 8, 12 * self._ball : 12 * self._ball + 12] = 255
        image[32:, 12 * self._place : 12 * self._place + 12] = 255
        return image


# Learning ----------------------------------------------------------------------------------------

CONTINUOUS = {
    "num_envs": 2,
    "batch_size": 32,
    "hidden": (32,),
    "learning_starts": 100,
    "learning_rate": 3e-3,
    "gamma": 0.9,
    "report_every": 100,
    "tau": 0.02,
}
DISCRETE = {
    "num_envs": 4,
    "rollout_length": 2,
    "utd_ratio": 0.5,
    "batch_size": 64,
    "hidden": (32,),
    "learning_starts": 200,
    "learning_rate": 2e-3,
    "gamma": 0.95,
    "report_every": 200,
}


@pytest.mark.parametrize(
    ("name", "environment", "steps", "least", "settings"),
    [
        (
            "dqn",
            "CartPole-v1",
            6_000,
            35,
            DISCRETE
            | {"target_update_interval": 100, "exploration_fraction": 0.3, "hidden": (64,), "n_step": 3},
        ),
        pytest.param(
            "dqn",
            "CartPole-v1",
            4_000,
            35,
            DISCRETE
            | {
                "target_update_interval": 50,
                "exploration_fraction": 0.3,
                "hidden": (64,),
                "num_atoms": 21,
                "value_range": (0.0, 20.0),
                "dueling": True,
                "n_step": 3,
                "priority_exponent": 0.5,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dqn",
            Signals,
            2_400,
            14,
            DISCRETE | {"target_update_interval": 50, "gamma": 0.5},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sac",
            Signals,
            2_400,
            12.5,
            DISCRETE | {"gamma": 0.5, "tau": 0.02, "target_entropy": 0.1},
            marks=pytest.mark.slow,
        ),
        ("sac", Home, 1_400, -5, CONTINUOUS),
        pytest.param(*("sac", Home, 1_400, -5, CONTINUOUS | {"num_quantiles": 10}), marks=pytest.mark.slow),
        pytest.param("td3", Home, 1_400, -5, CONTINUOUS, marks=pytest.mark.slow),
        pytest.param("ddpg", Home, 1_400, -5, CONTINUOUS, marks=pytest.mark.slow),
        pytest.param(
            "dqn",
            Catch,
            1_200,
            0.3,
            {
                "num_envs": 4,
                "rollout_length": 3,
                "utd_ratio": 1 / 6,
                "batch_size": 32,
                "hidden": (32,),
                "learning_starts": 120,
                "learning_rate": 5e-4,
                "target_update_interval": 25,
                "exploration_fraction": 0.5,
                "report_every": 120,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "apex",
            "CartPole-v1",
            6_000,
            35,
            {
                "num_envs": 4,
                "rollout_length": 20,
                "batch_size": 64,
                "learning_starts": 400,
                "learning_rate": 2e-3,
                "hidden": (64,),
                "gamma": 0.95,
                "target_update_interval": 50,
                "report_every": 200,
                "samples_per_insert": 16.0,
                "num_atoms": 21,
                "value_range": (0.0, 20.0),
                "epsilon_base": 0.2,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "dqn",
        "rainbow",
        "dqn with Dict observations and a mask",
        "sac with Dict observations and a mask",
        "sac",
        "tqc",
        "td3",
        "ddpg",
        "dqn with images",
        "apex",
    ],
)
def test_returns_rise(
    name: str, environment: Any, steps: int, least: float, settings: dict[str, Any]
) -> None:
    """Above what a wrong sign anywhere would reach: at random they are 22, 10, -10 and -0.3."""
    with training(name, "inline", environment, seed=1, steps=steps, **settings) as (plan, _):
        report = next(report for report in plan if report["time/total_timesteps"] >= steps)
    assert report["rollout/ep_rew_mean"] > least


# Reports -----------------------------------------------------------------------------------------

NAMES = {
    "dqn": {"loss", "beta", "q_value"},
    "apex": {"loss", "beta", "q_value"},
    "r2d2": {"loss", "beta", "q_value"},
    "sac": {"actor_loss", "critic_loss", "ent_coef", "ent_coef_loss", "entropy"},
    "td3": {"actor_loss", "critic_loss"},
    "ddpg": {"actor_loss", "critic_loss"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOMES)
def test_reports_tell_what_people_look_for(name: str) -> None:
    with training(name, "inline", HOMES[name]) as (plan, _):
        reports = [next(plan) for _ in range(8)]
    report, every = reports[-1], 20 if name in SHARDED else 16
    assert [own["time/total_timesteps"] for own in reports] == [every * number for number in range(1, 9)]
    assert {f"train/{own}" for own in NAMES[name] | {"learning_rate", "n_updates"}} <= report.keys()
    assert all(np.isfinite(value) for value in report.values())
    assert {
        "replay/size",
        "replay/lost_items" if name in SHARDED else "replay/samples_per_insert",
    } <= report.keys()
    assert "priority" not in report
    assert ("rollout/exploration_rate" in report) == (name in ("dqn", *SHARDED))
    if name not in SHARDED:
        assert report["replay/size"] == report["time/total_timesteps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "ratio"),
    [
        ("dqn", {}, 2 * 16 / 16),
        ("dqn", {"n_step": 3, "utd_ratio": 1 / 16}, 16 / 16),
        ("sac", {}, 16),
        ("sac", {"utd_ratio": 1.5, "num_envs": 2}, 1.5 * 16),
        ("sac", {"utd_ratio": 0.25, "num_envs": 2}, 16 / 4),
        ("td3", {"utd_ratio": 3 / 8, "rollout_length": 4}, 3 * 16 / 8),
    ],
)
def test_every_transition_is_learned_from_as_often_as_configured(
    name: str, settings: dict[str, Any], ratio: float
) -> None:
    with training(name, "inline", HOMES[name], **settings) as (plan, _):
        found = [next(plan).get("replay/samples_per_insert") for _ in range(40)]
    assert found[0] is None
    if settings.get("n_step", 1) == 1:  # sampling begins with the step that makes it enough
        assert {own for own in found if own is not None} == {ratio}
    else:
        assert found[-1] == pytest.approx(ratio, rel=0.05)


def test_apex_learns_as_often_as_configured() -> None:
    settings = {"samples_per_insert": 3.0, "n_step": 1}
    with training("apex", "threads", **settings) as (plan, workers):
        report = list(islice(plan, 30))[-1]
    inserts = report["time/total_timesteps"] - 80
    assert inserts > 400
    assert workers.learner.version * 16 == pytest.approx(3.0 * inserts, abs=3 * 3.0 * 20)


@pytest.mark.parametrize("name", HOMES)
def test_nothing_is_learned_before_there_is_enough(name: str) -> None:
    starts = 100
    settings = {"learning_starts": starts, "report_every": 1}
    with training(name, "inline", HOMES[name], **settings) as (plan, workers):
        size = 20 if name in SHARDED else workers.spec.num_envs * 2 * workers.spec.rollout_length
        for _ in range(200 // size):
            before = workers.learner.weights
            steps = next(plan)["time/total_timesteps"]
            learned = workers.learner.version > 0
            assert learned <= (steps >= starts)
            assert learned or workers.learner.weights is before
            assert float(workers.learner.weights["epsilon"]) == 1.0 or learned
        assert workers.learner.version > 0


def test_the_learner_knows_how_much_of_the_training_is_done() -> None:
    """Epsilon falls with environment steps, however many updates there are."""
    settings = {"exploration_fraction": 0.5, "final_epsilon": 0.1, "report_every": 1}
    with training("dqn", "inline", steps=320, **settings) as (plan, workers):
        for number in range(1, 21):
            report = next(plan)
            if number > 2:
                assert workers.local_learner.steps == report["time/total_timesteps"] == 16 * number
                done = min(1.0, number * 16 / 320 / 0.5)
                assert report["rollout/exploration_rate"] == pytest.approx(1 - 0.9 * done)
                assert float(workers.learner.weights["epsilon"]) == pytest.approx(1 - 0.9 * done)


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_a_training_ends_with_the_updates_of_its_last_rollout(name: str) -> None:
    config = ALGORITHMS[name].config(**SMALL[name])
    size = config.num_envs * config.rollout_length
    settings = {"utd_ratio": 5 / size, "report_every": 1000}
    with training(name, "inline", HOMES[name], steps=96, **settings) as (plan, workers):
        report = next(report for report in plan if report["time/total_timesteps"] >= 96)
        rounds = (96 - SMALL[name]["learning_starts"]) // size + 1
        assert report["train/n_updates"] == workers.learner.version == 5 * rounds


# The same everywhere, and on -----------------------------------------------------------------------

RAINBOW = {"n_step": 3, "priority_exponent": 0.6, "num_atoms": 5, "dueling": True, "buffer_size": 60}


ALIKE = {"dqn": RAINBOW, "sac": {"environment": "Pendulum-v1"}}


@cache
def on_inline(name: str) -> str:
    return trained(name, "inline", 8, **ALIKE[name])


@pytest.mark.parametrize("engine", [pytest.param("threads", marks=pytest.mark.slow), "processes"])
@pytest.mark.parametrize("name", ["dqn", pytest.param("sac", marks=pytest.mark.slow)])
def test_weights_are_the_same_on_every_engine(name: str, engine: str) -> None:
    assert trained(name, engine, 8, **ALIKE[name]) == on_inline(name)


def test_another_seed_gives_other_weights() -> None:
    assert trained("dqn", "inline", 4, seed=1) != trained("dqn", "inline", 4, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dqn", RAINBOW),
        ("dqn", {}),
        ("sac", {"environment": "Pendulum-v1"}),
        ("sac", {"environment": "Pendulum-v1", "num_quantiles": 5}),
        ("sac", {}),
        ("td3", {"environment": "Pendulum-v1"}),
    ],
)
def test_a_saved_plan_goes_on_exactly(name: str, settings: dict[str, Any]) -> None:
    """The buffer, the windows that have begun in it and what it draws next are in the state."""
    with training(name, "inline", **settings) as (plan, workers):
        straight = [next(plan) for _ in range(9)]
        expected = fingerprint(workers.learner)
    with training(name, "inline", **settings) as (plan, workers):
        resumed = [next(plan) for _ in range(6)]
        state = pickle.dumps(plan.state_dict())
    with training(name, "inline", **settings) as (plan, workers):
        plan.load_state_dict(pickle.loads(state))
        resumed += [next(plan) for _ in range(3)]
        assert fingerprint(workers.learner) == expected
    for one, other in zip(straight, resumed, strict=True):
        np.testing.assert_equal(one, other)


# Observations of every kind ----------------------------------------------------------------------

SEEN: dict[str, spaces.Space[Any]] = {
    "a choice": spaces.Discrete(4, start=2),
    "parts": spaces.Dict({"a/b": spaces.Box(-1, 1, (2,)), "#0": spaces.Dict({"%": spaces.MultiBinary(3)})}),
    "several": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.MultiDiscrete([2, 3])]),
    "an image": spaces.Box(0, 255, (36, 36, 1), np.uint8),
}


ACTIONS: dict[str, tuple[str, spaces.Space[Any]]] = {
    "dqn": ("dqn", spaces.Discrete(3, start=1)),
    "discrete sac": ("sac", spaces.Discrete(3)),
    "sac": ("sac", spaces.Box(-1, 2, (2, 1))),
    "td3": ("td3", spaces.Box(0, 5, (2,), np.int32)),
    "apex": ("apex", spaces.Discrete(2)),
    "r2d2": ("r2d2", spaces.Discrete(2)),
}


QUICK = [
    ("dqn", "a choice"),
    ("discrete sac", "parts"),
    ("sac", "parts"),
    ("td3", "several"),
    ("apex", "several"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        pytest.param(kind, seen, marks=[pytest.mark.slow] if (kind, seen) not in QUICK else [])
        for kind in ACTIONS
        for seen in SEEN
        if seen != "an image" or kind in ("dqn", "sac")
    ],
)
def test_observations_of_every_kind_are_learned_from(kind: str, seen: str) -> None:
    name, actions = ACTIONS[kind]
    settings = {"batch_size": 4, "learning_starts": 8, "report_every": 4}
    with training(name, "inline", lambda: Samples(SEEN[seen], actions), **settings) as (plan, workers):
        report = list(islice(plan, 6))[-1]
        assert workers.learner.version > 4
    assert np.isfinite([value for key, value in report.items() if "loss" in key]).all()


# What goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "environment", "kinds"),
    [
        ("dqn", "Pendulum-v1", "Discrete, and this environment's action space is Box"),
        ("r2d2", "Pendulum-v1", "Discrete, and this environment's action space is Box"),
        ("apex", "Pendulum-v1", "Discrete, and this environment's action space is Box"),
        ("td3", "CartPole-v1", "Box, and this environment's action space is Discrete"),
        ("ddpg", "CartPole-v1", "Box, and this environment's action space is Discrete"),
        (
            "sac",
            lambda: Samples(spaces.Discrete(2), spaces.MultiBinary(3)),
            "Box, Discrete, and this environment's action space is MultiBinary",
        ),
    ],
)
def test_an_action_space_that_does_not_fit_is_named(name: str, environment: Any, kinds: str) -> None:
    algorithm = ALGORITHMS[name]
    with (
        rs.engine("inline") as engine,
        pytest.raises(SpaceError, match=rf"^{name} supports action spaces of type {kinds}[^\n]*$"),
    ):
        algorithm.workers(engine, algorithm.config(), Task(EnvSpec(environment), 10_000))


@pytest.mark.parametrize("name", HOMES)
def test_a_buffer_that_is_never_full_enough_is_refused(name: str) -> None:
    with pytest.raises(
        rs.RollstreamError, match="learning_starts=100 is more than buffer_size=99, so training would never"
    ):
        ALGORITHMS[name].config(learning_starts=100, buffer_size=99)
    assert ALGORITHMS[name].config(learning_starts=100, buffer_size=100).buffer_size == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "workers", "first"),
    [
        ("dqn", {"learning_starts": 990, "num_envs": 1, "rollout_length": 4}, 0, 992),
        ("dqn", {"learning_starts": 990, "num_envs": 2, "rollout_length": 4, "n_step": 5}, 0, 1000),
        pytest.param("sac", {"learning_starts": 999}, 0, 999, marks=pytest.mark.slow),
        pytest.param(
            *("apex", {"learning_starts": 990, "num_envs": 4, "rollout_length": 10}, 2, 1020),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("r2d2", {"learning_starts": 990, "num_envs": 4, "rollout_length": 10, "sequence_length": 20}),
            *(2, 1100),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_training_that_ends_before_it_learns_is_refused(
    name: str, settings: dict[str, Any], workers: int, first: int
) -> None:
    algorithm, environment = ALGORITHMS[name], "CartPole-v1" if name != "sac" else "Pendulum-v1"
    usual: Any = {"env": environment, "config": settings, "workers": workers, "engine": "inline"}
    short = first - algorithm.config(**settings).steps_per_round(workers)
    told = rf"training ends after {short:,} steps, before the first update after {first:,} steps"
    with pytest.raises(rs.RollstreamError, match=told):
        rs.train(name, steps=short, quiet=True, **usual)
    settings |= {"report_every": 1, "hidden": (4,), "batch_size": 4}
    with rs.engine("inline") as engine:
        task = Task(EnvSpec(environment), first + 60, workers=workers)
        config = algorithm.config(**settings)
        learners = algorithm.workers(engine, config, task)
        started = (report for report in algorithm.plan(learners, config) if learners.learner.version)
        ahead = next(started)["time/total_timesteps"] - first
        assert 0 <= ahead <= (config.steps_per_round(workers) * 3 if name in SHARDED else 0)


def test_environments_and_shards_are_divided_among_workers() -> None:
    apex = ALGORITHMS["apex"]
    task = Task(EnvSpec("CartPole-v1"), 10_000, workers=3)
    with pytest.raises(rs.RollstreamError, match="8 environments cannot be divided evenly among 3 work"):
        apex.worker(apex.config(), task)
    with pytest.raises(
        rs.RollstreamError, match="4 replay shards cannot be filled by 3 workers: set replay_shards to"
    ):
        apex.worker(apex.config(num_envs=6, replay_shards=4), task)
    assert apex.worker(apex.config(num_envs=6, replay_shards=3), task).num_envs == 2


def test_every_environment_of_apex_has_its_own_epsilon() -> None:
    spec = apex.worker(apex.Config(num_envs=4), Task(EnvSpec("CartPole-v1"), 10_000, workers=2))
    assert spec.exploration is not None
    expected = 0.4 ** (1 + 7 * np.arange(4) / 3)
    for shared in (0.0, 0.05, 1.0):  # whatever the learner has
        weights = {"epsilon": np.float32(shared)}
        found = np.concatenate([spec.exploration(weights, index)["epsilon"][:, 0] for index in (0, 1)])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert apex.Config(num_envs=4).schedules(0.5)["epsilon"] == pytest.approx(expected.mean())


def test_apex_has_no_settings_that_it_does_not_use() -> None:
    names = {field.name for field in fields(ALGORITHMS["apex"].config)}
    assert not names & {"utd_ratio", "exploration_fraction", "final_epsilon"}


@pytest.mark.parametrize("n_step", [1, 3])
def test_initial_priorities_of_apex_are_td_errors_of_the_items_own_steps(n_step: int) -> None:
    """As the learner would compute them from the item, under the same weights."""
    config = apex.Config(num_envs=2, rollout_length=20, n_step=n_step, hidden=(4,), num_atoms=1)
    spec = apex.worker(config, Task(EnvSpec(Scripted), 1_000))
    worker = worker_of(spec)
    policy: Any = worker.policy
    rollout = worker.sample(Context("sample", ("worker", "sample", 0), None, {}))
    signature = transition_signature(policy.observation_space, policy.action_space)
    buffer = transition_buffer(signature, 0, max_size=99, min_size=1, batch_size=64, n_step=n_step)
    buffer.insert(rollout_chunk(rollout, 0))
    items = buffer.table.state_dict()["items"]
    stored = dict(zip(items["keys"].tolist(), items["priorities"].tolist(), strict=True))
    batch = buffer.sample()
    assert batch is not None
    weights = worker.weights
    _, metrics = dqn.loss(policy, config, weights, np.float32(1), batch.columns, weights)
    found = [stored[key] for key in batch.keys.tolist()]
    np.testing.assert_allclose(found, metrics["priority"], rtol=1e-4, atol=1e-4)
    assert len(set(batch.columns["length"].tolist())) == n_step
    assert 0 < batch.columns["terminated"].any(1).sum() < 64


def test_settings_of_these_tests_are_those_of_the_algorithms() -> None:
    for name in HOMES:
        ALGORITHMS[name].config(**SMALL[name])
