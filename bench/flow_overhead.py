"""What the flow costs: an operator on an item, and a gathered item, against the same work in plain Python.

Each figure is the median of several rounds, Rollstream and the plain version by turns in one process.
Statistics are on, as always. Run it with `make bench`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import rollstream as rs
from rollstream import flow

ITEMS = 50_000
OPERATORS = 10
SHARDS = 4
ROUNDS = 7
Figure = tuple[str, float, float, float]


def increment(value: int) -> int:
    return value + 1


class Counter:
    """An actor that does next to nothing."""

    def __init__(self) -> None:
        self.count = 0

    def sample(self) -> int:
        self.count += 1
        return self.count


def plain_chain(operators: int) -> None:
    def apply(source: Iterable[int]) -> Iterator[int]:
        for value in source:
            yield increment(value)

    stream: Iterable[int] = iter(range(ITEMS))
    for _ in range(operators):
        stream = apply(stream)
    for _ in stream:
        pass


def flow_chain(operators: int) -> None:
    stream = flow.from_items(range(ITEMS))
    for _ in range(operators):
        stream = stream.for_each(increment)
    for _ in stream:
        pass


def plain_calls() -> None:
    counters = [Counter() for _ in range(SHARDS)]
    for index in range(ITEMS):
        counters[index % SHARDS].sample()


def gathered(engine: rs.Engine, num_async: int, items: int) -> None:
    actors = engine.spawn(Counter, count=SHARDS)
    for _ in flow.from_actors(actors, "sample").gather_async(num_async).take(items):
        pass


def rows(engine: rs.Engine, items: int) -> None:
    actors = engine.spawn(Counter, count=SHARDS)
    for _ in flow.from_actors(actors, "sample").gather_sync().take(items // SHARDS):
        pass


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(*works: Callable[[], None]) -> list[float]:
    """Seconds for each piece of work, measured by turns."""
    times = [[seconds(work) for work in works] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main() -> None:
    micro = 1e6
    figures: list[Figure] = []

    ours_0, ours, plain_0, plain = medians(
        lambda: flow_chain(0),
        lambda: flow_chain(OPERATORS),
        lambda: plain_chain(0),
        lambda: plain_chain(OPERATORS),
    )
    per = micro / (ITEMS * OPERATORS)
    figures.append(("for_each, per operator and item", (ours - ours_0) * per, (plain - plain_0) * per, 1.0))

    with rs.engine("inline") as engine:
        one, rows_, calls = medians(
            lambda: gathered(engine, 1, ITEMS), lambda: rows(engine, ITEMS), plain_calls
        )
        figures.append(("gather_async inline, per item", one / ITEMS * micro, calls / ITEMS * micro, 5.0))
        figures.append(("gather_sync inline, per item", rows_ / ITEMS * micro, calls / ITEMS * micro, 5.0))

    print(f"{'':36}{'Rollstream':>12}{'plain Python':>14}{'target':>10}")
    for name, ours, plain, target in figures:
        verdict = "met" if ours <= target else "MISSED"
        print(f"{name:36}{ours:9.2f} us{plain:11.2f} us{target:7.1f} us  {verdict}")

    items = ITEMS // 10
    with rs.engine("threads") as engine:
        for num_async in (1, 4):
            [took] = medians(lambda: gathered(engine, num_async, items))  # noqa: B023
            label = f"gather_async threads, num_async={num_async}"
            print(f"{label:36}{took / items * micro:9.2f} us")


if __name__ == "__main__":
    main()
