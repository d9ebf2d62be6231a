"""Batches: experience as columns `[T, B, ...]`, T steps of B environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from rollstream.engine import RollstreamError
from rollstream.state_codec import serializable

FIRST_STATE = "first_state"
"""Column of a recurrent policy's states before the first step: one row, `[1, B, ...]`."""


class BatchError(RollstreamError):
    """Columns or batches whose names or shapes do not match."""


class MissingColumn(KeyError):
    """A batch has no column of that name."""

    def __str__(self) -> str:
        return str(self.args[0])


class Columns(dict[str, Any]):
    """A dict of columns, and a JAX pytree; the error for a missing one names those there are."""

    def __missing__(self, name: str) -> Any:
        raise MissingColumn(f"there is no column {name!r}; there are {', '.join(map(str, self))}")


@serializable
class Batch(Columns):
    """A dict of columns, and a JAX pytree. A column may be a dict or tuple of arrays, as observations can be.

    Every row of a batch that a worker sends is a step that was taken: a plain mean over rows is right for
    every environment. Provenance (the worker, the version of its weights) travels beside the batch through a
    flow.

    Batches of a recurrent policy are sequences, and have three more columns: `first_state`, its state before
    the first step, with one row; `episode_start`, where the state is reset before a step; and, with vector
    environments that reset in extra steps, `mask`, which is False there.

    >>> batch = Batch(reward=np.ones((4, 2)), observation={"position": np.zeros((4, 2, 3))})
    >>> batch.shape, batch.steps
    ((4, 2), 8)
    >>> Batch.concatenate([batch, batch]).shape
    (4, 4)
    """

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, B)`: steps and environments."""
        leaves = jax.tree.leaves(self.per_step())
        if not leaves:
            raise BatchError("a batch without columns has no shape")
        shape = np.shape(leaves[0])
        if len(shape) < 2:
            raise BatchError(
                f"columns of a batch have shape [T, B, ...]; the first one here has {list(shape)}"
            )
        return shape[0], shape[1]

    @property
    def steps(self) -> int:
        """Number of environment steps, T * B."""
        length, width = self.shape
        return length * width

    def validated(self) -> Batch:
        """The batch itself; raise `BatchError` unless all columns start with the same `[T, B]`."""
        shapes = {
            jax.tree_util.keystr(path): np.shape(leaf)[:2]
            for path, leaf in jax.tree.leaves_with_path(self.per_step())
        }
        if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise BatchError(f"all columns of a batch start with the same [T, B]; these do not: {listed}")
        for leaf in jax.tree.leaves(self.get(FIRST_STATE)):
            if np.shape(leaf)[:2] != (1, self.shape[1]):
                raise BatchError(
                    f"{FIRST_STATE} starts with [1, B], and B is {self.shape[1]} here; it has "
                    f"{list(np.shape(leaf))}"
                )
        return self

    def per_step(self) -> Batch:
        """The columns with a row for each step."""
        return Batch({name: column for name, column in self.items() if name != FIRST_STATE})

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """Apply a function to every array."""
        return Batch(jax.tree.map(function, dict(self)))

    def flattened(self) -> Columns:
        """Columns `[T * B, ...]`, of steps without their order; views where possible."""
        return Columns(jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), self.per_step()))

    def select(self, names: Sequence[str]) -> Batch:
        """A batch of some of the columns."""
        missing = [name for name in names if name not in self]
        if missing:
            raise BatchError(f"there is no column {', '.join(missing)}; there are {', '.join(self)}")
        return Batch({name: self[name] for name in names})

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """Join batches of the same length along the environment axis. A single batch is returned as it is.

        Columns on the device stay there.
        """
        if not batches:
            raise BatchError("there are no batches to concatenate")
        if len(batches) == 1:
            return batches[0]
        first = batches[0]
        for other in batches[1:]:
            if other.keys() != first.keys():
                odd = ", ".join(sorted(other.keys() ^ first.keys()))
                raise BatchError(
                    f"batches with different columns cannot be concatenated: {odd} is only in some"
                )
            if other.shape[0] != first.shape[0]:
                raise BatchError(
                    f"batches of {first.shape[0]} and {other.shape[0]} steps cannot be concatenated"
                )
        return Batch(jax.tree.map(side_by_side, *(dict(batch) for batch in batches)))


def side_by_side(*parts: Any) -> Any:
    """Parts `[T, B, ...]` of a column, joined along the environment axis; those of JAX where they are."""
    xp = jnp if any(isinstance(part, jax.Array) for part in parts) else np
    return xp.concatenate(parts, axis=1)


def _children(columns: Columns) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(columns))
    return [(DictKey(name), columns[name]) for name in names], names


def _rebuild(kind: type[Columns], names: tuple[str, ...], children: Iterable[Any]) -> Columns:
    return kind(zip(names, children, strict=True))


for _kind in (Columns, Batch):
    jax.tree_util.register_pytree_with_keys(_kind, _children, partial(_rebuild, _kind))
