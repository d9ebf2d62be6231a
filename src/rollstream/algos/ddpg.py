"""Deep deterministic policy gradient, DDPG (Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971).

TD3 without what it added: one critic, no policy delay, no target policy smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollstream.algos import td3
from rollstream.limits import NonNegativeFloat, PositiveInt
from rollstream.rl.algorithm import Algorithm


@dataclass(frozen=True)
class Config(td3.Config):
    """Hyperparameters of DDPG, which are those of TD3 with other defaults."""

    algorithm: ClassVar[str] = "ddpg"

    num_critics: PositiveInt = 1
    """Number of critics; targets use the lowest."""
    policy_delay: PositiveInt = 1
    """Number of critic updates per actor update."""
    target_policy_noise: NonNegativeFloat = 0.0
    """Standard deviation of the smoothing noise on target actions (target policy smoothing)."""


DDPG = Algorithm("ddpg", Config, td3.worker, td3.learner, td3.plan)
