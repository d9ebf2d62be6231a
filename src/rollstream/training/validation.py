"""Validation of hyperparameters and arguments by their annotations: type and range."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from rollstream.engine import RollstreamError
from rollstream.limits import Limits, limits


class ConfigError(RollstreamError):
    """An unknown hyperparameter, or a value of the wrong type or out of range."""


def validate(
    kind: type, values: Mapping[str, Any], label: Callable[[str, Any], str] = "{}={!r}".format
) -> None:
    """Raise, naming the field and its type and range, unless all values fit the fields of a dataclass."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        allowed = limits(kind, name)
        if not _has_type(hints[name], value) or not _is_within(allowed, value):
            raise ConfigError(f"{label(name, value)}: must be {_describe(hints[name], allowed)}")


def as_path(name: str, value: Any) -> Path:
    """A folder that an argument names."""
    if not isinstance(value, (str, PathLike)):
        raise RollstreamError(f"{name}={value!r}: must be the path of a run folder")
    return Path(value)


def require_integers(minimum: int, **values: Any) -> None:
    """Raise, naming the argument, unless all values are integers of at least `minimum`."""
    for name, value in values.items():
        if not _has_type(int, value) or value < minimum:
            raise RollstreamError(f"{name}={value!r}: must be an integer >= {minimum}")


def _is_within(allowed: Limits | None, value: Any) -> bool:
    if allowed is None or value is None:
        return True
    values = value if isinstance(value, tuple) else (value,)
    return all(allowed.low <= value <= allowed.high for value in values)


def _has_type(hint: Any, value: Any) -> bool:
    """Whether a value has a type; other types than those of hyperparameters are not checked."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(arg, value) for arg in args)
    if origin is tuple:
        elements = args[:1] * len(value) if isinstance(value, tuple) and args[1:] == (...,) else args
        return (
            isinstance(value, tuple) and len(elements) == len(value) and all(map(_has_type, elements, value))
        )
    if hint in (int, float):
        is_number = isinstance(value, Integral if hint is int else Real)
        return is_number and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, hint) if hint in (bool, str, type(None)) else True


def _describe(hint: Any, allowed: Limits | None) -> str:
    text = describe_type(hint)
    if allowed is None:
        return text
    low, high = allowed
    bounds = f">= {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
    return f"{text.removesuffix(' or None')} {bounds}"


def describe_type(hint: Any) -> str:
    """A type in words.

    >>> describe_type(int), describe_type(tuple[int, ...]), describe_type(float | None)
    ('an integer', 'a tuple of integers', 'a number or None')
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe_type, args))
    if origin is tuple and args[1:] == (...,):
        return f"a tuple of {describe_type(args[0]).partition(' ')[2]}s"
    if origin is tuple:
        return f"a tuple of {', '.join(map(describe_type, args))}"
    names = {
        int: "an integer",
        float: "a number",
        bool: "True or False",
        str: "a string",
        type(None): "None",
    }
    return names.get(hint, str(hint))
