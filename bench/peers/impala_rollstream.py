"""IMPALA in Rollstream: environment steps and seconds, learning included; or sampling alone; or bare ALE."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import impala_cases
import numpy as np
import optax

import rollstream as rs
from rollstream.algos.impala import IMPALA, Config
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner
from rollstream.rl.operators import ParallelRollouts
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

sys.path.insert(0, str(Path(__file__).parent.parent))

from sampling import Coin  # pyright: ignore[reportMissingImports]


def environment(options: Any) -> EnvSpec:
    """The environment, whose vector may get a number of threads in each worker."""
    threads = {} if options.threads is None else {"num_threads": options.threads}
    return EnvSpec(options.environment, threads)


def settings(options: Any) -> tuple[Config, Task]:
    """IMPALA's."""
    each, length = impala_cases.ENVIRONMENTS[options.environment], impala_cases.LENGTHS[options.environment]
    config = Config(
        num_envs=each * options.workers,
        rollout_length=length,
        rollouts_per_batch=max(1, impala_cases.BATCH // (each * length)),
        learning_rate=impala_cases.LEARNING_RATE,
        entropy_coefficient=impala_cases.ENTROPY,
        value_coefficient=impala_cases.VALUE,
        report_every=5,
    )
    task = Task(environment(options), 1 << 40, workers=options.workers, acting=options.acting)
    return config, task


def train(options: Any) -> None:
    """The plan of IMPALA, with its learner on an actor."""
    config, task = settings(options)
    with rs.engine(options.engine) as engine:
        workers = IMPALA.workers(engine, config, task)
        seen = 0
        with IMPALA.build(workers, config) as plan:

            def advance() -> int:
                nonlocal seen
                before, seen = seen, next(plan)["time/total_timesteps"]
                return seen - before

            impala_cases.report(advance, options.seconds)


def sample(options: Any) -> None:
    """Rollouts of a dummy policy, of which the driver gets references."""
    each, length = impala_cases.ENVIRONMENTS[options.environment], impala_cases.LENGTHS[options.environment]
    spec = WorkerSpec(environment(options), each, length, Coin)
    with rs.engine(options.engine) as engine:
        gather(WorkerSet(engine, spec, Learner(Coin(), None, optax.sgd(0.1)), options.workers), options)


def act(options: Any) -> None:
    """The same with IMPALA's policy, whose weights stay as they are."""
    config, task = settings(options)
    with rs.engine(options.engine) as engine:
        workers = IMPALA.workers(engine, config, task)
        workers.send_weights()
        gather(workers, options)


def gather(workers: WorkerSet, options: Any) -> None:
    with ParallelRollouts(workers).put().gather_async(num_async=2).zip_with_source() as items:
        impala_cases.report(lambda: int(next(items)[1].total("steps")), options.seconds)


def bare(options: Any) -> None:
    """ALE's vector environment in a loop, with a thread per core, as workers have together."""
    from ale_py.vector_env import AtariVectorEnv  # pyright: ignore[reportMissingImports]

    count = options.workers * impala_cases.ENVIRONMENTS[options.environment]
    vector: Any = AtariVectorEnv(
        "pong", count, num_threads=len(os.sched_getaffinity(0)), stack_num=1, reward_clipping=False
    )
    vector.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (impala_cases.LENGTHS[options.environment], count))

    def advance() -> int:
        for row in actions:
            vector.step(row)
        return actions.size

    impala_cases.report(advance, options.seconds)


def main() -> None:
    parser = impala_cases.parser(__doc__)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--acting", choices=("auto", "host", "central"), default="auto")
    parser.add_argument("--threads", type=int, help="of ALE, for each worker")
    parser.add_argument("--what", choices=("train", "sample", "act", "bare"), default="train")
    options = parser.parse_args()
    {"train": train, "sample": sample, "act": act, "bare": bare}[options.what](options)


if __name__ == "__main__":
    main()
