"""Every row of a batch is a step that was taken, also with vector environments that reset in extra steps."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from small_envs import sampled, worker_of

import rollstream as rs
from rollstream.algos import ALGORITHMS
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.gae import add_gae
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.rollout import replace_reset_steps
from rollstream.rl.vector import NativeVector
from rollstream.rl.worker import RolloutWorker, WorkerSpec


class Short(gymnasium.Env[Any, Any]):
    """Episodes of one to three steps, each with a reward of 1: the mean reward of steps is 1."""

    observation_space = spaces.Box(0, 100, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 0):
        self._episode, self._step, self._length = 0, 0, length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode, self._step = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        length = self._length or 1 + self._episode % 3
        info = {"is_success": self._episode % 2 == 0} if self._step == length else {}
        return self._observation(), 1.0, self._step == length, False, info

    def _observation(self) -> Any:
        return np.array([10 * self._episode + self._step], np.float32)


def short_worker(
    mode: AutoresetMode | None = AutoresetMode.NEXT_STEP, length: int = 20, num_envs: int = 3, **options: Any
) -> RolloutWorker:
    spec = WorkerSpec(EnvSpec(Short), num_envs, length, ActorCriticPolicy, **options)
    worker = worker_of(spec)
    if mode is not None:
        worker.vector = NativeVector(SyncVectorEnv([Short] * num_envs, autoreset_mode=mode))
        worker.observation = worker.vector.reset(list(range(num_envs)))
    return worker


def test_a_plain_mean_over_a_batch_is_right() -> None:
    """Of the rollout it is not: steps that only reset have no reward."""
    worker = short_worker()
    assert worker._rollout().columns["reward"].mean() < 0.8
    batch = sampled(worker)
    assert batch.shape == (20, 3)
    assert "mask" not in batch
    assert batch["reward"].mean() == 1
    worker.close()


@pytest.mark.parametrize("postprocess", [None, partial(add_gae, gamma=0.9, gae_lambda=0.9)])
def test_every_row_is_a_step_and_every_step_is_a_row(postprocess: Any) -> None:
    worker, same = (short_worker(postprocess=postprocess) for _ in range(2))
    rollout, batch = worker._rollout(), sampled(same)
    mask = rollout.columns["mask"]
    assert not mask.all()
    steps = postprocess(worker.policy)(worker.weights, rollout) if postprocess else rollout.columns
    columns = sorted(set(steps) - {"mask", "episode_return", "episode_length", "episode_success"})

    def rows(batch: Any, where: Any) -> set[tuple[float, ...]]:
        flat = [np.asarray(batch[name], np.float64).reshape(20, 3, -1)[where] for name in columns]
        return set(map(tuple, np.concatenate(flat, axis=-1)))

    assert rows(batch, np.ones((20, 3), bool)) == rows(steps, mask)
    for name in steps:
        if name != "mask":
            np.testing.assert_array_equal(np.asarray(batch[name])[mask], np.asarray(steps[name])[mask])
    worker.close()
    same.close()


def test_episodes_are_counted_once() -> None:
    worker = short_worker()
    batch = sampled(worker)
    lengths = batch["episode_length"][~np.isnan(batch["episode_length"])]
    assert len(lengths) + lengths.sum() == pytest.approx(60, abs=3 * 3)  # a step that only resets for each
    worker.close()


def test_every_step_takes_the_place_of_a_reset_equally_often() -> None:
    mask, generator = np.array([[True, True], [False, True]]), np.random.default_rng(0)
    batch = Batch(number={"it": np.arange(4).reshape(2, 2)}, episode_return=np.full((2, 2), np.nan))
    filled = [replace_reset_steps(batch, mask, generator)["number"]["it"] for _ in range(3000)]
    assert {tuple(own[mask]) for own in filled} == {(0, 1, 3)}
    counts = np.bincount([own[1, 0] for own in filled], minlength=4)
    assert counts[2] == 0
    np.testing.assert_allclose(counts[[0, 1, 3]], 1000, atol=100)
    assert batch["number"]["it"][1, 0] == 2, "the batch itself is as it was"


def test_a_rollout_of_resets_alone_is_followed_by_another() -> None:
    worker = short_worker(length=1, num_envs=1)
    rewards = [float(sampled(worker)["reward"][0, 0]) for _ in range(12)]
    assert rewards == [1.0] * 12
    worker.close()


@pytest.mark.parametrize("mode", [None, *AutoresetMode], ids=str)
def test_success_is_recorded_where_environments_report_it(mode: AutoresetMode | None) -> None:
    worker = short_worker(mode)
    columns = worker._rollout().columns
    ended = ~np.isnan(columns["episode_return"])
    np.testing.assert_array_equal(~np.isnan(columns["episode_success"]), ended)
    np.testing.assert_array_equal(
        columns["episode_success"][ended], (columns["observation"][..., 0][ended] // 10) % 2 == 0
    )
    worker.close()


@pytest.mark.parametrize("name", [pytest.param("ppo", marks=pytest.mark.slow), "dqn", "a3c"])
def test_the_success_rate_is_reported(name: str) -> None:
    algorithm = ALGORITHMS[name]
    config = (
        algorithm.config(num_envs=1, rollout_length=64, report_every=64, learning_starts=64)
        if (name == "dqn")
        else algorithm.config(num_envs=1, rollout_length=64, **({"report_every": 1} if name == "a3c" else {}))
    )
    with rs.engine("inline") as engine:
        workers = algorithm.workers(engine, config, Task(EnvSpec(Short), 1000))
        report = next(iter(algorithm.plan(workers, config)))
    assert report["rollout/success_rate"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_there_is_no_success_rate_where_none_is_reported() -> None:
    ppo = ALGORITHMS["ppo"]
    config = ppo.config(num_envs=1, rollout_length=64)
    with rs.engine("inline") as engine:
        workers = ppo.workers(engine, config, Task(EnvSpec("CartPole-v1"), 1000))
        report = next(iter(ppo.plan(workers, config)))
    assert "rollout/ep_rew_mean" in report
    assert "rollout/success_rate" not in report
