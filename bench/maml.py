"""MAML on families of tasks: what one adaptation step gains on new tasks, and what it gains without MAML.

On new tasks: mean returns before and after the adaptation, and after one of a policy that PPO has trained, in
as many steps, on the mixture of all tasks, with the learning rate of `RATES` that is best on other new tasks.
MAML passes for a seed if both differences, which are paired by task, are at least three standard errors.

    python bench/maml.py                               # both families, five seeds each
    python bench/maml.py PointNavigation-v0 --seeds 1
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import support

import rollstream as rs
from rollstream.algos.maml import MAML, adaptation_returns
from rollstream.rl.env_spec import EnvSpec
from rollstream.training.config import resolve_config

STEPS = {"PointNavigation-v0": 5_000_000, "VaryingPendulum-v0": 16_000_000}
PPO_CONFIG = {
    "num_envs": 64,
    "minibatch_size": 1_600,
    "hidden": (64, 64),
    "learning_rate": 1e-3,
    "learning_rate_decay": True,
    "initial_log_std": -0.5,
    "normalize_rewards": True,
}
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Learning rates of the adaptation of PPO's policy."""
STANDARD_ERRORS = 3.0
TEST_SEED = 1_000
"""Of the new tasks."""


@dataclass(frozen=True)
class Figure:
    """Mean returns on new tasks, and two gains in standard errors."""

    environment: str
    seed: int
    before: float
    after: float
    mixture: float
    """Of PPO's policy after the adaptation."""
    gain: float
    """From before to after."""
    gain_over_mixture: float

    @property
    def passed(self) -> bool:
        return min(self.gain, self.gain_over_mixture) >= STANDARD_ERRORS


def standard_errors(differences: Any) -> float:
    """The mean of paired differences, in its standard errors."""
    return differences.mean() / (differences.std(ddof=1) / np.sqrt(len(differences)))


def trained(algorithm: str, name: str, seed: int, config: Any) -> Any:
    """The weights after a training."""
    environment = f"rollstream.envs:{name}"
    run = rs.train(algorithm, env=environment, steps=STEPS[name], seed=seed, config=config, quiet=True)
    return dict(run.policy.weights)


def measure(name: str, seed: int, tasks: int) -> Figure:
    """Train MAML and PPO, and adapt both to the same new tasks."""
    maml = resolve_config(MAML, f"rollstream.envs:{name}")
    environment = EnvSpec(f"rollstream.envs:{name}")
    weights = trained("maml", name, seed, None)
    before, after = adaptation_returns(maml, environment, weights, tasks=tasks, seed=TEST_SEED)
    ppo = PPO_CONFIG | {"rollout_length": maml.rollout_length, "gamma": maml.gamma}
    ppo_weights = trained("ppo", name, seed, ppo)

    def adapted(rate: float, seed: int) -> Any:
        config = replace(maml, inner_learning_rate=rate)
        return adaptation_returns(config, environment, ppo_weights, tasks=tasks, seed=seed)[-1]

    rate = max(RATES, key=lambda rate: adapted(rate, TEST_SEED + 1).mean())
    mixture = adapted(rate, TEST_SEED)
    figures = before.mean(), after.mean(), mixture.mean()
    figures += standard_errors(after - before), standard_errors(after - mixture)
    return Figure(name, seed, *map(float, figures))


def show(figures: Sequence[Figure]) -> None:
    heading = ["family", "seed", "before", "after", "mixture", "gain", "over mixture", "3 standard errors"]
    rows = [
        [
            own.environment,
            str(own.seed),
            *(f"{value:.1f}" for value in (own.before, own.after, own.mixture)),
            *(f"{value:.1f} SE" for value in (own.gain, own.gain_over_mixture)),
            "met" if own.passed else "MISSED",
        ]
        for own in figures
    ]
    print()
    support.print_table(heading, rows)


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("families", nargs="*", default=list(STEPS), help=", ".join(STEPS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=200, help="new tasks")
    options = parser.parse_args()
    figures: list[Figure] = []
    for name in options.families:
        for seed in range(1, options.seeds + 1):
            figures.append(measure(name, seed, options.tasks))
            print(figures[-1], flush=True)
    show(figures)
    support.write_json(options.json, "maml", [asdict(own) for own in figures])
    if not all(own.passed for own in figures):
        sys.exit("MAML did not pass for every seed")


if __name__ == "__main__":
    main()
