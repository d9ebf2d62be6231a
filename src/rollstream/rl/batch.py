"""Experience as named columns, time-major: every array is `[T, B, ...]`, T steps of B environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey

from rollstream.engine import RollstreamError
from rollstream.state_codec import serializable


class BatchError(RollstreamError):
    """Columns that do not fit together."""


@serializable
class Batch(dict[str, Any]):
    """Columns by name. One may itself be a dict or tuple of arrays, as observations of such spaces are.

    A batch is a dict in every way, and JAX treats it like one.
    Its provenance (who sampled it, under which version of the weights) travels beside it through a flow.

    >>> batch = Batch(reward=np.ones((4, 2)), observation={"position": np.zeros((4, 2, 3))})
    >>> batch.shape, batch.steps
    ((4, 2), 8)
    >>> Batch.concatenate([batch, batch]).shape
    (4, 4)
    """

    @property
    def shape(self) -> tuple[int, int]:
        """How many steps, of how many environments side by side."""
        leaves = jax.tree.leaves(dict(self))
        if not leaves:
            raise BatchError("a batch without columns has no shape")
        shape = np.shape(leaves[0])
        if len(shape) < 2:
            raise BatchError(f"columns of a batch are [T, B, ...], and the first of these is {list(shape)}")
        return shape[0], shape[1]

    @property
    def steps(self) -> int:
        """How many environment steps."""
        length, width = self.shape
        return length * width

    def validated(self) -> Batch:
        """The batch itself, if every column has the same leading shape `[T, B]`."""
        shapes = {
            jax.tree_util.keystr(path): np.shape(leaf)[:2]
            for path, leaf in jax.tree.leaves_with_path(dict(self))
        }
        if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise BatchError(f"every column of a batch begins with the same [T, B]; these do not: {listed}")
        return self

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """Every array replaced by what the function makes of it."""
        return Batch(jax.tree.map(function, dict(self)))

    def flattened(self) -> dict[str, Any]:
        """Columns with time and environments as one axis, `[T * B, ...]`, not copied where possible."""
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), dict(self))

    def only(self, names: Sequence[str]) -> Batch:
        """Some of the columns."""
        missing = [name for name in names if name not in self]
        if missing:
            raise BatchError(f"there is no column {', '.join(missing)}; there are {', '.join(self)}")
        return Batch({name: self[name] for name in names})

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """Batches of the same length, environments side by side. A single one is given back as it is."""
        if not batches:
            raise BatchError("there are no batches to join")
        if len(batches) == 1:
            return batches[0]
        first = batches[0]
        for other in batches[1:]:
            if other.keys() != first.keys():
                odd = ", ".join(sorted(other.keys() ^ first.keys()))
                raise BatchError(f"batches with different columns cannot be joined: {odd} is only in some")
            if other.shape[0] != first.shape[0]:
                raise BatchError(
                    f"batches of {first.shape[0]} and {other.shape[0]} steps cannot be joined side by side"
                )
        return Batch(jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *(dict(b) for b in batches)))


def _children(batch: Batch) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(batch))
    return [(DictKey(name), batch[name]) for name in names], names


def _rebuild(names: tuple[str, ...], children: Iterable[Any]) -> Batch:
    return Batch(zip(names, children, strict=True))


jax.tree_util.register_pytree_with_keys(Batch, _children, _rebuild)
