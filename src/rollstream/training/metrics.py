"""Metrics of a run: `metrics.jsonl`, `metrics.csv` and TensorBoard events."""

from __future__ import annotations

import csv
import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from rollstream.atomic_files import named_errors, write_atomically
from rollstream.engine import ActorEvent
from rollstream.flow import Statistics
from rollstream.rl.operators import Report
from rollstream.training.tensorboard_events import EventFile

MetricsRow: TypeAlias = dict[str, float | str]
"""One row of metrics: the report, busy time per node, and actors that died."""
STEPS = "time/total_timesteps"


MAX_ROWS = 10_000
"""Rows kept in memory of a run without a folder: the newest."""


class MetricsLogger:
    """Appends the metrics of a run to files, or keeps the newest rows in memory if there is no folder.

    Args:
        folder: where to write; `None` keeps rows in memory.
        start_step: rows after this step, left by an interrupted part of the run, are dropped.
    """

    def __init__(self, folder: Path | None, start_step: int = 0):
        self._folder = folder
        self.rows: deque[MetricsRow] = deque(maxlen=MAX_ROWS)
        """The newest rows, without a folder."""
        self._columns: list[str] = []
        self._events: EventFile | None = None
        self._lines: TextIO | None = None
        self._table: TextIO | None = None
        if folder is None:
            return
        rows = iterate_metrics(folder, start_step, warn=True)
        write_atomically(folder / "metrics.jsonl", (_line(row).encode() for row in rows))
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._write_table()
        self._events = EventFile(folder, start_step)

    def add(self, row: MetricsRow) -> None:
        """Append a row."""
        if self._folder is None:
            self.rows.append(row)
            return
        with named_errors(self._folder / "metrics.jsonl"):
            self._write(row)

    def _write(self, row: MetricsRow) -> None:
        assert self._events is not None
        assert self._lines is not None
        assert self._table is not None
        self._lines.write(_line(row))
        self._lines.flush()
        if set(row) <= set(self._columns):
            csv.DictWriter(self._table, self._columns).writerow(row)
            self._table.flush()
        else:
            self._write_table()
        scalars = {name: float(value) for name, value in row.items() if not isinstance(value, str)}
        self._events.add(int(float(row[STEPS])), scalars)

    def sync(self) -> None:
        """Flush rows to disk, before the checkpoint that belongs to them."""
        if self._lines is not None:
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Close the files."""
        for file in (self._events, self._lines, self._table):
            if file is not None:
                file.close()
        self._events = self._lines = self._table = None

    def _write_table(self) -> None:
        """Rewrite the CSV file, whose set of columns is fixed, when a new metric appears."""
        assert self._folder is not None
        if self._table is not None:
            self._table.close()
        self._columns = list(dict.fromkeys(name for row in iterate_metrics(self._folder) for name in row))
        self._table = (self._folder / "metrics.csv").open("w", encoding="utf-8", newline="")
        table = csv.DictWriter(self._table, self._columns)
        if self._columns:
            table.writeheader()
        table.writerows(iterate_metrics(self._folder))
        self._table.flush()


def read_metrics(folder: Path, max_step: float = math.inf) -> list[MetricsRow]:
    """Read the metrics of a run up to a step; warn of lines that cannot be read."""
    return list(iterate_metrics(folder, max_step, warn=True))


def iterate_metrics(folder: Path, max_step: float = math.inf, *, warn: bool = False) -> Iterator[MetricsRow]:
    """Yield the metrics of a run up to a step. Lines that cannot be read are skipped.

    Args:
        folder: the run folder.
        max_step: rows after it are left out.
        warn: warn of lines that were skipped, other than a last one that was cut off.
    """
    path, skipped = folder / "metrics.jsonl", list[int]()
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                continue
            if (row := _parse(line)) is None:
                skipped.append(number)
            elif float(row[STEPS]) <= max_step:
                yield row
    if warn and skipped:
        lines = f"line {skipped[0]}" if len(skipped) == 1 else f"{len(skipped)} lines"
        warnings.warn(f"{path} has {lines} that cannot be read; the other rows are used", stacklevel=3)


def _parse(line: str) -> MetricsRow | None:
    """A row, with NaN for `null`; `None` if the line is something else."""
    try:
        row = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
        is_row = math.isfinite(row[STEPS]) and all(type(value) in (int, float, str) for value in row.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return row if is_row else None


def _line(row: Mapping[str, Any]) -> str:
    """One line of JSON, with `null` for NaN and infinity."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


class Stopwatch:
    """Measures elapsed time and steps per second, also across resumes."""

    def __init__(self, steps: int = 0, elapsed: float = 0.0, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._steps = steps
        self._before = elapsed

    @property
    def elapsed(self) -> float:
        """Seconds of training, including those before the run was resumed."""
        return self._before + self._clock() - self._start

    def add_times(self, report: Report) -> Report:
        """Add `time/fps` (since the start or resume) and `time/time_elapsed`."""
        seconds = self._clock() - self._start
        fps = (report[STEPS] - self._steps) / seconds if seconds else 0.0
        return report | {"time/fps": fps, "time/time_elapsed": self._before + seconds}


def metrics_row(report: Report, statistics: Statistics, events: Sequence[ActorEvent]) -> MetricsRow:
    """Build the row of a report; `events` are the actors that died since the last one."""
    row: MetricsRow = {**report}
    for node in statistics.nodes:
        row[f"flow/{node.name}/items"] = node.items
        row[f"flow/{node.name}/busy"] = node.busy
        if node.dropped:
            row[f"flow/{node.name}/dropped"] = node.dropped
    if statistics.bottleneck is not None:
        row["flow/bottleneck"] = statistics.bottleneck
    if stragglers := statistics.stragglers:
        row["flow/stragglers"] = ", ".join(stragglers)
    if events:
        row["events/deaths"] = len(events)
    for event in events:
        row[f"events/{event.actor}"] = f"{event.reason}: {event.outcome}"
    return row
