"""Nested plain state as JSON and named arrays, and back, exactly.

JSON holds the structure. What it does not know is marked by an object with one key that begins with `$`:
`{"$array": name}` stands for an array that is kept elsewhere under that name.

>>> structure, arrays = packed({"weights": np.ones(2), "seen": (1, 2.5)})
>>> structure
{'weights': {'$array': 'weights'}, 'seen': {'$tuple': [1, 2.5]}}
>>> unpacked(structure, arrays)
{'weights': array([1., 1.]), 'seen': (1, 2.5)}

Classes that consist of plain data say so: see `plain`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from rollstream.engine import RollstreamError

Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]
_SAFE = 2**53
"""Whole numbers up to here are the same for everybody who reads JSON; larger ones are written as text."""


T = TypeVar("T")
_KINDS: dict[str, type] = {}


class NotPlain(RollstreamError):
    """A state that holds something other than plain data."""


def plain(kind: type[T]) -> type[T]:
    """Declare that a dataclass, or a kind of dict, can be saved: as its fields, or its items, are.

    >>> from dataclasses import dataclass
    >>> @plain
    ... @dataclass
    ... class Point:
    ...     x: float
    ...     y: float
    >>> unpacked(*packed([Point(1.0, 2.0)]))
    [Point(x=1.0, y=2.0)]
    """
    _KINDS[_name(kind)] = kind
    return kind


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def packed(state: Any) -> tuple[Any, Arrays]:
    """The structure, fit for JSON, and the arrays in it by name."""
    arrays: Arrays = {}
    return _packed(state, "", arrays), arrays


def unpacked(structure: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """The state that was packed."""
    if isinstance(structure, list):
        return [unpacked(part, arrays) for part in structure]
    if not isinstance(structure, dict):
        return structure
    kind = next(iter(structure), "")
    if not kind.startswith("$"):
        return {key: unpacked(part, arrays) for key, part in structure.items()}
    value = structure[kind]
    match kind:
        case "$array":
            return _array(structure, arrays)
        case "$scalar":
            return _array(structure, arrays)[()]
        case "$tuple":
            return tuple(unpacked(part, arrays) for part in value)
        case "$dict":
            return {unpacked(key, arrays): unpacked(part, arrays) for key, part in value}
        case "$instance":
            if value not in _KINDS:
                raise NotPlain(f"a saved state has a {value} in it: import what declares it first")
            parts = unpacked(structure["parts"], arrays)
            return _KINDS[value](**parts) if is_dataclass(_KINDS[value]) else _KINDS[value](parts)
        case "$int":
            return int(value)
        case "$float":
            return float(value)
    raise NotPlain(f"a saved state has {kind!r} in it, which this version does not know; use a newer one")


def _packed(value: Any, path: str, arrays: Arrays) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_SAFE <= value <= _SAFE else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.ndarray) or _is_of_jax(value):
        return _stored("$array", np.asarray(value), path, arrays)
    if isinstance(value, np.generic):
        return _stored("$scalar", np.asarray(value), path, arrays)
    if kind is list or kind is tuple:
        parts = [_packed(part, f"{path}/{index}", arrays) for index, part in enumerate(value)]
        return parts if kind is list else {"$tuple": parts}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _packed(part, f"{path}/{key}", arrays) for key, part in value.items()}
    if kind in _KINDS.values():
        parts = (
            {own.name: getattr(value, own.name) for own in fields(kind)}
            if is_dataclass(kind)
            else dict(value)
        )
        return {"$instance": _name(kind), "parts": _packed(parts, path, arrays)}
    if kind is dict:
        items = [
            [_packed(key, f"{path}/key {index}", arrays), _packed(part, f"{path}/{key}", arrays)]
            for index, (key, part) in enumerate(value.items())
        ]
        return {"$dict": items}
    where, what = path.lstrip("/") or "the state", f"{kind.__module__}.{kind.__qualname__}"
    raise NotPlain(
        f"{where} is a {what}, which cannot be saved; "
        f"give dicts, lists, tuples, numbers, strings, None and arrays of numbers"
    )


def _is_of_jax(value: Any) -> bool:
    """Whether it is an array of JAX, which it is not where that was never imported."""
    return "jax" in sys.modules and isinstance(value, sys.modules["jax"].Array)


def _stored(mark: str, array: np.ndarray[Any, Any], path: str, arrays: Arrays) -> dict[str, Any]:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise NotPlain(
            f"{path.lstrip('/')} is an array of {array.dtype}, which cannot be saved; give arrays of numbers"
        )
    name = base = path.strip("/") or "state"
    number = 1
    while name in arrays:
        number += 1
        name = f"{base} {number}"
    if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8 and array.dtype.isnative:
        arrays[name] = np.asarray(array, order="C")
        return {mark: name}
    arrays[name] = np.frombuffer(array.tobytes(), np.uint8)  # of a type that safetensors does not know
    return {mark: name, "dtype": _described(array.dtype), "shape": list(array.shape)}


def _described(dtype: np.dtype[Any]) -> str:
    """`<c8`, or the name of a type that numpy itself does not know, as `bfloat16`."""
    return dtype.name if dtype.kind == "V" else dtype.str


def _array(structure: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    array = arrays[next(iter(structure.values()))]
    if "dtype" not in structure:
        return array
    return np.frombuffer(array.tobytes(), np.dtype(structure["dtype"])).reshape(structure["shape"])
