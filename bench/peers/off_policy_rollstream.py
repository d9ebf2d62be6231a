"""SAC, TD3 and DQN in Rollstream: steps and seconds, learning included; or the compiled update alone."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import off_policy_cases

import rollstream as rs
from rollstream.algos import algorithm as named
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Columns
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner


def bare(learner: Learner, case: off_policy_cases.Case, spaces: tuple[Any, Any]) -> None:
    """The compiled update by itself, again and again on one batch."""
    observations, actions = spaces
    count = case.batch_size * case.updates
    seen = np.stack([observations.sample() for _ in range(count)]).clip(-3, 3)
    rows = {
        "observation": seen,
        "next_observation": seen,
        "action": np.stack([actions.sample() for _ in range(count)]),
        "reward": np.ones((count, 1), np.float32),
        "terminated": np.zeros((count, 1), bool),
        "length": np.ones(count, np.float32),
        "relative_probability": np.ones(count, np.float32),
    }

    def train(steps: int) -> None:
        learner.train(Columns(rows), 0, updates=case.updates)
        schedules = {name: np.float32(value) for name, value in learner._schedules(0.0).items()}
        noise = learner._draw_inputs(case.updates)
        trained, finite = learner._pack(), np.float32(1)
        for _ in range(steps // case.update_every):
            program, learner.version = learner._program(case.updates, Columns), learner.version + case.updates
            trained, *_ = program(trained, finite, None, rows, noise, schedules)
        jax.block_until_ready(trained)

    off_policy_cases.report(case, train)


def main() -> None:
    name, case, options = off_policy_cases.chosen(__doc__)
    algorithm = named(name.partition("-")[0])
    own: dict[str, Any] = {"tau": case.tau}
    if name == "dqn":
        own = {
            "target_update_interval": case.target_every // case.update_every,
            "final_epsilon": case.final_epsilon,
            "double": False,
        }
    config = algorithm.config(
        hidden=case.hidden,
        batch_size=case.batch_size,
        buffer_size=case.buffer_size,
        learning_starts=case.learning_starts,
        learning_rate=case.learning_rate,
        gamma=case.discount,
        rollout_length=case.update_every,
        utd_ratio=case.updates / case.update_every,
        report_every=100,
        **own,
    )
    task = Task(EnvSpec(case.environment), case.warm_up + case.steps)
    with rs.engine("inline") as engine:
        workers = algorithm.workers(engine, config, task)
        if options.bare:
            bare(workers.local_learner, case, task.spaces())
            return
        reports = iter(algorithm.plan(workers, config))

        def train(steps: int) -> None:
            for _ in range(steps // 100):
                next(reports)

        off_policy_cases.report(case, train)


if __name__ == "__main__":
    main()
