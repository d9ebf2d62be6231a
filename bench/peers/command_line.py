"""What every competitor of `ppo_cartpole.py` is told, and how it answers: one line of JSON.

Only the standard library is used here: competitors run in interpreters of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """PPO, the same for everybody: 64 x 64 tanh for actor and critic each, Adam, and these numbers."""

    environment: str = "CartPole-v1"
    environments: int = 8
    batch: int = 2048
    """Environment steps between updates."""
    minibatch: int = 64
    epochs: int = 10
    workers: int = 0
    warm_up: int = 3
    """Batches sampled and learned from before the clock runs: whoever compiles has compiled by then."""
    batches: int = 20
    """Batches the clock runs for."""
    hidden: tuple[int, int] = (64, 64)
    learning_rate: float = 3e-4
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_coefficient: float = 0.0
    value_coefficient: float = 0.5
    max_gradient_norm: float = 0.5
    seed: int = 0

    @property
    def rollout_length(self) -> int:
        """Steps of each environment in a batch."""
        return self.batch // self.environments


_GIVEN = ("environments", "batch", "minibatch", "epochs", "workers", "warm_up", "batches", "seed")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with the settings that may be given."""
    made = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    for name in _GIVEN:
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name))
    return made


def settings(options: argparse.Namespace) -> Settings:
    """What was given."""
    return Settings(**{name: getattr(options, name) for name in _GIVEN})


def report(name: str, settings: Settings, train: Callable[[int], None]) -> None:
    """Train for some batches to warm up, then against the clock."""
    train(settings.warm_up)
    start = time.perf_counter()
    train(settings.batches)
    seconds = time.perf_counter() - start
    print(json.dumps({"name": name, "steps": settings.batches * settings.batch, "seconds": seconds}))
