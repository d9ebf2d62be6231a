"""Errors that say which part of a value cannot be sent to another process."""

from __future__ import annotations

import pickle
from types import FunctionType
from typing import Any

import cloudpickle

from rollstream.engine.actor import Actor
from rollstream.engine.errors import EngineError
from rollstream.engine.future import Future, Ref


class NotSerializable(pickle.PicklingError):
    """Something of an engine's own was sent where it means nothing; the text says what to do."""


def not_serializable(value: Any, what: str, problem: Exception) -> EngineError:
    """An error that says which part of a value cannot be pickled."""
    if isinstance(problem, NotSerializable):
        return EngineError(f"{what}: {problem}")
    path, thing = _culprit(value, what)
    noun = type(thing).__name__
    article = "an" if noun[0].lower() in "aeiou" else "a"
    return EngineError(
        f"{path} is {article} {noun}, which cannot be sent to another process: {problem}; "
        f"make it where it is needed, or leave it out with __getstate__"
    )


def _culprit(value: Any, path: str, depth: int = 4) -> tuple[str, Any]:
    """The innermost part that cannot be pickled, and its path from the value."""
    for step, part in _parts_of(value) if depth else ():
        try:
            cloudpickle.dumps(part)
        except Exception:
            if not isinstance(part, (Actor, Ref, Future)):
                return _culprit(part, path + step, depth - 1)
    return path, value


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        used = {name: cell.cell_contents for name, cell in cells}
        used |= {n: value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__}
        return [(f" (its variable {name!r})", part) for name, part in used.items()]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return [(f".{name}", part) for name, part in vars(value).items()]
    return []
