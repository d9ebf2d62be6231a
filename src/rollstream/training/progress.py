"""The interface of displays, which show a training run to the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollstream.flow import Statistics

if TYPE_CHECKING:
    from rollstream.rl.operators import Report


@dataclass(frozen=True)
class RunInfo:
    """What is about to be trained."""

    algorithm: str
    environment: str
    steps: int
    """Total number of environment steps, rounded up to whole rollouts."""
    seed: int
    workers: int
    engine: str
    path: Path | None
    """The run folder, if there is one."""
    start_step: int
    """Environment steps taken before the run was resumed; 0 for a new run."""


class Display(Protocol):
    """Shows a training run. One thread calls `start`, then the other methods, then `finish`."""

    def start(self, info: RunInfo) -> None:
        """Training starts or is resumed."""
        ...

    def report(self, report: Report, statistics: Statistics) -> None:
        """An iteration has ended. The report includes `time/fps`, `time/time_elapsed` and evaluations."""
        ...

    def heartbeat(self, steps: int, statistics: Statistics) -> None:
        """Steps so far, between two reports."""
        ...

    def note(self, text: str) -> None:
        """Show a one-line message. May be called before `start`, and from any thread."""
        ...

    def finish(self, completed: bool) -> None:
        """Training has ended; not `completed` if it was interrupted or failed."""
        ...


class Reworded:
    """Another display, with messages in other words: those of the command line.

    Args:
        display: what shows the run.
        reword: returns a message in other words.
    """

    def __init__(self, display: Display, reword: Callable[[str], str]):
        self._display, self._reword = display, reword
        self.start, self.report, self.heartbeat = display.start, display.report, display.heartbeat
        self.finish = display.finish

    def note(self, text: str) -> None:
        """Show the message in other words."""
        self._display.note(self._reword(text))


class NoDisplay:
    """Shows nothing."""

    def start(self, info: RunInfo) -> None:
        """Do nothing."""

    def report(self, report: Report, statistics: Statistics) -> None:
        """Do nothing."""

    def heartbeat(self, steps: int, statistics: Statistics) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def finish(self, completed: bool) -> None:
        """Do nothing."""
