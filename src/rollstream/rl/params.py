"""The arrays of an Equinox module by name, and the module again of such arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import numpy as np

Weights: TypeAlias = dict[str, Any]
"""Arrays by name: they travel, are saved and are told apart by it."""
TRAINED = "network"
"""How the names of weights begin that gradients change; the others are statistics."""


_OWN_STREAM = (0, 0, 3)
"""Seeds that differ in trailing zeros only are alike to numpy: every use has a last number of its own."""


class Named:
    """Makes modules of one structure; the names of their arrays begin with a prefix."""

    def __init__(self, make: Callable[[np.random.Generator], Any], prefix: str = TRAINED):
        self._make = make
        arrays, self._static = eqx.partition(make(np.random.default_rng(0)), _is_array)
        named, self._structure = jax.tree_util.tree_flatten_with_path(arrays)
        self.names = [prefix + jax.tree_util.keystr(path) for path, _ in named]

    def init(self, seed: int) -> Weights:
        """Fresh weights."""
        random = np.random.default_rng([seed, *_OWN_STREAM])
        arrays = jax.tree.leaves(eqx.filter(self._make(random), _is_array))
        return dict(zip(self.names, arrays, strict=True))

    def module(self, weights: Weights) -> Any:
        """The module with these weights."""
        arrays = jax.tree.unflatten(self._structure, [weights[name] for name in self.names])
        return eqx.combine(arrays, self._static)

    def template(self) -> Any:
        """The module with the names where its arrays would be."""
        return self.module({name: name for name in self.names})


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array))
