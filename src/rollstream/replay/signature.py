"""Signatures: the shape and dtype of every column of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

import numpy as np

from rollstream.replay.errors import SignatureError


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of a column for a single step."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Bytes per step."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype)}{list(self.shape)}"


Signature: TypeAlias = Mapping[str, ArraySpec]
_UNQUOTED = " !$&'()*+,:;=?@[]"
"""Characters kept as they are in path components; `/` separates components and `#` marks a tuple index."""


def flatten_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten columns that are dicts or tuples of arrays; keys become paths.

    >>> list(flatten_columns({"observation": {"image": [0.0], "goal": ([1], [2])}, "reward": [0.0]}))
    ['observation/image', 'observation/goal/#0', 'observation/goal/#1', 'reward']
    """
    flat: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, Mapping):
            parts = {f"{name}/{quote(key, safe=_UNQUOTED)}": part for key, part in value.items()}
            flat.update(flatten_columns(parts))
        elif isinstance(value, tuple):
            flat.update(flatten_columns({f"{name}/#{index}": part for index, part in enumerate(value)}))
        else:
            flat[name] = value
    return flat


def unflatten_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flatten_columns`.

    >>> unflatten_columns({"observation/image": 0, "observation/goal/#0": 1, "reward": 2})
    {'observation': {'image': 0, 'goal': (1,)}, 'reward': 2}
    """
    tree: dict[str, Any] = {}
    for path, value in columns.items():
        name, slash, rest = path.partition("/")
        if slash:
            tree.setdefault(name, {})[rest] = value
        else:
            tree[name] = value
    return {name: _unflatten(value) if isinstance(value, dict) else value for name, value in tree.items()}


def _unflatten(columns: dict[str, Any]) -> Any:
    tree = unflatten_columns(columns)
    if next(iter(tree)).startswith("#"):
        return tuple(tree.values())
    return {unquote(name): value for name, value in tree.items()}


def infer_signature(columns: Mapping[str, Any]) -> dict[str, ArraySpec]:
    """Infer the signature of time-major columns `[T, B, ...]`.

    >>> str(infer_signature({"reward": np.zeros((5, 2), np.float32)})["reward"])
    'float32[]'
    """
    arrays = {name: np.asarray(value) for name, value in flatten_columns(columns).items()}
    return {name: ArraySpec(array.shape[2:], array.dtype) for name, array in arrays.items()}


def check_columns(signature: Signature, columns: Mapping[str, Any], leading: tuple[int, ...]) -> None:
    """Raise `SignatureError` unless the columns match the signature, with these leading axes."""
    if columns.keys() != signature.keys():
        for name in signature:
            if name not in columns:
                raise SignatureError(f"column {name!r} is missing; got {', '.join(columns) or 'no columns'}")
        unknown = ", ".join(sorted(columns.keys() - signature.keys()))
        raise SignatureError(f"the table has no column {unknown}; its columns are {', '.join(signature)}")
    for name, spec in signature.items():
        value = columns[name]
        if value.shape != (*leading, *spec.shape) or value.dtype != spec.dtype:
            raise SignatureError(
                f"column {name!r} is {ArraySpec(value.shape, value.dtype)}; "
                f"expected {ArraySpec((*leading, *spec.shape), spec.dtype)}"
            )
