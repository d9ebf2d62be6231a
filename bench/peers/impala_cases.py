"""What every competitor of `impala.py` is told, and how it answers: one line of JSON.

Only the standard library is used here: competitors run in interpreters of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

ENVIRONMENTS = {"CartPole-v1": 8, "ALE/Pong-v5": 8}
"""Environments per worker."""
LENGTHS = {"CartPole-v1": 50, "ALE/Pong-v5": 20}
"""Steps per environment in a rollout."""
BATCH = 800
"""Environment steps per update on CartPole."""
LEARNING_RATE, ENTROPY, VALUE = 6e-4, 0.01, 0.5
HIDDEN = (64, 64)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of a competitor."""
    made = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    made.add_argument("environment", choices=ENVIRONMENTS)
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--seconds", type=float, default=15.0, help="against the clock, after warming up")
    return made


def report(advance: Callable[[], int], seconds: float, warm_up: float = 5.0) -> None:
    """Take steps to warm up, then against the clock. `advance` takes some and returns how many."""
    for limit in (warm_up, seconds):
        start, steps = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < limit or not steps:
            steps += advance()
    print(json.dumps({"steps": steps, "seconds": elapsed}))
