"""A policy and learner in PyTorch train through the plan of PPO, on every engine alike."""

import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollstream as rs
from rollstream.algos import ppo
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec

pytest.importorskip("torch")

CONFIG = ppo.Config(rollout_length=64, minibatch_size=128, epochs=6, learning_rate=1e-3)
TASK = Task(EnvSpec("CartPole-v1"), steps=20_000, seed=1)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    return importlib.import_module("torch_policy")


def trained(example: Any, engine_name: str, iterations: int, workers: int = 0) -> tuple[Any, list[Any]]:
    """The learner after some iterations, and its reports."""
    task = replace(TASK, workers=workers)
    with rs.engine(engine_name) as engine:
        actors = example.TORCH_PPO.workers(engine, CONFIG, task)
        plan = example.TORCH_PPO.plan(actors, CONFIG)
        return actors.learner, list(itertools.islice(plan, iterations))


def test_it_learns(example: Any) -> None:
    learner, reports = trained(example, "inline", 40)
    assert learner.version == 40
    assert reports[-1]["time/total_timesteps"] == learner.steps == 40 * CONFIG.batch_size
    assert reports[-1]["rollout/ep_rew_mean"] > 80 > 3 * reports[0]["rollout/ep_rew_mean"]


def test_engines_give_the_same_weights(example: Any) -> None:
    here, _ = trained(example, "inline", 3, workers=2)
    there, _ = trained(example, "processes", 3, workers=2)
    assert_same(here.get_weights(), there.get_weights())


def test_a_saved_learner_goes_on_exactly(example: Any) -> None:
    learner, _ = trained(example, "inline", 2)
    other = example.learner(CONFIG, TASK, learner.policy)
    other.load_state_dict(learner.state_dict())
    with rs.engine("inline") as engine:
        actors = example.TORCH_PPO.workers(engine, CONFIG, TASK)
        batch = next(iter(rs.flow.from_actors(actors.actors, "sample").gather_sync().flatten()))
    assert learner.train(batch) == other.train(batch)
    assert_same(learner.get_weights(), other.get_weights())


def test_acting_leaves_what_is_learned_alone(example: Any) -> None:
    learner, _ = trained(example, "inline", 1)
    before = learner.get_weights()
    learner.policy.step(learner.policy.init(7), np.zeros((1, 4), np.float32), (), None)
    assert_same(learner.get_weights(), before)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])
