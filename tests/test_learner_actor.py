"""A learner on an actor: what it publishes, what reaches the driver, resuming, and its death."""

import os
import re
import signal
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripts
from learning_runs import SMALL, training

import rollstream as rs
from rollstream.algos import ALGORITHMS
from rollstream.flow import Context
from rollstream.replay.buffer import ReplayBatch
from rollstream.replay.priorities import PRIORITY_EPSILON
from rollstream.rl.algorithm import Task
from rollstream.rl.learner import Learner
from rollstream.rl.training_step import train_on
from rollstream.testing import kill
from rollstream.training.progress import NoDisplay, RunInfo

APEX = {"num_envs": 4, "rollout_length": 10, "learning_starts": 50, "batch_size": 8, "report_every": 1}
SETTINGS: dict[str, dict[str, Any]] = {"apex": APEX, "impala": SMALL["impala"], "r2d2": SMALL["r2d2"]}


class FakeLearner:
    """Reports priorities of 0."""

    version = 3
    steps = 0

    def train(self, columns: Any, steps: int | None, updates: int = 1) -> dict[str, Any]:
        self.trained = columns
        return {"loss": 1.0, "priority": np.zeros(len(columns["reward"]))}


class LocalLearner(FakeLearner):
    """Enough for the driver."""

    def get_weights(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}


def context_of(**notes: float) -> Context:
    context = Context("train", ("replay", "sample", 0), None, {})
    context.note(**notes)
    return context


def test_an_item_without_any_td_error_keeps_a_chance() -> None:
    batch = ReplayBatch({"reward": np.ones(4)}, np.arange(4), env_steps=70)
    learner: Any = FakeLearner()
    report = train_on(learner, batch, context_of(version=1))

    keys, priority = report["priority"]
    np.testing.assert_array_equal(keys, np.arange(4))
    np.testing.assert_array_equal(priority, PRIORITY_EPSILON)
    assert (report["weights/staleness"], learner.steps) == ([2], 70)


def test_probabilities_of_shards_are_made_comparable_where_they_are_used() -> None:
    columns = {"reward": np.ones(2), "relative_probability": np.array([1.0, 3.0])}
    learner: Any = FakeLearner()
    train_on(learner, ReplayBatch(columns, np.arange(2), 0), context_of(probability_scale=2.0))

    np.testing.assert_array_equal(learner.trained["relative_probability"], [2.0, 6.0])
    np.testing.assert_array_equal(columns["relative_probability"], [1.0, 3.0])  # others read them, too


@pytest.mark.parametrize("name", ["apex", "r2d2"])
def test_rollouts_that_are_too_old_are_not_stored(name: str) -> None:
    settings = SMALL[name] | {"samples_per_insert": 8.0, "report_every": 4}
    for limit in (None, 3):
        with training(name, "inline", **settings, max_staleness=limit) as (plan, _):
            stale = [report.get("weights/staleness_max", 0) for report in islice(plan, 10)]
            dropped = plan.statistics()["max_staleness"].dropped if limit else 0
        assert (max(stale) > 3, dropped > 0) == ((True, False) if limit is None else (False, True))


@pytest.mark.parametrize("engine", ["inline", "threads", "processes", "ray"])
def test_the_driver_knows_what_the_learner_published_and_workers_get_it(engine: str) -> None:
    with training("apex", engine, **APEX) as (plan, workers):
        learner = workers.remote_learner
        first, weights = learner.version, learner.get_weights()
        list(islice((own for own in plan if "train/loss" in own), 5))

        assert learner.version > first == 0
        assert any((weights[name] != own).any() for name, own in learner.get_weights().items())
        workers.send_weights()
        for actor in workers.actors:
            assert actor.apply(_version).result() == learner.version
        with pytest.raises(rs.RollstreamError, match="the learner is on an actor"):
            _ = workers.local_learner


def _version(worker: Any) -> int:
    return worker.version


def test_on_ray_the_learner_asks_for_a_gpu_if_the_cluster_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from rollstream.engine.ray_cluster import accelerator

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 1.0})
    assert accelerator() == {"num_gpus": 1}
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 2.0})
    with pytest.warns(UserWarning, match="all GPUs of the cluster are in use"):
        assert accelerator() == {}
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    assert accelerator() == {}


def test_a_learner_in_the_driver_has_no_actor() -> None:
    with training("a2c", "inline") as (_, workers), pytest.raises(rs.RollstreamError, match="learner_on_act"):
        _ = workers.learner_actor


def algorithms_and_engines(quick: str) -> Any:
    """Every asynchronous algorithm on every engine with processes; all but one are slow."""
    pairs = [(name, engine) for name in SETTINGS for engine in ("processes", "ray")]
    marks = {pair: () if pair == (quick, "processes") else pytest.mark.slow for pair in pairs}
    cases = [pytest.param(*pair, marks=marks[pair]) for pair in pairs]
    return pytest.mark.parametrize(("name", "engine"), cases)


@algorithms_and_engines(quick="impala")
def test_training_goes_on_after_the_death_of_a_worker(name: str, engine: str) -> None:
    with training(name, engine, **SETTINGS[name]) as (plan, workers):
        trained = (report for report in plan if "train/loss" in report)
        next(trained)
        kill(workers.actors[0])
        while not workers.engine.events:
            next(trained)
        version, before = workers.learner.version, plan.statistics()
        counts = [report["time/total_timesteps"] for report in islice(trained, 20)]
        statistics = plan.statistics()

        [event] = statistics.events
        assert (event.actor, event.outcome, event.restarts) == ("worker[0]", "restarted", 1)
        assert workers.learner.version >= version + 18, "two batches may have been on their way"
        assert counts == sorted(counts)
        assert statistics["ParallelRollouts"].items > before["ParallelRollouts"].items
        assert statistics["gather_async"].lost <= 2, "of num_async=2, counted once"
        assert workers.actors[0].apply(_version).result() > 0, "sticky weights reach the new instance"


@algorithms_and_engines(quick="apex")
def test_the_death_of_the_learner_ends_the_run_with_its_cause(name: str, engine: str) -> None:
    with training(name, engine, **SETTINGS[name]) as (plan, workers):
        next(own for own in plan if "train/loss" in own)
        kill(workers.learner_actor)
        with pytest.raises(rs.ActorDied, match="learner"):
            list(plan)


def fragile(name: str, marker: Path, config: Any, task: Task, policy: Any) -> Learner:
    """A learner that kills its process once, in the middle of the training."""
    learner = ALGORITHMS[name].learner(config, task, policy)
    train = learner.train

    def train_or_die(*args: Any, **kwargs: Any) -> Any:
        if learner.version >= 20 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return train(*args, **kwargs)

    learner.train = train_or_die
    return learner


@pytest.mark.parametrize("name", [pytest.param("impala", marks=pytest.mark.slow), "apex"])
def test_a_run_whose_learner_died_says_how_to_go_on_and_does(tmp_path: Path, name: str) -> None:
    algorithm = replace(ALGORITHMS[name], learner=partial(fragile, name, tmp_path / "marker"))
    settings: dict[str, Any] = {"config": SETTINGS[name], "out": tmp_path / "run", "quiet": True}
    with pytest.raises(rs.RollstreamError, match=r"learner.*SIGKILL.*--resume"):
        rs.train(
            algorithm, env="CartPole-v1", steps=1200, workers=2, seed=3, checkpoint_every=100, **settings
        )
    run = rs.train(algorithm, resume=True, out=tmp_path / "run", quiet=True)

    assert run.metrics[-1]["time/total_timesteps"] == 1200
    assert float(run.metrics[-1]["train/n_updates"]) > 20


def mortal(marker: Path, config: Any, task: Task, policy: Any) -> Learner:
    """A learner that kills its process once, when the last checkpoint is saved."""
    learner = ALGORITHMS["impala"].learner(config, task, policy)
    state_dict = learner.state_dict

    def state_or_death() -> Any:
        if learner.steps >= 400 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return state_dict()

    learner.state_dict = state_or_death
    return learner


@pytest.mark.slow
def test_the_learner_may_die_in_the_last_checkpoint(tmp_path: Path) -> None:
    algorithm = replace(ALGORITHMS["impala"], learner=partial(mortal, tmp_path / "marker"))
    settings: dict[str, Any] = {"config": SETTINGS["impala"], "checkpoint_every": 100, "quiet": True}
    run = rs.train(
        algorithm,
        env="CartPole-v1",
        steps=400,
        workers=2,
        out=tmp_path / "run",
        max_failures=1,
        **settings,
    )
    assert run.metrics[-1]["time/total_timesteps"] == 400


def test_a_learner_on_an_actor_has_what_it_needs_there() -> None:
    algorithm = replace(ALGORITHMS["impala"], learner=lambda *_: LocalLearner())
    with pytest.raises(rs.RollstreamError, match="a learner on an actor has collate, load_state_dict"):
        rs.train(algorithm, env="CartPole-v1", steps=400, engine="inline", quiet=True)


@pytest.mark.slow
def test_a_run_whose_learner_died_resumes_by_itself_as_often_as_asked(tmp_path: Path) -> None:
    algorithm = replace(ALGORITHMS["impala"], learner=partial(fragile, "impala", tmp_path / "marker"))
    settings: dict[str, Any] = {"env": "CartPole-v1", "steps": 1200, "workers": 2, "quiet": True}
    settings |= {"config": SETTINGS["impala"], "checkpoint_every": 100}
    shown = Notes()
    run = rs.train(algorithm, out=tmp_path / "run", max_failures=1, display=shown, **settings)

    assert run.metrics[-1]["time/total_timesteps"] == 1200
    steps = [row["time/total_timesteps"] for row in run.metrics]
    assert steps == sorted(set(steps)), "rows after the checkpoint are replaced"
    [note] = [note for note in shown.notes if "resuming" in note]
    assert re.search(r"learner.*SIGKILL.*resuming from the newest checkpoint \(1 of 1\)", note)
    assert [info.start_step > 0 for info in shown.starts] == [False, True]
    [died] = [row for row in run.metrics if "events/deaths" in row]
    assert died["events/deaths"] == 1
    assert "SIGKILL" in str(died["events/learner"])
    start = shown.starts[1].start_step
    assert start < float(died["time/total_timesteps"]) <= start + 200
    with pytest.raises(rs.RollstreamError, match="max_failures needs a folder"):
        rs.train(algorithm, max_failures=1, **settings)


def test_max_failures_is_for_learners_on_actors(tmp_path: Path) -> None:
    with pytest.raises(rs.RollstreamError, match="that of ppo is in the driver: leave it out"):
        rs.train("ppo", env="CartPole-v1", steps=400, out=tmp_path / "run", max_failures=2, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(tmp_path: Path, engine: str) -> None:
    """With one worker and one item in flight everywhere, nothing is asynchronous."""
    script = f"""
        import os, signal, sys
        import rollstream as rs

        def kill_at(step):
            pid, steps = os.getpid(), "time/total_timesteps"
            return lambda report: report[steps] >= step and os.kill(pid, signal.SIGKILL)

        settings = {SMALL["impala"] | {"num_async": 1, "batches_in_flight": 1}}
        rs.train("impala", env="CartPole-v1", steps=600, workers=1, seed=5, engine={engine!r},
                 out=sys.argv[1], config=settings, checkpoint_every=100, quiet=True,
                 on_report=kill_at(int(sys.argv[2])))
    """
    killed = scripts.run_code(script, str(tmp_path / "killed"), "350", check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = rs.train("impala", resume=True, out=tmp_path / "killed", quiet=True)
    assert resumed.metrics[0]["time/total_timesteps"] == 20
    scripts.run_code(script, str(tmp_path / "straight"), "10_000")
    straight = rs.load(tmp_path / "straight")

    assert [row["train/loss"] for row in resumed.metrics] == [row["train/loss"] for row in straight.metrics]
    assert resumed.policy.weights.keys() == straight.policy.weights.keys()
    for name, value in straight.policy.weights.items():
        np.testing.assert_array_equal(resumed.policy.weights[name], value)


class Notes(NoDisplay):
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.starts: list[RunInfo] = []
        self.notes: list[str] = []

    def start(self, info: RunInfo) -> None:
        self.starts.append(info)

    def note(self, text: str) -> None:
        self.notes.append(text)
