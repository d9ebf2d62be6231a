"""Initialization of networks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator

Array = Any


def orthogonal(shape: tuple[int, ...], gain: float, random: Generator) -> Array:
    """Orthogonal initialization (Saxe et al., 2014, arXiv:1312.6120)."""
    rows, columns = shape[0], int(np.prod(shape[1:]))
    q = orthonormal_columns(random.standard_normal((max(rows, columns), min(rows, columns))))
    return (gain * (q if rows >= columns else q.T)).reshape(shape).astype(np.float32)


def orthonormal_columns(matrix: Array) -> Array:
    """The Q of a QR decomposition whose R has a positive diagonal, so that Q is uniform over rotations.

    By Cholesky, in three large steps. The hundreds of small ones of `np.linalg.qr` wait for each other's
    threads, which on a busy machine takes half a minute for one layer.
    """
    try:
        return np.linalg.solve(np.linalg.cholesky(matrix.T @ matrix), matrix.T).T
    except np.linalg.LinAlgError:  # nearly singular, once in many thousand square matrices
        q, r = np.linalg.qr(matrix)
        return np.where(np.diag(r) < 0, -q, q)
