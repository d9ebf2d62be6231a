"""One array to every actor and a fresh one back from each: our engines, Ray itself, and the physical limit.

A round stores an array (`engine.put`, `ray.put`), passes it to 2 to 16 actors, waits for what each of them
returns, a new array of the same size, reads one element of each, and lets go of everything. Competitors:

- the engines `threads`, `processes` and `ray` (`threads` copies nothing: the price of the work itself);
- `Ray itself`: actors and `ray.get` without anything of ours, in a cluster with the same settings;
- `bare shared memory`: plain processes, preallocated blocks, one byte to signal (`bare_shared_memory.py`).

Only one competitor's processes live at a time, started and ended outside the timed part. Competitors take
turns for every number of actors; figures are medians over all rounds of all `--passes`. Compare within one
run only.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import support
from bare_shared_memory import Array, BareSharedMemory, is_possible

ENGINES = ("threads", "processes", "ray")
BARE_RAY = "Ray itself"
BARE_MEMORY = "bare shared memory"
SIZES = {"1KB": 2**10, "1MB": 2**20, "10MB": 10 * 2**20}
ACTORS = (2, 4, 8, 16)
WARM_UP = 4
ROUNDS = 30
ROUNDS_LARGE = 8
PLOT_ACTORS = 16
PLOT_SIZE = 10 << 20
Exchange = Callable[[Array], Sequence[Array]]
Competitor = Callable[[int], AbstractContextManager[Exchange]]


@dataclass(frozen=True)
class Figure:
    """What one competitor took for a round, in one case."""

    competitor: str
    actors: int
    size: int
    milliseconds: float
    rounds: int


class Echo:
    """An actor that returns a fresh array of the size it was given."""

    def echo(self, array: Array) -> Array:
        return array + np.float32(1)


# The competitors -------------------------------------------------------------------------------


def on_engine(name: str) -> Competitor:
    @contextmanager
    def opened(count: int) -> Iterator[Exchange]:
        with support.opened(name) as engine:
            actors = engine.spawn(Echo, count=count)

            def exchange(array: Array) -> Sequence[Array]:
                reference = engine.put(array)
                return engine.results([actor.call("echo", reference) for actor in actors])

            yield exchange

    return opened


@contextmanager
def on_ray_itself(count: int) -> Iterator[Exchange]:
    with support.ray_cluster() as ray:
        actors = [ray.remote(num_cpus=0.01)(Echo).remote() for _ in range(count)]

        def exchange(array: Array) -> Sequence[Array]:
            reference = ray.put(array)
            return ray.get([actor.echo.remote(reference) for actor in actors])

        yield exchange


@contextmanager
def on_bare_memory(count: int) -> Iterator[Exchange]:
    with BareSharedMemory(count, max(SIZES.values())) as processes:
        yield processes.exchange


def competitors(engines: Sequence[str], bare: Sequence[str]) -> dict[str, Competitor]:
    chosen = {name: on_engine(name) for name in support.available(engines)}
    if "ray" in bare and support.has_ray():
        chosen[BARE_RAY] = on_ray_itself
    if "memory" in bare and is_possible():
        chosen[BARE_MEMORY] = on_bare_memory
    return chosen


# Measuring -------------------------------------------------------------------------------------


def one_round(exchange: Exchange, array: Array) -> None:
    """The timed part, which ends when everything received is let go of again."""
    expected = float(array[0]) + 1
    if any(float(answer[0]) != expected for answer in exchange(array)):
        raise AssertionError("an actor returned something else than the array plus one")


def round_times(exchange: Exchange, size: int) -> list[float]:
    """Seconds of each round, with another array every time."""
    rounds = ROUNDS_LARGE if size >= SIZES["10MB"] else ROUNDS
    array = np.zeros(size // 4, dtype=np.float32)
    times: list[float] = []
    for number in range(WARM_UP + rounds):
        array[:] = number
        start = time.perf_counter()
        one_round(exchange, array)
        times.append(time.perf_counter() - start)
    return times[WARM_UP:]


def measure(
    chosen: dict[str, Competitor], counts: Sequence[int], sizes: Sequence[int], passes: int
) -> list[Figure]:
    """All figures, in milliseconds; a line as each set of processes is done."""
    times: dict[tuple[int, int, str], list[float]] = {}
    for turn in range(passes):
        for count in counts:
            for name, competitor in chosen.items():
                print(f"pass {turn + 1}: {count} actors, {name} ...", flush=True)
                with competitor(count) as exchange:
                    for size in sizes:
                        times.setdefault((count, size, name), []).extend(round_times(exchange, size))
    return [
        Figure(name, count, size, statistics.median(row) * 1e3, len(row))
        for (count, size, name), row in times.items()
    ]


# Showing ---------------------------------------------------------------------------------------


def size_label(size: int) -> str:
    return f"{size // 2**20} MB" if size >= 2**20 else f"{size // 2**10} KB"


def ratios(row: dict[str, float]) -> dict[str, str]:
    """How the competitors of one case compare; a dash where one of the two is missing."""
    pairs = [(BARE_RAY, "processes"), ("processes", BARE_MEMORY), ("ray", BARE_RAY)]
    return {f"{upper} / {lower}": _ratio(row.get(upper), row.get(lower)) for upper, lower in pairs}


def _ratio(upper: float | None, lower: float | None) -> str:
    return "-" if upper is None or lower is None else f"{upper / lower:.2f}"


def show(figures: Sequence[Figure], chosen: Sequence[str]) -> None:
    cases = sorted({(figure.size, figure.actors) for figure in figures})
    rows: list[list[str]] = []
    for size, actors in cases:
        row = {f.competitor: f.milliseconds for f in figures if (f.size, f.actors) == (size, actors)}
        cells = [f"{row[name]:.3f}" for name in chosen]
        rows.append([f"{size_label(size)}, {actors} actors", *cells, *ratios(row).values()])
    print()
    support.print_table(["milliseconds a round", *chosen, *ratios({})], rows)


STYLES = {
    BARE_RAY: {"color": "#d55e00", "marker": "s"},
    "ray": {"color": "#e69f00", "marker": "D"},
    "processes": {"color": "#0072b2", "marker": "o", "linewidth": 2.5, "zorder": 3},
    "threads": {"color": "#009e73", "marker": "^"},
    BARE_MEMORY: {"color": "#555555", "marker": "x", "linestyle": "--"},
}
"""Colours that stay apart for colour-blind readers; the order is that of the legend."""


def series_name(competitor: str) -> str:
    return competitor if competitor in (BARE_RAY, BARE_MEMORY) else f"engine {competitor}"


def plot(path: Path, figures: Sequence[Figure], by: str, title: str, label: str) -> None:
    """One line a competitor, both axes logarithmic; `by` is the field of the figures along the x axis."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    ticks = sorted({getattr(figure, by) for figure in figures})
    canvas, axes = pyplot.subplots(figsize=(8.6, 4.0), layout="constrained")
    for competitor, style in STYLES.items():
        points = sorted((getattr(f, by), f.milliseconds) for f in figures if f.competitor == competitor)
        if points:
            axes.plot(*zip(*points, strict=True), label=series_name(competitor), **style)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="milliseconds a round (median)", title=title)
    axes.set_xticks(ticks, [size_label(tick) if by == "size" else str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    canvas.savefig(path, metadata={"Date": None})
    pyplot.close(canvas)
    print(f"drawn: {path}")


def draw(folder: Path, figures: Sequence[Figure]) -> None:
    """Both plots: against the size, and against the number of actors."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        print("no plots: they need matplotlib; install it with `pip install matplotlib`.")
        return
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rollstream", "font.size": 11})
    folder.mkdir(parents=True, exist_ok=True)
    actors = min({f.actors for f in figures}, key=lambda count: abs(count - PLOT_ACTORS))
    size = min({f.size for f in figures}, key=lambda other: abs(other - PLOT_SIZE))
    at_actors = [figure for figure in figures if figure.actors == actors]
    at_size = [figure for figure in figures if figure.size == size]
    title = f"One array to {actors} actors, one back from each"
    plot(folder / "broadcast_gather_size.svg", at_actors, "size", title, "size of the array")
    title = f"{size_label(size)} to every actor, {size_label(size)} back from each"
    plot(folder / "broadcast_gather_actors.svg", at_size, "actors", title, "number of actors")


def main() -> None:
    parser = support.arguments(__doc__, ENGINES)
    parser.add_argument(
        "--bare", type=support.names, default=["ray", "memory"], help="what to compare with: ray, memory"
    )
    parser.add_argument("--actors", type=support.numbers, default=list(ACTORS), help="comma separated")
    parser.add_argument("--sizes", type=support.names, default=list(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--passes", type=int, default=1, help="how often to go through everything")
    parser.add_argument("--plot-dir", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    options = parser.parse_args()
    sizes = [SIZES[size] for size in options.sizes]
    chosen = competitors(options.engines, options.bare)
    figures = measure(chosen, options.actors, sizes, options.passes)
    show(figures, list(chosen))
    draw(options.plot_dir, figures)
    support.write_json(options.json, "broadcast_gather", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
