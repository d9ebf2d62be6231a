"""PPO in Rollstream: steps and seconds, learning included."""

from __future__ import annotations

import command_line

import rollstream as rs
from rollstream.algos.ppo import PPO, Config
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--engine", default="inline")
    parser.add_argument("--overlap", action="store_true", help="sample while learning, one version behind")
    parser.add_argument("--vectorization", choices=("sync", "native"), default="sync")
    options = parser.parse_args()
    given = command_line.settings(options)
    config = Config(
        num_envs=given.environments,
        rollout_length=given.rollout_length,
        gamma=given.discount,
        gae_lambda=given.gae_lambda,
        learning_rate=given.learning_rate,
        entropy_coefficient=given.entropy_coefficient,
        value_coefficient=given.value_coefficient,
        max_grad_norm=given.max_gradient_norm,
        hidden=given.hidden,
        activation="tanh",
        epochs=given.epochs,
        minibatch_size=given.minibatch,
        clip_range=given.clip_range,
        overlap=options.overlap,
    )
    environment = EnvSpec(given.environment, vectorization=options.vectorization)
    steps = (given.warm_up + given.batches) * given.batch
    with rs.engine(options.engine) as engine:
        task = Task(environment, steps, seed=given.seed, workers=given.workers)
        plan = PPO.plan(PPO.workers(engine, config, task), config)
        reports = iter(plan)

        def train(batches: int) -> None:
            for _ in range(batches):
                next(reports)

        command_line.report("rollstream", given, train)
        plan.close()


if __name__ == "__main__":
    main()
