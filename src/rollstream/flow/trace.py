"""A recording of a run that opens in Perfetto (ui.perfetto.dev) or Chrome's about:tracing."""

from __future__ import annotations

import itertools
import json
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

TimeSpan: TypeAlias = tuple[str, float, float]
"""An operator's name, and when it began and ended to handle one item."""
Recorder: TypeAlias = Callable[[TimeSpan], None]
_CHUNK = 1000
"""Events kept in memory before they are written."""


class Tracer:
    """Writes spans and arrows as Chrome trace events; a complete file replaces the partial one."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._events: list[dict[str, Any]] = []
        self._written = 0
        self._broken: OSError | None = None
        self._tracks: dict[str, int] = {"driver": 0}
        self._arrows = itertools.count(1)
        self._lock = threading.Lock()  # messages are recorded by the threads that handle them
        self._finished: dict[tuple[str, str], list[float]] = {}

    def span(self, span: TimeSpan, place: str = "driver") -> None:
        """One operator on one item."""
        name, start, end = span
        self._event("X", place, name, "operator", start, dur=(end - start) * 1e6)

    def message(
        self, label: str, sender: str, receiver: str, posted: float, start: float, end: float
    ) -> None:
        """One message: a span on its receiver, an arrow from its sender."""
        self._event("X", receiver, label, "message", start, dur=(end - start) * 1e6)
        self._arrow(label, (sender, posted), (receiver, start))
        self._finished.setdefault((label, receiver), []).append(end)

    def reply(self, label: str, receiver: str, time: float) -> None:
        """One reply that reached its node: an arrow back from the actor."""
        if ends := self._finished.get((label, receiver)):
            self._arrow(f"{label} reply", (receiver, ends.pop(0)), ("driver", time))

    def write(self) -> None:
        """Write the remaining events and complete the file."""
        for place, track in self._tracks.items():
            for key, value in (("name", place), ("sort_index", track)):
                event = {"ph": "M", "pid": 1, "tid": track, "name": f"thread_{key}", "args": {key: value}}
                self._events.append(event)
        self._flush()
        if self._broken is not None:
            warnings.warn(f"no trace was written to {self.path}: {self._broken}", stacklevel=2)
            return
        with self._partial.open("a") as file:
            file.write("\n]}\n")
        self._partial.replace(self.path)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if self._broken is not None:
            return
        begin = ",\n" if self._written else '{"displayTimeUnit": "ms", "traceEvents": [\n'
        try:
            with self._partial.open("a" if self._written else "w") as file:
                file.write(begin + ",\n".join(json.dumps(event) for event in events))
            self._written += len(events)
        except OSError as error:  # a run does not fail because its trace does
            self._broken = error

    def _arrow(self, name: str, source: tuple[str, float], target: tuple[str, float]) -> None:
        number = next(self._arrows)
        self._event("s", source[0], name, "message", source[1], id=number)
        self._event("f", target[0], name, "message", target[1], id=number, bp="e")

    def _event(self, phase: str, place: str, name: str, category: str, time: float, **more: Any) -> None:
        with self._lock:
            track = self._tracks.setdefault(place, len(self._tracks))
            event = {"ph": phase, "pid": 1, "tid": track, "name": name, "cat": category, "ts": time * 1e6}
            self._events.append(event | more)
            if len(self._events) >= _CHUNK:
                self._flush()
