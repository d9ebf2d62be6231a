"""Replay as a service across processes: throughput, and the cost of a checkpoint.

- `writers`: 1, 2 and 4 actors send chunks of 50 frames of 84 x 84 bytes to one shard that keeps the newest
  20,000; a reader samples batches of 256 transitions with stacks of 4 frames. Each figure is shown beside the
  memory copy bandwidth of one core: a frame is copied into shared memory, and from there into the table.
- `checkpoint`: a shard with a table of 2 GB is sampled without pause while it writes a checkpoint. The
  longest pause between two samples should be at most 100 ms; it is shown beside the longest without one.

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
"""Maximum pause of sampling during a checkpoint, in milliseconds."""


def shard(engine: rs.Engine, size: int) -> ReplayShards:
    make = partial(
        transition_buffer, SIGNATURE, max_size=size, min_size=1, batch_size=BATCH, frame_stack=STACK
    )
    return ReplayShards(engine, make)


def chunk(number: int) -> Chunk:
    """A chunk of an episode that does not end."""
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
    """Sends chunks to a shard."""

    def __init__(self, target: Actor[ReplayShard], *, context: rs.ActorContext):
        self._target = target
        self._chunk = chunk(context.index)

    def send(self, count: int) -> int:
        """Send chunks; return the number of their steps."""
        for _ in range(count):
            self._target.send("insert", self._chunk)
        return count * STEPS


def num_inserted(shard: ReplayShard) -> int:
    return shard.buffer.table.rate_limiter.inserts


def insert(engine: rs.Engine, shards: ReplayShards, senders: list[Actor[Sender]], chunks: int) -> int:
    """Let every sender send that many chunks, and wait until they are stored; return the number of steps."""
    stored = shards.actors[0].apply(num_inserted).result()
    sent = sum(engine.results([sender.call("send", chunks) for sender in senders]))
    while shards.actors[0].apply(num_inserted).result() < stored + sent:
        pass
    return sent


@dataclass(frozen=True)
class Figure:
    """A measurement and its reference."""

    name: str
    value: float
    reference: float


def copy_bandwidth() -> float:
    """Memory copy bandwidth of one core in GB/s, in pieces of a chunk's size."""
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
    figures, limit = [], copy_bandwidth()
    for count in (1, 2, 4):
        with rs.engine("processes") as engine:
            shards = shard(engine, 20_000)
            senders = engine.spawn(Sender, (shards.actors[0],), count=count)
            insert(engine, shards, senders, 20)
            steps, start = 0, time.perf_counter()
            while (passed := time.perf_counter() - start) < seconds:
                steps += insert(engine, shards, senders, 40)
            stored = steps * np.prod(SHAPE)
            figures.append(Figure(f"{count} writers, GB/s stored", stored / passed / 1e9, limit))
            if count == 1:
                sampled, start = 0, time.perf_counter()
                while (passed := time.perf_counter() - start) < seconds:
                    columns = shards.sample().columns
                    sampled += columns["observation"].nbytes + columns["next_observation"].nbytes
                figures.append(Figure("1 reader, GB/s sampled", sampled / passed / 1e9, limit))
    return figures


def pauses(shards: ReplayShards, seconds: float) -> np.ndarray[Any, Any]:
    """Milliseconds between consecutive samples."""
    times = [time.perf_counter()]
    while times[-1] - times[0] < seconds:
        shards.sample()
        times.append(time.perf_counter())
    return np.diff(times) * 1e3


def checkpoint(gigabytes: float) -> list[Figure]:
    """The longest pause during a checkpoint, and without one."""
    items = int(gigabytes * 1e9 / np.prod(SHAPE))
    with tempfile.TemporaryDirectory(dir=".") as folder, rs.engine("processes") as engine:
        shards = shard(engine, items)
        senders = engine.spawn(Sender, (shards.actors[0],))
        for _ in range(items // (10 * STEPS) + 1):
            insert(engine, shards, senders, 10)
        usual = pauses(shards, 5).max()
        path = Path(folder).resolve() / "replay.safetensors"
        start = time.perf_counter()
        saving = shards.actors[0].call("save_to", path)
        longest = 0.0
        while read_checksum(path) is None:
            longest = max(longest, pauses(shards, 0.1).max())
        took = time.perf_counter() - start
        saving.result()
        error = shards.actors[0].call("wait_saved").result()
        assert error is None, error
        size = path.stat().st_size / 1e9
    print(f"wrote {size:.2f} GB in {took:.1f} s, {size / took:.2f} GB/s")
    return [Figure("checkpoint, longest pause, ms", longest, usual)]


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the table in the checkpoint")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement")
    options = parser.parse_args()
    figures = [*traffic(options.seconds), *checkpoint(options.gigabytes)]
    rows = []
    for figure in figures:
        note = f"{figure.value / figure.reference:.2f}"
        if figure.name.startswith("checkpoint"):
            note = f"at most {PAUSE:g} {'met' if figure.value <= PAUSE else 'MISSED'}"
        rows.append([figure.name, f"{figure.value:.2f}", f"{figure.reference:.2f}", note])
    support.print_table(["", "", "copy bandwidth, or no checkpoint", "ratio, or target"], rows)
    support.write_json(options.json, "replay_service", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
