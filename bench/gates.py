"""Learning gates: the return each algorithm has to reach, the results of every seed, and the commands.

    python bench/gates.py                      # all gates, about an hour on two cores
    python bench/gates.py ppo a2c              # some algorithms
    python bench/gates.py --write docs/results.md

A gate passes if enough seeds reach the return, as a mean over evaluation episodes with deterministic
actions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rollstream as rs


@dataclass(frozen=True)
class Gate:
    """`needed` of `seeds` seeds have to reach the return `at_least` after `steps` environment steps."""

    algorithm: str
    environment: str
    steps: int
    at_least: float
    seeds: int
    needed: int
    workers: int = 0
    evaluate_every: int | None = None
    """If given, the best policy of these evaluations counts, evaluated again in fresh episodes."""
    episodes: int = 100
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """Hyperparameters that are not the tuned ones."""
    tuned: dict[str, Any] = field(default_factory=dict)
    """Hyperparameters tuned for an environment that the package has none for."""
    below: bool = False
    """The seeds have to stay below the return: it takes something that is left out."""

    @property
    def name(self) -> str:
        """The environment, without its file."""
        return self.environment.rpartition(":")[2]

    @property
    def title(self) -> str:
        """The environment, with hyperparameters that are not the tuned ones."""
        return ", ".join([self.name, *(f"{name} {value}" for name, value in self.config.items())])

    @property
    def target(self) -> str:
        """What has to be reached, in words."""
        return f"{'<' if self.below else '>='} {self.at_least:g} in {self.needed} of {self.seeds}"

    @property
    def commands(self) -> list[str]:
        """The commands for seed 1."""
        task = f"{self.algorithm} --env {self.environment} --steps {self.steps} --seed 1"
        workers = f" --workers {self.workers}" if self.workers else ""
        options = "".join(f" --env-kwargs {key}={value}" for key, value in self.env_kwargs.items())
        evaluate = f" --evaluate-every {self.evaluate_every}" if self.evaluate_every else ""
        best = " --best" if self.evaluate_every else ""
        folder = "-".join(["runs/" + self.algorithm, self.name, *map(str, self.config.values()), "1"])
        for key, value in (self.config | self.tuned).items():
            options += f" --config.{key}" if value is True else f" --config.{key} {value}"
        options += f" --out {folder}" if self.config else ""
        return [
            f"rollstream train {task}{options}{workers}{evaluate}",
            f"rollstream evaluate {folder} --episodes {self.episodes}{best}",
        ]


HIDDEN_VELOCITIES = "examples/hidden_velocities.py:HiddenVelocities"
IMPALA_MEMORY = {"learning_rate": 0.002, "learning_rate_decay": True, "normalize_rewards": True}
PPO_MEMORY = {
    "rollout_length": 128,
    "minibatch_size": 256,
    "learning_rate": 0.001,
    "learning_rate_decay": True,
    "normalize_observations": True,
}
R2D2_MEMORY = {
    "rollout_length": 40,
    "sequence_length": 40,
    "burn_in": 20,
    "samples_per_insert": 32.0,
    "buffer_size": 50_000,
    "learning_rate": 0.0005,
    "gamma": 0.99,
    "target_update_interval": 200,
}

GATES = (
    Gate("ppo", "CartPole-v1", 100_000, 475, seeds=5, needed=5),
    Gate("a2c", "CartPole-v1", 500_000, 475, seeds=5, needed=4),
    Gate("a3c", "CartPole-v1", 500_000, 475, seeds=5, needed=4, workers=2),
    Gate("impala", "CartPole-v1", 1_000_000, 475, seeds=5, needed=4, workers=2),
    Gate("appo", "CartPole-v1", 500_000, 475, seeds=5, needed=4, workers=2),
    Gate(
        "impala", HIDDEN_VELOCITIES, 1_000_000, 450, 5, 3, 2, config={"memory": "lstm"}, tuned=IMPALA_MEMORY
    ),
    Gate("ppo", "Acrobot-v1", 200_000, -100, seeds=5, needed=4),
    Gate("ppo", "Pendulum-v1", 200_000, -250, seeds=5, needed=5),
    Gate("ppo", "LunarLander-v3", 1_000_000, 200, seeds=3, needed=3),
    Gate("dqn", "CartPole-v1", 100_000, 475, 5, 4, evaluate_every=5_000, episodes=200),
    Gate("apex", "CartPole-v1", 300_000, 475, 5, 4, workers=2, evaluate_every=20_000, episodes=200),
    Gate("r2d2", HIDDEN_VELOCITIES, 300_000, 450, 5, 3, tuned=R2D2_MEMORY),
    Gate("sac", "Pendulum-v1", 20_000, -180, 5, 5, evaluate_every=2_000, episodes=200),
    Gate("td3", "Pendulum-v1", 20_000, -180, 5, 4, evaluate_every=2_000, episodes=200),
    Gate("dqn", "CartPole-v1", 100_000, 475, 5, 4, 0, 5_000, 200, config={"replay": "device"}),
    Gate("sac", "Pendulum-v1", 20_000, -180, 5, 5, 0, 2_000, 200, config={"replay": "device"}),
    Gate("sac", "Pendulum-v1", 20_000, -180, 5, 5, 0, 2_000, 200, config={"rollout_length": 8}),
    Gate("ppo", "Taxi-v4", 500_000, 7, seeds=3, needed=3, episodes=300),
    Gate("dqn", "Taxi-v4", 150_000, 7, seeds=3, needed=3, episodes=300),
    Gate("sac", "Taxi-v4", 60_000, 7, seeds=3, needed=3, episodes=300),
    Gate("dqn", "CliffWalking-v1", 50_000, -13, seeds=3, needed=3, env_kwargs={"max_episode_steps": 200}),
    Gate("ppo", "Blackjack-v1", 200_000, -0.06, seeds=3, needed=3, episodes=10_000),
    Gate("ppo", HIDDEN_VELOCITIES, 300_000, 450, 5, 4, config={"memory": "gru"}, tuned=PPO_MEMORY),
    Gate("ppo", HIDDEN_VELOCITIES, 300_000, 450, 5, 5, tuned=PPO_MEMORY, below=True),
)


@dataclass(frozen=True)
class Result:
    """Mean returns and seconds of every seed."""

    gate: Gate
    returns: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def passed(self) -> bool:
        gate = self.gate
        return sum((value >= gate.at_least) is not gate.below for value in self.returns) >= gate.needed


def run_gate(gate: Gate) -> Result:
    returns, seconds = [], []
    for seed in range(1, gate.seeds + 1):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run = rs.train(
                gate.algorithm,
                env=gate.environment,
                env_kwargs=gate.env_kwargs,
                steps=gate.steps,
                seed=seed,
                workers=gate.workers,
                config=gate.config | gate.tuned or None,
                out=Path(folder) / "run",
                evaluate_every=gate.evaluate_every,
                quiet=True,
            )
            if gate.evaluate_every is not None:
                run = rs.load(Path(folder) / "run", best=True)
            returns.append(run.evaluate(episodes=gate.episodes).mean_return)
        seconds.append(time.perf_counter() - start)
        result = f"{format_return(returns[-1])} in {seconds[-1]:.0f} s"
        print(f"{gate.algorithm} {gate.title} seed {seed}: {result}", flush=True)
    return Result(gate, tuple(returns), tuple(seconds))


def format_return(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3f}"


def table(results: list[Result]) -> str:
    """A table in Markdown."""
    lines = [
        "| algorithm | environment | workers | steps | gate | every seed | passed | seconds per seed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        gate = result.gate
        reached = ", ".join(map(format_return, result.returns))
        passed = "yes" if result.passed else "**no**"
        mean = sum(result.seconds) / len(result.seconds)
        lines.append(
            f"| {gate.algorithm} | {gate.title} | {gate.workers} | {gate.steps:,} "
            f"| {gate.target} | {reached} | {passed} | {mean:.0f} |"
        )
    return "\n".join(lines)


def page(results: list[Result]) -> str:
    commands = "\n".join(command for result in results for command in result.gate.commands)
    return f"""# Results

Mean return over evaluation episodes with deterministic actions after training, one value per seed
(1, 2, ...). Where the command has `--best`: over fresh episodes of the best policy found by evaluating during
training. Taxi masks illegal actions. Seconds include compilation and evaluation, with one core per worker, at
least one, of a shared machine. `make gates` writes this page.

{table(results)}

Hyperparameters are the tuned ones (`src/rollstream/training/tuned.toml`) or those of the command, or else the
defaults of the algorithm. The commands for seed 1:

```sh
{commands}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the learning gates.")
    parser.add_argument("algorithms", nargs="*", help="run only these algorithms (default: all)")
    parser.add_argument("--environment", help="run only this environment")
    parser.add_argument("--write", type=Path, help="write the results page to this file")
    parser.add_argument("--json", type=Path, help="write the results as JSON to this file")
    arguments = parser.parse_args()
    chosen = [
        gate
        for gate in GATES
        if (not arguments.algorithms or gate.algorithm in arguments.algorithms)
        and arguments.environment in (None, gate.name)
    ]
    results = [run_gate(gate) for gate in chosen]
    print(f"\n{table(results)}")
    if arguments.write is not None:
        arguments.write.write_text(page(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if not all(result.passed for result in results):
        sys.exit("a gate failed")


if __name__ == "__main__":
    main()
