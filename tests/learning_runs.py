"""Short trainings for tests, also in a process of their own: `python learning_runs.py JOBS`, as JSON.

A job says what to train and for how many iterations, and perhaps which state to go on from; what comes out is
a fingerprint of the weights, which is the same only if every bit is.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import rollstream as rs
from rollstream.algos import ALGORITHMS
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner
from rollstream.rl.learner_actor import RemoteLearner
from rollstream.rl.worker_set import WorkerSet

SMALL: dict[str, dict[str, Any]] = {
    "ppo": {
        "num_envs": 4,
        "rollout_length": 16,
        "minibatch_size": 32,
        "epochs": 2,
        "learning_rate": 0.01,
    },
    "a2c": {"num_envs": 4, "rollout_length": 5, "report_every": 1, "learning_rate": 0.01},
    "a3c": {"num_envs": 4, "rollout_length": 5, "report_every": 1, "learning_rate": 0.01},
    "impala": {"num_envs": 4, "rollout_length": 5, "report_every": 1, "learning_rate": 0.01},
    "appo": {
        "num_envs": 4,
        "rollout_length": 5,
        "report_every": 1,
        "learning_rate": 0.01,
        "epochs": 2,
        "minibatches": 2,
        "target_update_interval": 2,
    },
    "dqn": {
        "num_envs": 4,
        "rollout_length": 4,
        "utd_ratio": 0.125,
        "batch_size": 16,
        "learning_starts": 32,
        "hidden": (16,),
        "report_every": 16,
        "learning_rate": 0.01,
        "target_update_interval": 3,
    },
    **{
        name: {
            "num_envs": 2,
            "batch_size": 16,
            "learning_starts": 16,
            "hidden": (16,),
            "report_every": 16,
            "learning_rate": 0.01,
        }
        for name in ("sac", "td3", "ddpg")
    },
    "apex": {
        "num_envs": 4,
        "rollout_length": 10,
        "batch_size": 16,
        "hidden": (16,),
        "learning_starts": 80,
        "report_every": 20,
    },
    "r2d2": {
        "num_envs": 4,
        "rollout_length": 10,
        "batch_size": 8,
        "hidden": (8,),
        "memory_size": 8,
        "sequence_length": 6,
        "burn_in": 4,
        "samples_per_insert": 4.0,
        "learning_starts": 60,
        "report_every": 20,
    },
}
"""Settings with which an iteration takes little time and moves the weights a lot."""


def fingerprint(learner: Learner | RemoteLearner) -> str:
    """The same for the same weights, to the last bit."""
    digest = hashlib.sha256()
    for name, value in sorted(learner.get_weights().items()):
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


@contextmanager
def training(
    name: str,
    engine: str,
    environment: Any = "CartPole-v1",
    *,
    seed: int = 3,
    steps: int = 10_000,
    **settings: Any,
) -> Iterator[tuple[Any, WorkerSet]]:
    """A plan of two workers, and its workers, on a fresh engine."""
    algorithm = ALGORITHMS[name]
    config = algorithm.config(**{**SMALL[name], **settings})
    task = Task(EnvSpec(environment), steps, seed, workers=2)
    with rs.engine(engine) as opened:
        workers = algorithm.workers(opened, config, task)
        yield algorithm.plan(workers, config), workers


def trained(name: str, engine: str, iterations: int = 5, state: str | None = None, **settings: Any) -> str:
    """The fingerprint after so many iterations, perhaps from a saved state on."""
    with training(name, engine, **settings) as (plan, workers):
        if state is not None:
            with open(state, "rb") as file:
                plan.load_state_dict(pickle.load(file))
        for _ in range(iterations):
            next(plan)
        return fingerprint(workers.learner)


if __name__ == "__main__":
    cores, jobs = json.loads(sys.argv[1])
    assert len(os.sched_getaffinity(0)) == cores or cores is None
    print(json.dumps([trained(**job) for job in jobs]))
