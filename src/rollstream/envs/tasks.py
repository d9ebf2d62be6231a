"""Task distributions, for algorithms that learn to adapt.

Their environments have `sample_task(generator)`, and `reset(options={"task": task})` starts episodes
of that task from then on. Until then, every reset chooses a task at random, so that other algorithms train on
the mixture of all.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from numpy.random import Generator

Array = np.ndarray[Any, Any]


class PointNavigation(gymnasium.Env[Array, Array]):
    """Move a point to a goal that is not observed (Finn et al., 2017, https://arxiv.org/abs/1703.03400).

    The point starts at the origin, observes its position, and moves by at most 0.1 per axis and step. Goals
    are in [-0.5, 0.5] x [-0.5, 0.5]. The reward is the negative squared distance to the goal.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = spaces.Box(-1, 1, (2,))
        self._position = np.zeros(2, np.float32)
        self._goal = np.zeros(2, np.float32)
        self._has_task = False

    def sample_task(self, generator: Generator) -> Array:
        """A goal."""
        return generator.uniform(-0.5, 0.5, 2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return to the origin."""
        super().reset(seed=seed)
        if options is not None and "task" in options:
            self._goal, self._has_task = np.asarray(options["task"], np.float32), True
        elif not self._has_task:
            self._goal = self.sample_task(self.np_random)
        self._position = np.zeros(2, np.float32)
        return self._position.copy(), {}

    def step(self, action: Array) -> Any:
        """Move."""
        self._position = self._position + np.float32(0.1) * np.clip(action, -1, 1).astype(np.float32)
        offset = self._position - self._goal
        return self._position.copy(), -float(offset @ offset), False, False, {}


class VaryingPendulum(PendulumEnv):
    """Gymnasium's Pendulum-v1 with a mass from 0.5 to 1.5, and a torque that may act the other way round.

    Neither is observed.
    """

    _has_task = False
    _sign = 1.0

    def sample_task(self, generator: Generator) -> Array:
        """The mass, and the sign of the torque."""
        return np.array([generator.uniform(0.5, 1.5), generator.choice([-1.0, 1.0])], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start anywhere."""
        options = dict(options or {})
        task = options.pop("task", None)
        result = super().reset(seed=seed, options=options or None)
        self._has_task |= task is not None
        if task is None and not self._has_task:
            task = self.sample_task(self.np_random)
        if task is not None:
            self.m, self._sign = map(float, task)
        return result

    def step(self, u: Array) -> Any:
        """Apply the torque, which may have the other sign."""
        return super().step(self._sign * u)
