"""Deep deterministic policy gradients (Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971).

The plain setting of `td3`, which grew out of it: one critic, no delay, no smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollstream.algos import td3
from rollstream.limits import NonNegativeFloat, PositiveInt
from rollstream.rl.algorithm import Algorithm


@dataclass(frozen=True)
class Config(td3.Config):
    """Settings of DDPG: those of TD3, without what it added."""

    algorithm: ClassVar[str] = "ddpg"

    critics: PositiveInt = 1
    policy_delay: PositiveInt = 1
    target_noise: NonNegativeFloat = 0.0


DDPG = Algorithm("ddpg", Config, Config.worker, td3.learner, td3.plan)
