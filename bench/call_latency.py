"""How long an empty call takes there and back, on every engine and on Ray itself.

One actor each; the driver calls a method that does nothing and waits for the reply before it calls again:
`actor.call("nothing").result()` on an engine, `ray.get(actor.nothing.remote())` on Ray. Calls come in blocks,
one block of each competitor by turns, so that what disturbs the machine disturbs all alike. Engines on this
machine take turns among themselves; the engine `ray` and Ray itself take turns in one cluster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import support

import rollstream as rs

BLOCKS = 20
LOCAL_CALLS = 2_000
RAY_CALLS = 1_000
WARM_UP = 200
BARE_RAY = "Ray itself"
Call = Callable[[], object]


class Idle:
    """An actor that does nothing."""

    def nothing(self) -> None:
        return None


def engine_call(engine: rs.Engine) -> Call:
    [actor] = engine.spawn(Idle)
    return lambda: actor.call("nothing").result()


def bare_ray_call(ray: Any) -> Call:
    actor = ray.remote(num_cpus=0.01)(Idle).remote()
    return lambda: ray.get(actor.nothing.remote())


@contextmanager
def engine_calls(engines: Sequence[str]) -> Iterator[dict[str, Call]]:
    with ExitStack() as stack:
        yield {name: engine_call(stack.enter_context(rs.engine(name))) for name in engines}


@contextmanager
def ray_calls(engines: Sequence[str]) -> Iterator[dict[str, Call]]:
    """The engine and Ray itself in one cluster."""
    with support.ray_cluster() as ray, engine_calls(engines) as calls:
        yield {**calls, BARE_RAY: bare_ray_call(ray)}


def timed(call: Call, count: int) -> list[float]:
    """Seconds of each of `count` calls."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def by_turns(calls: dict[str, Call], count: int) -> dict[str, list[float]]:
    """Seconds of `count` calls of each competitor, after a warm-up, a block of each by turns."""
    for call in calls.values():
        timed(call, WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(BLOCKS):
        size = count * (block + 1) // BLOCKS - count * block // BLOCKS
        for name, call in calls.items():
            times[name] += timed(call, size)
    return times


def percentile(times: Sequence[float], percent: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Microseconds."""
    return {
        name: {"median": statistics.median(row) * 1e6, "p99": percentile(row, 99) * 1e6, "calls": len(row)}
        for name, row in times.items()
    }


def measure(engines: Sequence[str], count: int | None, with_ray: bool) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {}
    if local := [name for name in engines if name != "ray"]:
        with engine_calls(local) as calls:
            times |= by_turns(calls, count or LOCAL_CALLS)
    if with_ray:
        with ray_calls([name for name in engines if name == "ray"]) as calls:
            times |= by_turns(calls, count or RAY_CALLS)
    return summary(times)


def show(results: dict[str, dict[str, float]]) -> None:
    rows = [
        [name, f"{row['median']:.1f} us", f"{row['p99']:.1f} us", f"{row['calls']:,.0f}"]
        for name, row in results.items()
    ]
    support.print_table(["empty call, there and back", "median", "p99", "calls"], rows)
    if "ray" in results and BARE_RAY in results:
        ratio = results["ray"]["median"] / results[BARE_RAY]["median"]
        print(f"\nengine ray / {BARE_RAY}: {ratio:.2f} (medians)")


def main() -> None:
    parser = support.arguments(__doc__, support.ENGINES)
    parser.add_argument("--calls", type=int, help="calls of each (default: 2,000, with Ray 1,000)")
    parser.add_argument("--without-ray", action="store_true", help="neither the engine nor Ray itself")
    options = parser.parse_args()
    engines = support.available(options.engines)
    results = measure(engines, options.calls, support.has_ray() and not options.without_ray)
    show(results)
    support.write_json(options.json, "call_latency", results)


if __name__ == "__main__":
    main()
