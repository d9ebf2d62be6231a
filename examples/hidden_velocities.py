"""CartPole without velocities: from one observation, nobody can tell which way the pole falls.

A policy with memory learns to balance it, and one without does not:

    rollstream train ppo --env examples/hidden_velocities.py:HiddenVelocities --steps 300_000 \
        --config.memory lstm
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class HiddenVelocities(gymnasium.ObservationWrapper[Any, Any, Any]):
    """CartPole-v1 whose observations are the cart's position and the pole's angle."""

    def __init__(self, **options: Any):
        super().__init__(gymnasium.make("CartPole-v1", **options))
        full: Any = self.env.observation_space
        self.observation_space = spaces.Box(full.low[::2], full.high[::2], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[::2]
