"""Arrays packed into one buffer of bytes, so that they reach a device in one transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
_ALIGNMENT = 8


class _Part(NamedTuple):
    name: str
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class TransferBuffer:
    """Packs arrays of fixed shapes and dtypes on the host, and unpacks them inside a jitted function.

    >>> packing = TransferBuffer({"reward": ((2,), np.float32), "done": ((2,), bool)})
    >>> buffer = packing.pack({"reward": np.array([1.0, 2.0]), "done": np.array([False, True])})
    >>> {name: array.tolist() for name, array in packing.unpack(buffer).items()}
    {'reward': [1.0, 2.0], 'done': [False, True]}

    Args:
        specs: Shape and dtype of each array by name. Dtypes are of at most 32 bits, as JAX's are.
    """

    def __init__(self, specs: Mapping[str, tuple[tuple[int, ...], Any]]):
        self._parts: list[_Part] = []
        self.nbytes = 0
        for name, (shape, dtype) in specs.items():
            part = _Part(name, self.nbytes, shape, np.dtype(dtype))
            self._parts.append(part)
            self.nbytes = rounded_up(part.stop, _ALIGNMENT)

    def pack(self, arrays: Mapping[str, Array]) -> np.ndarray[Any, Any]:
        """A new buffer with these arrays, converted to the dtypes of the specs."""
        buffer = np.empty(self.nbytes, np.uint8)
        for part in self._parts:
            buffer[part.start : part.stop].view(part.dtype).reshape(part.shape)[...] = arrays[part.name]
        return buffer

    def unpack(self, buffer: Array) -> dict[str, Array]:
        """The arrays in a buffer."""
        return {part.name: _unpacked(buffer[part.start : part.stop], part) for part in self._parts}


def rounded_up(count: int, multiple: int) -> int:
    """The least multiple that is no smaller than a count.

    >>> rounded_up(9, 8), rounded_up(16, 8)
    (16, 16)
    """
    return -(-count // multiple) * multiple


def _unpacked(own: Array, part: _Part) -> Array:
    if part.dtype == np.bool_:
        return own.reshape(part.shape) != 0
    if part.dtype.itemsize > 1:
        own = own.reshape(-1, part.dtype.itemsize)
    return jax.lax.bitcast_convert_type(jnp.asarray(own), part.dtype).reshape(part.shape)
