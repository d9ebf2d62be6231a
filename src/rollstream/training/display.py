"""A training, shown while it runs: a live picture on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollstream.flow import Statistics
from rollstream.flow.statistics import NodeStatistics
from rollstream.training.progress import Display, RunAbout
from rollstream.training.progress_tracker import ProgressTracker, duration, headline, named, sparkline

if TYPE_CHECKING:
    from rollstream.rl.operators import Report
    from rollstream.training.run import Run

_REFRESH = 4
"""Pictures a second."""
_EVERY = 5.0
"""Seconds from one line to the next, where there is no terminal."""
_NODES = 12
"""Nodes of a flow that are shown, at most: the busiest."""
_CURVE, _LABEL = 32, 12
"""Characters of the curve of returns, and of a label with the space after it."""
_WIDE = 84
"""Columns from which on there is room to say where a node runs, and how much it gave."""
_ACCENT = "deep_pink2"


def display_for(stream: TextIO) -> Display:
    """A live picture if the stream is a terminal, else lines."""
    console = Console(file=stream)
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else Lines(stream)


# Lines -------------------------------------------------------------------------------------------


class Lines:
    """One line every few seconds, and one for the last report."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.perf_counter, every: float = _EVERY):
        self._stream = stream
        self._clock = clock
        self._every = every
        self._course: ProgressTracker | None = None
        self._written: float | None = None
        self._waits = False

    def start(self, about: RunAbout) -> None:
        """Say what is trained."""
        self._course, self._began = ProgressTracker(about), self._clock()
        goes_on = f", from step {about.done:,} on" if about.done else ""
        self._write(f"{headline(about)} · {about.steps:,} steps{goes_on}")

    def report(self, report: Report, statistics: Statistics) -> None:
        """A line, unless there has just been one."""
        course, now = self._started(), self._clock()
        course.add(report, statistics, now)
        self._show(course, now)

    def beat(self, steps: int, statistics: Statistics) -> None:
        """As a report."""
        course, now = self._started(), self._clock()
        course.beat(steps, statistics, now)
        self._show(course, now)

    def _show(self, course: ProgressTracker, now: float) -> None:
        self._waits = self._written is not None and now - self._written < self._every
        if not self._waits:
            self._written = now
            self._write(_line(course, now))

    def note(self, text: str) -> None:
        """The text."""
        self._write(text)

    def finish(self, run: Run | None) -> None:
        """The last report, if it has not been shown, where the time went, and where things are."""
        course, now = self._course, self._clock()
        if course is None:
            return
        if self._waits:
            self._write(_line(course, now))
        if run is not None:
            self._write(_summary(course, now - self._began))

    def _started(self) -> ProgressTracker:
        assert self._course is not None, "a display is started before it is given reports"
        return self._course

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _line(course: ProgressTracker, now: float) -> str:
    parts = [f"{course.steps:>11,} steps {course.part:4.0%}"]
    if "rollout/ep_rew_mean" in course.report:
        parts.append(f"return {course.report['rollout/ep_rew_mean']:,.1f}")
        parts.append(f"length {course.report['rollout/ep_len_mean']:,.1f}")
    if "eval/mean_reward" in course.report:
        parts.append(f"evaluation {course.report['eval/mean_reward']:,.1f}")
    for name in ("loss", "actor_loss", "critic_loss"):
        if f"train/{name}" in course.report:
            parts.append(f"{name.replace('_', ' ')} {course.report[f'train/{name}']:.3g}")
    if course.rate is not None:
        parts.append(f"{course.rate:,.0f} steps/s")
        if course.part < 1:
            parts.append(f"{duration(course.left(now))} left")
    return "  ".join(parts)


def _summary(course: ProgressTracker, seconds: float) -> str:
    """What remains to be said at the end."""
    text, statistics = f"{course.steps - course.about.done:,} steps in {duration(seconds)}", course.statistics
    if statistics is not None and (bottleneck := statistics.bottleneck) is not None:
        share = statistics.share(statistics[bottleneck])
        text += f"; the bottleneck was {bottleneck}, busy {share:.0%} of the time"
    return text if course.about.path is None else f"{text}\nSaved in {course.about.path}"


# On a terminal -----------------------------------------------------------------------------------


class LiveDisplay:
    """A picture that is drawn anew a few times a second, by a thread of its own.

    A report is only taken in here, and so costs next to nothing however often it comes.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter):
        self._console = console
        self._clock = clock
        self._course: ProgressTracker | None = None
        self._live: Live | None = None

    def start(self, about: RunAbout) -> None:
        """Begin to draw."""
        self._course, self._began = ProgressTracker(about), self._clock()
        self._live = Live(
            get_renderable=self.picture,
            console=self._console,
            refresh_per_second=_REFRESH,
            redirect_stdout=sys.stdout.isatty(),  # else what is printed would end up here
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def report(self, report: Report, statistics: Statistics) -> None:
        """Have it in the next picture."""
        assert self._course is not None, "a display is started before it is given reports"
        self._course.add(report, statistics, self._clock())

    def beat(self, steps: int, statistics: Statistics) -> None:
        """Likewise."""
        assert self._course is not None, "a display is started before it is given reports"
        self._course.beat(steps, statistics, self._clock())

    def note(self, text: str) -> None:
        """The text, above the picture."""
        self._console.print(Text(text, style="yellow"))

    def finish(self, run: Run | None) -> None:
        """Draw it a last time, and leave it there."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            if run is not None and self._course is not None:
                self._console.print(Text(_summary(self._course, self._clock() - self._began)))

    def picture(self) -> Text:
        """The training as it is now.

        Laid out here: rich's tables take 7 ms for the same picture, and this takes 2.
        """
        course, (width, height) = self._course, self._console.size
        if course is None:
            return Text()
        lines = [_header(course), _bar(course, self._clock(), width), Text(), *_numbers(course)]
        if course.statistics is not None and course.statistics.nodes:
            events = [Text(str(event), style="yellow") for event in course.statistics.events[-3:]]
            room = height - len(lines) - len(events) - 3  # the titles of a table, and a line around it
            lines += [Text(), *_nodes(course.statistics, width, room), *events] if room > 0 else events
        lines = lines[: height - 1]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", no_wrap=True).join(lines)


def _header(course: ProgressTracker) -> Text:
    path = course.about.path
    text = Text(headline(course.about), style="bold")
    return Text.assemble(text, (f" → {path}" if path is not None else "", "dim"))


def _bar(course: ProgressTracker, now: float, width: int) -> Text:
    left = course.left(now)
    rest = "done" if course.part >= 1 else f"{duration(left)} left" if left is not None else ""
    told = f"  {course.part:4.0%}  {rest:<12}"
    room = max(0, width - len(told))
    full = int(room * course.part)
    colour = "green" if course.part >= 1 else _ACCENT
    return Text.assemble(("━" * full, colour), ("━" * (room - full), "grey30"), told)


def _numbers(course: ProgressTracker) -> list[Text]:
    rate = "" if course.rate is None else f"{course.rate:,.0f}/s"
    lines = [_labelled("steps", f"{course.steps:,} of {course.about.steps:,}", (rate, "dim"))]
    report = course.report
    if "rollout/ep_rew_mean" in report:
        value = (f"{report['rollout/ep_rew_mean']:,.1f}", "bold")
        lines.append(_labelled("return", value, (sparkline(course.returns, _CURVE), _ACCENT)))
        episodes = (f"{report.get('rollout/episodes', 0):,.0f} episodes", "dim")
        lines.append(_labelled("length", f"{report['rollout/ep_len_mean']:,.1f}", episodes))
    else:
        lines.append(_labelled("return", ("no episode has ended yet" if report else "compiling", "dim")))
    if course.evaluated is not None:
        lines.append(_labelled("evaluation", (f"{course.evaluated:,.1f}", "bold green")))
    if losses := course.losses():
        lines.append(_labelled("losses", named(losses)))
    if update := course.update():
        lines.append(_labelled("update", named(update)))
    return lines


def _labelled(label: str, *parts: str | tuple[str, str]) -> Text:
    text = Text.assemble((f"{label:<{_LABEL}}", "dim"))
    for part in parts:
        text.append(*((part,) if isinstance(part, str) else part)).append("  ")
    return text


def _nodes(statistics: Statistics, width: int, room: int) -> list[Text]:
    """Where the time goes: a line for each node, in the order of the flow."""
    nodes, wide = _busiest(statistics.nodes, min(room, _NODES)), width >= _WIDE
    bar = 16 if wide else 8
    name = max(len(node.name) for node in nodes)
    place = max(len(node.place) for node in nodes)
    title = f"{'node':<{name}}  " + (f"{'where':<{place}}  " if wide else "")
    title += f"{'busy':<{bar + 6}}  {'waited for':>10}  " + (f"{'items':>9}" if wide else "")
    lines = [Text(title, style="dim")]
    for node in nodes:
        share, worst = statistics.share(node), node.name == statistics.bottleneck
        waited = node.waiting / statistics.elapsed if statistics.elapsed else 0.0
        lines.append(
            Text.assemble(
                (f"{node.name:<{name}}  ", "bold" if worst else ""),
                (f"{node.place:<{place}}  " if wide else "", "dim"),
                (f"{_blocks(share, bar):<{bar}}", _ACCENT if worst else "blue"),
                f" {share:>5.0%}  {f'{waited:.0%}' if node.waiting else '':>10}  ",
                f"{node.items:>9,}  " if wide else "",
                ("bottleneck" if worst else "", _ACCENT),
            )
        )
    return lines


def _busiest(nodes: tuple[NodeStatistics, ...], most: int) -> list[NodeStatistics]:
    if len(nodes) <= most:
        return list(nodes)
    least = sorted((node.busy for node in nodes), reverse=True)[most - 1]
    return [node for node in nodes if node.busy >= least][:most]


def _blocks(share: float, width: int) -> str:
    """A bar, in eighths of a character."""
    full, rest = divmod(round(min(1.0, share) * width * 8), 8)
    return "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")
