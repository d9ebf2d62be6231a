"""What passes through one driver: items per second at most, and bytes per item.

The ceiling: stub workers answer at once, so the driver is what limits `gather_async`. `inline` and `threads`
have 256 of them. On `processes` there are 32, as 256 interpreters would only compete for the cores, with 8
items each in flight: also 256 requests at a time. The rate is the best of several rounds; on a busy machine,
the driver's CPU time per item says more.

The bytes: Ape-X and IMPALA on frames of 84 x 84 in stacks of 4. Rollouts, batches and weights go from actor
to actor, so an item (a rollout, or a batch from replay) should cost the driver the same few bytes however
long rollouts are.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
import support

from rollstream import flow
from rollstream.algos import ALGORITHMS
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec

ITEMS = 5_000
ROUNDS = 10
CEILING = 20_000
"""Items per second to reach."""
BYTES = 2_000
"""Bytes per item to stay below."""
STUBS = (
    ("inline", 256, 1),
    ("threads", 256, 1),
    ("threads", 256, 4),
    ("processes", 32, 8),
    ("processes", 32, 1),
)
"""Engine, number of stub workers, and `num_async`."""
SMALL = {"num_envs": 2, "report_every": 1}
APEX = {"batch_size": 32, "samples_per_insert": 2.0, "learning_starts": 40, "buffer_size": 4_000}
CONFIGS: dict[str, dict[str, Any]] = {"apex": SMALL | APEX, "impala": SMALL}
LENGTHS = (10, 50)


class Stub:
    """A worker that answers at once."""

    def sample(self) -> int:
        return 1


@dataclass(frozen=True)
class Ceiling:
    """How fast items came from stub workers."""

    engine: str
    workers: int
    num_async: int
    items_per_second: float
    cpu_per_item: float
    """Seconds of the driver's process, all of its threads."""
    profile: list[tuple[str, float]]
    """The functions that took most of the driver's thread in another run, with their fraction of it."""


def ceiling(engine: str, workers: int, num_async: int, items: int) -> Ceiling:
    with support.opened(engine) as opened:
        plan = flow.from_actors(opened.spawn(Stub, count=workers), "sample").gather_async(num_async)
        _consume(plan, workers * num_async)
        rounds = [_timed(plan, items) for _ in range(ROUNDS)]
        profile = _profiled(plan, items)
        plan.close()
    wall, cpu = (min(times) / items for times in zip(*rounds, strict=True))
    return Ceiling(engine, workers, num_async, 1 / wall, cpu, profile)


def _timed(plan: flow.Iter[Any], items: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process."""
    start, cpu = time.perf_counter(), time.process_time()
    _consume(plan, items)
    return time.perf_counter() - start, time.process_time() - cpu


def _consume(plan: flow.Iter[Any], items: int) -> None:
    for _ in islice(plan, items):
        pass


def _profiled(plan: flow.Iter[Any], items: int, top: int = 3) -> list[tuple[str, float]]:
    profiler = cProfile.Profile()
    profiler.runcall(_consume, plan, items)
    stats: Any = pstats.Stats(profiler)
    own = sorted(((row[2], key[2].strip("<>")) for key, row in stats.stats.items()), reverse=True)
    return [(name, seconds / stats.total_tt) for seconds, name in own[:top]]


class Frames(gymnasium.Env[Any, Any]):
    """Frames of 84 x 84, as Atari's; an episode has 100 steps."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._steps = 0
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
        self._steps += 1
        return self._frame(), 1.0, self._steps == 100, False, {}

    def _frame(self) -> Any:
        return np.full((84, 84), self._steps, np.uint8)


@dataclass(frozen=True)
class Traffic:
    """What passed through the driver while an algorithm trained."""

    algorithm: str
    engine: str
    rollout_length: int
    items: int
    bytes_per_item: float


def traffic(name: str, engine: str, length: int, batches: int) -> Traffic:
    algorithm = ALGORITHMS[name]
    config = algorithm.config(**CONFIGS[name], rollout_length=length)
    task = Task(EnvSpec(Frames, frame_stack=4), 10**6, 1, workers=2)
    with support.opened(engine) as opened:
        workers = algorithm.workers(opened, config, task)
        plan = algorithm.plan(workers, config)
        _train(plan, workers, 2)
        items, moved = _gathered(plan), opened.statistics().bytes_moved
        _train(plan, workers, batches)
        items, moved = _gathered(plan) - items, opened.statistics().bytes_moved - moved
        plan.close()
    return Traffic(name, engine, length, items, moved / items)


def _train(plan: Any, workers: Any, batches: int) -> None:
    enough = workers.learner.version + batches
    while workers.learner.version < enough:
        next(plan)


def _gathered(plan: Any) -> int:
    return sum(node.items for node in plan.statistics().nodes if node.kind == "gather_async")


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def show_ceilings(rows: list[Ceiling]) -> None:
    table = [
        (
            f"{row.engine}, {row.workers} workers, num_async={row.num_async}",
            f"{row.items_per_second:,.0f}",
            f"{row.cpu_per_item * 1e6:.1f} us",
            f"{CEILING:,}",
            verdict(row.items_per_second >= CEILING),
            ", ".join(f"{name} {share:.0%}" for name, share in row.profile),
        )
        for row in rows
    ]
    head = ("stub workers", "items/s", "driver's CPU per item", "target", "", "most of the driver's thread")
    support.print_table(head, table)


def show_traffic(rows: list[Traffic]) -> None:
    table = [
        (
            f"{row.algorithm}, {row.engine}, rollouts of {row.rollout_length} steps",
            f"{row.items:,}",
            f"{row.bytes_per_item:,.0f}",
            f"{BYTES:,}",
            verdict(row.bytes_per_item < BYTES),
        )
        for row in rows
    ]
    support.print_table(("through the driver", "items", "bytes/item", "target", ""), table)


def main() -> None:
    parser = support.arguments(__doc__, support.ENGINES)
    parser.add_argument("--items", type=int, default=ITEMS, help="items per round")
    parser.add_argument("--batches", type=int, default=12, help="batches trained on per count of bytes")
    options = parser.parse_args()
    engines = support.available(options.engines)
    ceilings = [ceiling(*stubs, options.items) for stubs in STUBS if stubs[0] in engines]
    show_ceilings(ceilings)
    remote = [name for name in ("processes", "ray") if name in engines]
    cases = [(name, engine, length) for engine in remote for name in CONFIGS for length in LENGTHS]
    counts = [traffic(*case, options.batches) for case in cases]
    show_traffic(counts)
    results = {"ceilings": [asdict(row) for row in ceilings], "traffic": [asdict(row) for row in counts]}
    support.write_json(options.json, "driver", results)


if __name__ == "__main__":
    main()
