"""IMPALA in RLlib: environment steps and seconds, learning included."""

from __future__ import annotations

import logging
import os
import warnings

import impala_cases


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # for networks of this size the fastest, and by far on busy machines
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change to come
    warnings.filterwarnings("ignore")
    import ray  # now that it is quiet
    from ray.rllib.algorithms.impala import IMPALAConfig  # pyright: ignore[reportMissingImports]
    from ray.rllib.core.rl_module import default_model_config  # pyright: ignore[reportMissingImports]

    options = impala_cases.parser(__doc__).parse_args()
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    config = (
        IMPALAConfig()
        .environment(options.environment)
        .env_runners(
            num_env_runners=options.workers,
            num_envs_per_env_runner=impala_cases.ENVIRONMENTS[options.environment],
            rollout_fragment_length=impala_cases.LENGTHS[options.environment],
        )
        .rl_module(
            model_config=default_model_config.DefaultModelConfig(
                fcnet_hiddens=list(impala_cases.HIDDEN), fcnet_activation="tanh", vf_share_layers=False
            )
        )
        .training(
            lr=impala_cases.LEARNING_RATE,
            entropy_coeff=impala_cases.ENTROPY,
            vf_loss_coeff=impala_cases.VALUE,
            train_batch_size_per_learner=impala_cases.BATCH,
        )
        .reporting(min_time_s_per_iteration=1, metrics_num_episodes_for_smoothing=10)
        .debugging(seed=0, log_level="ERROR")
    )
    algorithm = config.build_algo()
    seen = 0

    def advance() -> int:
        nonlocal seen
        found = algorithm.train()
        before, seen = seen, int(found["env_runners"].get("num_env_steps_sampled_lifetime", seen))
        return seen - before

    impala_cases.report(advance, options.seconds, warm_up=10.0)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
