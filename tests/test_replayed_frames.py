"""Frames that are stored once are seen again as they were seen."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rollstream.engine import ActorContext
from rollstream.replay.buffer import transition_buffer
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.off_policy import transition_signature
from rollstream.rl.q_policy import QPolicy
from rollstream.rl.replay_operators import rollout_chunk
from rollstream.rl.rollout import newest_frames
from rollstream.rl.spaces import channel_axis
from rollstream.rl.worker import RolloutWorker, WorkerSpec

FRAMES = 3


class Pages(gymnasium.Env[Any, Any]):
    """Images whose every pixel is the number of the step since the first reset, so that each is known."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.page = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 6))
        return self._next(), {}

    def _next(self) -> Any:
        self.page += 1
        return np.full(self.shape, self.page, np.uint8)

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._next(), 0.0, self.left == 0 and action == 0, self.left == 0, {}


@pytest.mark.parametrize(
    "shape",
    [(40, 40, 1), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((2, 40, 40), (40, 40)))],
    ids=str,
)
def test_stacks_are_as_the_environment_showed_them(shape: tuple[int, ...]) -> None:
    environment = EnvSpec(Pages, {"shape": shape}, frame_stack=FRAMES)
    spec = WorkerSpec(
        environment, num_envs=2, rollout_length=4, policy=QPolicy, postprocess=lambda _: lambda _, own: own
    )
    worker = RolloutWorker(spec, context=ActorContext("worker", 0, 1))
    worker.set_weights(0, worker.policy.init(0))
    space = worker.vector.observation_space
    stacked = space.shape or ()
    axis = channel_axis(stacked)
    buffer = transition_buffer(
        transition_signature(space, Pages.action_space, FRAMES),
        0,
        max_size=1000,
        min_size=1,
        batch_size=500,
        frame_stack=FRAMES,
        frame_axis=axis,
    )
    seen: set[bytes] = set()
    for _ in range(8):
        rollout = worker._rollout()
        seen |= _pages(rollout.columns["observation"].reshape(-1, *stacked), axis)
        buffer.insert(rollout_chunk(newest_frames(rollout, space, FRAMES), 0))
    samples = buffer.sample()
    assert samples is not None
    assert samples.columns["observation"].shape == (500, *stacked)
    assert _pages(samples.columns["observation"], axis) == seen
    first = _numbers(samples.columns["observation"], axis)
    after = _numbers(samples.columns["next_observation"], axis)
    ended = samples.columns["terminated"][:, 0]
    np.testing.assert_array_equal(after[~ended][:, :-1], first[~ended][:, 1:])
    np.testing.assert_array_equal(after[~ended][:, -1], first[~ended][:, -1] + 1)


def _numbers(stacks: Any, axis: int) -> Any:
    """The page of each frame, `[N, FRAMES]`."""
    return np.stack([part.reshape(len(part), -1)[:, 0] for part in np.split(stacks, FRAMES, axis)], axis=1)


def _pages(stacks: Any, axis: int) -> set[bytes]:
    return {row.tobytes() for row in _numbers(stacks, axis)}
