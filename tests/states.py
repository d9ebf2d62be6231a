"""Comparison of state dicts."""

from typing import Any

from rollstream.state_codec import encode_state


def same_state(one: Any, other: Any) -> bool:
    """Whether two states have the same structure, and arrays of the same dtypes and bytes."""
    (structure, arrays), (other_structure, other_arrays) = encode_state(one), encode_state(other)
    return structure == other_structure and all(
        array.dtype == other_arrays[name].dtype and array.tobytes() == other_arrays[name].tobytes()
        for name, array in arrays.items()
    )
