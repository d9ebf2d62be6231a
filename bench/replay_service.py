"""Replay as a service, across processes: how much it takes in and gives out, and what a checkpoint costs.

- `writers`: 1, 2 and 4 actors send chunks of 84 x 84 frames, 50 at a time, to one shard that keeps the newest
  20,000; and whoever samples gets batches of 256 of them, stacks of 4 with the next. Each figure is beside
  how fast one core copies memory here: a frame is copied into shared memory, and from there into the table.
- `checkpoint`: a shard with a table of 2 GB is sampled without a pause while it has to write a checkpoint.
  The longest pause between two samples is to be at most 100 ms; it is shown beside the longest without one.

    python bench/replay_service.py
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import support

import rollstream as rs
from rollstream.background_save import read_checksum
from rollstream.engine import Actor
from rollstream.replay import ArraySpec
from rollstream.replay.buffer import Chunk, transition_buffer
from rollstream.replay.service import ReplayShard, ReplayShards

SHAPE, STEPS, STACK, BATCH = (84, 84), 50, 4, 256
SIGNATURE = {
    "observation": ArraySpec(SHAPE, np.dtype(np.uint8)),
    "action": ArraySpec((), np.dtype(np.int32)),
    "reward": ArraySpec((), np.dtype(np.float32)),
    "terminated": ArraySpec((), np.dtype(bool)),
}
PAUSE = 100.0
"""Milliseconds that sampling may stop for a checkpoint."""


def shard(engine: rs.Engine, size: int) -> ReplayShards:
    make = partial(
        transition_buffer, SIGNATURE, max_size=size, min_size=1, batch_size=BATCH, frame_stack=STACK
    )
    return ReplayShards(engine, make)


def chunk(number: int) -> Chunk:
    """Steps of an episode that does not end."""
    frames = np.random.default_rng(number).integers(0, 256, (STEPS + 1, 1, *SHAPE), np.uint8)
    ends = np.zeros((2, STEPS, 1), bool)
    columns: dict[str, Any] = {
        "observation": frames[:-1],
        "action": np.zeros((STEPS, 1), np.int32),
        "reward": np.ones((STEPS, 1), np.float32),
        "terminated": ends[0],
        "truncated": ends[1],
    }
    return Chunk(columns, frames[-1], (), np.array([number]))


class Sender:
    """Writes to a shard, two chunks ahead of its answers."""

    def __init__(self, target: Actor[ReplayShard], *, context: rs.ActorContext):
        self._target = target
        self._chunk = chunk(context.index)

    def send(self, count: int) -> int:
        """The bytes of so many chunks, once all are stored."""
        waiting = []
        for _ in range(count):
            waiting.append(self._target.call("insert", self._chunk))
            if len(waiting) > 2:
                waiting.pop(0).result()
        for reply in waiting:
            reply.result()
        return count * self._chunk.columns["observation"].nbytes


@dataclass(frozen=True)
class Figure:
    """A measurement, and what it is measured against."""

    what: str
    value: float
    against: float


def copying() -> float:
    """GB a second that one core copies, in pieces as large as a chunk."""
    one = np.ones(STEPS * int(np.prod(SHAPE)), np.uint8)
    many = np.empty((400, one.size), np.uint8)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        for row in many:
            row[:] = one
        best = max(best, many.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def traffic(seconds: float) -> list[Figure]:
    figures, limit = [], copying()
    for count in (1, 2, 4):
        with rs.engine("processes") as engine:
            shards = shard(engine, 20_000)
            senders = engine.spawn(Sender, (shards.actors[0],), count=count)
            engine.results([sender.call("send", 20) for sender in senders])
            stored, start = 0, time.perf_counter()
            while (passed := time.perf_counter() - start) < seconds:
                stored += sum(engine.results([sender.call("send", 40) for sender in senders]))
            figures.append(Figure(f"{count} writers, GB/s stored", stored / passed / 1e9, limit))
            if count == 1:
                given, start = 0, time.perf_counter()
                while (passed := time.perf_counter() - start) < seconds:
                    columns = shards.sample().columns
                    given += columns["observation"].nbytes + columns["next_observation"].nbytes
                figures.append(Figure("1 reader, GB/s sampled", given / passed / 1e9, limit))
    return figures


def pauses(shards: ReplayShards, seconds: float) -> np.ndarray[Any, Any]:
    """Milliseconds between samples that are asked for one after the other."""
    times = [time.perf_counter()]
    while times[-1] - times[0] < seconds:
        shards.sample()
        times.append(time.perf_counter())
    return np.diff(times) * 1e3


def checkpoint(gigabytes: float) -> list[Figure]:
    """The longest pause while a table is written, against the longest while it is not."""
    items = int(gigabytes * 1e9 / np.prod(SHAPE))
    with tempfile.TemporaryDirectory(dir=".") as folder, rs.engine("processes") as engine:
        shards = shard(engine, items)
        [sender] = engine.spawn(Sender, (shards.actors[0],))
        sender.call("send", items // STEPS + 10).result()
        usual = pauses(shards, 5).max()
        path = Path(folder).resolve() / "replay.safetensors"
        start = time.perf_counter()
        asked = shards.actors[0].call("save_to", path)
        longest = 0.0
        while read_checksum(path) is None:
            longest = max(longest, pauses(shards, 0.1).max())
        took = time.perf_counter() - start
        asked.result()
        wrong = shards.actors[0].call("wait_saved").result()
        assert wrong is None, wrong
        size = path.stat().st_size / 1e9
    print(f"{size:.2f} GB were written in {took:.1f} s, {size / took:.2f} GB/s")
    return [Figure("checkpoint, longest pause, ms", longest, usual)]


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the table that is written")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each measurement takes")
    options = parser.parse_args()
    figures = [*traffic(options.seconds), *checkpoint(options.gigabytes)]
    rows = []
    for figure in figures:
        note = f"{figure.value / figure.against:.2f}"
        if figure.what.startswith("checkpoint"):
            note = f"at most {PAUSE:g} {'met' if figure.value <= PAUSE else 'MISSED'}"
        rows.append([figure.what, f"{figure.value:.2f}", f"{figure.against:.2f}", note])
    support.print_table(["", "", "one copy, or no checkpoint", "ratio, or target"], rows)
    support.write_json(options.json, "replay_service", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
