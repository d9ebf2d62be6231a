"""PPO, A3C, IMPALA and APPO on one environment: time and steps to a return, and how old weights were.

Each trains with its tuned settings, or else its defaults, until the mean return of its last 100 episodes
reaches a goal, or until its steps are over. Seconds are those of the whole training, start and compilation
included; figures are medians over seeds. `steps a second` is the rate of the second half of the training,
when everything is compiled. Ape-X is not here: its workers explore, so their returns are not the policy's.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import support

import rollstream as rs

GOAL, STEPS, SEEDS = 475.0, 1_000_000, 3


@dataclass(frozen=True)
class Entry:
    """An algorithm, and where its workers are."""

    name: str
    algorithm: str
    workers: int
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Figure:
    """One training."""

    name: str
    seed: int
    seconds: float
    steps: int
    reached: bool
    steps_per_second: float
    staleness: float
    """Mean number of versions."""


def entries(workers: int) -> list[Entry]:
    """What competes, the asynchronous ones with so many workers."""
    return [
        Entry("PPO, no workers", "ppo", 0),
        Entry("PPO with overlap, 1 worker", "ppo", 1, {"overlap": True}),
        *(
            Entry(f"{title}, {workers} workers", title.lower(), workers)
            for title in ("A3C", "IMPALA", "APPO")
        ),
    ]


def train(entry: Entry, environment: str, goal: float, steps: int, seed: int) -> Figure:
    rows: list[tuple[float, int]] = []
    staleness: list[float] = []
    returns = [float("-inf")]

    def note(report: Any) -> bool:
        rows.append((time.perf_counter(), report["time/total_timesteps"]))
        staleness.append(report.get("weights/staleness", 0.0))
        returns.append(report.get("rollout/ep_rew_mean", float("-inf")))
        return returns[-1] >= goal

    start = time.perf_counter()
    rs.train(
        entry.algorithm,
        env=environment,
        steps=steps,
        seed=seed,
        workers=entry.workers,
        config=entry.config,
        on_report=note,
        quiet=True,
    )
    middle, (end, last) = rows[len(rows) // 2], rows[-1]
    rate = (last - middle[1]) / (end - middle[0]) if end > middle[0] else float("nan")
    return Figure(entry.name, seed, end - start, last, returns[-1] >= goal, rate, statistics.fmean(staleness))


def show(figures: list[Figure]) -> None:
    rows: list[list[str]] = []
    for name in dict.fromkeys(figure.name for figure in figures):
        own = [figure for figure in figures if figure.name == name]
        median = {
            key: statistics.median(getattr(figure, key) for figure in own)
            for key in ("seconds", "steps", "steps_per_second", "staleness")
        }
        rows.append(
            [
                name,
                f"{sum(figure.reached for figure in own)} of {len(own)}",
                f"{median['seconds']:.0f}",
                f"{median['steps']:,.0f}",
                f"{median['steps_per_second']:,.0f}",
                f"{median['staleness']:.1f}",
            ]
        )
    print()
    head = ["", "reached the goal", "seconds", "steps", "steps a second", "versions behind"]
    support.print_table(head, rows)


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--workers", type=int, default=2, help="of the asynchronous algorithms")
    parser.add_argument("--goal", type=float, default=GOAL, help="mean return of the last 100 episodes")
    parser.add_argument("--steps", type=int, default=STEPS, help="at most so many")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    figures: list[Figure] = []
    for seed in range(1, options.seeds + 1):
        for entry in entries(options.workers):
            figures.append(train(entry, options.environment, options.goal, options.steps, seed))
            print(figures[-1], flush=True)
    show(figures)
    support.write_json(options.json, "asynchronous", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
