"""PPO in RLlib: steps and seconds, learning included."""

from __future__ import annotations

import logging
import os
import warnings

import command_line


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # for networks of this size the fastest, and by far on busy machines
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change to come
    warnings.filterwarnings("ignore")
    import ray  # now that it is quiet
    from ray.rllib.algorithms.ppo import PPOConfig  # pyright: ignore[reportMissingImports]
    from ray.rllib.core.rl_module import default_model_config  # pyright: ignore[reportMissingImports]

    given = command_line.settings(command_line.parser(__doc__).parse_args())
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    config = (
        PPOConfig()
        .environment(given.environment)
        .env_runners(
            num_env_runners=given.workers,
            num_envs_per_env_runner=given.environments // max(1, given.workers),
        )
        .rl_module(
            model_config=default_model_config.DefaultModelConfig(
                fcnet_hiddens=list(given.hidden), fcnet_activation="tanh", vf_share_layers=False
            )
        )
        .training(
            lr=given.learning_rate,
            train_batch_size_per_learner=given.batch,
            minibatch_size=given.minibatch,
            num_epochs=given.epochs,
            gamma=given.discount,
            lambda_=given.gae_lambda,
            clip_param=given.clip_range,
            entropy_coeff=given.entropy_coefficient,
            vf_loss_coeff=given.value_coefficient,
            vf_clip_param=float("inf"),
            use_kl_loss=False,
            grad_clip=given.max_gradient_norm,
        )
        .debugging(seed=given.seed, log_level="ERROR")
    )
    algorithm = config.build_algo()

    def train(batches: int) -> None:
        for _ in range(batches):
            algorithm.train()

    command_line.report("rllib", given, train)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
