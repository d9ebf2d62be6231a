"""Where the time of one round goes: one environment, a batch from replay, an update, engine `inline`.

Settings are those of `off_policy.py`. Each part is timed where it happens, in a training that learns, so
caches are as they are in a training. What a round takes outside of the environment and of the compiled update
is what the library costs; its parts are printed, and its total is compared with a target.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import support

import rollstream as rs
from rollstream.algos import algorithm as named
from rollstream.replay.buffer import ReplayBuffer
from rollstream.rl import reporting
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner
from rollstream.rl.replay_operators import StoreToBuffer
from rollstream.rl.worker import RolloutWorker
from rollstream.rl.worker_set import WorkerSet

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import off_policy_cases  # pyright: ignore[reportMissingImports]

TARGETS = {"sac": 250.0, "td3": 250.0, "dqn": 300.0}
"""Microseconds of a round outside of the environment and of the compiled update."""
OUTSIDE = ("environment", "compiled update")
PARTS = {
    "rollout": (RolloutWorker, "sample"),
    "take up weights": (RolloutWorker, "_use"),
    "store": (StoreToBuffer, "__call__"),
    "draw": (ReplayBuffer, "sample"),
    "train": (Learner, "train"),
    "send weights": (WorkerSet, "send_weights"),
    "report": (reporting._Reporter, "__call__"),
}


class Timer:
    """Seconds spent in each part, without those of the parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for the part."""

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[part] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        return wrapper


def rounds(name: str, passes: int) -> list[dict[str, float]]:
    """Microseconds per round and part, for each pass."""
    case, algorithm, timer = off_policy_cases.CASES[name], named(name), Timer()
    for part, (owner, method) in PARTS.items():
        setattr(owner, method, timer.timed(part, getattr(owner, method)))
    acting = RolloutWorker._acting
    setattr(RolloutWorker, "_acting", lambda worker: timer.timed("act", acting(worker)))  # noqa: B010
    config = algorithm.config(
        hidden=case.hidden,
        batch_size=case.batch_size,
        buffer_size=case.buffer_size,
        learning_starts=case.learning_starts,
        rollout_length=case.update_every,
        utd_ratio=case.updates / case.update_every,
        report_every=100,
    )
    found: list[dict[str, float]] = []
    with rs.engine("inline") as engine:
        workers = algorithm.workers(engine, config, Task(EnvSpec(case.environment), 10_000_000))
        for environment in workers.actors[0].connection.instance.vector._environments:
            environment.step = timer.timed("environment", environment.step)
        reports = iter(algorithm.build(workers, config))
        for _ in range(10):
            next(reports)
        compiled: Any = workers.local_learner._compiled
        compiled |= {key: timer.timed("compiled update", program) for key, program in compiled.items()}
        advance = timer.timed("flow and engine", lambda: next(reports))
        for _ in range(passes):
            timer.seconds.clear()
            for _ in range(5):
                advance()
            count = 500 / case.update_every
            found.append({part: 1e6 * spent / count for part, spent in timer.seconds.items()})
    return found


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--passes", type=int, default=11, help="of 500 steps each; figures are medians")
    parser.add_argument("algorithm", choices=list(TARGETS))
    options = parser.parse_args()
    found = rounds(options.algorithm, options.passes)
    medians = {part: statistics.median(own[part] for own in found) for part in found[0]}
    totals = [sum(spent for part, spent in own.items() if part not in OUTSIDE) for own in found]
    total, target = statistics.median(totals), TARGETS[options.algorithm]
    rows = [[part, f"{spent:.0f}"] for part, spent in sorted(medians.items(), key=lambda own: -own[1])]
    rows += [["outside of environment and compiled update", f"{total:.0f}"]]
    support.print_table([options.algorithm, "us a round"], rows)
    print(f"target {target:g}: {'met' if total <= target else 'MISSED'}")
    support.write_json(options.json, "round_trip", medians | {"total": total})


if __name__ == "__main__":
    main()
