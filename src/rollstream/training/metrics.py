"""The numbers of a run in its folder: `metrics.jsonl`, `metrics.csv`, and events for TensorBoard."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from rollstream.atomic_files import write_file, writing
from rollstream.engine import ActorEvent
from rollstream.flow import Statistics
from rollstream.rl.operators import Report

Row: TypeAlias = dict[str, float | str]
"""What is written of an iteration: the report, where the time went, and who died."""
STEPS = "time/total_timesteps"


class MetricsLog:
    """All rows of a run, in memory and, if there is a folder, in files that grow with every row.

    Args:
        folder: where to write; `None` keeps rows in memory only.
        until: rows of more steps than this, which an earlier part of the run has left, are cut.
    """

    def __init__(self, folder: Path | None, until: int = 0):
        self._folder = folder
        self.rows: list[Row] = []
        self._columns: list[str] = []
        self._events: _Events | None = None
        self._lines: TextIO | None = None
        self._table: TextIO | None = None
        if folder is None:
            return
        self.rows = read_metrics(folder, until)
        write_file(folder / "metrics.jsonl", "".join(map(_line, self.rows)).encode())
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._write_table()
        self._events = _Events(folder, until)

    def add(self, row: Row) -> None:
        """One more row."""
        self.rows.append(row)
        if self._folder is None:
            return
        with writing(self._folder / "metrics.jsonl"):
            self._write(row)

    def _write(self, row: Row) -> None:
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
        self._events.add(row)

    def sync(self) -> None:
        """See to it that rows are on the disk before a checkpoint is that rests on them."""
        if self._lines is not None:
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Let the files go."""
        for file in (self._events, self._lines, self._table):
            if file is not None:
                file.close()
        self._events = self._lines = self._table = None

    def _write_table(self) -> None:
        """A table has a fixed set of columns, so it is written anew when there is a new one."""
        assert self._folder is not None
        if self._table is not None:
            self._table.close()
        self._columns = list(dict.fromkeys(name for row in self.rows for name in row))
        self._table = (self._folder / "metrics.csv").open("w", encoding="utf-8", newline="")
        table = csv.DictWriter(self._table, self._columns)
        if self._columns:
            table.writeheader()
        table.writerows(self.rows)
        self._table.flush()


def read_metrics(folder: Path, until: float = math.inf) -> list[Row]:
    """The rows of a run up to some steps; one that was not written to its end does not count."""
    rows: list[Row] = []
    path = folder / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            row = json.loads(line)
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return [row for row in rows if float(row[STEPS]) <= until]


def _line(row: Mapping[str, Any]) -> str:
    """One line of JSON, which has no word for what is no number."""
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(known, allow_nan=False) + "\n"


class _Events:
    """An event for TensorBoard a row, written at once.

    tensorboardX's own writer makes one for each number and hands them to a thread, which takes longer than
    all else that is done with a row.
    """

    def __init__(self, folder: Path, until: int):
        self._writer = EventsWriter(str(folder / "events"), f".{until}")
        protobuf: Any = event_pb2
        self._event: Any = protobuf.Event
        summary: Any = summary_pb2
        self._summary: Any = summary.Summary
        if until:  # what is past this was cut
            start = protobuf.SessionLog(status=protobuf.SessionLog.START)
            self._write(self._event(step=until + 1, session_log=start))

    def add(self, row: Row) -> None:
        numbers = [(name, value) for name, value in row.items() if not isinstance(value, str)]
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers]
        self._write(self._event(step=int(float(row[STEPS])), summary=self._summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Stopwatch:
    """How long a run has taken and how fast it goes, also over several parts of it."""

    def __init__(self, steps: int = 0, elapsed: float = 0.0, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._steps = steps
        self._before = elapsed

    @property
    def elapsed(self) -> float:
        """Seconds, those of earlier parts included."""
        return self._before + self._clock() - self._start

    def timed(self, report: Report) -> Report:
        """The report with the time it took, and the steps a second of this part of the run."""
        seconds = self._clock() - self._start
        fps = (report[STEPS] - self._steps) / seconds if seconds else 0.0
        return report | {"time/fps": fps, "time/time_elapsed": self._before + seconds}


def row_of(report: Report, statistics: Statistics, events: tuple[ActorEvent, ...]) -> Row:
    """What is written of an iteration; `events` are the deaths since the last one."""
    row: Row = {**report}
    for node in statistics.nodes:
        row[f"flow/{node.name}/items"] = node.items
        row[f"flow/{node.name}/busy"] = node.busy
    if statistics.bottleneck is not None:
        row["flow/bottleneck"] = statistics.bottleneck
    if events:
        row["events/deaths"] = len(events)
    for event in events:
        row[f"events/{event.actor}"] = f"{event.reason}: {event.outcome}"
    return row
