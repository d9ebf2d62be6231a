"""Rollstream runs distributed reinforcement learning as dataflow.

>>> import rollstream as rs
>>> from rollstream import flow
>>> with rs.engine("inline") as engine:
...     squares = flow.from_items([1, 2, 3]).for_each(lambda x: x * x)
...     list(squares)
[1, 4, 9]
"""

from typing import TYPE_CHECKING, Any

from rollstream import flow
from rollstream.engine import (
    Actor,
    ActorDied,
    ActorEvent,
    Deadlock,
    Deferred,
    Engine,
    EngineClosed,
    EngineError,
    Future,
    Ref,
    RollstreamError,
    engine,
)
from rollstream.flow import OperatorError, PlanError, StateError

if TYPE_CHECKING:
    from rollstream.training import load, train

__version__ = "0.1.0.dev0"

__all__ = [
    "Actor",
    "ActorDied",
    "ActorEvent",
    "Deadlock",
    "Deferred",
    "Engine",
    "EngineClosed",
    "EngineError",
    "Future",
    "OperatorError",
    "PlanError",
    "Ref",
    "RollstreamError",
    "StateError",
    "engine",
    "flow",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import training, and with it JAX, on first use: flows and their processes need neither."""
    if name not in ("load", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollstream import training

    return getattr(training, name)


def __dir__() -> list[str]:
    """Include what is imported lazily."""
    return sorted({*globals(), *__all__})
