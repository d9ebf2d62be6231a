"""Evaluation: when it is due, what counts as an episode, and that it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rollstream as rs
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.vector import NativeVector
from rollstream.training import inference, loop
from rollstream.training.checkpoint import CheckpointWriter
from rollstream.training.evaluation import Evaluation, EvaluationStopped, Evaluator, with_evaluation
from rollstream.training.progress import NoDisplay
from rollstream.training.run import Run

SMALL = {"num_envs": 4, "rollout_length": 16, "minibatch_size": 32, "epochs": 1, "hidden": (4,)}
"""PPO in batches of 64 steps."""


@pytest.mark.parametrize("acting", ["auto", "host", "device", "central"])
def test_an_evaluation_acts_where_the_rule_says(acting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def choose(acting: str, policy: Any, weights: Any, num_envs: int, *, own_process: bool) -> str:
        asked.append((acting, num_envs, own_process))
        return "host" if acting == "host" else "device"

    moved: list[Any] = []
    put = inference.jax.device_put
    monkeypatch.setattr(inference, "choose_acting", choose)
    monkeypatch.setattr(inference, "cpu_device", lambda: None)
    monkeypatch.setattr(
        inference.jax, "device_put", lambda tree, place: moved.append(place) or put(tree, place)
    )
    policy = ActorCriticPolicy(spaces.Box(0, np.inf, (1,)), spaces.Discrete(2))
    with Evaluator(EnvSpec(partial(Walk, 3)), policy, acting=acting) as evaluator:
        for episodes in (2, 2, 3):
            evaluator(policy.init(0), episodes)
    rule = "auto" if acting == "central" else acting
    assert asked == [(rule, 2, False), (rule, 3, False)]
    assert moved == [None if acting == "host" else jax.devices()[0]] * (0 if acting == "host" else 3)


@pytest.fixture(autouse=True)
def empty_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as a short training; `test_display` and the first run of a module do it."""
    monkeypatch.setattr(loop, "draw_curve", lambda _, path, __: path.touch())


class Still:
    """A policy that always does the same."""

    jit = False

    def initial_state(self, size: int) -> Any:
        return ()

    def step(self, weights: Any, observation: Any, state: Any, noise: Any) -> Any:
        return np.zeros(len(observation), int), state


class Walk(gymnasium.Env[Any, Any]):
    """Pays 2 a step; has no end but after a number of steps, if one is given."""

    observation_space = spaces.Box(0, np.inf, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 0):
        self.length = length
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(1, self.time, np.float32), 2.0, self.time == self.length, False, {}


def still() -> Any:
    return Still()


def test_an_episode_without_an_end_is_cut_and_that_is_said_once() -> None:
    notes: list[str] = []
    with Evaluator(EnvSpec(Walk), still(), max_episode_steps=30, notify=notes.append) as evaluator:
        for _ in range(2):
            assert evaluator({}, 3) == Evaluation(60.0, 0.0, 30.0, 3)
        assert evaluator({}, 40).episodes == 32  # an environment that has not ended begins no other
    assert len(notes) == 1
    assert notes[0].startswith("an evaluation episode of Walk was cut off after 30 steps")


def test_an_episode_that_ends_in_time_is_not_cut() -> None:
    with Evaluator(
        EnvSpec(partial(Walk, 30)), still(), max_episode_steps=30, notify=pytest.fail
    ) as evaluator:
        assert evaluator({}, 40) == Evaluation(60.0, 0.0, 30.0, 40)


def test_an_evaluation_can_be_stopped() -> None:
    asked = iter([False, False, True])
    with (
        Evaluator(EnvSpec(Walk), still(), should_stop=lambda: next(asked)) as evaluator,
        pytest.raises(EvaluationStopped),
    ):
        evaluator({}, 1)


def test_a_short_evaluation_is_finished() -> None:
    with Evaluator(EnvSpec(partial(Walk, 30)), still(), should_stop=lambda: True) as evaluator:
        assert evaluator({}, 40).episodes == 40


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_that_would_go_on_for_long(tmp_path: Path) -> None:
    class Interrupting(Walk):
        """Asks to end while it is evaluated: no other is walked in that far."""

        def step(self, action: Any) -> Any:
            if self.time == 1_200:
                os.kill(os.getpid(), signal.SIGINT)
            return super().step(action)

    options: Any = {
        "env": Interrupting,
        "steps": 128,
        "config": SMALL,
        "quiet": True,
        "out": tmp_path / "run",
    }
    with pytest.raises(KeyboardInterrupt):
        rs.train("ppo", **options, evaluate_every=64, evaluate_episodes=1)
    run = rs.load(tmp_path / "run", env=Interrupting)
    assert [row["time/total_timesteps"] for row in run.metrics] == [64]
    assert "eval/mean_reward" not in run.metrics[0]


def test_rows_that_are_no_steps_count_neither_as_length_nor_as_return() -> None:
    class Native(EnvSpec):
        def make(self, count: int, seed: int | None = None, threads: int | None = None) -> Any:
            mode = AutoresetMode.NEXT_STEP
            return NativeVector(SyncVectorEnv([partial(Walk, 3)] * count, autoreset_mode=mode))

    with Evaluator(Native("unused"), still()) as evaluator:
        assert evaluator({}, 40) == Evaluation(6.0, 0.0, 3.0, 40)


def test_evaluations_are_due_at_multiples_whatever_the_size_of_batches() -> None:
    class Learner:
        def get_weights(self) -> Any:
            return {}

    class WorkerSet:
        learner = Learner()

    workers: Any = WorkerSet()
    reports = rs.flow.from_items([{"time/total_timesteps": float(steps)} for steps in range(70, 701, 70)])
    with Evaluator(EnvSpec(partial(Walk, 3)), still()) as evaluator:
        given = list(with_evaluation(reports, workers, evaluator, every=100, episodes=1))
    evaluated = [report["time/total_timesteps"] for report in given if "eval/mean_reward" in report]
    assert evaluated == [140, 210, 350, 420, 560, 630, 700]


# The best ----------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A run whose every evaluation is better than the one before."""

    def better(self: Evaluator, weights: Any, episodes: int, index: int = 0) -> Evaluation:
        return Evaluation(float(index), 0.0, 1.0, episodes)

    monkeypatch.setattr(Evaluator, "__call__", better)
    usual: Any = {"config": SMALL, "quiet": True, "out": tmp_path / "run"}
    return lambda **more: rs.train("ppo", **(usual | more))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_crash_between_two_checkpoints_does_not_lose_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Callable[..., Run]
) -> None:
    commit = CheckpointWriter.commit
    saved: list[int] = []

    def crash(writer: CheckpointWriter, keep: int) -> Path:
        saved.append(writer.step)
        if saved.count(128) == 2:
            raise SystemExit
        return commit(writer, keep)

    monkeypatch.setattr(CheckpointWriter, "commit", crash)
    begun: Any = {"env": "CartPole-v1", "evaluate_every": 64, "evaluate_episodes": 1, "checkpoint_every": 64}
    with pytest.raises(SystemExit):
        train(steps=128, **begun)
    assert names(tmp_path / "run" / "checkpoints") == ["step_000000064"]
    monkeypatch.setattr(CheckpointWriter, "commit", commit)
    train(resume=True)
    assert names(tmp_path / "run" / "best") == ["step_000000064", "step_000000128"]


@pytest.mark.filterwarnings("ignore:checkpoint:UserWarning")
def test_the_best_is_not_newer_than_where_a_run_goes_on(tmp_path: Path, train: Callable[..., Run]) -> None:
    train(env="CartPole-v1", steps=192, evaluate_every=64, evaluate_episodes=1, checkpoint_every=64)
    assert names(tmp_path / "run" / "best") == names(tmp_path / "run" / "checkpoints")
    os.truncate(tmp_path / "run" / "checkpoints" / "step_000000192" / "state.json", 10)

    class Looking(NoDisplay):
        def report(self, report: Any, statistics: Any) -> None:
            seen.append(names(tmp_path / "run" / "best"))

    seen: list[list[str]] = []
    train(resume=True, display=Looking())
    assert seen == [["step_000000064", "step_000000128"]]
    assert names(tmp_path / "run" / "best")[-1] == "step_000000192"


@pytest.mark.slow
def test_the_best_is_there_as_long_as_one_may_go_back_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Callable[..., Run]
) -> None:
    """Checkpoints that never become whole do not cost the best one before them."""
    begun: Any = {"env": "CartPole-v1", "evaluate_every": 64, "evaluate_episodes": 1, "checkpoint_every": 64}
    train(steps=128, keep=1, **begun)
    assert names(tmp_path / "run" / "best") == ["step_000000128"], "nobody goes back to before that"
    commit = CheckpointWriter.commit

    def fail(writer: CheckpointWriter, keep: int | None) -> Path:
        if writer.step > 128 and writer._folder.name == "checkpoints":
            raise OSError(28, "No space left on device")
        return commit(writer, keep)

    monkeypatch.setattr(CheckpointWriter, "commit", fail)
    with pytest.raises(OSError, match="No space"):
        train(resume=True, steps=256)
    monkeypatch.undo()
    assert names(tmp_path / "run" / "checkpoints") == ["step_000000128"]
    assert names(tmp_path / "run" / "best") == ["step_000000128", "step_000000192"]
