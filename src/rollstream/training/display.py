"""Displays: a live view on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pdb import Pdb
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollstream.flow import Statistics
from rollstream.flow.statistics import NodeStatistics
from rollstream.training.progress import Display, RunInfo
from rollstream.training.progress_tracker import (
    ProgressTracker,
    duration,
    format_metrics,
    headline,
    significant,
    sparkline,
)

if TYPE_CHECKING:
    from rollstream.rl.operators import Report

_REFRESH = 4
"""Refreshes of the live view per second."""
_LINE_SECONDS = 5.0
"""Seconds between two lines, without a terminal."""
_MAX_NODES = 12
"""Flow nodes shown at most: the busiest."""
_SPARKLINE, _LABEL = 32, 12
"""Width in characters of the sparkline of returns, and of labels."""
_WIDE = 84
"""Width in characters from which on the columns `where` and `items` are shown."""
_ACCENT = "deep_pink2"


def display_for(stream: TextIO) -> Display:
    """Return a live display for a terminal, else one that writes lines."""
    console = Console(file=stream)
    return (
        LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else LineDisplay(stream)
    )


# Lines -------------------------------------------------------------------------------------------


class LineDisplay:
    """Writes a line every few seconds, and one for the last report."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.perf_counter, every: float = _LINE_SECONDS
    ):
        self._stream = stream
        self._clock = clock
        self._every = every
        self._tracker: ProgressTracker | None = None
        self._last_line: float | None = None
        self._pending = False

    def start(self, info: RunInfo) -> None:
        """Write what is trained."""
        self._tracker, self._start_time = ProgressTracker(info), self._clock()
        resumed = f", resumed at step {info.start_step:,}" if info.start_step else ""
        self._write(f"{headline(info)} · {info.steps:,} steps{resumed}")

    def report(self, report: Report, statistics: Statistics) -> None:
        """Write a line, unless the last one is recent."""
        tracker, now = self._started(), self._clock()
        tracker.add(report, statistics, now)
        self._show(tracker, now)

    def heartbeat(self, steps: int, statistics: Statistics) -> None:
        """Write a line, unless the last one is recent."""
        tracker, now = self._started(), self._clock()
        tracker.heartbeat(steps, statistics, now)
        self._show(tracker, now)

    def _show(self, tracker: ProgressTracker, now: float) -> None:
        self._pending = self._last_line is not None and now - self._last_line < self._every
        if not self._pending:
            self._last_line = now
            self._write(_line(tracker, now))

    def note(self, text: str) -> None:
        """Write the text."""
        self._write(text)

    def finish(self, completed: bool) -> None:
        """Write the last report, unless it is there already, and a summary."""
        tracker, now = self._tracker, self._clock()
        if tracker is None:
            return
        if self._pending:
            self._write(_line(tracker, now))
        if completed:
            self._write(_summary(tracker, now - self._start_time))

    def _started(self) -> ProgressTracker:
        assert self._tracker is not None, "call start first"
        return self._tracker

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _line(tracker: ProgressTracker, now: float) -> str:
    parts = [f"{tracker.steps:>11,} steps {tracker.fraction:4.0%}"]
    if "rollout/ep_rew_mean" in tracker.report:
        parts.append(f"return {significant(tracker.report['rollout/ep_rew_mean'])}")
        parts.append(f"length {significant(tracker.report['rollout/ep_len_mean'])}")
    if "eval/mean_reward" in tracker.report:
        parts.append(f"evaluation {significant(tracker.report['eval/mean_reward'])}")
    for name in ("loss", "actor_loss", "critic_loss"):
        if f"train/{name}" in tracker.report:
            parts.append(f"{name.replace('_', ' ')} {tracker.report[f'train/{name}']:.3g}")
    if tracker.steps_per_second is not None:
        parts.append(f"{tracker.steps_per_second:,.0f} steps/s")
    if tracker.fraction < 1 and (left := tracker.seconds_left(now)) is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def _summary(tracker: ProgressTracker, seconds: float) -> str:
    """Steps, duration, bottleneck and folder."""
    text, statistics = (
        f"{tracker.steps - tracker.info.start_step:,} steps in {duration(seconds)}",
        tracker.statistics,
    )
    if statistics is not None and (bottleneck := statistics.bottleneck) is not None:
        share = statistics.share(statistics[bottleneck])
        text += f"; the bottleneck was {bottleneck}, busy {share:.0%} of the time"
    return text if tracker.info.path is None else f"{text}\nSaved in {shlex.quote(str(tracker.info.path))}"


# On a terminal -----------------------------------------------------------------------------------


class LiveDisplay:
    """A view that a thread redraws a few times per second; reports are only stored, which costs little."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter):
        self._console = console
        self._clock = clock
        self._tracker: ProgressTracker | None = None
        self._live: Live | None = None

    def start(self, info: RunInfo) -> None:
        """Start drawing."""
        self._tracker, self._start_time = ProgressTracker(info), self._clock()
        self._live = Live(
            get_renderable=self.render,
            console=self._console,
            refresh_per_second=_REFRESH,
            redirect_stdout=sys.stdout.isatty(),  # else redirected output would end up here
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        if sys.breakpointhook is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = self._debug

    def report(self, report: Report, statistics: Statistics) -> None:
        """Show the report on the next refresh."""
        self._resumed().add(report, statistics, self._clock())

    def heartbeat(self, steps: int, statistics: Statistics) -> None:
        """Show the steps on the next refresh."""
        self._resumed().heartbeat(steps, statistics, self._clock())

    def note(self, text: str) -> None:
        """Print the text above the view."""
        self._console.print(Text(text, style="yellow"))

    def finish(self, completed: bool) -> None:
        """Draw a last time and leave the view on the terminal."""
        if sys.breakpointhook == self._debug:
            sys.breakpointhook = sys.__breakpointhook__
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            if completed and self._tracker is not None:
                self._console.print(Text(_summary(self._tracker, self._clock() - self._start_time)))

    def _resumed(self) -> ProgressTracker:
        """Draw again after the debugger."""
        assert self._tracker is not None, "call start first"
        if self._live is not None and not self._live.is_started:
            self._live.start()
        return self._tracker

    def _debug(self, *_: object, **__: object) -> None:
        """What `breakpoint()` does in this process: the view would be drawn over the debugger."""
        if self._live is not None:
            self._live.stop()
        Pdb().set_trace(sys._getframe(1))

    def render(self) -> Text:
        """The current view. Laid out by hand in 2 ms; rich's tables take 7."""
        tracker, (width, height) = self._tracker, self._console.size
        if tracker is None:
            return Text()
        lines = [_header(tracker), _bar(tracker, self._clock(), width), Text(), *_metrics(tracker)]
        if tracker.statistics is not None and tracker.statistics.nodes:
            statistics = tracker.statistics
            told = [*statistics.straggler_lines()[:3], *map(str, statistics.events[-3:])]
            events = [Text(line, style="yellow") for line in told]
            room = height - len(lines) - len(events) - 3  # the table's header and blank lines
            lines += [Text(), *_nodes(statistics, width, room), *events] if room > 0 else events
        if len(lines) > height - 1:
            lines = [*lines[: height - 2], Text("… more in a taller window", style="dim")]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", no_wrap=True).join(lines)


def _header(tracker: ProgressTracker) -> Text:
    path = tracker.info.path
    text = Text(headline(tracker.info), style="bold")
    return Text.assemble(text, (f" → {path}" if path is not None else "", "dim"))


def _bar(tracker: ProgressTracker, now: float, width: int) -> Text:
    left = tracker.seconds_left(now)
    rest = "done" if tracker.fraction >= 1 else f"{duration(left)} left" if left is not None else ""
    label = f"  {tracker.fraction:4.0%}  {rest:<12}"
    room = max(0, width - len(label))
    full = int(room * tracker.fraction)
    colour = "green" if tracker.fraction >= 1 else _ACCENT
    return Text.assemble(("━" * full, colour), ("━" * (room - full), "grey30"), label)


def _metrics(tracker: ProgressTracker) -> list[Text]:
    rate = "" if tracker.steps_per_second is None else f"{tracker.steps_per_second:,.0f}/s"
    lines = [_labelled("steps", f"{tracker.steps:,} of {tracker.info.steps:,}", (rate, "dim"))]
    report = tracker.report
    if "rollout/ep_rew_mean" in report:
        value = (significant(report["rollout/ep_rew_mean"]), "bold")
        lines.append(_labelled("return", value, (sparkline(tracker.returns, _SPARKLINE), _ACCENT)))
        episodes = (f"{report.get('rollout/episodes', 0):,.0f} episodes", "dim")
        lines.append(_labelled("length", significant(report["rollout/ep_len_mean"]), episodes))
    else:
        lines.append(_labelled("return", ("no episode has ended yet" if report else "compiling", "dim")))
    if tracker.evaluation is not None:
        lines.append(_labelled("evaluation", (significant(tracker.evaluation), "bold green")))
    if losses := tracker.losses():
        lines.append(_labelled("losses", format_metrics(losses)))
    if update := tracker.update():
        lines.append(_labelled("update", format_metrics(update)))
    return lines


def _labelled(label: str, *parts: str | tuple[str, str]) -> Text:
    text = Text.assemble((f"{label:<{_LABEL}}", "dim"))
    for part in parts:
        text.append(*((part,) if isinstance(part, str) else part)).append("  ")
    return text


def _nodes(statistics: Statistics, width: int, room: int) -> list[Text]:
    """A table of where the time goes: one row per node, in the order of the flow."""
    wide, is_cut = width >= _WIDE, len(statistics.nodes) > min(room, _MAX_NODES)
    nodes = _busiest(statistics.nodes, min(room - (is_cut and room > 1), _MAX_NODES))
    bar = 16 if wide else 8
    name = max(len(node.name) for node in nodes)
    place = max(len(node.place) for node in nodes)
    title = f"{'node':<{name}}  " + (f"{'where':<{place}}  " if wide else "")
    title += f"{'busy':<{bar + 6}}  {'waiting':>10}  " + (f"{'items':>9}" if wide else "")
    lines = [Text(title, style="dim")]
    for node in nodes:
        share, is_bottleneck = statistics.share(node), node.name == statistics.bottleneck
        waited = node.waiting / statistics.elapsed if statistics.elapsed else 0.0
        lines.append(
            Text.assemble(
                (f"{node.name:<{name}}  ", "bold" if is_bottleneck else ""),
                (f"{node.place:<{place}}  " if wide else "", "dim"),
                (f"{_blocks(share, bar):<{bar}}", _ACCENT if is_bottleneck else "blue"),
                f" {share:>5.0%}  {f'{waited:.0%}' if node.waiting else '':>10}  ",
                f"{node.items:>9,}  " if wide else "",
                (f"{node.dropped:,} dropped  " if node.dropped else "", "yellow"),
                ("bottleneck" if is_bottleneck else "", _ACCENT),
            )
        )
    if room > 1 and (hidden := len(statistics.nodes) - len(nodes)):
        lines.append(Text(f"… and {hidden} less busy", style="dim"))
    return lines


def _busiest(nodes: tuple[NodeStatistics, ...], most: int) -> list[NodeStatistics]:
    if len(nodes) <= most:
        return list(nodes)
    least = sorted((node.busy for node in nodes), reverse=True)[most - 1]
    return [node for node in nodes if node.busy >= least][:most]


def _blocks(share: float, width: int) -> str:
    """A bar with a resolution of an eighth of a character."""
    full, rest = divmod(round(min(1.0, share) * width * 8), 8)
    return "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")
