"""The learning curve of a run as a picture: with matplotlib where it is installed, else a plain SVG."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

Points: TypeAlias = list[tuple[float, float]]

BLUE, PINK, INK, GREY, PALE = "#3f6fb5", "#e0287d", "#1f2937", "#667085", "#e4e7ec"
_WIDTH, _HEIGHT = 720.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 72.0, 24.0, 40.0, 52.0
_STEPS, _RETURN = "environment steps", "mean return of an episode"


def draw_curve(metrics: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> Path | None:
    """Draw returns and evaluations against steps.

    Args:
        metrics: the reports of a run, in order.
        path: the picture, `curve.png`; without matplotlib it is an SVG beside it, `curve.svg`.
        title: what was trained.

    Returns:
        The file that was written; `None` if no episode has ended, and so there is nothing to draw.
    """
    sampled = _points(metrics, "rollout/ep_rew_mean")
    evaluated = _points(metrics, "eval/mean_reward")
    if not sampled and not evaluated:
        return None
    path = Path(path)
    if importlib.util.find_spec("matplotlib") is None:
        path = path.with_suffix(".svg")
        partial = path.with_name(f".{path.name}")
        partial.write_text(curve_svg(sampled, evaluated, title), encoding="utf-8")
    else:
        partial = path.with_name(f".{path.name}")
        _plot(sampled, evaluated, title, partial, path.suffix.removeprefix("."))
    os.replace(partial, path)  # whoever looks sees a whole picture
    return path


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [
        (row["time/total_timesteps"], row[name])
        for row in metrics
        if name in row and "time/total_timesteps" in row and math.isfinite(row[name])
    ]


def _plot(sampled: Points, evaluated: Points, title: str, path: Path, kind: str) -> None:
    from matplotlib.figure import Figure  # without pyplot: no window, nothing global
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(_WIDTH / 100, _HEIGHT / 100), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    if sampled:
        axes.plot(*zip(*sampled, strict=True), color=BLUE, linewidth=1.8, label="training")
    if evaluated:
        axes.plot(
            *zip(*evaluated, strict=True), "o-", color=PINK, linewidth=1, markersize=4, label="evaluation"
        )
        axes.legend(frameon=False, labelcolor=INK)
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_xlabel(_STEPS, color=GREY)
    axes.set_ylabel(_RETURN, color=GREY)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color=PALE)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    figure.savefig(path, format=kind)


# By hand -----------------------------------------------------------------------------------------


def curve_svg(sampled: Points, evaluated: Points, title: str = "") -> str:
    """The same picture as text of an SVG file."""
    points = sampled + evaluated
    rows = ticks(min(y for _, y in points), max(y for _, y in points), 6)
    columns = ticks(min(0.0, *(x for x, _ in points)), max(x for x, _ in points), 7)
    low, high, last = rows[0], rows[-1], columns[-1]

    def across(x: float) -> float:
        return _LEFT + (x - columns[0]) / (last - columns[0]) * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def place(some: Points) -> str:
        return " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in some)

    body = [f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="white"/>']
    for y in rows:
        body.append(f'<path d="M{_LEFT:g} {down(y):.1f}H{_WIDTH - _RIGHT:g}" stroke="{PALE}"/>')
        body.append(_text(_LEFT - 8, down(y) + 4, f"{y:,g}", "end"))
    for x in columns:
        body.append(f'<path d="M{across(x):.1f} {_TOP:g}V{_HEIGHT - _BOTTOM:g}" stroke="{PALE}"/>')
        body.append(_text(across(x), _HEIGHT - _BOTTOM + 18, short(x), "middle"))
    for some, colour, width in ((sampled, BLUE, 2), (evaluated, PINK, 1)):
        line = f'points="{place(some)}" fill="none" stroke="{colour}" stroke-width="{width}"'
        body.append(f'<polyline {line} stroke-linejoin="round"/>')
    for x, y in evaluated:
        body.append(f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{PINK}"/>')
    body.append(_text(_LEFT, 24, title, "start", INK, 14))
    if evaluated:
        body.append(_text(_WIDTH - _RIGHT - 84, 24, "training", "end", BLUE))
        body.append(_text(_WIDTH - _RIGHT, 24, "evaluation", "end", PINK))
    middle = _TOP + (_HEIGHT - _TOP - _BOTTOM) / 2
    body.append(_text(_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2, _HEIGHT - 12, _STEPS, "middle"))
    turned = f'transform="rotate(-90 16 {middle:g})"'
    body.append(_text(16, middle, _RETURN, "middle").replace("<text", f"<text {turned}"))
    size = f'width="{_WIDTH:g}" height="{_HEIGHT:g}" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([start, *body, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, colour: str = GREY, size: int = 12) -> str:
    looks = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {looks}>{escape(text)}</text>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """About so many round numbers, from one below the low to one above the high.

    >>> ticks(9.2, 487.0, 6)
    [0.0, 100.0, 200.0, 300.0, 400.0, 500.0]
    """
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    pitch = next(power * step for step in (1, 2, 5, 10) if power * step * count >= span)
    first, last = math.floor(low / pitch), max(math.ceil(high / pitch), math.floor(low / pitch) + 1)
    return [round(index * pitch, 10) for index in range(first, last + 1)]


def short(steps: float) -> str:
    """Steps in thousands or millions.

    >>> short(0), short(20_000), short(1_500_000)
    ('0', '20k', '1.5M')
    """
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if abs(steps) >= unit:
            return f"{steps / unit:g}{name}"
    return f"{steps:g}"
