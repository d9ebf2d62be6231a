"""Trees of arrays, packed into few arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollstream.engine import RollstreamError
from rollstream.rl.jit import jit
from rollstream.rl.params import Weights

Array = Any
LARGE = 1 << 16
"""Bytes from which on an array is not packed, on a CPU: copying it would cost more than is saved."""


class PackedTree:
    """Packs trees of one structure into an array per dtype, and their large leaves, inside a jitted function.

    A learner of SAC has 50 arrays. On a CPU, each result of a jitted function takes 3 us, so a packed update
    of DQN takes 45 us instead of 66, and one of SAC 165 us less. On one H200, arguments and results take 5 us
    each.

    >>> tree = {"a": np.zeros(2, np.float32), "b": np.int32(3), "c": np.ones((1, 2), np.float32)}
    >>> packing = PackedTree(tree)
    >>> [array.tolist() for array in packing.pack(tree)]
    [[0.0, 0.0, 1.0, 1.0], [3]]
    >>> packing.unpack(packing.pack(tree))["c"].tolist()
    [[1.0, 1.0]]

    Args:
        tree: A tree of that structure.
        large: Bytes from which on a leaf is not packed.
    """

    def __init__(self, tree: Any, large: float = math.inf):
        leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [np.shape(leaf) for leaf in leaves]
        self._dtypes = [jnp.result_type(leaf) for leaf in leaves]
        self._small: dict[Any, list[int]] = {}
        """Indices of the leaves of each dtype that are packed."""
        self._large: list[int] = []
        for index, dtype in enumerate(self._dtypes):
            is_large = math.prod(self._shapes[index]) * dtype.itemsize >= large
            (self._large if is_large else self._small.setdefault(dtype, [])).append(index)
        self.pack_on_device = jit(lambda tree: copied(self.pack(tree)))
        self.unpack_on_device = jit(lambda arrays: copied(self.unpack(arrays)))

    def pack(self, tree: Any) -> tuple[Array, ...]:
        """An array per dtype with all leaves of the tree that are not large, and the large ones."""
        self._require_same(tree)
        leaves = jax.tree.leaves(tree)
        packed = (
            jnp.concatenate([jnp.ravel(leaves[index]) for index in indices])
            for indices in self._small.values()
        )
        return (*packed, *(leaves[index] for index in self._large))

    def _require_same(self, tree: Any) -> None:
        named, structure = jax.tree_util.tree_flatten_with_path(tree)
        if structure != self._structure:
            raise RollstreamError(
                f"an update has to return weights and a state of the same structure as it was given, which "
                f"was {self._structure}, and not {structure}"
            )
        expected = zip(named, self._shapes, self._dtypes, strict=True)
        for (path, leaf), shape, dtype in expected:
            found, kind = np.shape(leaf), jnp.result_type(leaf)
            if (found, kind) != (shape, dtype):
                raise RollstreamError(
                    f"an update has to return arrays of the same shape and dtype as it was given: "
                    f"{jax.tree_util.keystr(path)} was {dtype}{list(shape)} and is {kind}{list(found)} now"
                )

    def unpack(self, arrays: Sequence[Array]) -> Any:
        """The tree; of NumPy arrays, leaves are views."""
        leaves: list[Any] = [None] * len(self._shapes)
        packed = iter(arrays)
        for indices in self._small.values():
            array, start = next(packed), 0
            for index in indices:
                shape = self._shapes[index]
                stop = start + math.prod(shape)
                leaves[index] = array[start:stop].reshape(shape)
                start = stop
        for index in self._large:
            leaves[index] = next(packed)
        return jax.tree.unflatten(self._structure, leaves)


class PackedTrees:
    """Packs several trees, each into arrays of its own.

    Args:
        trees: Trees of the structures that are packed.
        large: Bytes from which on a leaf is not packed.
    """

    def __init__(self, *trees: Any, large: float = math.inf):
        self.parts = tuple(PackedTree(tree, large) for tree in trees)
        self.pack_on_device = jit(lambda trees: copied(self.pack(trees)))
        self.unpack_on_device = jit(lambda packed: copied(self.unpack(packed)))

    def pack(self, trees: Sequence[Any]) -> tuple[tuple[Array, ...], ...]:
        """The arrays of each tree."""
        return tuple(part.pack(tree) for part, tree in zip(self.parts, trees, strict=True))

    def unpack(self, packed: Sequence[Sequence[Array]]) -> tuple[Any, ...]:
        """The trees."""
        return tuple(part.unpack(arrays) for part, arrays in zip(self.parts, packed, strict=True))


class PublishedWeights:
    """A version of the weights, which a learner has packed, for workers in its process.

    They are unpacked, or read, when somebody acts with them.

    Args:
        packing: How they are packed.
        packed: The packed arrays, in the memory of the host or of the device.
    """

    def __init__(self, packing: PackedTree, packed: Sequence[Array]):
        self._packing = packing
        self._packed = packed
        self._on_host: Weights | None = None
        self._on_device: dict[Any, Weights] = {}

    def on_host(self) -> Weights:
        """As NumPy arrays; waits for the update that makes them."""
        weights = self._on_host
        if weights is None:
            self._on_host = weights = self._packing.unpack([np.asarray(array) for array in self._packed])
        return weights

    def on_device(self, device: Any) -> Weights:
        """As arrays of a device."""
        if device not in self._on_device:
            packed = jax.device_put(self._packed, device)
            self._on_device[device] = self._packing.unpack_on_device(packed)
        return self._on_device[device]


def copied(tree: Any) -> Any:
    """A copy of each array, inside a jitted function: a result that shares memory with nothing else."""
    return jax.tree.map(jnp.copy, tree)
