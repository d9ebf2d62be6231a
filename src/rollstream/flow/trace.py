"""A recording of a run that opens in Perfetto (ui.perfetto.dev) or Chrome's about:tracing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Tracer:
    """Collects spans and arrows, and writes them once, at the end, as Chrome trace events."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[str, int] = {}
        self._arrows = 0
        self._finished: dict[tuple[str, str], list[float]] = {}

    def span(self, place: str | None, name: str, start: float, end: float) -> None:
        """One operator on one item; the driver's place is `None`."""
        self._add(place or "driver", name, "operator", start, end)

    def message(
        self, label: str, sender: str, receiver: str, posted: float, start: float, end: float
    ) -> None:
        """One message: a span on its receiver, an arrow from its sender."""
        self._add(receiver, label, "message", start, end)
        self._arrow(label, (sender, posted), (receiver, start))
        self._finished.setdefault((label, receiver), []).append(end)

    def reply(self, label: str, receiver: str, time: float) -> None:
        """A reply the flow took in: an arrow back from the actor."""
        if ends := self._finished.get((label, receiver)):
            self._arrow(f"{label} reply", (receiver, ends.pop(0)), ("driver", time))

    def write(self) -> None:
        """Write the file, whole or not at all."""
        names = [
            {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": place}}
            for place, track in self._tracks.items()
        ]
        text = json.dumps({"traceEvents": names + self._events, "displayTimeUnit": "ms"})
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(text)
        partial.replace(self.path)

    def _add(self, place: str, name: str, category: str, start: float, end: float) -> None:
        self._events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": self._track(place),
                "name": name,
                "cat": category,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
            }
        )

    def _arrow(self, name: str, source: tuple[str, float], target: tuple[str, float]) -> None:
        self._arrows += 1
        for phase, (place, time) in (("s", source), ("f", target)):
            self._events.append(
                {
                    "ph": phase,
                    "pid": 1,
                    "tid": self._track(place),
                    "name": name,
                    "cat": "message",
                    "id": self._arrows,
                    "ts": time * 1e6,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )

    def _track(self, place: str) -> int:
        return self._tracks.setdefault(place, len(self._tracks))
