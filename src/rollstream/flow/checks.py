"""Checks of a plan while it is built: each error is one sentence, with the fix."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from rollstream.engine import Actor
from rollstream.flow.errors import PlanError, plan_line


def checked_actors(actors: Actor[Any] | Sequence[Actor[Any]], method: str) -> list[Actor[Any]]:
    """The actors as a list; each must be alive and have the method."""
    actors = [actors] if isinstance(actors, Actor) else list(actors)
    if not actors:
        raise PlanError("a stream needs at least one actor; spawn some: engine.spawn(Worker, count=2)")
    for actor in actors:
        if not isinstance(actor, Actor):
            raise PlanError(f"{actor!r} is not an actor; give those that engine.spawn returns")
        if actor.engine.closed:
            raise PlanError(
                f"{actor.name} has ended with its engine; build the plan inside the engine's scope"
            )
        actor.require(method)
    return actors


def require_whole(what: str, number: Any, least: int) -> None:
    """Refuse what is not a whole number, or too small."""
    if not isinstance(number, int) or number < least:
        raise PlanError(f"{what}={number!r}: give a whole number, at least {least}")


def name_of(function: Any, name: str | None, kind: str) -> str:
    """The given name, else that of the function or its class; a lambda is named for its kind."""
    if name is not None:
        return name
    while isinstance(function, functools.partial):
        function = function.func
    own = getattr(function, "__name__", type(function).__name__)
    return kind if own == "<lambda>" else own


def require_operator(function: Any, kind: str) -> None:
    """Refuse what cannot be called with an item, and a context if it asks for one."""
    try:
        signature = inspect.signature(function)
        signature.bind(None, **({"context": None} if "context" in signature.parameters else {}))
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        raise PlanError(
            f"{kind} at {plan_line()} needs a function of one item, or of an item and a `context`, and "
            f"{function!r} is not one: {error}"
        ) from None
