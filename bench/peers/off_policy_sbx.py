"""SAC, TD3 and DQN in SBX, which is Stable-Baselines3 on JAX: steps and seconds, learning included."""

from __future__ import annotations

import off_policy_cases
import sbx  # pyright: ignore[reportMissingImports]
from off_policy_sb3 import model


def main() -> None:
    algorithm, case, _ = off_policy_cases.chosen(__doc__)
    made = model(sbx, algorithm, case)
    off_policy_cases.report(case, lambda steps: made.learn(steps, reset_num_timesteps=False))


if __name__ == "__main__":
    main()
