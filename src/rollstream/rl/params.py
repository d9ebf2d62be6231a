"""Weights: the arrays of an Equinox module, and other arrays, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, TypeAlias

import equinox as eqx
import jax
import numpy as np

Weights: TypeAlias = dict[str, Any]
"""Arrays by name. Workers receive and checkpoints save all of them: parameters, running statistics,
epsilon."""
TRAINABLE_PREFIX = "network"
"""Names of parameters start with it; only these have gradients."""
_SEED_STREAM = (0, 0, 3)
"""NumPy ignores trailing zeros of a seed sequence, so every use of a seed ends with a number of its own."""


def trainable(weights: Weights) -> Weights:
    """The parameters among weights: what gradients change."""
    return {name: value for name, value in weights.items() if name.startswith(TRAINABLE_PREFIX)}


class ModuleParams:
    """Converts between Equinox modules of one structure and their arrays by name.

    Args:
        make: Creates the module with random initial parameters.
        prefix: Prefix of the names.
    """

    def __init__(self, make: Callable[[np.random.Generator], Any], prefix: str = TRAINABLE_PREFIX):
        self._make = make
        arrays, self._static = eqx.partition(make(np.random.default_rng(0)), _is_array)
        named, self._structure = jax.tree_util.tree_flatten_with_path(arrays)
        self.names = [prefix + jax.tree_util.keystr(path) for path, _ in named]

    def init(self, seed: int) -> Weights:
        """Random initial parameters."""
        random = np.random.default_rng([seed, *_SEED_STREAM])
        arrays = jax.tree.leaves(eqx.filter(self._make(random), _is_array))
        return dict(zip(self.names, arrays, strict=True))

    def module(self, weights: Weights) -> Any:
        """The module with these parameters."""
        arrays = jax.tree.unflatten(self._structure, [weights[name] for name in self.names])
        return eqx.combine(arrays, self._static)

    def numpy_module(self, weights: Weights, rows: int) -> Any:
        """The module with NumPy arrays, for that many rows at once.

        For several rows the transpose of a matrix is contiguous, which is faster. One row gains nothing, and
        its weights may be used only once: they are not copied. Looking up an attribute of an Equinox module
        takes longer than a small layer (60 of 100 us per step), so the result consists of plain objects.
        """
        convert = np.asfortranarray if rows > 1 else np.asarray
        return _as_plain_objects(self.module({name: convert(weights[name]) for name in self.names}))


def _as_plain_objects(value: Any) -> Any:
    """A module and the modules in it as objects with the same methods and attributes."""
    if isinstance(value, eqx.Module):
        plain = object.__new__(_plain_class(type(value)))
        vars(plain).update({name: _as_plain_objects(own) for name, own in vars(value).items()})
        return plain
    if isinstance(value, (list, tuple)):
        return type(value)(_as_plain_objects(own) for own in value)
    return value


@cache
def _plain_class(kind: type[eqx.Module]) -> type:
    """A class with the methods and properties of an Equinox module."""
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(eqx.Module)]):
        kept = (FunctionType, property)
        methods |= {name: own for name, own in vars(base).items() if isinstance(own, kept)}
    return type(kind.__name__, (), {name: own for name, own in methods.items() if name != "__init__"})


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array))
