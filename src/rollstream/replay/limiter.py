"""How many samples there may be for so many inserts: three counts and two inequalities, as in Reverb.

Cassirer et al., 2021, "Reverb: A Framework For Experience Replay", arXiv:2102.04736.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from rollstream.replay.errors import ReplayError


class RateLimiter:
    r"""Admits inserts and samples by the counts so far: I inserts, S samples and D deletes.

    - n samples may be drawn if $I - D \ge$ `min_size` and $I r - S - n \ge$ `min_diff`;
    - n items may be inserted if $I + n - D \le$ `min_size` or $(I + n) r - S \le$ `max_diff`.

    I - D is the size of the table, which may fall under `min_size` again.

    >>> limiter = RateLimiter(samples_per_insert=2, min_size=3, min_diff=2, max_diff=10)
    >>> limiter.may_insert(3), limiter.may_sample(1)
    (True, False)
    >>> limiter.inserts += 3
    >>> limiter.may_sample(4), limiter.may_sample(5)
    (True, False)

    Args:
        samples_per_insert: r, how often an item is sampled on average.
        min_size: of a table that may be sampled from, at least 1.
        min_diff: how small I*r - S may become by sampling.
        max_diff: how large I*r - S may become by inserting.
    """

    def __init__(self, samples_per_insert: float, min_size: int, min_diff: float, max_diff: float):
        if samples_per_insert <= 0:
            raise ReplayError(f"samples_per_insert is {samples_per_insert:g} and has to be above 0")
        if min_size < 1:
            raise ReplayError(f"min_size is {min_size} and has to be at least 1: there has to be an item")
        self.samples_per_insert = samples_per_insert
        self.min_size = min_size
        self.min_diff = min_diff
        self.max_diff = max_diff
        self.inserts = 0
        self.samples = 0
        self.deletes = 0

    def may_insert(self, count: int = 1) -> bool:
        """Whether so many items may be inserted now."""
        inserts = self.inserts + count
        if inserts - self.deletes <= self.min_size:
            return True
        return inserts * self.samples_per_insert - self.samples <= self.max_diff

    def may_sample(self, count: int = 1) -> bool:
        """Whether so many items may be sampled now."""
        if self.inserts - self.deletes < self.min_size:
            return False
        return self.inserts * self.samples_per_insert - self.samples - count >= self.min_diff

    def __repr__(self) -> str:
        least = f"at least {self.min_size} item{'s' * (self.min_size > 1)}"
        if self.min_diff == -math.inf and self.max_diff == math.inf:
            return f"RateLimiter({least})"
        return (
            f"RateLimiter({self.samples_per_insert:g} samples an insert, {least}, "
            f"inserts * {self.samples_per_insert:g} - samples within {self.min_diff:g} to {self.max_diff:g})"
        )

    def counts(self) -> str:
        """The counts in words, for those who are refused."""
        return f"{self.inserts} inserts, {self.samples} samples and {self.deletes} deletes so far"

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"inserts": self.inserts, "samples": self.samples, "deletes": self.deletes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these counts."""
        self.inserts, self.samples = int(state["inserts"]), int(state["samples"])
        self.deletes = int(state["deletes"])


def MinSize(min_size: int) -> RateLimiter:  # noqa: N802
    """Sampling begins when there are so many items; nothing else is limited."""
    return RateLimiter(1.0, min_size, -math.inf, math.inf)


def SampleToInsertRatio(  # noqa: N802
    samples_per_insert: float, min_size: int, buffer: float | tuple[float, float]
) -> RateLimiter:
    """Keeps samples and inserts at a ratio, once there are `min_size` items.

    `buffer` is by how much I*r - S may differ from where it is when sampling begins, `min_size * r`, or the
    pair of its least and largest value itself.

    >>> SampleToInsertRatio(4, min_size=100, buffer=50)
    RateLimiter(4 samples an insert, at least 100 items, inserts * 4 - samples within 350 to 450)
    """
    start = samples_per_insert * min_size
    pair = buffer if isinstance(buffer, tuple) else (start - buffer, start + buffer)
    limiter = RateLimiter(samples_per_insert, min_size, *pair)
    least, largest = pair
    if largest - least < 2 * max(1.0, samples_per_insert):
        raise ReplayError(
            f"the range from {least:g} to {largest:g} is too narrow for {samples_per_insert:g} samples an "
            f"insert: single inserts or samples would be blocked for good; give a buffer of at least "
            f"{max(1.0, samples_per_insert):g}"
        )
    if least > start:
        raise ReplayError(
            f"with at least {least:g} for inserts * {samples_per_insert:g} - samples nothing could be "
            f"sampled when there are {min_size} items, where it is {start:g}; give a lower limit of at most "
            f"that"
        )
    if largest < start:
        warnings.warn(
            f"inserts stop at {largest:g} for inserts * {samples_per_insert:g} - samples, before there are "
            f"{min_size} items: if nobody samples at that moment, inserts and samples wait for each other",
            stacklevel=2,
        )
    return limiter


def Queue(size: int) -> RateLimiter:  # noqa: N802
    """At most `size` items wait to be sampled, each once.

    For a table with `Fifo()` as sampler and as remover and `max_times_sampled=1`.
    """
    return RateLimiter(1.0, 1, 0.0, float(size))


def Stack(size: int) -> RateLimiter:  # noqa: N802
    """At most `size` items wait to be sampled, each once.

    For a table with `Lifo()` as sampler and as remover and `max_times_sampled=1`.
    """
    return RateLimiter(1.0, 1, 0.0, float(size))
