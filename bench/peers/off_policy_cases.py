"""What every competitor of `off_policy.py` is told, and how it answers: one line of JSON.

Only the standard library is used here: competitors run in interpreters of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """An algorithm and its settings, the same for everybody; ReLU, Adam, and one environment."""

    environment: str
    hidden: tuple[int, int]
    batch_size: int
    update_every: int
    """Steps between updates."""
    learning_rate: float
    steps: int
    """Against the clock."""
    updates: int = 1
    """Updates each time."""
    buffer_size: int = 100_000
    learning_starts: int = 100
    warm_up: int = 400
    """Steps before the clock runs: whoever compiles has compiled by then."""
    discount: float = 0.99
    tau: float = 0.005
    target_every: int = 1_000
    """Steps from one target network to the next, where it is copied."""
    final_epsilon: float = 0.05


CASES = {
    "sac": Case("Pendulum-v1", (256, 256), 256, 1, 3e-4, 1_000),
    "td3": Case("Pendulum-v1", (256, 256), 256, 1, 1e-3, 1_000),
    "dqn": Case("CartPole-v1", (64, 64), 32, 4, 1e-4, 20_000),
    "sac-utd8": Case("Pendulum-v1", (256, 256), 256, 1, 3e-4, 200, updates=8, warm_up=200),
}
"""By algorithm; `sac-utd8` has 8 updates per step."""


def chosen(description: str | None) -> tuple[str, Case, argparse.Namespace]:
    """The case that was asked for."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("algorithm", choices=list(CASES))
    parser.add_argument("--bare", action="store_true", help="only the compiled update, on one batch")
    options = parser.parse_args()
    return options.algorithm, CASES[options.algorithm], options


def report(case: Case, train: Callable[[int], None]) -> None:
    """Train for some steps to warm up, then against the clock."""
    train(case.warm_up)
    start = time.perf_counter()
    train(case.steps)
    print(json.dumps({"steps": case.steps, "seconds": time.perf_counter() - start}))
