"""How a training is shown while it runs: what a display has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollstream.flow import Statistics

if TYPE_CHECKING:
    from rollstream.rl.operators import Report
    from rollstream.training.run import Run


@dataclass(frozen=True)
class RunAbout:
    """What is about to be trained."""

    algorithm: str
    environment: str
    steps: int
    """Environment steps of the whole training, in whole batches."""
    seed: int
    workers: int
    engine: str
    path: Path | None
    """The run's folder, if it has one."""
    done: int
    """Steps that an earlier part of the run has taken; 0 for a new one."""


class Display(Protocol):
    """Shows a training to somebody. One thread calls: start, then reports and notes, then finish."""

    def start(self, about: RunAbout) -> None:
        """The training begins, or goes on."""
        ...

    def report(self, report: Report, statistics: Statistics) -> None:
        """An iteration is over. The report also has `time/fps`, `time/time_elapsed` and evaluations."""
        ...

    def beat(self, steps: int, statistics: Statistics) -> None:
        """There have been so many steps, and the next report is yet to come."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know: one line. May come before `start`."""
        ...

    def finish(self, run: Run | None) -> None:
        """The training is over; without a run if it was interrupted or has failed."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, about: RunAbout) -> None:
        """Nothing."""

    def report(self, report: Report, statistics: Statistics) -> None:
        """Nothing."""

    def beat(self, steps: int, statistics: Statistics) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def finish(self, run: Run | None) -> None:
        """Nothing."""
