"""The rate limiters of Reverb (Cassirer et al., 2021, arXiv:2102.04736), by the names they have there."""

from __future__ import annotations

import math
import warnings

from rollstream.rate_limiter import RateLimiter
from rollstream.replay.errors import ReplayError


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
    RateLimiter(4 samples per insert, at least 100 items, inserts * 4 - samples within 350 to 450)
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
