"""Learning gates: what each algorithm is to reach, how far it got with every seed, and the command for it.

    python bench/gates.py                      # all of them, about half an hour on two cores
    python bench/gates.py ppo a2c              # of some algorithms
    python bench/gates.py --write docs/results.md

A gate is passed if enough seeds reach the return with 100 evaluation episodes of the likeliest actions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import rollstream as rs


@dataclass(frozen=True)
class Gate:
    """So many of so many seeds reach a return after so many steps."""

    algorithm: str
    environment: str
    steps: int
    at_least: float
    seeds: int
    needed: int
    workers: int = 0
    evaluate_every: int | None = None
    """If given, the best of the policies that were evaluated so often counts, in episodes of their own."""
    episodes: int = 100

    @property
    def command(self) -> str:
        """What to type for one seed."""
        task = f"{self.algorithm} --env {self.environment} --steps {self.steps} --seed 1"
        workers = f" --workers {self.workers}" if self.workers else ""
        often = f" --evaluate-every {self.evaluate_every}" if self.evaluate_every else ""
        return f"rollstream train {task}{workers}{often}"


GATES = (
    Gate("ppo", "CartPole-v1", 100_000, 475, seeds=5, needed=5),
    Gate("a2c", "CartPole-v1", 500_000, 475, seeds=5, needed=4),
    Gate("a3c", "CartPole-v1", 500_000, 475, seeds=5, needed=4, workers=2),
    Gate("ppo", "Acrobot-v1", 200_000, -100, seeds=5, needed=4),
    Gate("ppo", "Pendulum-v1", 200_000, -250, seeds=5, needed=4),
    Gate("ppo", "LunarLander-v3", 1_000_000, 200, seeds=3, needed=3),
    Gate("dqn", "CartPole-v1", 100_000, 475, 5, 4, evaluate_every=5_000, episodes=200),
    Gate("apex", "CartPole-v1", 300_000, 475, 5, 4, workers=2, evaluate_every=20_000, episodes=200),
    Gate("sac", "Pendulum-v1", 20_000, -180, 5, 5, evaluate_every=2_000, episodes=200),
    Gate("td3", "Pendulum-v1", 20_000, -180, 5, 4, evaluate_every=2_000, episodes=200),
)


@dataclass(frozen=True)
class Result:
    """What the seeds of a gate came to."""

    gate: Gate
    returns: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return sum(one >= self.gate.at_least for one in self.returns) >= self.gate.needed


def tried(gate: Gate) -> Result:
    returns, seconds = [], []
    for seed in range(1, gate.seeds + 1):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run = rs.train(
                gate.algorithm,
                env=gate.environment,
                steps=gate.steps,
                seed=seed,
                workers=gate.workers,
                out=Path(folder) / "run",
                evaluate_every=gate.evaluate_every,
                quiet=True,
            )
            if gate.evaluate_every is not None:
                run = rs.load(Path(folder) / "run", best=True)
            returns.append(run.evaluate(episodes=gate.episodes).mean_return)
        seconds.append(time.perf_counter() - start)
        print(
            f"{gate.algorithm} {gate.environment} seed {seed}: {returns[-1]:.1f} in {seconds[-1]:.0f} s",
            flush=True,
        )
    return Result(gate, tuple(returns), tuple(seconds))


def table(results: list[Result]) -> str:
    """A table in Markdown."""
    lines = [
        "| algorithm | environment | steps | gate | every seed | passed | seconds a seed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        gate = result.gate
        workers = f", {gate.workers} process workers" if gate.workers else ""
        reached = ", ".join(f"{one:.1f}" for one in result.returns)
        passed = "yes" if result.passed else "**no**"
        mean = sum(result.seconds) / len(result.seconds)
        lines.append(
            f"| {gate.algorithm}{workers} | {gate.environment} | {gate.steps:,} | >= {gate.at_least:g} in "
            f"{gate.needed} of {gate.seeds} | {reached} | {passed} | {mean:.0f} |"
        )
    return "\n".join(lines)


def page(results: list[Result]) -> str:
    commands = "\n".join(dict.fromkeys(result.gate.command for result in results))
    return f"""# Results

Mean return over 100 evaluation episodes, of the likeliest actions, after training; one figure a seed
(1, 2, ...). Of algorithms that learn from replay: over 200 fresh episodes, of the best policy that was found
by evaluating now and then. Seconds include compilation and evaluation, on two cores of a shared machine.
`make gates` makes this page.

{table(results)}

The settings are those that come with the package (`src/rollstream/training/tuned.toml`), else the defaults of
the algorithm. For one seed:

```sh
{commands}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Does everything learn what it is to learn?")
    parser.add_argument("algorithms", nargs="*", help="some only")
    parser.add_argument("--environment", help="one only")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    arguments = parser.parse_args()
    chosen = [
        gate
        for gate in GATES
        if (not arguments.algorithms or gate.algorithm in arguments.algorithms)
        and arguments.environment in (None, gate.environment)
    ]
    results = [tried(gate) for gate in chosen]
    print(f"\n{table(results)}")
    if arguments.write is not None:
        arguments.write.write_text(page(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if not all(result.passed for result in results):
        sys.exit("a gate was not passed")


if __name__ == "__main__":
    main()
