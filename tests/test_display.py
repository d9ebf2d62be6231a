"""What the user sees of a training run: lines, the live view, the learning curve."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from pdb import Pdb
from typing import Any

import pytest
from rich.console import Console

from rollstream.flow import Statistics
from rollstream.flow.statistics import NodeStatistics
from rollstream.training.curve import draw_curve
from rollstream.training.display import LineDisplay, LiveDisplay, _line, display_for
from rollstream.training.progress import RunInfo
from rollstream.training.progress_tracker import ProgressTracker, headline, sparkline

INFO = RunInfo("ppo", "CartPole-v1", 10_000, 1, 2, "processes", Path("runs/x"), 0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(steps: int, value: float | None = 20.0, **more: float) -> dict[str, float]:
    own = {"time/total_timesteps": float(steps), "train/loss": 0.5, "train/value_loss": 0.25}
    if value is not None:
        own |= {"rollout/ep_rew_mean": value, "rollout/ep_len_mean": value, "rollout/episodes": 7.0}
    return own | {name.replace("__", "/"): number for name, number in more.items()}


def statistics(elapsed: float = 2.0) -> Statistics:
    def node(name: str, place: str, copies: int, busy: float, waiting: float = 0.0) -> NodeStatistics:
        return NodeStatistics(name, "for_each", place, copies, 1234, 0, 0, busy, waiting, 0)

    return Statistics(
        elapsed,
        (
            node("ParallelRollouts", "worker[0..1]", 2, 3.0),
            node("gather_sync", "driver", 1, 0.01, waiting=1.0),
            node("TrainOneStep", "driver", 1, 0.5),
        ),
    )


def live(width: int = 100, height: int = 40) -> tuple[LiveDisplay, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=True, width=width, height=height, legacy_windows=False)
    return LiveDisplay(console, clock), stream, clock


# Lines -------------------------------------------------------------------------------------------


def test_what_is_no_terminal_gets_lines() -> None:
    assert isinstance(display_for(io.StringIO()), LineDisplay)


def test_lines_come_now_and_then_and_the_last_one_always() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = LineDisplay(stream, clock, every=5)
    lines.start(INFO)
    for second in range(1, 13):
        clock.now += 1
        lines.report(report(500 * second), statistics())
    lines.finish(completed=False)
    shown = stream.getvalue().splitlines()
    assert shown[0] == "ppo on CartPole-v1 · 2 workers on processes · seed 1 · 10,000 steps"
    steps = [line.split()[0] for line in shown[1:]]
    assert steps == ["500", "3,000", "5,500", "6,000"]
    assert "return 20.0" in shown[2]
    assert "500 steps/s" in shown[2]
    assert "0:14 left" in shown[2]


def test_the_last_line_is_not_said_twice() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = LineDisplay(stream, clock)
    lines.start(INFO)
    lines.report(report(10_000), statistics())
    lines.finish(completed=False)
    assert len(stream.getvalue().splitlines()) == 2


def test_the_headline_counts_the_worker_that_engines_need() -> None:
    assert headline(replace(INFO, workers=0, engine="ray")) == "ppo on CartPole-v1 · 1 worker on ray · seed 1"
    assert headline(replace(INFO, workers=0, engine="inline")) == "ppo on CartPole-v1 · inline · seed 1"


def test_a_resumed_run_says_where_it_starts() -> None:
    stream = io.StringIO()
    LineDisplay(stream).start(RunInfo("a2c", "Acrobot-v1", 10_000, 0, 0, "inline", None, 4_000))
    assert stream.getvalue() == "a2c on Acrobot-v1 · inline · seed 0 · 10,000 steps, resumed at step 4,000\n"


def test_a_display_that_never_started_finishes() -> None:
    display, stream, _ = live()
    display.note("before the start")
    display.finish(completed=False)
    LineDisplay(stream).finish(completed=False)
    assert "before the start" in stream.getvalue()


# On a terminal -----------------------------------------------------------------------------------


def drawn(width: int = 100, height: int = 40) -> str:
    display, _, clock = live(width, height)
    display._tracker = ProgressTracker(INFO)
    for index in range(1, 21):
        clock.now += 0.5
        display.report(report(250 * index, 10.0 * index), statistics())
    display.report(report(5_250, 210.0, eval__mean_reward=487.25), statistics())
    return display.render().plain


def test_the_picture_has_it_all() -> None:
    text = drawn()
    for part in (
        "ppo on CartPole-v1 · 2 workers on processes · seed 1 → runs/x",
        "52%",
        "0:09 left",
        "5,250 of 10,000",
        "210.0",
        "▁",
        "█",
        "evaluation  487.2",
        "total 0.5 · value 0.25",
        "worker[0..1]",
    ):
        assert part in text
    [worst] = [line for line in text.splitlines() if "bottleneck" in line]
    assert worst.split()[0] == "ParallelRollouts"
    assert "75%" in worst


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_too_long(width: int) -> None:
    assert max(map(len, drawn(width).splitlines())) <= width


@pytest.mark.parametrize(("height", "nodes"), [(4, 0), (12, 1), (13, 1), (24, 2)])
def test_no_picture_is_too_high(height: int, nodes: int) -> None:
    """Where there is little room, it is for the busiest node; rich would cut what is too high."""
    lines = drawn(50, height).splitlines()
    assert len(lines) < height
    shown = [line.split()[0] for line in lines if line.startswith(("ParallelRollouts", "TrainOneStep"))]
    assert len(shown) == nodes
    assert "ParallelRollouts" in shown or not nodes


def test_a_table_that_is_cut_says_so() -> None:
    display, _, _ = live(120, 40)
    many = tuple(replace(statistics().nodes[0], name=f"node {index}") for index in range(20))
    display.start(INFO)
    try:
        display.report(report(500), replace(statistics(), nodes=many))
        assert "… and 8 less busy" in display.render().plain
    finally:
        display.finish(completed=False)
    assert drawn(50, 5).splitlines()[-1] == "… more in a taller window"


def test_small_returns_have_significant_digits() -> None:
    tracker = ProgressTracker(INFO)
    tracker.add(report(500) | {"rollout/ep_rew_mean": -0.0512, "time/fps": 123.0}, statistics(), 1.0)
    tracker.add(report(900) | {"rollout/ep_rew_mean": -0.0512, "time/fps": 123.0}, statistics(), 2.0)
    assert "return -0.0512" in _line(tracker, 2.0)
    assert "123 steps/s" in _line(tracker, 2.0)  # the one that the metrics have


def test_before_the_first_report_and_the_first_episode() -> None:
    display, _, _ = live()
    display._tracker = ProgressTracker(INFO)
    assert "compiling" in display.render().plain
    display.report(report(100, None), Statistics(0.0, ()))
    assert "no episode has ended yet" in display.render().plain


def test_the_terminal_is_left_clean() -> None:
    display, stream, clock = live()
    display.start(INFO)
    try:
        clock.now += 1
        display.report(report(5_000), statistics())
        display.note("worker[1] was killed")
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        display.finish(completed=False)
    shown = stream.getvalue()
    assert "worker[1] was killed" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert shown.endswith("\n\x1b[?25h")
    display.finish(completed=False)
    assert stream.getvalue() == shown


def test_many_nodes_are_the_busiest_in_their_order() -> None:
    nodes = tuple(
        NodeStatistics(f"node {index}", "for_each", "driver", 1, 1, 0, 0, float(index % 7), 0.0, 0)
        for index in range(40)
    )
    display, _, _ = live()
    display._tracker = ProgressTracker(INFO)
    display.report(report(100), Statistics(10.0, nodes))
    shown = [line.split()[1] for line in display.render().plain.splitlines() if line.startswith("node ")]
    assert len(shown) == 13  # and the title
    assert [int(name) for name in shown[1:]] == sorted(int(name) for name in shown[1:])


# Numbers -----------------------------------------------------------------------------------------


def test_the_speed_is_that_of_the_last_seconds() -> None:
    tracker = ProgressTracker(INFO)
    tracker.add(report(100), statistics(), 0.0)
    assert tracker.steps_per_second is None
    assert tracker.seconds_left(0.0) is None
    tracker.add(report(200), statistics(), 1.0)
    assert tracker.steps_per_second == 100
    for second in range(2, 40):
        tracker.add(report(200 + 10 * second), statistics(), float(second))
    assert tracker.steps_per_second == 10
    assert tracker.seconds_left(39.0) == pytest.approx((10_000 - tracker.steps) / 10)
    assert tracker.seconds_left(49.0) == pytest.approx((10_000 - tracker.steps) / 10 - 10)


def test_returns_are_kept_within_bounds() -> None:
    tracker = ProgressTracker(INFO)
    for index in range(5_000):
        tracker.add(report(index, float(index)), statistics(), float(index))
    assert len(tracker.returns) <= 1024
    assert len(sparkline(tracker.returns, 32)) == 32


@pytest.mark.parametrize("points", [[], [(5, 1.0)], [(5, 1.0), (5, 2.0)]])
def test_too_few_points_are_no_curve(points: list[tuple[int, float]]) -> None:
    assert sparkline(points, 8) == ""


def test_a_constant_is_flat() -> None:
    assert sparkline([(0, 3.0), (10, 3.0)], 4) == "▁▁▁▁"


# The curve ---------------------------------------------------------------------------------------

METRICS = [
    report(1_000 * index, 20.0 * index, **({"eval__mean_reward": 25.0 * index} if index % 4 == 0 else {}))
    for index in range(1, 20)
]


def test_a_curve_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw_curve(METRICS, tmp_path / "curve.png", "ppo on CartPole-v1")
    assert path is not None
    assert path == tmp_path / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert draw_curve([report(100, None), report(200, float("nan"))], tmp_path / "curve.png") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", [{512: -3.0}, {1: 5.0, 2: 5.0}])
def test_few_points_can_be_drawn(tmp_path: Path, values: dict[int, float]) -> None:
    pytest.importorskip("matplotlib")
    rows = [report(steps, value) for steps, value in values.items()]
    assert draw_curve(rows, tmp_path / "curve.png") is not None


def test_the_view_is_out_of_the_debuggers_way(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Any] = []
    monkeypatch.setattr(Pdb, "set_trace", lambda _, frame: frames.append(frame))
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    display, _, _ = live()
    display.start(INFO)
    assert display._live is not None
    breakpoint()
    assert not display._live.is_started
    assert frames == [sys._getframe()]
    display.heartbeat(1, statistics())
    assert display._live.is_started
    display.finish(completed=False)
    assert sys.breakpointhook is sys.__breakpointhook__
