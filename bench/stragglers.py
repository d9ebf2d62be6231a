"""What one worker 10 times slower than the rest costs, and how old items are, wherever the learner is.

Throughput: PPO, whose `gather_sync` waits for every worker, beside A3C and IMPALA, whose `gather_async` waits
for none. 4 workers step CartPoles; steps sleep, so workers do not compete for cores. The same workers train
before and after the last one becomes slow. That may cost an asynchronous plan its share, a quarter, at most;
at its own speed, the slow worker still contributes a tenth of it. The flow's statistics should name it, and
nobody before.

Lag: stub workers, the last one slow, and a stub learner. Each version goes back to the worker whose item it
was trained on, as in A3C and IMPALA. Until it takes effect, that worker makes at most num_async - 1 more
items, and with a learner on an actor in_flight - 1 more than that (`DESIGN.md`, contract 4). Staleness, in
versions, has no bound: while the slow worker makes one item, the others make many.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import support

import rollstream as rs
from rollstream import flow
from rollstream.algos import ALGORITHMS
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec

WORKERS, SLOWER = 4, 10
LEFT, OWN_SPEED = (WORKERS - 1) / WORKERS, (WORKERS - 1 + 1 / SLOWER) / WORKERS
"""What is left of the throughput without the slow worker's share, and with what its speed permits."""
ROLLOUTS = {"num_envs": 2 * WORKERS, "rollout_length": 10}
CONFIGS: dict[str, dict[str, Any]] = {
    "ppo": ROLLOUTS | {"minibatch_size": 40},
    "a3c": ROLLOUTS | {"report_every": 1},
    "impala": ROLLOUTS | {"report_every": 1},
}
NUM_ASYNC, IN_FLIGHT = (1, 2, 4), 2


@dataclass(frozen=True)
class Throughput:
    """Steps per second of an algorithm before and after a worker becomes slow."""

    algorithm: str
    engine: str
    before: float
    after: float
    named_before: dict[str, float]
    named_after: dict[str, float]
    """Stragglers in the statistics: how many times as long as most they take for an item."""


def throughput(name: str, engine: str, seconds: float, step_time: float) -> Throughput:
    algorithm = ALGORITHMS[name]
    config, task = algorithm.config(**CONFIGS[name]), Task(EnvSpec("CartPole-v1"), 10**9, workers=WORKERS)
    rates, named = list[float](), list[dict[str, float]]()
    with support.opened(engine) as opened:
        workers = algorithm.workers(opened, config, task)
        for actors, longer in (workers.actors, step_time), (workers.actors[-1:], step_time * (SLOWER - 1)):
            for actor in actors:
                actor.apply(lengthen_steps, longer).result()
            with algorithm.build(workers, config) as plan:
                rates.append(steps_per_second(plan, seconds))
                named.append(dict(plan.statistics().stragglers))
    return Throughput(name, engine, rates[0], rates[1], named[0], named[1])


def lengthen_steps(worker: Any, seconds: float) -> None:
    """Runs where the worker is."""
    step = worker.vector.step

    def longer(actions: Any) -> Any:
        time.sleep(seconds)
        return step(actions)

    worker.vector.step = longer


def steps_per_second(plan: flow.Iter[Any], seconds: float) -> float:
    """After a warm-up in which every worker sends two rollouts."""
    first = next(plan)
    while sum(shard.items > 1 for shard in plan.statistics().nodes[0].shards) < WORKERS:
        first = next(plan)
    start, last = time.perf_counter(), first
    while (passed := time.perf_counter() - start) < seconds:
        last = next(plan)
    return (last["time/total_timesteps"] - first["time/total_timesteps"]) / passed


class Stub:
    """A worker whose items have the version it received last."""

    def __init__(self, item_time: float, *, context: Any) -> None:
        self._seconds = item_time * (SLOWER if context.index == WORKERS - 1 else 1)
        self._version = 0

    def sample(self, context: flow.Context) -> int:
        context.note(version=self._version)
        time.sleep(self._seconds)
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version


class StubLearner:
    """Counts versions, in the driver or on an actor."""

    version = 0

    def train(self, used: int) -> tuple[int, int]:
        """The version it becomes, and how many versions old the item was."""
        self.version += 1
        return self.version, self.version - 1 - used


class SendBack:
    """Sends each version to the worker whose item it was trained on."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[int, int]] = {}
        """After how many of its items each worker was sent a version."""

    def __call__(self, trained: tuple[int, int], context: flow.Context) -> tuple[bool, int, int]:
        """Whether the item is the slow worker's, its lag in items of that worker, and in versions."""
        (version, behind), [worker] = trained, context.actors
        sent = self._sent.setdefault(worker.name, {0: 0})
        lag = len(sent) - 1 - sent[int(context.least("version") or 0)]
        sent[version] = len(sent)
        worker.send("set_version", version)
        return worker.name.endswith(f"[{WORKERS - 1}]"), lag, behind


@dataclass(frozen=True)
class Lag:
    """How old items are when they are trained on."""

    learner: str
    num_async: int
    items: int
    lag: int
    """The most, in items of the same worker."""
    bound: int
    staleness: tuple[float, float]
    """Median number of versions: of the other workers' items, and of the slow one's."""
    most: int
    """Versions."""


def lag(opened: rs.Engine, num_async: int, in_flight: int, seconds: float, item_time: float) -> Lag:
    """With so many items at the learner's actor; with 0, the learner is in the driver."""
    workers = opened.spawn(Stub, (item_time,), count=WORKERS, name="worker")
    items = flow.from_actors(workers, "sample").gather_async(num_async)
    if in_flight:
        trained = items.via(opened.spawn(StubLearner, name="learner"), "train", in_flight=in_flight)
    else:
        trained = items.for_each(StubLearner().train)
    with trained.for_each(SendBack()) as plan:
        seen, end = [next(plan)], time.perf_counter() + seconds
        while time.perf_counter() < end:
            seen.append(next(plan))
    others, slow = (statistics.median(row[2] for row in seen if row[0] is which) for which in (False, True))
    _, own, versions = (max(column) for column in zip(*seen, strict=True))
    learner = f"{opened.name}, learner " + (
        f"on an actor, in_flight={in_flight}" if in_flight else "in driver"
    )
    bound = num_async - 1 + max(0, in_flight - 1)
    return Lag(learner, num_async, len(seen), own, bound, (others, slow), versions)


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def show_throughput(rows: list[Throughput]) -> None:
    def named(workers: dict[str, float]) -> str:
        return ", ".join(f"{name} {times:.1f} x" for name, times in workers.items()) or "nobody"

    table = [
        (
            f"{row.algorithm}, {row.engine}",
            f"{row.before:,.0f}",
            f"{row.after:,.0f}",
            f"{row.after / row.before:.1%}",
            f"{OWN_SPEED:.1%}",
            "-" if row.algorithm == "ppo" else f"{LEFT:.0%} {verdict(row.after / row.before >= LEFT)}",
            named(row.named_before),
            named(row.named_after),
        )
        for row in rows
    ]
    head = (
        "steps a second",
        "all alike",
        "one slow",
        "left",
        "by its speed",
        "target",
        "named",
        "named then",
    )
    support.print_table(head, table)


def show_lags(rows: list[Lag]) -> None:
    table = [
        (
            f"{row.learner}, num_async={row.num_async}",
            f"{row.items:,}",
            f"{row.lag}",
            f"{row.bound} {verdict(row.lag <= row.bound)}",
            *(f"{median:.0f}" for median in row.staleness),
            f"{row.most}",
        )
        for row in rows
    ]
    head = ("lag", "items", "own items", "at most", "versions behind", "slow worker's", "most")
    support.print_table(head, table)


def main() -> None:
    parser = support.arguments(__doc__, ["processes"])
    parser.add_argument("--seconds", type=float, default=5.0, help="of a measurement of steps per second")
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of a step, and of a stub's item")
    options = parser.parse_args()
    step_time = options.step_ms / 1e3
    rates, lags = list[Throughput](), list[Lag]()
    for engine in support.available(options.engines):
        for name in CONFIGS:
            print(f"{name}, {engine} ...", flush=True)
            rates.append(throughput(name, engine, options.seconds, step_time))
        with support.opened(engine) as opened:
            cases = [(num_async, held) for held in (0, IN_FLIGHT) for num_async in NUM_ASYNC]
            lags += [lag(opened, *case, options.seconds / 4, step_time) for case in cases]
    show_throughput(rates)
    print()
    show_lags(lags)
    results = {"throughput": [asdict(row) for row in rates], "lag": [asdict(row) for row in lags]}
    support.write_json(options.json, "stragglers", results)


if __name__ == "__main__":
    main()
