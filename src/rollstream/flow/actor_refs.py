"""The actors of an operator: those it runs on, by name, and those it can send messages to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Sequence
from typing import Any

from rollstream.engine import Actor
from rollstream.engine.actor import DRIVER


def place_of(actors: Sequence[Actor[Any]]) -> str:
    """`worker[0..3]` for four workers, else the actors' names; `driver` without any."""
    names = [actor.name for actor in actors] or [DRIVER]
    bases = {family(actor) for actor in actors}
    indices = [actor.index for actor in actors]
    if len(names) > 1 and len(bases) == 1 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"{bases.pop()}[{indices[0]}..{indices[-1]}]"
    return ", ".join(names)


def family(actor: Actor[Any]) -> str:
    """The name that actors spawned together share."""
    return actor.name.partition("[")[0]


def actors_in(thing: Any, depth: int = 3) -> list[Actor[Any]]:
    """The actors a function refers to: in its attributes, its closure, its arguments.

    An operator that holds more actors than it sends messages to says so with a method `receivers()`.
    """
    receivers: Any = getattr(thing, "receivers", None)
    if receivers is not None:
        return list(receivers())
    found: dict[str, Actor[Any]] = {}
    _search(thing, depth, found)
    return list(found.values())


def _search(thing: Any, depth: int, found: dict[str, Actor[Any]]) -> None:
    if isinstance(thing, Actor):
        found[thing.name] = thing
        return
    if depth == 0:
        return
    parts: Iterable[Any] = ()
    if isinstance(thing, (list, tuple, set, frozenset)):
        parts = thing
    elif isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, functools.partial):
        parts = (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.FunctionType):
        empty = types.CellType()
        parts = [cell.cell_contents for cell in thing.__closure__ or () if cell != empty]
    elif isinstance(thing, types.MethodType):
        parts = (thing.__self__,)
    elif hasattr(thing, "__dict__") and not isinstance(thing, (type, types.ModuleType)):
        parts = vars(thing).values()
    for part in parts:
        _search(part, depth - 1, found)
