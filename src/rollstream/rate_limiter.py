"""The rate limiter of replay tables and flows: three counts and two inequalities, as in Reverb.

Cassirer et al., 2021, "Reverb: A Framework For Experience Replay", arXiv:2102.04736.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollstream.engine.errors import RollstreamError


class RateLimiter:
    r"""Allows inserts and samples depending on the counts so far: I inserts, S samples and D deletes.

    - n samples are allowed if $I - D \ge$ `min_size` and $I r - S - n \ge$ `min_diff`;
    - n inserts are allowed if $I + n - D \le$ `min_size` or $(I + n) r - S \le$ `max_diff`.

    I - D is the size of the table; it may fall below `min_size` again.

    >>> limiter = RateLimiter(samples_per_insert=2, min_size=3, min_diff=2, max_diff=10)
    >>> limiter.can_insert(3), limiter.can_sample(1)
    (True, False)
    >>> limiter.inserts += 3
    >>> limiter.can_sample(4), limiter.can_sample(5)
    (True, False)

    Args:
        samples_per_insert: r, the average number of samples per item.
        min_size: The table's size at which sampling may start, at least 1.
        min_diff: The lower bound of I*r - S when sampling.
        max_diff: The upper bound of I*r - S when inserting.
    """

    def __init__(self, samples_per_insert: float, min_size: int, min_diff: float, max_diff: float):
        if samples_per_insert <= 0:
            raise RollstreamError(f"samples_per_insert is {samples_per_insert:g} and must be positive")
        if min_size < 1:
            raise RollstreamError(f"min_size is {min_size} and must be at least 1")
        self.samples_per_insert = samples_per_insert
        self.min_size = min_size
        self.min_diff = min_diff
        self.max_diff = max_diff
        self.inserts = 0
        self.samples = 0
        self.deletes = 0

    def can_insert(self, count: int = 1) -> bool:
        """Whether `count` inserts are allowed now."""
        inserts = self.inserts + count
        if inserts - self.deletes <= self.min_size:
            return True
        return inserts * self.samples_per_insert - self.samples <= self.max_diff

    def can_sample(self, count: int = 1) -> bool:
        """Whether `count` samples are allowed now."""
        if self.inserts - self.deletes < self.min_size:
            return False
        return self.inserts * self.samples_per_insert - self.samples - count >= self.min_diff

    def __repr__(self) -> str:
        least = f"at least {self.min_size} item{'s' * (self.min_size > 1)}"
        if self.min_diff == -math.inf and self.max_diff == math.inf:
            return f"RateLimiter({least})"
        return (
            f"RateLimiter({self.samples_per_insert:g} samples per insert, {least}, "
            f"inserts * {self.samples_per_insert:g} - samples within {self.min_diff:g} to {self.max_diff:g})"
        )

    def counts(self) -> str:
        """The counts in words, for error messages."""
        return f"{self.inserts} inserts, {self.samples} samples and {self.deletes} deletes so far"

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"inserts": self.inserts, "samples": self.samples, "deletes": self.deletes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self.inserts, self.samples = int(state["inserts"]), int(state["samples"])
        self.deletes = int(state["deletes"])
