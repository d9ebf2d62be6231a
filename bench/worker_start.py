"""How long 8 workers that use JAX take to start, against plain interpreters that do the same side by side.

Ours: from `engine.spawn` until every actor, whose constructor imports JAX and computes `jnp.zeros(1)`, has
replied once. Plain: from the first of as many `python -c` until each has printed one line; they import what a
worker of ours imports, too (numpy, cloudpickle), but nothing of ours, and live until all have answered, as
actors do. All have the same environment, one thread a library. Rounds take turns; figures are medians.
"""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import support

import rollstream as rs

ENGINES = ("processes", "ray")
PLAIN = "plain interpreters"
WORKERS = 8
ROUNDS = 3
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
PROGRAM = """
import sys, cloudpickle, numpy, jax, jax.numpy
print(float(jax.numpy.zeros(1)[0]), flush=True)
sys.stdin.read()
"""


class UsesJax:
    """An actor that is ready when JAX has computed something."""

    def __init__(self) -> None:
        self.zero = float(importlib.import_module("jax.numpy").zeros(1)[0])

    def first(self) -> float:
        return self.zero


def seconds_on_engine(engine: rs.Engine, workers: int) -> float:
    start = time.perf_counter()
    actors = engine.spawn(UsesJax, count=workers)
    engine.results([actor.call("first") for actor in actors])
    return time.perf_counter() - start


def seconds_on(name: str, workers: int) -> float:
    """On an engine opened, and closed, outside the timed part."""
    with support.opened(name) as engine:
        return seconds_on_engine(engine, workers)


def plain_interpreter() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a plain interpreter ended without a word; is JAX installed?")
    return line


def seconds_plain(workers: int) -> float:
    with ExitStack() as stack:
        start = time.perf_counter()
        processes = [stack.enter_context(plain_interpreter()) for _ in range(workers)]
        for process in processes:
            first_line(process)
        return time.perf_counter() - start  # leaving the stack ends them: their input is closed


def measure(engines: Sequence[str], workers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by competitor."""
    seconds_plain(1)  # so that the files are in the system's cache for all
    times: dict[str, list[float]] = {name: [] for name in [PLAIN, *engines]}
    for number in range(rounds):
        for name, row in times.items():
            row.append(seconds_plain(workers) if name == PLAIN else seconds_on(name, workers))
            print(f"round {number + 1}: {name} {row[-1]:.2f} s", flush=True)
    return times


def show(times: dict[str, list[float]], workers: int) -> None:
    rows: list[list[str]] = []
    for name, row in times.items():
        ratio = statistics.median(row) / statistics.median(times[PLAIN])
        figures = (statistics.median(row), min(row), max(row))
        rows.append([name, *(f"{seconds:.2f} s" for seconds in figures), f"{ratio:.2f}"])
    print()
    head = [f"until {workers} workers have replied", "median", "least", "most", f"ratio to {PLAIN}"]
    support.print_table(head, rows)


def main() -> None:
    parser = support.arguments(__doc__, ENGINES)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(THREADS, "1"))
    times = measure(support.available(options.engines), options.workers, options.rounds)
    show(times, options.workers)
    support.write_json(options.json, "worker_start", times)


if __name__ == "__main__":
    main()
