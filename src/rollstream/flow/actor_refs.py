"""Finding the actors an operator can send messages to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from rollstream.engine import Actor


def actors_in(thing: Any, depth: int = 3) -> list[Actor[Any]]:
    """The actor handles an operator holds: in its attributes, its closure, its arguments."""
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
        parts = [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
    elif isinstance(thing, types.MethodType):
        parts = (thing.__self__,)
    elif hasattr(thing, "__dict__") and not isinstance(thing, (type, types.ModuleType)):
        parts = vars(thing).values()
    for part in parts:
        _search(part, depth - 1, found)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
