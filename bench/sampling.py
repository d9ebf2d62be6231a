"""How fast experience is sampled, against raw environment stepping in as many processes.

The sampling microbenchmark of the RLlib Flow paper (Figure 8): a dummy policy with one scalar weight acts in
CartPole-v1, 8 environments a worker, 250 steps an item; nothing is learned. Competitors, for 0, 1 and 2
workers (0 is one in the driver's own thread):

- `gather_sync`, `gather_async`: `ParallelRollouts` through either gather, on inline or processes;
- `lean`: plain processes that step the same vector of environments with the same kind of actions, drawn
  beforehand; no flow, no policy, nothing recorded, nothing sent but a number at the end of a turn;
- `bare`: the same processes with a `for` loop over Gymnasium's environments, and nothing else at all.

The coin that decides on actions is fair everywhere, so episodes are equally short. Competitors take turns;
figures are medians over the rounds. The target is a share of `lean`; that of `bare` is shown beside it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import optax
import support

import rollstream as rs
from rollstream.flow import Iter
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner
from rollstream.rl.operators import ParallelRollouts
from rollstream.rl.policy import Weights
from rollstream.rl.worker import WorkerSpec
from rollstream.rl.worker_set import WorkerSet

ENVIRONMENT = EnvSpec("CartPole-v1")
WORKERS = (0, 1, 2)
ENVIRONMENTS = 8
LENGTH = 250
ITEMS = 40
PASSES = 7
TARGET = 0.85
SETTLE = 0.05
"""Seconds between turns, in which workers finish what was asked for and not waited for."""
ITEM = ENVIRONMENTS * LENGTH
Turn = Callable[[int], int]
"""Samples so many items with every worker: environment steps."""


@dataclass(frozen=True)
class Figure:
    """What one competitor reached."""

    workers: int
    competitor: str
    steps_per_second: float
    rounds: int


class Coin:
    """A policy with one weight: how often it says 1."""

    jit = False

    def __init__(self, *spaces: Any):
        pass

    def init(self, seed: int) -> Weights:  # noqa: ARG002
        return {"network.scalar": np.float32(0.5)}

    def initial_state(self, size: int) -> tuple[()]:  # noqa: ARG002
        return ()

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        return generator.random(leading, np.float32)

    def step(self, weights: Weights, observation: Any, state: Any, noise: Any) -> tuple[Any, Any]:  # noqa: ARG002
        return (noise < weights["network.scalar"]).astype(np.int64), state


# Through a flow --------------------------------------------------------------------------------


@contextmanager
def flows(count: int) -> Iterator[dict[str, Turn]]:
    """Both gathers, over the same workers."""
    spec = WorkerSpec(ENVIRONMENT, ENVIRONMENTS, LENGTH, Coin)
    with rs.engine("processes" if count else "inline") as engine:
        workers = WorkerSet(engine, spec, Learner(Coin(), None, optax.sgd(0.1)), max(1, count))

        def sync(items: int) -> int:
            rows = ParallelRollouts(workers).gather_sync().flatten()
            return _consumed(workers, rows, items)

        def asynchronous(items: int) -> int:
            return _consumed(workers, ParallelRollouts(workers).gather_async(), items)

        yield {"gather_sync": sync, "gather_async": asynchronous}


def _consumed(workers: WorkerSet, batches: Iter[Batch], items: int) -> int:
    return sum(batch.steps for batch in batches.take(items * len(workers.actors)))


# Without one -----------------------------------------------------------------------------------


def lean_stepping(seed: int) -> Turn:
    """The vector that workers step, and nothing around it."""
    vector = ENVIRONMENT.make(ENVIRONMENTS)
    vector.reset(range(seed, seed + ENVIRONMENTS))
    actions = np.random.default_rng(seed).integers(0, 2, (LENGTH, ENVIRONMENTS))

    def turn(items: int) -> int:
        for _ in range(items):
            for action in actions:
                vector.step(action)
        return items * ITEM

    return turn


def bare_stepping(seed: int) -> Turn:
    """Gymnasium's environments in a loop."""
    environments = [ENVIRONMENT.make_one() for _ in range(ENVIRONMENTS)]
    for index, environment in enumerate(environments):
        environment.reset(seed=seed + index)
    actions = list(np.random.default_rng(seed).integers(0, 2, (LENGTH, ENVIRONMENTS)))

    def turn(items: int) -> int:
        for _ in range(items):
            for row in actions:
                for environment, action in zip(environments, row, strict=True):
                    _, _, terminated, truncated, _ = environment.step(action)
                    if terminated or truncated:
                        environment.reset()
        return items * ITEM

    return turn


def in_plain_process(connection: Connection, make: Callable[[int], Turn], seed: int) -> None:
    """A process that takes a turn for every number it is sent, until that is 0."""
    turn = make(seed)
    turn(1)
    while items := connection.recv():
        connection.send(turn(items))


@contextmanager
def plain(make: Callable[[int], Turn], count: int) -> Iterator[Turn]:
    """The same in so many processes, or here."""
    if count == 0:
        yield make(0)
        return
    context = multiprocessing.get_context("spawn")
    connections: list[Any] = []
    processes: list[Any] = []
    for index in range(count):
        here, there = context.Pipe()
        process = context.Process(target=in_plain_process, args=(there, make, 100 * index))
        process.start()
        connections.append(here)
        processes.append(process)

    def turn(items: int) -> int:
        for connection in connections:
            connection.send(items)
        return sum(connection.recv() for connection in connections)

    try:
        yield turn
    finally:
        for connection in connections:
            connection.send(0)
        for process in processes:
            process.join()


# Measuring and showing -------------------------------------------------------------------------


def measure(count: int, items: int, passes: int) -> list[Figure]:
    """All competitors with so many workers, by turns."""
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        turns = {
            "bare": stack.enter_context(plain(bare_stepping, count)),
            "lean": stack.enter_context(plain(lean_stepping, count)),
            **stack.enter_context(flows(count)),
        }
        for number in range(passes + 1):
            for name, turn in turns.items():
                start = time.perf_counter()
                steps = turn(items if number else 1)
                rate = steps / (time.perf_counter() - start)
                if number:  # the first is to warm up
                    rates.setdefault(name, []).append(rate)
                time.sleep(SETTLE)
    return [Figure(count, name, statistics.median(row), len(row)) for name, row in rates.items()]


def show(figures: Sequence[Figure]) -> None:
    rows: list[list[str]] = []
    for count in sorted({figure.workers for figure in figures}):
        rate = {f.competitor: f.steps_per_second for f in figures if f.workers == count}
        for name in ("gather_sync", "gather_async"):
            share = rate[name] / rate["lean"]
            cells = [f"{rate[each] / 1e3:.1f}" for each in (name, "lean", "bare")]
            verdict = "met" if share >= TARGET else "MISSED"
            shares = [f"{share:.1%}", f"{TARGET:.0%} {verdict}", f"{rate[name] / rate['bare']:.1%}"]
            rows.append([f"{count} workers, {name}", *cells, *shares])
    print()
    support.print_table(
        ["thousand steps a second", "flow", "lean", "bare", "of lean", "target", "of bare"], rows
    )


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--workers", type=support.numbers, default=list(WORKERS), help="comma separated")
    parser.add_argument("--items", type=int, default=ITEMS, help=f"of {ITEM} steps, a worker and turn")
    parser.add_argument("--passes", type=int, default=PASSES, help="how often everybody has a turn")
    options = parser.parse_args()
    figures: list[Figure] = []
    for count in options.workers:
        print(f"{count} workers ...", flush=True)
        figures += measure(count, options.items, options.passes)
    show(figures)
    support.write_json(options.json, "sampling", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
