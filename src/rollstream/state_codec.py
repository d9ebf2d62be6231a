"""Encodes nested state as JSON and named arrays, and decodes it bit for bit; no pickle.

JSON holds the structure. Values that JSON lacks become an object whose only key begins with `$`:
`{"$array": name}` refers to an array that is stored separately under that name.

>>> structure, arrays = encode_state({"params": np.ones(2), "counts": (1, 2.5)})
>>> structure
{'params': {'$array': 'params'}, 'counts': {'$tuple': [1, 2.5]}}
>>> decode_state(structure, arrays)
{'params': array([1., 1.]), 'counts': (1, 2.5)}

Classes of plain data are supported once they are registered: see `serializable`.
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
"""The largest integer that every JSON reader represents exactly; larger ones are stored as strings."""


T = TypeVar("T")
_KINDS: dict[str, type] = {}


class StateEncodingError(RollstreamError):
    """A state contains a value that cannot be saved."""


def serializable(kind: type[T]) -> type[T]:
    """Register a dataclass, or a subclass of dict, whose fields or items can be saved.

    >>> from dataclasses import dataclass
    >>> @serializable
    ... @dataclass
    ... class Point:
    ...     x: float
    ...     y: float
    >>> decode_state(*encode_state([Point(1.0, 2.0)]))
    [Point(x=1.0, y=2.0)]
    """
    _KINDS[_name(kind)] = kind
    return kind


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def encode_state(state: Any) -> tuple[Any, Arrays]:
    """Return the JSON structure of a state and its arrays by name."""
    arrays: Arrays = {}
    return _encode(state, "", arrays), arrays


def decode_state(structure: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Rebuild a state from its structure and arrays."""
    if isinstance(structure, list):
        return [decode_state(part, arrays) for part in structure]
    if not isinstance(structure, dict):
        return structure
    kind = next(iter(structure), "")
    if not kind.startswith("$"):
        return {key: decode_state(part, arrays) for key, part in structure.items()}
    value = structure[kind]
    match kind:
        case "$array":
            return _load_array(structure, arrays)
        case "$scalar":
            return _load_array(structure, arrays)[()]
        case "$tuple":
            return tuple(decode_state(part, arrays) for part in value)
        case "$dict":
            return {decode_state(key, arrays): decode_state(part, arrays) for key, part in value}
        case "$instance":
            if value not in _KINDS:
                raise StateEncodingError(
                    f"a saved state contains a {value}: import the module that defines it first"
                )
            parts = decode_state(structure["parts"], arrays)
            return _KINDS[value](**parts) if is_dataclass(_KINDS[value]) else _KINDS[value](parts)
        case "$int":
            return int(value)
        case "$float":
            return float(value)
    raise StateEncodingError(f"a saved state contains {kind!r}, unknown to this version; use a newer one")


def _encode(value: Any, path: str, arrays: Arrays) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_SAFE <= value <= _SAFE else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.ndarray) or _is_jax_array(value):
        return _store("$array", np.asarray(value), path, arrays)
    if isinstance(value, np.generic):
        return _store("$scalar", np.asarray(value), path, arrays)
    if kind is list or kind is tuple:
        parts = [_encode(part, f"{path}/{index}", arrays) for index, part in enumerate(value)]
        return parts if kind is list else {"$tuple": parts}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(part, f"{path}/{key}", arrays) for key, part in value.items()}
    if kind in _KINDS.values():
        parts = (
            {field.name: getattr(value, field.name) for field in fields(kind)}
            if is_dataclass(kind)
            else dict(value)
        )
        return {"$instance": _name(kind), "parts": _encode(parts, path, arrays)}
    if kind is dict:
        items = [
            [_encode(key, f"{path}/key {index}", arrays), _encode(part, f"{path}/{key}", arrays)]
            for index, (key, part) in enumerate(value.items())
        ]
        return {"$dict": items}
    where, what = path.lstrip("/") or "the state", f"{kind.__module__}.{kind.__qualname__}"
    raise StateEncodingError(
        f"{where} is a {what}, which cannot be saved; "
        f"use dicts, lists, tuples, numbers, strings, None and numeric arrays"
    )


def _is_jax_array(value: Any) -> bool:
    """Check without importing JAX."""
    return "jax" in sys.modules and isinstance(value, sys.modules["jax"].Array)


def _store(mark: str, array: np.ndarray[Any, Any], path: str, arrays: Arrays) -> dict[str, Any]:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise StateEncodingError(
            f"{path.lstrip('/')} is an array of {array.dtype}, which cannot be saved; use numeric arrays"
        )
    name = base = path.strip("/") or "state"
    number = 1
    while name in arrays:
        number += 1
        name = f"{base} {number}"
    if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8 and array.dtype.isnative:
        arrays[name] = np.asarray(array, order="C")
        return {mark: name}
    arrays[name] = np.frombuffer(array.tobytes(), np.uint8)  # a dtype that safetensors lacks
    return {mark: name, "dtype": _dtype_name(array.dtype), "shape": list(array.shape)}


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """`<c8`, or the name of an extension dtype such as `bfloat16`."""
    return dtype.name if dtype.kind == "V" else dtype.str


def _load_array(
    structure: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    array = arrays[next(iter(structure.values()))]
    if "dtype" not in structure:
        return array
    return np.frombuffer(array.tobytes(), np.dtype(structure["dtype"])).reshape(structure["shape"])
