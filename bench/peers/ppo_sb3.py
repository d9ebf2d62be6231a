"""PPO in Stable-Baselines3: steps and seconds, learning included."""

from __future__ import annotations

import command_line
import torch  # pyright: ignore[reportMissingImports]
from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]


def main() -> None:
    given = command_line.settings(command_line.parser(__doc__).parse_args())
    torch.set_num_threads(1)  # for networks of this size, the fastest
    model = PPO(
        "MlpPolicy",
        make_vec_env(given.environment, given.environments, seed=given.seed),
        learning_rate=given.learning_rate,
        n_steps=given.rollout_length,
        batch_size=given.minibatch,
        n_epochs=given.epochs,
        gamma=given.discount,
        gae_lambda=given.gae_lambda,
        clip_range=given.clip_range,
        ent_coef=given.entropy_coefficient,
        vf_coef=given.value_coefficient,
        max_grad_norm=given.max_gradient_norm,
        policy_kwargs={"net_arch": list(given.hidden), "activation_fn": torch.nn.Tanh},
        device="cpu",
        verbose=0,
    )
    command_line.report("sb3", given, lambda batches: model.learn(batches * given.batch))


if __name__ == "__main__":
    main()
