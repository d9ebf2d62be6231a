"""SAC, TD3 and DQN in Stable-Baselines3: steps and seconds, learning included."""

from __future__ import annotations

from typing import Any

import off_policy_cases
import stable_baselines3  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]


def model(library: Any, algorithm: str, case: off_policy_cases.Case, **more: Any) -> Any:
    """The algorithm with the settings of the case, in Stable-Baselines3 or SBX."""
    own = (
        {"tau": case.tau}
        if algorithm != "dqn"
        else {
            "target_update_interval": case.target_every,
            "exploration_final_eps": case.final_epsilon,
        }
    )
    return getattr(library, algorithm.partition("-")[0].upper())(
        "MlpPolicy",
        case.environment,
        learning_rate=case.learning_rate,
        buffer_size=case.buffer_size,
        learning_starts=case.learning_starts,
        batch_size=case.batch_size,
        gamma=case.discount,
        train_freq=case.update_every,
        gradient_steps=case.updates,
        policy_kwargs={"net_arch": list(case.hidden)},
        seed=0,
        verbose=0,
        **own,
        **more,
    )


def main() -> None:
    algorithm, case, _ = off_policy_cases.chosen(__doc__)
    if algorithm == "dqn":
        torch.set_num_threads(1)  # for networks of this size, the fastest
    made = model(stable_baselines3, algorithm, case, device="cpu")
    off_policy_cases.report(case, lambda steps: made.learn(steps, reset_num_timesteps=False))


if __name__ == "__main__":
    main()
