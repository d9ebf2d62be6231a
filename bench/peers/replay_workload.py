"""Workloads of `replay.py`, and the protocol of its competitors: one line of JSON per request and answer.

Only needs NumPy: competitors run in their own interpreters.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True)
class Workload:
    """Steps of parallel environments whose episodes all have the same length."""

    name: str
    shape: tuple[int, ...]
    """Of one observation, before stacking."""
    dtype: str
    action: tuple[int, ...]
    environments: int
    items: int
    stack: int = 1
    episode: int = 200

    @property
    def step_bytes(self) -> int:
        """Distinct bytes per step: observation, action, reward and terminated."""
        action = 4 * int(np.prod(self.action)) if self.action else 8
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize + action + 4 + 1

    def steps(self, length: int, seed: int = 0) -> dict[str, Array]:
        """Time-major columns `[T, B, ...]`; environments terminate at different times."""
        generator = np.random.default_rng(seed)
        leading = (length, self.environments)
        random = generator.integers(0, 255, (length + 1, self.environments, *self.shape))
        offset = np.arange(self.environments) * (self.episode // self.environments)
        action = generator.random((*leading, *self.action)).astype(np.float32) if self.action else None
        return {
            "observation": random[:-1].astype(self.dtype),
            "next_observation": random[1:].astype(self.dtype),
            "action": np.zeros(leading, np.int64) if action is None else action,
            "reward": generator.random(leading).astype(np.float32),
            "terminated": (np.arange(1, length + 1)[:, None] + offset) % self.episode == 0,
        }


WORKLOADS = {
    "cartpole": Workload("cartpole", (4,), "float32", (), environments=8, items=1_000_000),
    "cheetah": Workload("cheetah", (17,), "float32", (6,), environments=8, items=1_000_000),
    "frames": Workload("frames", (84, 84), "uint8", (), environments=1, items=50_000, stack=4),
}


class Competitor(ABC):
    """A replay buffer under test."""

    def __init__(self, workload: Workload, *, prioritized: bool):
        self.workload = workload
        self.prioritized = prioritized

    @abstractmethod
    def block(self, length: int) -> Any:
        """Steps in the library's native format."""

    @abstractmethod
    def insert(self, block: Any) -> None:
        """Insert a block."""

    @abstractmethod
    def sample(self, count: int) -> Any:
        """Sample a batch of copies."""

    @abstractmethod
    def update(self, batch: Any, priorities: Array) -> None:
        """Update the priorities of a batch."""

    def report(self) -> dict[str, float]:
        """Further figures of the full buffer."""
        return {}


def main(make: Callable[..., Competitor]) -> None:
    """Fill a buffer, then answer requests line by line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--prioritized", action="store_true")
    parser.add_argument("--items", type=int)
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    if options.items:
        workload = Workload(**{**workload.__dict__, "items": options.items})
    before = _resident()
    competitor = make(workload, prioritized=options.prioritized)
    _fill(competitor, workload)
    answer({"resident_bytes": _resident() - before, **competitor.report()})
    generator = np.random.default_rng(0)
    blocks: dict[int, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        kind, count = request["kind"], request["count"]
        if kind == "insert":
            if count not in blocks:
                blocks[count] = competitor.block(count)
            call = partial(competitor.insert, blocks[count])
        elif kind == "sample":
            call = partial(competitor.sample, count)
        else:
            call = partial(_sample_and_update, competitor, generator.random(count))
        answer({"microseconds": _measure(call, request["seconds"]) * 1e6})


def _sample_and_update(competitor: Competitor, priorities: Array) -> None:
    competitor.update(competitor.sample(len(priorities)), priorities)


def _fill(competitor: Competitor, workload: Workload) -> None:
    """Fill beyond the maximum size, with random priorities."""
    length = 500
    block, steps = competitor.block(length), 0
    while steps < workload.items * 1.01:
        competitor.insert(block)
        steps += length * workload.environments
    if competitor.prioritized:
        generator = np.random.default_rng(1)
        for _ in range(workload.items // 2000):
            competitor.update(competitor.sample(1000), generator.random(1000))


def _measure(call: Callable[[], Any], seconds: float) -> float:
    """Average CPU time per call, in seconds."""
    call()
    calls, start, taken = 0, time.process_time(), 0.0
    while taken < seconds:
        for _ in range(5):  # the clock takes a microsecond itself
            call()
        calls += 5
        taken = time.process_time() - start
    return taken / calls


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answer(figures: dict[str, float]) -> None:
    """Print one line of JSON."""
    print(json.dumps(figures), flush=True)
