"""Which values a setting can have: the type of its annotation, and the range written on it."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal

from rollstream.engine import RollstreamError
from rollstream.limits import Limits, limits


class SettingsError(RollstreamError):
    """Settings that an algorithm does not have, or values that they cannot have."""


def require_values(config: type, values: Mapping[str, Any]) -> None:
    """Raise, naming the setting and what it takes, if a value is not one that a Config can have."""
    hints = typing.get_type_hints(config)
    for name, value in values.items():
        allowed = limits(config, name)
        if not _fits(hints[name], value) or not _is_within(allowed, value):
            told = "" if allowed is None else f", {_named_range(allowed)}"
            raise SettingsError(f"config {name}={value!r}: give {named_type(hints[name])}{told}")


def _is_within(allowed: Limits | None, value: Any) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return allowed is None or all(allowed.low <= number <= allowed.high for number in numbers)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of a type; of types that are not known here everything is."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return value in parts
    if kind in (typing.Union, types.UnionType):
        return any(_fits(part, value) for part in parts)
    if kind is tuple:
        own = parts[:1] * len(value) if isinstance(value, tuple) and parts[1:] == (...,) else parts
        return isinstance(value, tuple) and len(own) == len(value) and all(map(_fits, own, value))
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real)
        return number and not isinstance(value, bool) and value == value
    return isinstance(value, hint) if hint in (bool, str, type(None)) else True


def named_type(hint: Any) -> str:
    """A type in words.

    >>> named_type(int), named_type(tuple[int, ...]), named_type(float | None)
    ('a whole number', 'a tuple of whole numbers', 'a number or None')
    """
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if kind in (typing.Union, types.UnionType):
        return " or ".join(map(named_type, parts))
    if kind is tuple and parts[1:] == (...,):
        return f"a tuple of {named_type(parts[0]).removeprefix('a ')}s"
    if kind is tuple:
        return f"a tuple of {', '.join(map(named_type, parts))}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "a text",
        type(None): "None",
    }
    return names.get(hint, str(hint))


def _named_range(allowed: Limits) -> str:
    low, high = allowed
    return f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
