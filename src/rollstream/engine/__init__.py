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

from rollstream.engine.actor import Actor, ActorContext
from rollstream.engine.base import ActorStatistics, Engine, EngineStatistics
from rollstream.engine.errors import Deadlock, EngineClosed, EngineError, ReentryError, RollstreamError
from rollstream.engine.future import Deferred, Future, Ref
from rollstream.engine.inline import InlineEngine
from rollstream.engine.threads import ThreadsEngine

__all__ = [
    "Actor",
    "ActorContext",
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
    "RollstreamError",
    "ThreadsEngine",
    "engine",
]

_ENGINES: dict[str, type[Engine]] = {"inline": InlineEngine, "threads": ThreadsEngine}


def engine(name: str = "inline") -> Engine:
    """Open an engine by name: `inline` for debugging and one core, `threads` for several."""
    if name not in _ENGINES:
        raise EngineError(f"there is no engine {name!r}; choose one of: {', '.join(_ENGINES)}")
    return _ENGINES[name]()
