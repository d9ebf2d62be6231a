"""IMPALA with 1 to 14 process workers of 8 environments: sampling and training, local and central inference.

- `dummy policy`: workers sample with a policy of one weight; the driver gets references to rollouts;
- `local inference`, `central inference`: the same with IMPALA's policy, on each worker's core, or on an
  inference actor, which has the accelerator if there is one;
- `training`: the plan of IMPALA, with its learner on an actor.

ALE gets one thread per worker. `linear` is the rate per worker divided by that of the fewest workers. There
have to be as many cores as workers, and Pong needs the extra `atari`. Each figure is from a process of its
own, which warms up first.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import support
from rivals import Competitor

SERIES: dict[str, tuple[str, ...]] = {
    "dummy policy": ("--what", "sample"),
    "local inference": ("--what", "act", "--acting", "host"),
    "central inference": ("--what", "act", "--acting", "central"),
    "training, local inference": ("--what", "train", "--acting", "host"),
    "training, central inference": ("--what", "train", "--acting", "central"),
}
LINEAR, UP_TO = 0.9, 12
"""What share of linear sampling with the dummy policy and with local inference is to reach, up to so many
workers."""
STYLES: dict[str, dict[str, Any]] = {
    "dummy policy": {"color": "#667085", "marker": "o"},
    "local inference": {"color": "#3f6fb5", "marker": "o"},
    "central inference": {"color": "#c2527f", "marker": "o"},
    "training, local inference": {"color": "#3f6fb5", "marker": "s", "linestyle": "--"},
    "training, central inference": {"color": "#c2527f", "marker": "s", "linestyle": "--"},
}


@dataclass(frozen=True)
class Figure:
    """The rate of one series with a number of workers."""

    environment: str
    series: str
    workers: int
    steps_per_second: float


def show(figures: Sequence[Figure]) -> None:
    first = {figure.series: figure for figure in reversed(figures)}
    rows: list[list[str]] = []
    for figure in figures:
        base = first[figure.series]
        linear = figure.steps_per_second / figure.workers / (base.steps_per_second / base.workers)
        verdict = "-"
        if figure.series in ("dummy policy", "local inference") and base.workers < figure.workers <= UP_TO:
            verdict = f"{LINEAR:.0%} {'met' if linear >= LINEAR else 'MISSED'}"
        name = f"{figure.series}, {figure.workers} workers"
        rows.append([name, f"{figure.steps_per_second:,.0f}", f"{linear:.0%}", verdict])
    print()
    support.print_table([figures[0].environment, "steps a second", "linear", "target"], rows)


def draw(path: Path, figures: Sequence[Figure]) -> None:
    """Rates against the number of workers."""
    importlib.import_module("matplotlib").use("svg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.rcParams.update({"svg.hashsalt": "rollstream", "font.size": 11})
    canvas, axes = pyplot.subplots(figsize=(8.6, 4.0), layout="constrained")
    for series, style in STYLES.items():
        points = [(own.workers, own.steps_per_second) for own in figures if own.series == series]
        if points:
            axes.plot(*zip(*points, strict=True), label=series, **style)
    axes.set(title=figures[0].environment, xlabel="workers of 8 environments", ylabel="steps a second")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({own.workers for own in figures}))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    canvas.savefig(path, metadata={"Date": None})
    print(f"drawn: {path}")


def main() -> None:
    parser = support.arguments(__doc__)
    parser.add_argument("--environment", default="ALE/Pong-v5", help="ALE/Pong-v5 or CartPole-v1")
    parser.add_argument(
        "--workers", type=support.numbers, default=[1, 2, 4, 8, 12, 14], help="comma separated"
    )
    parser.add_argument("--series", type=lambda text: text.split(";"), default=list(SERIES), help="A;B;...")
    parser.add_argument("--seconds", type=float, default=10.0, help="per figure")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures to this SVG file")
    options = parser.parse_args()
    figures: list[Figure] = []
    for series in options.series:
        competitor = Competitor("impala_rollstream.py", (options.environment, *SERIES[series]))
        for workers in sorted(options.workers):
            more = ["--workers", str(workers), "--seconds", str(options.seconds)]
            more += ["--threads", "1"] * options.environment.startswith("ALE/")
            rate = competitor.steps_per_second(None, more)
            figures.append(Figure(options.environment, series, workers, rate))
            print(figures[-1], flush=True)
    show(figures)
    if options.plot is not None:
        draw(options.plot, figures)
    support.write_json(options.json, "impala_scaling", [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
