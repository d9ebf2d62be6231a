"""Weights: the arrays of an Equinox module, and other arrays, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax
import numpy as np

from rollstream.engine import RollstreamError

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


def require_same_shapes(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless arrays have the names and shapes of those of a network."""
    shapes, own = ({name: np.shape(value) for name, value in each.items()} for each in (found, expected))
    bad = sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name))
    if bad:
        raise RollstreamError(
            f"these weights are of another network: {bad[0]} is {shapes.get(bad[0], 'missing')}, "
            f"not {own.get(bad[0], 'expected at all')}; what shapes a network, such as hidden or memory, "
            f"cannot be changed"
        )


def host_arrays(weights: Weights) -> Weights:
    """Weights as NumPy arrays."""
    return {name: np.asarray(value) for name, value in weights.items()}


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

    def names_module(self) -> Any:
        """The module with the names of its arrays instead of the arrays."""
        return self.module({name: name for name in self.names})


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array))
