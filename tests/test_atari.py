"""ALE's own vector environments: true scores, and frames that replay stores once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from gymnasium import spaces
from small_envs import sampled, worker_of

from rollstream.rl.env_spec import EnvSpec, UnknownEnvironment
from rollstream.rl.gae import add_gae
from rollstream.rl.off_policy import transition_signature
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.q_policy import QPolicy
from rollstream.rl.rollout import rollout_for_replay
from rollstream.rl.worker import WorkerSpec

pytest.importorskip("ale_py")


def pacman(**options: Any) -> Any:
    spec = EnvSpec("ALE/MsPacman-v5", {"max_num_frames_per_episode": 400} | options)
    postprocess = partial(rollout_for_replay, frame_stack=spec.frame_stack)
    return worker_of(WorkerSpec(spec, 2, 150, QPolicy, postprocess))._rollout()


def test_returns_are_true_scores_and_rewards_are_clipped() -> None:
    columns = pacman().columns
    returns = columns["episode_return"][~np.isnan(columns["episode_return"])]
    assert returns.size
    assert (returns >= 50).all()
    assert set(np.unique(columns["reward"])) == {0, 1}


@pytest.mark.slow
def test_the_device_samples_what_the_host_samples() -> None:
    """Frames are stacked there, also after resets, which are steps of their own."""
    environment = EnvSpec("ALE/MsPacman-v5", {"max_num_frames_per_episode": 40})
    postprocess = partial(add_gae, gamma=0.9, gae_lambda=0.9)
    spec = WorkerSpec(environment, 2, 15, ActorCriticPolicy, postprocess, evaluates_steps=True)
    host, device = (worker_of(replace(spec, acting=acting)) for acting in ("host", "device"))
    for _ in range(2):
        expected, found = sampled(host), sampled(device)
        assert expected["truncated"].any() or expected["terminated"].any()
        assert isinstance(found["observation"], jax.Array)
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    host.close()
    device.close()


@pytest.mark.slow
def test_rewards_are_not_clipped_if_told() -> None:
    assert pacman(reward_clipping=False).columns["reward"].max() == 10


@pytest.mark.parametrize(
    ("options", "stack", "shape"),
    [
        ({}, 4, (4, 84, 84)),
        ({"stack_num": 2}, 2, (2, 84, 84)),
        ({"stack_num": 1}, 1, (1, 84, 84)),
        ({"grayscale": False}, 4, (84, 84, 12)),
    ],
)
def test_frames_are_stacked_once(options: dict[str, Any], stack: int, shape: tuple[int, ...]) -> None:
    spec = EnvSpec("ALE/Pong-v5", options)
    vector = spec.make(2)
    assert (spec.frame_stack, vector.observation_space.shape) == (stack, shape)
    assert vector.reset([0, 1]).shape == (2, *shape)
    assert vector.step(np.zeros(2, int)).observation.shape == (2, *shape)
    vector.close()


def test_frame_stack_replaces_the_number_of_ale() -> None:
    assert EnvSpec("ALE/Pong-v5", frame_stack=3).frame_stack == 3
    with pytest.raises(UnknownEnvironment, match=r"frame_stack .* is 'four'; use 1 or more"):
        EnvSpec("ALE/Pong-v5", {"stack_num": "four"})


def test_replay_of_100k_steps_of_pong_takes_less_than_800_mb() -> None:
    spec = EnvSpec("ALE/Pong-v5")
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    signature = transition_signature(space, spaces.Discrete(6), spec.frame_stack)
    step = sum(int(np.prod(own.shape)) * np.dtype(own.dtype).itemsize for own in signature.values())
    assert 100_000 * step < 0.8e9
