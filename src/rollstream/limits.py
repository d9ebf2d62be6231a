"""Allowed ranges of settings, written on the fields of a Config.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Config:
...     gamma: Fraction = 0.99
...     hidden: Sizes = (64, 64)
>>> limits(Config, "gamma"), limits(Config, "hidden")
(Limits(low=0, high=1), Limits(low=1, high=inf))
"""

from __future__ import annotations

import math
import typing
from typing import Annotated, NamedTuple, TypeAlias


class Limits(NamedTuple):
    """The smallest and the largest value a setting can have; of a tuple, each of its elements."""

    low: float = -math.inf
    high: float = math.inf


PositiveInt: TypeAlias = Annotated[int, Limits(1)]
"""An integer, 1 or more."""
Fraction: TypeAlias = Annotated[float, Limits(0, 1)]
"""A number from 0 to 1."""
NonNegativeInt: TypeAlias = Annotated[int, Limits(0)]
"""An integer, 0 or more."""
OptionalPositiveInt: TypeAlias = Annotated[int | None, Limits(1)]
"""An integer, 1 or more, or `None`."""
OptionalNonNegativeInt: TypeAlias = Annotated[int | None, Limits(0)]
"""An integer, 0 or more, or `None`."""
NonNegativeFloat: TypeAlias = Annotated[float, Limits(0)]
"""A number, 0 or more."""
OptionalMilliseconds: TypeAlias = Annotated[float | None, Limits(0, 1000)]
"""A number from 0 to 1000, or `None`."""
Ratio: TypeAlias = Annotated[float, Limits(0.01)]
"""A number, 0.01 or more."""
Sizes: TypeAlias = Annotated[tuple[int, ...], Limits(1)]
"""Integers, each 1 or more."""
OptionalSizes: TypeAlias = Annotated[tuple[int, ...] | None, Limits(1)]
"""Integers, each 1 or more, or `None` for a default that depends on the environment."""


def limits(config: type, name: str) -> Limits | None:
    """The range of a setting; `None` if its field has none."""
    hint = typing.get_type_hints(config, include_extras=True)[name]
    return next((own for own in getattr(hint, "__metadata__", ()) if isinstance(own, Limits)), None)
