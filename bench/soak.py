"""A long run that has to end as it began: nothing lost, nothing overwritten, nothing leaked.

Four workers make items of mixed sizes, from plain numbers to 3 MB, in an order that follows from worker and
index alone; a flow gathers them (`gather_async(4)`), splits the stream with a small buffer, and holds a
tenth of it in batches, while the consumer pauses now and then. Every byte of every item is checked, when it
comes and again after it was held, and so is every worker's order. Resident memory of the driver and of each
worker, its own and what it shares, is compared between the end of the warm-up (a tenth of the items) and the
end of the run: growth of 5 % or more is a failure, and so is shared memory that outlives its engine. Each
worker begins with a row of the largest items, so that its pool has seen what is to come: shared memory is
taken when it is first needed, and the largest items are rare. There is no competitor: the run is measured
against itself. Below some 100,000 items memory still settles, so that a short run says nothing of growth.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import support
from process_memory import Resident, descendants, resident, segments_held

import rollstream as rs
from rollstream import flow

ITEMS = 1_000_000
WORKERS = 4
NUM_ASYNC = 4
BATCH = 8
SPLIT_BUFFER = 4
SAMPLES = 100
"""How often memory is looked at in a run; a tenth of them is warm-up."""
LINES = 20
"""How many lines the table of progress has."""
LIMIT = 5.0
"""Percent of growth that fail the run."""
SIZES = ((0, 400), (100, 300), (10_000, 240), (300_000, 59), (3_000_000, 1))
"""Bytes, and how many of 1,000 items have so many."""
LARGEST_FIRST = 24
"""With how many of the largest items a worker begins; all are held for a while."""
PAUSES = ((0.05, 0.0001), (0.001, 0.01))
"""Seconds, and how likely the consumer pauses so long after an item."""
MASK = 2**64 - 1
Item = tuple[int, int, Any]
"""Worker, index and payload."""


# Items: the word decides everything, so both sides can compute it ---------------------------------


def word_of(worker: int, index: int) -> int:
    """64 bits that no other item has, in no visible order (splitmix64)."""
    word = (((worker + 1) << 40) + index) * 0x9E3779B97F4A7C15 & MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def size_of(worker: int, index: int) -> int:
    """Bytes of an item."""
    if index < LARGEST_FIRST:
        return SIZES[-1][0]
    place = word_of(worker, index) % 1000
    for size, share in SIZES:
        place -= share
        if place < 0:
            return size
    raise AssertionError("the shares of all sizes make 1,000")


def payload_of(worker: int, index: int) -> Any:
    """A number, bytes, or an array, filled with the item's word."""
    size, word = size_of(worker, index), word_of(worker, index)
    if size == 0:
        return word
    if size < 1_000:
        return (word.to_bytes(8, "little") * (size // 8 + 1))[:size]
    return np.full(size // 8, word, dtype=np.uint64)


def is_intact(item: Item) -> bool:
    """Whether every byte is as it was made. Two cheap passes over an array say so."""
    worker, index, payload = item
    word = word_of(worker, index)
    if isinstance(payload, np.ndarray):
        size = size_of(worker, index)
        return payload.nbytes == size and int(payload.min()) == word == int(payload.max())
    return payload == payload_of(worker, index)


class Maker:
    """An actor that makes items."""

    def __init__(self, *, context: Any) -> None:
        self.worker: int = context.index
        self.index = -1

    def make(self) -> Item:
        self.index += 1
        return self.worker, self.index, payload_of(self.worker, self.index)


# The plan and its checks ---------------------------------------------------------------------------


class Inspector:
    """Checks items as they come, and again those that were held."""

    def __init__(self) -> None:
        self.items = 0
        self.held = 0
        self.size = 0
        self._next = dict.fromkeys(range(WORKERS), 0)

    def arrived(self, item: Item) -> int:
        """The size of an item that is intact and the next of its worker."""
        worker, index, _ = item
        if index != self._next[worker]:
            raise AssertionError(f"worker {worker}: item {index} came instead of {self._next[worker]}")
        self._next[worker] += 1
        self.items += 1
        self._require_intact(item)
        size = size_of(worker, index)
        self.size += size
        return size

    def released(self, batch: list[Item]) -> int:
        """The length of a batch of items that are intact still."""
        for item in batch:
            self._require_intact(item)
        self.held += len(batch)
        return len(batch)

    def _require_intact(self, item: Item) -> None:
        if not is_intact(item):
            raise AssertionError(
                f"item {item[1]} of worker {item[0]} is not what it was made as: {item[2]!r}"
            )


def is_held(item: Item) -> bool:
    """Whether an item is of the tenth that goes through the batches."""
    return item[1] < LARGEST_FIRST or word_of(item[0], item[1]) // 1000 % 10 == 0


def soak_plan(workers: list[rs.Actor[Maker]], items: int, inspector: Inspector) -> flow.Iter[int]:
    made = flow.from_actors(workers, "make").gather_async(num_async=NUM_ASYNC).take(items)
    every, some = made.split(2, buffer=SPLIT_BUFFER)
    arrived = every.for_each(inspector.arrived)
    released = some.filter(is_held).batch(BATCH).for_each(inspector.released)
    return flow.union_async([arrived, released])


def pause(dice: random.Random) -> None:
    """Mostly none."""
    throw = dice.random()
    for seconds, likelihood in PAUSES:
        if throw < likelihood:
            time.sleep(seconds)
            return
        throw -= likelihood


# Memory ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Resident memory at one moment of the run."""

    items: int
    seconds: float
    size: int
    """Bytes of the items so far."""
    driver: Resident
    workers: dict[int, Resident]
    """By process number."""

    @property
    def all_workers(self) -> Resident:
        return sum(self.workers.values(), Resident(0, 0))


@dataclass
class Report:
    """What a run came to."""

    items: int
    held: int
    seconds: float
    growth: dict[str, float]
    """Percent of memory gained since the warm-up, of the driver and of each worker, own and shared."""
    left_behind: list[str]
    """Shared memory that outlived the engine."""
    samples: list[Sample] = field(repr=False)

    @property
    def failures(self) -> list[str]:
        """What is wrong, in words; nothing, if all is well."""
        grown = [f"{who} grew by {by:.1f} %" for who, by in self.growth.items() if by >= LIMIT]
        return grown + [f"left behind: {what}" for what in self.left_behind]


def take_sample(inspector: Inspector, start: float) -> Sample:
    workers = {pid: resident(pid) for pid in descendants(os.getpid())}
    seconds = time.perf_counter() - start
    return Sample(inspector.items, seconds, inspector.size, resident(os.getpid()), workers)


def growth(samples: list[Sample]) -> dict[str, float]:
    """Percent, from the first samples after the warm-up to the last ones.

    One sample hangs on what is under way at its moment; the median of several does not.
    """
    warm = samples[len(samples) // 10 :]
    window = max(1, len(samples) // 20)
    first, last = warm[:window], warm[-window:]
    grown = _percent("driver", [s.driver for s in first], [s.driver for s in last])
    everywhere = [pid for pid in last[-1].workers if all(pid in s.workers for s in [*first, *last])]
    for number, pid in enumerate(everywhere):
        before, after = ([sample.workers[pid] for sample in part] for part in (first, last))
        grown |= _percent(f"worker {number}", before, after)
    return grown


def _percent(who: str, before: list[Resident], after: list[Resident]) -> dict[str, float]:
    percent: dict[str, float] = {}
    for kind in ("own", "shared"):
        old, new = (statistics.median(getattr(part, kind) for part in parts) for parts in (before, after))
        percent[f"{who}, {kind}"] = (new - old) / old * 100 if old else 0.0
    return percent


# The run -----------------------------------------------------------------------------------------

COLUMNS = ("items", "seconds", "items/s", "MB/s", "driver own", "shared", "workers own", "shared")


def progress_head() -> str:
    return "".join(f"{column:>13}" for column in COLUMNS) + "   (memory in MB)"


def progress_line(sample: Sample) -> str:
    mega = 2**20
    workers = sample.all_workers
    memory = (sample.driver.own, sample.driver.shared, workers.own, workers.shared)
    rates = f"{sample.items / sample.seconds:>13,.0f}{sample.size / mega / sample.seconds:>13,.1f}"
    return f"{sample.items:>13,}{sample.seconds:>13,.1f}{rates}" + "".join(
        f"{size / mega:>13,.1f}" for size in memory
    )


def run_samples(plan: flow.Iter[int], inspector: Inspector, items: int, seed: int) -> Iterator[Sample]:
    """Consume a plan, pausing now and then, and look at memory on the way."""
    dice, start = random.Random(seed), time.perf_counter()
    interval = max(1, items // SAMPLES)
    due = interval
    for _ in plan:
        pause(dice)
        if inspector.items >= due:
            yield take_sample(inspector, start)
            due += interval


def soak(items: int = ITEMS, *, engine: str = "processes", seed: int = 0, quiet: bool = False) -> Report:
    """Run the flow, checking everything; raises if an item is lost, out of order or damaged."""
    segments, inspector, samples = segments_held(), Inspector(), list[Sample]()
    start = time.perf_counter()
    if not quiet:
        print(progress_head(), flush=True)
    with rs.engine(engine) as opened:
        plan = soak_plan(opened.spawn(Maker, count=WORKERS), items, inspector)
        for sample in run_samples(plan, inspector, items, seed):
            samples.append(sample)
            if not quiet and len(samples) % (SAMPLES // LINES) == 0:
                print(progress_line(sample), flush=True)
    del plan, opened
    gc.collect()  # what is in a cycle is late, not lost
    if inspector.items != items:
        raise AssertionError(f"{inspector.items} items came instead of {items}")
    seconds = time.perf_counter() - start
    left_behind = sorted(segments_held() - segments)
    return Report(items, inspector.held, seconds, growth(samples), left_behind, samples)


def show(report: Report) -> None:
    print(f"\n{report.items:,} items intact and in order, {report.held:,} of them held in batches")
    for who, percent in report.growth.items():
        print(f"{who:16} memory since the warm-up: {percent:+.1f} %")
    print(f"shared memory left behind: {', '.join(report.left_behind) or 'none'}")
    print("FAILED: " + "; ".join(report.failures) if report.failures else "passed")


def main() -> None:
    parser = support.arguments(__doc__, ["processes"])
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--seed", type=int, default=0, help="of the consumer's pauses")
    options = parser.parse_args()
    reports: dict[str, Report] = {}
    for name in support.available(options.engines):
        print(f"engine {name}: {options.items:,} items from {WORKERS} workers")
        reports[name] = soak(options.items, engine=name, seed=options.seed)
        show(reports[name])
    results = {name: asdict(report) for name, report in reports.items()}
    support.write_json(options.json, "soak", results)
    sys.exit(1 if any(report.failures for report in reports.values()) else 0)


if __name__ == "__main__":
    main()
