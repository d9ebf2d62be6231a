"""Which arguments a resumed run keeps, which may change, and what config.json holds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import rollstream as rs
from rollstream.algos import ALGORITHMS
from rollstream.rl.algorithm import Algorithm
from rollstream.training import loop
from rollstream.training.config_file import read_run_config, write_run_config
from rollstream.training.progress import NoDisplay
from rollstream.training.run import Run
from rollstream.training.run_folder import CheckpointConfig, EvaluationConfig, RunError
from rollstream.training.training_arguments import TrainingArguments
from rollstream.training.video import record_video

SMALL = {"num_envs": 2, "rollout_length": 8, "minibatch_size": 16, "epochs": 1, "hidden": (4,)}
"""PPO in batches of 16 steps."""


@pytest.fixture(autouse=True)
def empty_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as a short training; `test_display` and the first run of a module do it."""
    monkeypatch.setattr(loop, "draw_curve", lambda _, path, __: path.touch())


def begun(out: Path | None, algorithm: str | Algorithm[Any] = "ppo", **more: Any) -> Run:
    options: dict[str, Any] = {"env": "CartPole-v1", "steps": 32, "config": SMALL, "quiet": True}
    return rs.train(algorithm, out=out, **(options | more))


class Notes(NoDisplay):
    """A display that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_algorithm_of_ones_own_is_not_taken_for_one_of_the_same_name(tmp_path: Path) -> None:
    mine = replace(ALGORITHMS["ppo"])
    begun(tmp_path / "run", mine)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["algorithm"] is None
    with pytest.raises(RunError, match=r"the algorithm ppo of the run in .* is neither .*: algorithm=\.\.\."):
        rs.load(tmp_path / "run")
    assert rs.load(tmp_path / "run", algorithm=mine).run_config.algorithm is mine


def test_steps_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    begun(tmp_path / "run", steps=np.int64(32), seed=np.int32(3))
    task = read_run_config(tmp_path / "run").task
    assert (task.steps, task.seed) == (32, 3)
    with pytest.raises(rs.RollstreamError, match=r"steps=32\.0: must be an integer >= 1"):
        begun(None, steps=32.0)


@pytest.mark.filterwarnings("ignore:checkpoint:UserWarning")
def test_a_run_that_is_over_has_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    begun(tmp_path / "run", steps=48, checkpoint_every=16)
    os.truncate(tmp_path / "run" / "checkpoints" / "step_000000048" / "state.json", 10)
    run = rs.train("ppo", steps=32, out=tmp_path / "run", resume=True, quiet=True)
    assert [row["time/total_timesteps"] for row in run.metrics] == [16, 32]
    assert run.metrics == rs.load(tmp_path / "run").metrics


def test_a_film_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rs.RollstreamError, match="episodes=0: must be an integer >= 1"):
        record_video(begun(None), tmp_path / "film.mp4", episodes=0)


# What is not said again is as it was -------------------------------------------------------------


def resumed(out: Path, **more: Any) -> Run:
    return rs.train("ppo", out=out, resume=True, quiet=True, **more)


def test_checkpoints_are_written_and_kept_as_before(tmp_path: Path) -> None:
    begun(tmp_path / "run", steps=80, checkpoint_every=16, keep=10)
    assert len(names(tmp_path / "run" / "checkpoints")) == 5
    resumed(tmp_path / "run", steps=112)
    assert len(names(tmp_path / "run" / "checkpoints")) == 7
    assert resumed(tmp_path / "run", steps=144, keep=2).run_config.checkpoints == CheckpointConfig(16, 2)
    assert names(tmp_path / "run" / "checkpoints") == ["step_000000128", "step_000000144"]
    assert resumed(tmp_path / "run", checkpoint_every=64).run_config.checkpoints == CheckpointConfig(64, 2)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with evaluations."""
    out = tmp_path_factory.mktemp("runs") / "evaluated"
    begun(out, evaluate_every=32, evaluate_episodes=1, stop_at=9999.0)
    return out


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ({}, {}),
        ({"evaluate_every": 16}, {"every": 16}),
        ({"evaluate_episodes": 2}, {"episodes": 2}),
        ({"stop_at": 475.0}, {"stop_at": 475.0}),
    ],
)
def test_evaluation_is_changed_only_where_something_is_said(
    evaluated: Path, said: dict[str, Any], changed: dict[str, Any]
) -> None:
    expected = replace(EvaluationConfig(32, 1, 9999.0), **changed)
    assert resumed(evaluated, **said).run_config.evaluation == expected


def test_a_return_to_stop_at_is_looked_for_every_so_often(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", stop_at=9999.0)
    assert run.run_config.evaluation == EvaluationConfig(10_000, 10, 9999.0)
    begun(tmp_path / "other")
    with pytest.raises(RunError, match="has evaluate_every None, not 10000, which cannot change"):
        resumed(tmp_path / "other", stop_at=475.0)


class Heavy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with options that JSON has no words for."""

    def __init__(self, masses: Any = (), names: Any = None):
        super().__init__(gymnasium.make("CartPole-v1"))
        assert isinstance(masses, tuple)
        assert names is None or all(isinstance(key, int) for key in names)


def test_the_same_may_be_said_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "config": SMALL | {"hidden": [4, 4]},
        "env_kwargs": {"masses": (1, 2), "names": {1: "one"}},
        "seed": 3,
        "workers": 0,
        "frame_stack": 2,
    }
    begun(tmp_path / "run", env=Heavy, **options)
    run = resumed(tmp_path / "run", env=Heavy, **options)
    assert run.run_config.task.environment.options == options["env_kwargs"]
    assert run.run_config.config.hidden == (4, 4)


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a seed, stacked frames and keyword arguments of its environment."""
    out = tmp_path_factory.mktemp("runs") / "unusual"
    begun(out, seed=3, frame_stack=2, env_kwargs={"sutton_barto_reward": True}, steps=16)
    return out


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"seed": 0}, "has seed 3, not 0"),
        ({"frame_stack": 1}, "has frame_stack 2, not 1"),
        ({"env_kwargs": {}}, "has env_kwargs {'sutton_barto_reward': True}, not {}"),
        ({"config": {"hidden": [5]}}, r"has config {'hidden': \(4,\)}, not {'hidden': \(5,\)}"),
    ],
)
def test_something_else_may_not(unusual: Path, said: dict[str, Any], text: str) -> None:
    with pytest.raises(RunError, match=text):
        resumed(unusual, **said)


@pytest.mark.parametrize(
    "name",
    [
        "ppo",
        "dqn",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("a3c", "apex", "impala", "appo", "r2d2")),
    ],
)
def test_the_number_of_workers_may_change(name: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"num_envs": 4, "rollout_length": 8, "hidden": (4,)}
    if name in ("dqn", "apex", "r2d2"):
        config |= {"learning_starts": 32, "batch_size": 8, "report_every": 64, "buffer_size": 1000}
    if name == "ppo":
        config |= {"minibatch_size": 32, "epochs": 1}
    if name == "r2d2":
        config |= {"sequence_length": 8, "burn_in": 4, "n_step": 2}
    options: dict[str, Any] = {"config": config, "engine": "inline"}
    begun(tmp_path / "run", name, steps=256, workers=2, **options)
    for workers, steps in ((4, 512), (1, 768)):
        run = rs.train(name, out=tmp_path / "run", resume=True, quiet=True, workers=workers, steps=steps)
        assert run.run_config.task.workers == workers
        assert int(run.metrics[-1]["time/total_timesteps"]) >= steps
        counted = [row["time/total_timesteps"] for row in run.metrics]
        assert counted == sorted(set(counted))
    with pytest.raises(rs.RollstreamError, match="among 3 workers; numbers of workers that fit: 1, 2, 4"):
        rs.train(name, out=tmp_path / "run", resume=True, quiet=True, workers=3, steps=1024)


@pytest.mark.parametrize(
    ("engine", "before", "after", "expected"),
    [
        (None, 0, 2, "processes"),
        (None, 2, 0, "inline"),
        (None, 2, None, "processes"),
        ("threads", 2, 0, "threads"),
        ("inline", 2, 4, "inline"),
    ],
)
def test_the_default_engine_follows_the_workers(
    engine: Any, before: int, after: int | None, expected: str, tmp_path: Path
) -> None:
    config = {"num_envs": 4, "rollout_length": 8, "minibatch_size": 32, "epochs": 1, "hidden": (4,)}
    arguments = TrainingArguments(
        algorithm=ALGORITHMS["ppo"], env="CartPole-v1", steps=64, config=config, workers=before, engine=engine
    )
    write_run_config(tmp_path, arguments.new_run(), {})
    resumed = TrainingArguments(algorithm=ALGORITHMS["ppo"], workers=after).resumed_run(tmp_path)
    assert resumed.engine == expected


def test_environments_are_rounded_up_to_the_workers(tmp_path: Path) -> None:
    display = Notes()
    config = {"num_envs": 8, "rollout_length": 4, "minibatch_size": 32, "epochs": 1, "hidden": (4,)}
    run = begun(tmp_path / "run", config=config, workers=3, engine="inline", display=display)
    assert (run.config.num_envs, run.config.minibatch_size) == (9, 36)
    changed = "num_envs is 9 instead of 8 and minibatch_size is 36 instead of 32"
    assert display.notes[0].startswith(f"{changed}, so that each of 3 workers")


@pytest.mark.parametrize(
    ("value", "text"),
    [(object(), "masses is a builtins.object"), (np.ones(1), "masses is an array; use a list")],
)
def test_options_that_cannot_be_written_are_named(tmp_path: Path, value: Any, text: str) -> None:
    with pytest.raises(RunError, match=f"env_kwargs cannot be written to config.json: {text}"):
        begun(
            tmp_path / "run", env=lambda masses: gymnasium.make("CartPole-v1"), env_kwargs={"masses": value}
        )
