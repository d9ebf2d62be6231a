"""Environments whose every step is known beforehand, for tests, and what stands in for a flow's contexts."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rollstream.engine import ActorContext
from rollstream.flow import Context
from rollstream.rl.batch import Batch
from rollstream.rl.worker import RolloutWorker, WorkerSpec

ENDINGS = ((3, "terminated"), (2, "truncated"), (1, "truncated"), (4, "both"), (1, "terminated"))
"""How long episodes are and how they end, over and over."""


class OwnSpaces(gymnasium.Env[Any, Any]):
    """Copies the spaces of its class.

    Gymnasium's vector environments give a space a random state. Where all environments of a class share it,
    their state cannot be saved any more, in any test that follows in the same process.
    """

    def __init__(self) -> None:
        self.observation_space = deepcopy(type(self).observation_space)
        self.action_space = deepcopy(type(self).action_space)


class Scripted(OwnSpaces):
    """Follows `ENDINGS` from a place that the seed chooses; observations tell episode and step.

    With `reuses`, it writes all observations into one array, as environments may.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, reuses: bool = False):
        super().__init__()
        self._reuses = reuses
        self._array = np.zeros(2)
        self._episode = self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._episode = self._episode + 1 if seed is None else seed % 1000
        self._step = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        length, how = ENDINGS[self._episode % len(ENDINGS)]
        assert self._step <= length, "a step after the end"
        over = self._step == length
        reward = float(action) + 0.25 * self._step
        return (
            self._observation(),
            reward,
            over and how in ("terminated", "both"),
            over and how in ("truncated", "both"),
            {},
        )

    def _observation(self) -> Any:
        array = self._array if self._reuses else np.zeros(2)
        array[:] = self._episode / 10, self._step
        return array


class Samples(gymnasium.Env[Any, Any]):
    """Shows samples of any space, takes actions of any space, and keeps both.

    Episodes last four steps; where the seed is odd, perhaps others.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any] = spaces.Discrete(2),  # noqa: B008
        masks: list[Any] | None = None,
        reward: float = 1.0,
        odd_length: int = 4,
    ):
        self.observation_space = observation_space
        self.action_space = action_space
        self.seen: list[Any] = []
        self.taken: list[Any] = []
        self._masks = masks
        self._reward = reward
        self._odd_length, self._length = odd_length, 4
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.observation_space.seed(seed)
            self.seen.clear()
            self._length = self._odd_length if seed % 2 else 4
        self._step = 0
        return self._observation()

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        if self._masks is not None:
            mask = self._mask()
            parts, chosen = (mask, action) if isinstance(mask, tuple) else ((mask,), (action,))
            assert all(part[one] for part, one in zip(parts, chosen, strict=True)), (mask, action)
        self.taken.append(action)
        self._step += 1
        observation, info = self._observation()
        return observation, self._reward, False, self._step == self._length, info

    def _mask(self) -> Any:
        assert self._masks is not None
        return self._masks[self._step % len(self._masks)]

    def _observation(self) -> Any:
        self.seen.append(self.observation_space.sample())
        return self.seen[-1], {} if self._masks is None else {"action_mask": self._mask()}


class Target(OwnSpaces):
    """The reward is how near an action comes to what is asked for; one number, and one step an episode."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-2, 2, (1,), np.float32)

    def __init__(self) -> None:
        super().__init__()
        self._wanted = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._wanted = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self._wanted, {}

    def step(self, action: Any) -> Any:
        reward = -float((action[0] + self._wanted[0]) ** 2)
        return self._wanted, reward, True, False, {}


class Signals(OwnSpaces):
    """Of three actions two are legal; a number and a choice together tell which one pays.

    An episode is twenty steps long: at random it pays 10.
    """

    observation_space = spaces.Dict(
        {"number": spaces.Box(-1, 1, (2,)), "choice": spaces.Discrete(2, start=3)}
    )
    action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        super().__init__()
        self._number, self._choice, self._forbidden = np.zeros(2, np.float32), 0, 0
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._next(), self._info()

    def step(self, action: Any) -> Any:
        assert action != self._forbidden, "an action that is not legal"
        legal = [one for one in range(3) if one != self._forbidden]
        reward = float(action == legal[int(self._number[0] + self._choice > 0.5)])
        self._step += 1
        return self._next(), reward, False, self._step == 20, self._info()

    def _next(self) -> Any:
        self._number = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self._choice = int(self.np_random.integers(2))
        self._forbidden = int(self.np_random.integers(3))
        return {"number": self._number, "choice": 3 + self._choice}

    def _info(self) -> dict[str, Any]:
        return {"action_mask": (np.arange(3) != self._forbidden).astype(np.int8)}


class Recall(OwnSpaces):
    """Shows a cue of 1 or -1 first, then zeros; the fourth action pays 1 if it tells the cue, else -1.

    Without memory, the mean return is 0 whatever the policy.
    """

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        super().__init__()
        self._cue = self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._cue, self._step = int(self.np_random.integers(2)), 0
        return np.array([2 * self._cue - 1, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        over = self._step == 4
        reward = 0.0 if not over else 1.0 if action == self._cue else -1.0
        return np.array([0, self._step == 3], np.float32), reward, over, False, {}


class Catch(OwnSpaces):
    """A ball falls through a grid of 10 x 10; the paddle below pays 1 for catching it, and -1 otherwise.

    At random, an episode pays about -0.8.
    """

    observation_space = spaces.Box(0, 255, (10, 10, 4), np.uint8)
    action_space = spaces.Discrete(3)

    def __init__(self, value: int = 1):
        super().__init__()
        self._value = value
        self._ball = self._row = self._paddle = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._ball, self._row, self._paddle = int(self.np_random.integers(10)), 0, 5
        return self._grid(), {}

    def step(self, action: Any) -> Any:
        self._paddle = int(np.clip(self._paddle + action - 1, 0, 9))
        self._row += 1
        over = self._row == 9
        reward = 0.0 if not over else 1.0 if self._ball == self._paddle else -1.0
        return self._grid(), reward, over, False, {}

    def _grid(self) -> Any:
        grid = np.zeros((10, 10, 4), np.uint8)
        grid[self._row, self._ball, 0] = grid[-1, self._paddle, 1] = self._value
        return grid


class Identity(gymnasium.Env[Any, Any]):
    """Pays 1 for the action that equals the observation; of a Box, within `tolerance` of it.

    Every observation is a fresh sample, and an episode is cut off after 100 steps, so the best return is 100.
    Stable-Baselines3 tests its algorithms on such environments.
    """

    def __init__(self, space: spaces.Space[Any] | None = None, tolerance: float = 0.5):
        self.observation_space = self.action_space = spaces.Discrete(4) if space is None else space
        self._tolerance = tolerance
        self._observation: Any = None
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.observation_space.seed(seed)
        self._step = 0
        return self._next(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        tolerance = self._tolerance if isinstance(self.action_space, spaces.Box) else 0
        reward = float(np.all(np.abs(np.subtract(action, self._observation, dtype=float)) <= tolerance))
        self._step += 1
        return self._next(), reward, False, self._step == 100, {}

    def _next(self) -> Any:
        self._observation = self.observation_space.sample()
        return self._observation


IDENTITY_SPACES: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(4),
    "Box": spaces.Box(-1, 1, (1,), np.float32),
    "MultiDiscrete": spaces.MultiDiscrete([4, 4]),
    "MultiBinary": spaces.MultiBinary(4),
}


def identity(name: str) -> Identity:
    """An identity environment of its own for every call: spaces have a random state."""
    return Identity(deepcopy(IDENTITY_SPACES[name]))


def worker_of(spec: WorkerSpec, index: int = 0) -> RolloutWorker:
    """A worker as an engine would make it, with fresh weights."""
    worker = RolloutWorker(spec, context=ActorContext("worker", index, 1))
    worker.set_weights(0, worker.policy.init(0))
    return worker


def sampled(worker: RolloutWorker) -> Batch:
    """A batch, outside of any flow."""
    return worker.sample(Context("sample", ("worker", "sample", 0), None, {})).validated()
