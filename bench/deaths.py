"""Learning gates with deaths: a worker, a replay shard and the learner are killed (SIGKILL) on the way.

The worker dies after a quarter of the steps, a replay shard after a half, and the learner after three
quarters. The first two are restarted while the training goes on; with `max_failures`, the run resumes from
its newest checkpoint after the third. One seed of each gate of `gates.py`, on each engine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import support
from gates import GATES, Gate

import rollstream as rs
from rollstream.algos import ALGORITHMS
from rollstream.rl.worker_set import WorkerSet
from rollstream.testing import kill

CASES = (("impala", "CartPole-v1"), ("apex", "CartPole-v1"), ("r2d2", "HiddenVelocities"))
STEPS = "time/total_timesteps"


@dataclass(frozen=True)
class Figure:
    """One training, and how it ended."""

    algorithm: str
    environment: str
    engine: str
    deaths: tuple[str, ...]
    mean_return: float
    at_least: float
    seconds: float


class Killer:
    """Kills actors of a plan, each once."""

    def __init__(self, steps: int):
        self.steps = steps
        self.killed: list[str] = []

    def plan(self, make: Callable[[WorkerSet, Any], Any], workers: WorkerSet, config: Any) -> Any:
        """The plan, whose reports kill."""

        def watch(report: dict[str, Any]) -> dict[str, Any]:
            shards = [own for name, own in workers.engine.actors.items() if name.startswith("replay")]
            victims = {0.25: workers.actors[0], 0.75: workers.learner_actor}
            if shards:
                victims[0.5] = shards[0]
            for part, victim in victims.items():
                if victim.name not in self.killed and report[STEPS] >= part * self.steps:
                    self.killed.append(victim.name)
                    kill(victim)
            return report

        return make(workers, config).for_each(watch, name="watch")


def run(gate: Gate, engine: str) -> Figure:
    algorithm, killer = ALGORITHMS[gate.algorithm], Killer(gate.steps)
    make = algorithm.plan
    algorithm = replace(algorithm, plan=lambda workers, config: killer.plan(make, workers, config))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        rs.train(
            algorithm,
            env=gate.environment,
            steps=gate.steps,
            seed=1,
            workers=max(1, gate.workers),
            engine=engine,
            config=gate.config | gate.tuned or None,
            out=out,
            evaluate_every=gate.evaluate_every,
            max_failures=1,
            quiet=True,
        )
        trained = rs.load(out, best=gate.evaluate_every is not None, algorithm=algorithm)
        reached = trained.evaluate(episodes=gate.episodes).mean_return
    seconds = time.perf_counter() - start
    return Figure(gate.algorithm, gate.name, engine, tuple(killer.killed), reached, gate.at_least, seconds)


def show(figures: list[Figure]) -> None:
    rows = [
        [
            f"{own.algorithm} {own.environment}, {own.engine}",
            ", ".join(own.deaths),
            f"{own.mean_return:.1f}",
            f"{own.at_least:g} {'met' if own.mean_return >= own.at_least else 'MISSED'}",
            f"{own.seconds:.0f}",
        ]
        for own in figures
    ]
    print()
    support.print_table(["", "killed", "mean return", "gate", "seconds"], rows)


def main() -> None:
    parser = support.arguments(__doc__, ("processes", "ray"))
    parser.add_argument("--algorithms", type=support.names, default=[name for name, _ in CASES])
    options = parser.parse_args()
    figures: list[Figure] = []
    for engine in support.available(options.engines):
        for gate in GATES:
            if (gate.algorithm, gate.name) in CASES and gate.algorithm in options.algorithms:
                figures.append(run(gate, engine))
                print(figures[-1], flush=True)
    show(figures)
    support.write_json(options.json, "deaths", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
