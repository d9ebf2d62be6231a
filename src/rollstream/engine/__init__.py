"""Engines run actors: few verbs, the same on every engine.

>>> class Counter:
...     def __init__(self):
...         self.total = 0
...     def add(self, amount):
...         self.total += amount
...         return self.total
>>> with engine("threads") as threads:
...     [counter] = threads.spawn(Counter)
...     counter.send("add", 2)
...     counter.call("add", 3).result()
5
"""

import importlib
import inspect
from typing import Any

from rollstream.engine.actor import Actor
from rollstream.engine.engine import Engine
from rollstream.engine.errors import (
    ActorDied,
    Deadlock,
    EngineClosed,
    EngineError,
    RemoteError,
    RollstreamError,
)
from rollstream.engine.future import Deferred, Future, Ref
from rollstream.engine.options import ActorEvent, ActorStatistics, EngineStatistics, EventCallback
from rollstream.engine.slot import ActorContext
from rollstream.engine.transport import Transport

__all__ = [
    "Actor",
    "ActorContext",
    "ActorDied",
    "ActorEvent",
    "ActorStatistics",
    "Deadlock",
    "Deferred",
    "Engine",
    "EngineClosed",
    "EngineError",
    "EngineStatistics",
    "Future",
    "Ref",
    "RemoteError",
    "RollstreamError",
    "Transport",
    "engine",
]

_TRANSPORTS = {
    "inline": ("rollstream.engine.inline", "InlineTransport"),
    "threads": ("rollstream.engine.threads", "ThreadsTransport"),
    "processes": ("rollstream.engine.processes", "ProcessesTransport"),
    "ray": ("rollstream.engine.ray_transport", "RayTransport"),
}


def engine(name: str = "inline", *, on_event: EventCallback | None = None, **options: Any) -> Engine:
    """Open an engine by name.

    `inline` for debugging and one core, `threads` for work that releases the interpreter lock, `processes`
    for all cores of one machine, `ray` for a cluster.

    Args:
        name: the engine.
        on_event: called with an `ActorEvent` when an actor dies, in whichever thread notices; it must not
            wait for actors.
        options: those of the engine's transport (`ProcessesTransport`, `RayTransport`).
    """
    if name not in _TRANSPORTS:
        raise EngineError(f"there is no engine {name!r}; choose one of: {', '.join(_TRANSPORTS)}")
    module, attribute = _TRANSPORTS[name]
    kind: type[Transport] = getattr(importlib.import_module(module), attribute)
    known = list(inspect.signature(kind).parameters)
    for option in options:
        if option not in known:
            raise EngineError(
                f"engine({name!r}) has no option {option!r}; it has: {', '.join([*known, 'on_event'])}"
            )
    return Engine(kind(**options), on_event=on_event)
