"""Which values a setting can have: types by its annotation, and a range if it is one of ours."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal

from rollstream.engine import RollstreamError

_PART, _COUNT, _AMOUNT = (0, 1), (1, math.inf), (0, math.inf)
_RANGES: dict[str, tuple[float, float]] = {
    "atoms": _COUNT,
    "batch_size": _COUNT,
    "boldest": _PART,
    "boldness_exponent": _AMOUNT,
    "buffer_size": _COUNT,
    "clip_range": _AMOUNT,
    "critics": _COUNT,
    "discount": _PART,
    "environments": _COUNT,
    "epochs": _COUNT,
    "exploration_fraction": _PART,
    "exploration_noise": _AMOUNT,
    "final_epsilon": _PART,
    "gae_lambda": _PART,
    "hidden": _COUNT,
    "importance_exponent": _AMOUNT,
    "initial_temperature": _AMOUNT,
    "learning_rate": _AMOUNT,
    "learning_starts": _AMOUNT,
    "max_gradient_norm": _AMOUNT,
    "minibatch_size": _COUNT,
    "n_step": _COUNT,
    "policy_delay": _COUNT,
    "priority_exponent": _AMOUNT,
    "report_every": _COUNT,
    "rollout_length": _COUNT,
    "samples_per_insert": _AMOUNT,
    "shards": _COUNT,
    "target_every": _COUNT,
    "target_noise": _AMOUNT,
    "target_noise_clip": _AMOUNT,
    "target_rate": _PART,
    "updates": _COUNT,
    "value_coefficient": _AMOUNT,
}
"""The least and the largest value of settings that come with the package, by name."""


class SettingsError(RollstreamError):
    """Settings that an algorithm does not have, or values that they cannot have."""


def require_values(config: type, values: Mapping[str, Any]) -> None:
    """Raise, naming the setting and what it takes, if a value is not one that a Config can have."""
    hints = typing.get_type_hints(config)
    for name, value in values.items():
        limits = _limits(config, name)
        if not _fits(hints[name], value) or not _is_within(limits, value):
            allowed = "" if limits is None else f", {_named_range(*limits)}"
            raise SettingsError(f"config {name}={value!r}: give {named_type(hints[name])}{allowed}")


def _limits(config: type, name: str) -> tuple[float, float] | None:
    """The range of a setting; those that people have added to a Config of their own have none."""
    home = next(own for own in config.__mro__ if name in vars(own).get("__annotations__", ()))
    return _RANGES.get(name) if home.__module__.startswith("rollstream.") else None


def _is_within(limits: tuple[float, float] | None, value: Any) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return limits is None or all(limits[0] <= number <= limits[1] for number in numbers)


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


def _named_range(least: float, most: float) -> str:
    return f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
