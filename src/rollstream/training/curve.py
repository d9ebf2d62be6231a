"""The learning curve of a run as a picture, drawn with matplotlib (the `plots` extra)."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Points: TypeAlias = list[tuple[float, float]]

_MAX_POINTS = 10_000
"""Points of a line; at twice as many, every other one is dropped."""
_FEW = 20
"""Points of a learning curve up to which each is marked: one alone would not be seen as a line."""
_STALENESS: dict[str, dict[str, Any]] = {
    "p50": {"linewidth": 1.8},
    "p90": {"linewidth": 1.0},
    "max": {"linewidth": 1.0, "linestyle": ":"},
}
"""How the lines of the staleness look, by what they show."""
BLUE, PINK, INK, GREY, PALE = "#3f6fb5", "#e0287d", "#1f2937", "#667085", "#e4e7ec"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_curve(metrics: Iterable[Mapping[str, Any]], path: Path, title: str = "") -> Path | None:
    """Plot episode returns and evaluations over environment steps.

    Of an asynchronous algorithm, also the staleness: how many versions old the weights were.

    Args:
        metrics: rows of `metrics.jsonl`, in order.
        path: the picture, such as `curve.png`.
        title: of the picture.

    Returns:
        The path, or `None` if no episode has ended, and so there is nothing to plot.
    """
    training: Points = []
    evaluation: Points = []
    staleness: dict[str, Points] = {name: [] for name in _STALENESS}
    for row in metrics:
        _add(training, row, "rollout/ep_rew_mean")
        _add(evaluation, row, "eval/mean_reward")
        for name, points in staleness.items():
            _add(points, row, f"weights/staleness_{name}")
    if not training and not evaluation:
        return None
    partial = path.with_name(f".{path.name}")
    _plot(training, evaluation, staleness, title, partial, path.suffix.removeprefix("."))
    os.replace(partial, path)  # readers never see half a picture
    return path


def _add(points: Points, row: Mapping[str, Any], name: str) -> None:
    if name in row and "time/total_timesteps" in row and math.isfinite(row[name]):
        if len(points) >= 2 * _MAX_POINTS:
            del points[::2]
        points.append((row["time/total_timesteps"], row[name]))


def _plot(
    training: Points,
    evaluation: Points,
    staleness: Mapping[str, Points],
    title: str,
    path: Path,
    format: str,  # noqa: A002
) -> None:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    is_stale = any(staleness.values())
    figure = Figure(figsize=(7.2, 5.6 if is_stale else 4.2), dpi=160, layout="constrained")
    axes, *below = figure.subplots(
        1 + is_stale, sharex=True, height_ratios=[3, 1][: 1 + is_stale], squeeze=False
    )[:, 0]
    if training:
        marker = "o" if len(training) < _FEW else None
        axes.plot(*zip(*training, strict=True), color=BLUE, linewidth=1.8, marker=marker, label="training")
    if evaluation:
        points = zip(*evaluation, strict=True)
        axes.plot(*points, "o-", color=PINK, linewidth=1, markersize=4, label="evaluation")
        axes.legend(frameon=False, labelcolor=INK)
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    _dress(axes, "mean episode return")
    for lower in below:
        for name, points in staleness.items():
            lower.plot(*zip(*points, strict=True), color=PINK, label=name, **_STALENESS[name])
        lower.set_ylim(bottom=0)
        lower.legend(frameon=False, labelcolor=INK, ncols=3, fontsize=8, loc="upper left")
        _dress(lower, "staleness")
    (below or [axes])[-1].set_xlabel("environment steps", color=GREY)
    figure.savefig(path, format=format)


def _dress(axes: Any, label: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_ylabel(label, color=GREY)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color=PALE)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
