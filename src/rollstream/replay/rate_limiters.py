"""Rate limiters for tables, under the names they have in Reverb (Cassirer et al., 2021, arXiv:2102.04736)."""

from __future__ import annotations

import math
import warnings

from rollstream.rate_limiter import RateLimiter
from rollstream.replay.errors import ReplayError


def MinSize(min_size: int) -> RateLimiter:  # noqa: N802
    """Allow sampling once the table has `min_size` items; limit nothing else."""
    return RateLimiter(1.0, min_size, -math.inf, math.inf)


def SampleToInsertRatio(  # noqa: N802
    samples_per_insert: float, min_size: int, error_buffer: float | tuple[float, float]
) -> RateLimiter:
    """Keep the ratio of samples to inserts near `samples_per_insert`, once the table has `min_size` items.

    >>> SampleToInsertRatio(4, min_size=100, error_buffer=50)
    RateLimiter(4 samples per insert, at least 100 items, inserts * 4 - samples within 350 to 450)

    Args:
        samples_per_insert: Average number of samples per item.
        min_size: Number of items at which sampling starts.
        error_buffer: How far `inserts * samples_per_insert - samples` may deviate from its value when
            sampling starts, or the pair of its minimum and maximum.
    """
    start = samples_per_insert * min_size
    bounds = error_buffer if isinstance(error_buffer, tuple) else (start - error_buffer, start + error_buffer)
    limiter = RateLimiter(samples_per_insert, min_size, *bounds)
    lower, upper = bounds
    margin = max(1.0, samples_per_insert)
    if upper - lower < 2 * margin:
        raise ReplayError(
            f"the range {lower:g} to {upper:g} is too narrow for {samples_per_insert:g} samples per insert: "
            f"inserts and samples would block each other; set error_buffer to at least {margin:g}"
        )
    if lower > start:
        raise ReplayError(
            f"the lower bound {lower:g} blocks sampling when the table has {min_size} items; "
            f"set it to at most min_size * samples_per_insert = {start:g}"
        )
    if upper < start:
        warnings.warn(
            f"the upper bound {upper:g} blocks inserts before the table has {min_size} items, and then "
            f"inserts and samples may block each other; set it to at least "
            f"min_size * samples_per_insert = {start:g}",
            stacklevel=2,
        )
    return limiter


def Queue(size: int) -> RateLimiter:  # noqa: N802
    """Allow at most `size` items that have not been sampled.

    For a table with `Fifo()` as sampler and remover and `max_times_sampled=1`.
    """
    return RateLimiter(1.0, 1, 0.0, float(size))


def Stack(size: int) -> RateLimiter:  # noqa: N802
    """Allow at most `size` items that have not been sampled.

    For a table with `Lifo()` as sampler and remover and `max_times_sampled=1`.
    """
    return RateLimiter(1.0, 1, 0.0, float(size))
