"""Size, memory and counts of a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableInfo:
    """Size, memory and counts of a table."""

    size: int
    """Number of items."""
    max_size: int
    episodes: int
    """Number of episodes with items."""
    rows: int
    """Number of steps stored, for items and for streams."""
    row_bytes: int
    """Memory of those steps."""
    index_bytes: int
    """Memory of everything else: links between steps, items, and selectors."""
    inserts: int
    samples: int
    deletes: int
    """Items removed, for any reason."""
    unique_samples: int
    """Items sampled at least once."""
    stale_updates: int
    """Priority updates for items that had already been removed."""
