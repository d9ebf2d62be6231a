"""Value rescaling (Pohlen et al., 2018, arXiv:1805.11593): Q values of large returns become small."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

Array = Any
EPSILON = 1e-3
"""Makes the function invertible, with a bounded slope."""


def rescale(value: Array) -> Array:
    r"""Rescaled values: $h(x) = \operatorname{sign}(x) (\sqrt{|x| + 1} - 1) + \epsilon x$.

    >>> rescale(jnp.array([0.0, 3.0, -99.0])).round(3).tolist()
    [0.0, 1.003000020980835, -9.098999977111816]
    """
    return jnp.sign(value) * (jnp.sqrt(jnp.abs(value) + 1) - 1) + EPSILON * value


def undo_rescaling(rescaled: Array) -> Array:
    """The inverse of `rescale`.

    Its usual form subtracts 1 from a square root that is close to 1, which in float32 costs four digits; this
    one divides by their sum instead.
    """
    larger = jnp.abs(rescaled) + 1 + EPSILON
    root = 2 * larger / (jnp.sqrt(1 + 4 * EPSILON * larger) + 1)
    return jnp.sign(rescaled) * (jnp.square(root) - 1)
