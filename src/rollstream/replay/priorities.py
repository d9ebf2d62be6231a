"""Priorities: validation, and what keeps them positive."""

from __future__ import annotations

import numpy as np

from rollstream.replay.arrays import Array
from rollstream.replay.errors import ReplayError

PRIORITY_EPSILON = 1e-6
"""Added to priorities, so that every priority is positive."""


def largest_priority(priorities: Array) -> float:
    """Return the largest priority; raise unless all are finite and at least 0."""
    if not priorities.size:
        return 0.0
    largest = np.maximum.reduce(priorities, axis=None)
    if not (largest < np.inf and np.count_nonzero(priorities >= 0) == priorities.size):
        invalid = priorities[~((priorities >= 0) & (priorities < np.inf))]
        raise ReplayError(f"priorities must be finite and at least 0; got {listed(invalid)}")
    return float(largest)


def listed(values: Array) -> str:
    """The first few of some numbers, for error messages."""
    text = ", ".join(f"{value:g}" for value in values[:5])
    return f"{text}, ..." if len(values) > 5 else text
