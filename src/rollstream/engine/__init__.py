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

from rollstream.engine.actor import Actor, ActorContext
from rollstream.engine.base import ActorStatistics, Engine, EngineStatistics
from rollstream.engine.errors import (
    ActorDied,
    Deadlock,
    EngineClosed,
    EngineError,
    ReentryError,
    RemoteError,
    RollstreamError,
)
from rollstream.engine.future import Deferred, Future, Ref
from rollstream.engine.inline import InlineEngine
from rollstream.engine.supervision import ActorEvent
from rollstream.engine.threads import ThreadsEngine

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
    "InlineEngine",
    "ReentryError",
    "Ref",
    "RemoteError",
    "RollstreamError",
    "ThreadsEngine",
    "engine",
]

_ENGINES = {
    "inline": ("rollstream.engine.inline", "InlineEngine"),
    "threads": ("rollstream.engine.threads", "ThreadsEngine"),
    "processes": ("rollstream.engine.processes", "ProcessesEngine"),
    "ray": ("rollstream.engine.ray_engine", "RayEngine"),
}


def engine(name: str = "inline", **options: Any) -> Engine:
    """Open an engine by name.

    `inline` for debugging and one core, `threads` for work that releases the interpreter lock, `processes`
    for all cores of one machine, `ray` for a cluster. Options are those of the engine's class.
    """
    if name not in _ENGINES:
        raise EngineError(f"there is no engine {name!r}; choose one of: {', '.join(_ENGINES)}")
    module, attribute = _ENGINES[name]
    kind: type[Engine] = getattr(importlib.import_module(module), attribute)
    known = [option for option in inspect.signature(kind).parameters if option != "self"]
    for option in options:
        if option not in known:
            raise EngineError(
                f"engine({name!r}) has no option {option!r}; it has: {', '.join(known) or 'none'}"
            )
    return kind(**options)
