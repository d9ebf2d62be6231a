"""Comparison of state dicts."""

from typing import Any

from rollstream.state_codec import packed


def same_state(one: Any, other: Any) -> bool:
    """Whether two states have the same structure, and arrays of the same dtypes and bytes."""
    (structure, arrays), (other_structure, other_arrays) = packed(one), packed(other)
    return structure == other_structure and all(
        array.dtype == other_arrays[name].dtype and array.tobytes() == other_arrays[name].tobytes()
        for name, array in arrays.items()
    )
