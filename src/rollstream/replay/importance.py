"""Weights that undo the bias of prioritised sampling."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def importance_weights(probabilities: Array, size: Array | int, beta: float) -> Array:
    r"""Importance weights of a prioritised sample (Schaul et al., 2016, arXiv:1511.05952).

    $$w_i = (N p_i)^{-\beta} / \max_j w_j$$

    The largest is that of the batch. Of items from several tables, `size` is that of all together, and a
    probability is that of the table times that within it. With tables drawn in proportion to `Table.total`
    these are the probabilities and weights one large table would give.

    >>> importance_weights(np.array([0.5, 0.25, 0.25]), 3, beta=1.0)
    array([0.5, 1. , 1. ])

    Args:
        probabilities: with which each item was drawn, above 0.
        size: N, how many items there were to draw from.
        beta: 0 for no correction, 1 for all of it.
    """
    weights = np.power(np.multiply(probabilities, size), -beta)
    return weights / weights.max()
