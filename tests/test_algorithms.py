"""Algorithms learn, give the same weights everywhere, go on exactly, and survive the death of a worker."""

import json
import os
import pickle
import signal
from contextlib import suppress
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import scripts
from gymnasium.envs.classic_control import CartPoleEnv
from learning_runs import SMALL, fingerprint, trained, training
from small_envs import Signals, Target

import rollstream as rs
from rollstream.algos import ALGORITHMS, a2c, ppo
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.spaces import SpaceError

WIDE: dict[str, dict[str, Any]] = {
    "ppo": {"hidden": (256, 256), "rollout_length": 64, "minibatch_size": 256},
    "a2c": {"hidden": (256, 256), "rollout_length": 64},
}
"""Large enough that XLA, had it several threads, would share products out and add up in another order."""


# Learning ----------------------------------------------------------------------------------------

QUICK_A2C = {
    "num_envs": 8,
    "rollout_length": 8,
    "learning_rate": 0.002,
    "gamma": 0.95,
    "value_coefficient": 0.1,
    "max_grad_norm": 100.0,
    "report_every": 20,
}


@pytest.mark.parametrize(
    ("name", "environment", "steps", "least", "settings"),
    [
        (
            "ppo",
            "CartPole-v1",
            20_000,
            140,
            {
                "num_envs": 8,
                "rollout_length": 64,
                "minibatch_size": 128,
                "epochs": 8,
                "learning_rate": 1e-3,
            },
        ),
        pytest.param("a2c", "CartPole-v1", 12_000, 38, QUICK_A2C, marks=pytest.mark.slow),
        pytest.param("a3c", "CartPole-v1", 10_000, 40, QUICK_A2C, marks=pytest.mark.slow),
        pytest.param(
            "ppo",
            Target,
            3_000,
            -0.2,
            {
                "rollout_length": 32,
                "minibatch_size": 32,
                "epochs": 8,
                "hidden": (16,),
                "initial_log_std": -0.5,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ppo",
            Signals,
            4_000,
            14,
            {"num_envs": 8, "rollout_length": 32, "minibatch_size": 64, "epochs": 8, "hidden": (32,)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ppo", "a2c", "a3c", "ppo with Box actions", "ppo with Dict observations and a mask"],
)
def test_returns_rise(
    name: str, environment: Any, steps: int, least: float, settings: dict[str, Any]
) -> None:
    """Above what a wrong sign anywhere would reach: at random they are 22, -0.8 and 10."""
    with training(name, "inline", environment, seed=1, steps=steps, **settings) as (plan, _):
        report = next(report for report in plan if report["time/total_timesteps"] >= steps)
    assert report["rollout/ep_rew_mean"] > least


# Reports -----------------------------------------------------------------------------------------


def test_reports_tell_what_people_look_for() -> None:
    with training("ppo", "inline") as (plan, workers):
        reports = [next(plan) for _ in range(4)]
    batch = 4 * 16
    assert [report["time/total_timesteps"] for report in reports] == [batch, 2 * batch, 3 * batch, 4 * batch]
    assert [report["time/iterations"] for report in reports] == [1, 2, 3, 4]
    assert [report["train/n_updates"] for report in reports] == [
        2,
        4,
        6,
        8,
    ]  # epochs, as in Stable-Baselines3
    assert [report["weights/staleness"] for report in reports] == [0, 0, 0, 0]
    assert workers.local_learner.steps == 4 * batch
    names = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction")
    names += ("explained_variance", "learning_rate", "clip_range")
    assert {f"train/{name}" for name in names} <= reports[0].keys()
    assert reports[-1]["rollout/episodes"] > 4
    assert reports[-1]["rollout/ep_rew_mean"] == reports[-1]["rollout/ep_len_mean"] > 5


def test_overlap_samples_one_version_behind() -> None:
    with training("ppo", "threads", overlap=True) as (plan, _):
        stale = [next(plan)["weights/staleness"] for _ in range(4)]
    assert stale == [0, 1, 1, 1]


def test_a_report_covers_several_updates_and_the_last_step() -> None:
    with training("a2c", "inline", report_every=3, steps=100) as (plan, _):
        reports = [next(plan) for _ in range(3)]
    assert [report["train/n_updates"] for report in reports] == [3, 5, 8]
    assert [report["time/total_timesteps"] for report in reports] == [60, 100, 160]


@pytest.mark.parametrize("name", ["ppo", "a2c", "a3c", "impala", "appo"])
def test_an_action_space_that_does_not_fit_is_named(name: str) -> None:
    class Buttons(Signals):
        action_space: Any = gymnasium.spaces.Text(3)

        def reset(self, **options: Any) -> Any:
            return super().reset(**options)[0], {}  # no mask, which such actions cannot have

    algorithm = ALGORITHMS[name]
    with (
        rs.engine("inline") as engine,
        pytest.raises(SpaceError, match=r"this environment's action space is Text"),
    ):
        algorithm.workers(engine, algorithm.config(), Task(EnvSpec(Buttons), 10))


def test_environments_are_shared_out_evenly() -> None:
    task = Task(EnvSpec("CartPole-v1"), 10, workers=3)
    with pytest.raises(rs.RollstreamError, match="8 environments cannot be divided evenly among 3 workers"):
        a2c.worker(a2c.Config(), task)
    assert ppo.worker(ppo.Config(num_envs=6), task).num_envs == 2


# The same everywhere -----------------------------------------------------------------------------


@cache
def on_inline(name: str, wide: bool) -> str:
    return trained(name, "inline", **WIDE[name] if wide else {})


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(("ppo", engine) for engine in ("processes", "ray")),
        *(pytest.param(name, "threads", marks=pytest.mark.slow) for name in ("ppo", "a2c")),
        pytest.param("a2c", "processes", marks=pytest.mark.slow),
    ],
)
def test_weights_are_the_same_on_every_engine(name: str, engine: str) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    assert trained(name, engine, **WIDE[name]) == on_inline(name, wide=True)


@pytest.mark.parametrize("engine", [pytest.param("threads", marks=pytest.mark.slow), "processes"])
@pytest.mark.slow
def test_normalized_weights_are_the_same_on_every_engine(engine: str) -> None:
    normalized: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}
    assert trained("ppo", engine, 3, **normalized) == trained("ppo", "inline", 3, **normalized)


def test_another_seed_gives_other_weights() -> None:
    assert trained("a2c", "inline", 2, seed=1) != trained("a2c", "inline", 2, seed=2)


@pytest.fixture(scope="module")
def in_a_fresh_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What a process of its own that may use one core makes of wide layers, and of states saved here."""
    folder = tmp_path_factory.mktemp("states")
    jobs = []
    for name in ("ppo", "a2c"):
        with training(name, "threads") as (plan, workers):
            for _ in range(3):
                next(plan)
            (folder / name).write_bytes(pickle.dumps(plan.state_dict()))
            before = fingerprint(workers.learner)
            next(plan)
            assert fingerprint(workers.learner) != before
        jobs.append({"name": name, "engine": "inline", **WIDE[name]})
        jobs.append({"name": name, "engine": "inline", "iterations": 2, "state": str(folder / name)})
    core = min(os.sched_getaffinity(0))
    script = (
        f"import os, runpy, sys; os.sched_setaffinity(0, {{{core}}}); "
        f"sys.argv = ['learning_runs.py', {json.dumps(json.dumps([1, jobs]))}]; "
        f"runpy.run_path({str(Path(__file__).with_name('learning_runs.py'))!r}, run_name='__main__')"
    )
    found = json.loads(scripts.run("-c", script).stdout.splitlines()[-1])
    return {"ppo": found[:2], "a2c": found[2:]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_weights_are_the_same_with_one_core(name: str, in_a_fresh_process: dict[str, list[str]]) -> None:
    assert in_a_fresh_process[name][0] == on_inline(name, wide=True)


@pytest.mark.parametrize("name", ["ppo", pytest.param("a2c", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_saved_plan_goes_on_exactly(name: str, in_a_fresh_process: dict[str, list[str]]) -> None:
    """Three iterations here, then two in another process, are five without a stop."""
    assert in_a_fresh_process[name][1] == on_inline(name, wide=False)


def test_reports_go_on_exactly() -> None:
    with training("a2c", "inline", report_every=3) as (plan, _):
        straight = [next(plan) for _ in range(3)]
    with training("a2c", "inline", report_every=3) as (plan, _):
        first = next(plan)
        state = plan.state_dict()
    with training("a2c", "inline", report_every=3) as (plan, _):
        plan.load_state_dict(state)
        resumed = [first, next(plan), next(plan)]
    for one, other in zip(straight, resumed, strict=True):
        np.testing.assert_equal(one, other)


# Deaths ------------------------------------------------------------------------------------------


class DiesOnce(CartPoleEnv):
    """Ends its process in the middle of an episode, unless a file says that this has happened."""

    def __init__(self, happened: str):
        super().__init__()
        self._happened = Path(happened)
        self._left = 90

    def step(self, action: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            with suppress(FileExistsError):  # of two that come here at once, one is first
                self._happened.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a3c", "impala"))]
)
def test_training_goes_on_when_a_worker_is_killed(name: str, tmp_path: Path) -> None:
    happened = str(tmp_path / "happened")
    with training(name, "processes", lambda: DiesOnce(happened)) as (plan, workers):
        before = list(takewhile(lambda _: not workers.engine.events, islice(plan, 1000)))
        after = list(islice(plan, 8))
        [event] = workers.engine.events
    assert before
    assert event.actor.startswith("worker")
    assert event.outcome == "restarted"
    assert "killed" in event.reason
    first = len(before) + 2  # what came with the event is neither before nor after it
    each = SMALL[name].get("epochs", 1)
    assert [report["train/n_updates"] for report in after] == [each * (first + i) for i in range(8)]
    size = SMALL[name]["num_envs"] * SMALL[name]["rollout_length"] // (2 if name == "a3c" else 1)
    assert [report["time/total_timesteps"] for report in after] == [size * (first + i) for i in range(8)]
    assert np.isfinite([report["train/loss"] for report in after]).all()
