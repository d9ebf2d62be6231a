"""What a plan costs: PPO and A3C as flows, against loops written by hand over the same workers and learner.

Both have workers and a learner of their own, made alike from one seed, in one engine: 2 workers, CartPole-v1,
the algorithm's usual settings. The loops are in `loops.py`. A pair is one turn of either, of equally many
updates; who goes first alternates, and whoever waits uses no processor. The figure is the median over the
pairs of the flow's time divided by the loop's, with a bootstrap confidence interval of 95 %.

Where the order of events is fixed (PPO; on inline also A3C) both must have learned the same weights in the
end, bit for bit: the work was the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import loops
import numpy as np
import support

import rollstream as rs
from rollstream.algos.a3c import A3C
from rollstream.algos.ppo import PPO
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.worker_set import WorkerSet

ENGINES = ("processes",)
WORKERS = 2
PAIRS = 20
SETTLE = 0.02
"""Seconds between turns, in which workers finish what they were still asked for."""
RESAMPLES = 10_000


@dataclass(frozen=True)
class Case:
    """An algorithm, its loop, and how much of it makes a turn."""

    algorithm: Algorithm[Any]
    loop: Callable[[WorkerSet, Any], Iterator[Any]]
    reports: int
    """In a turn; of PPO one is an update, of A3C a hundred."""
    target: float
    """The most the flow may take, as a multiple of the loop."""
    fixed: bool
    """Whether the order of events is the same on every engine."""


CASES = {
    "ppo": Case(PPO, lambda workers, _: loops.ppo(workers), 8, 1.03, True),
    "a3c": Case(A3C, lambda workers, config: loops.a3c(workers, config.report_every), 8, 1.05, False),
}


@dataclass(frozen=True)
class Figure:
    """How a flow compares with its loop."""

    algorithm: str
    engine: str
    flow_seconds: float
    loop_seconds: float
    ratio: float
    low: float
    high: float
    target: float
    pairs: int


def seconds(iterator: Iterator[Any], reports: int) -> float:
    start = time.perf_counter()
    for _ in range(reports):
        next(iterator)
    return time.perf_counter() - start


def turns(flow: Iterator[Any], loop: Iterator[Any], reports: int, pairs: int) -> np.ndarray[Any, Any]:
    """Seconds of every pair, `[pairs, 2]`: the flow's, the loop's."""
    times = np.empty((pairs, 2))
    for number in range(-1, pairs):  # the first is to compile: its times are overwritten by the last
        order = (0, 1) if number % 2 else (1, 0)
        for side in order:
            times[number, side] = seconds((flow, loop)[side], reports)
            time.sleep(SETTLE)
    return times


def interval(ratios: np.ndarray[Any, Any]) -> tuple[float, float]:
    """What the median of the ratios would be between, had other pairs been drawn."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


def measure(name: str, case: Case, engine_name: str, pairs: int) -> Figure:
    config, task = case.algorithm.config(), Task(EnvSpec("CartPole-v1"), 10**9, workers=WORKERS)
    with rs.engine(engine_name) as engine:
        by_flow, by_loop = (case.algorithm.workers(engine, config, task) for _ in range(2))
        plan = case.algorithm.plan(by_flow, config)
        times = turns(iter(plan), case.loop(by_loop, config), case.reports, pairs)
        if case.fixed or engine_name == "inline":
            require_equal(by_flow, by_loop)
        plan.close()
    ratios = times[:, 0] / times[:, 1]
    flow, loop = np.median(times, axis=0)
    return Figure(
        name,
        engine_name,
        float(flow),
        float(loop),
        float(np.median(ratios)),
        *interval(ratios),
        case.target,
        pairs,
    )


def require_equal(one: WorkerSet, other: WorkerSet) -> None:
    """Raise unless both have learned the same."""
    mine, theirs = one.learner.get_weights(), other.learner.get_weights()
    if one.learner.version != other.learner.version or any(
        not np.array_equal(mine[name], theirs[name]) for name in mine
    ):
        raise AssertionError("the flow and the loop have learned different weights: their work was not equal")


def show(figures: list[Figure]) -> None:
    rows: list[list[str]] = []
    for f in figures:
        verdict = "met" if f.ratio <= f.target else "MISSED"
        rows.append(
            [
                f"{f.algorithm}, {f.engine}",
                f"{f.flow_seconds * 1e3:.1f} ms",
                f"{f.loop_seconds * 1e3:.1f} ms",
                f"{f.ratio - 1:+.1%}",
                f"{f.low - 1:+.1%} to {f.high - 1:+.1%}",
                f"{f.target - 1:+.0%} {verdict}",
            ]
        )
    print()
    support.print_table(["a turn", "flow", "loop", "the flow costs", "95 %", "target"], rows)


def main() -> None:
    parser = support.arguments(__doc__, ENGINES)
    parser.add_argument("--algorithms", type=support.names, default=list(CASES), help="comma separated")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    figures: list[Figure] = []
    for engine in support.available(options.engines):
        for name in options.algorithms:
            print(f"{name}, {engine} ...", flush=True)
            figures.append(measure(name, CASES[name], engine, options.pairs))
    show(figures)
    support.write_json(options.json, "flow_vs_loop", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
