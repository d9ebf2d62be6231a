"""A sum tree on the device: prioritized sampling and its updates as pure functions in JAX.

The leaves are scaled priorities: priorities to the power of alpha. A node of a level above holds the sum of
32 nodes below it, as in the sum tree of `rollstream.replay`. A draw takes one random number per level, so
that float32 only has to tell 32 children apart, however many leaves there are. Sums are always computed from
the children: they do not drift.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax.numpy as jnp

from rollstream.rl.transfer_buffer import rounded_up

Array = Any
Levels: TypeAlias = tuple[Array, ...]
"""Sums per level, from the leaves up; the top level has 32."""
WIDTH = 32


def create_levels(count: int) -> Levels:
    """A tree of `count` leaves of 0."""
    levels = [jnp.zeros(rounded_up(count, WIDTH), jnp.float32)]
    while levels[-1].size > WIDTH:
        levels.append(jnp.zeros(rounded_up(levels[-1].size // WIDTH, WIDTH), jnp.float32))
    return tuple(levels)


def num_levels(count: int) -> int:
    """Number of levels of a tree of `count` leaves: random numbers per draw.

    >>> num_levels(32), num_levels(33), num_levels(1_000_000)
    (1, 2, 4)
    """
    size, levels = rounded_up(count, WIDTH), 1
    while size > WIDTH:
        size, levels = rounded_up(size // WIDTH, WIDTH), levels + 1
    return levels


def draw_leaves(levels: Levels, uniforms: Array) -> tuple[Array, Array]:
    """Leaves drawn in proportion to their scaled priorities, and these; never one of 0.

    Args:
        levels: A tree with a positive sum.
        uniforms: Random numbers in [0, 1), `[N, levels]`.
    """
    node = jnp.zeros(len(uniforms), jnp.int32)
    scaled_priority = jnp.zeros(len(uniforms), jnp.float32)
    for depth, sums in enumerate(reversed(levels)):
        children = take_rows(sums.reshape(-1, WIDTH), node)
        cumulative = jnp.cumsum(children, axis=1)
        above = cumulative > uniforms[:, depth, None] * cumulative[:, -1:]
        # A parallel cumulative sum may rise by rounding where a child is 0, or not pass its target.
        positive = children > 0
        chosen = above & positive
        chosen = jnp.where(chosen.any(axis=1, keepdims=True), chosen, positive)
        child = jnp.argmax(chosen, axis=1).astype(jnp.int32)
        scaled_priority = jnp.take_along_axis(children, child[:, None], axis=1)[:, 0]
        node = node * WIDTH + child
    return node, scaled_priority


def set_leaves(levels: Levels, leaves: Array, scaled_priorities: Array) -> Levels:
    """Set the scaled priorities of some leaves; of one that occurs twice, the larger counts.

    The order in which an accelerator writes to one place is not fixed; the maximum does not depend on it.
    """
    # The new values come before both writes, so that reading the tree for them makes no copy of it necessary.
    bottom = levels[0].at[leaves].set(-scaled_priorities).at[leaves].max(scaled_priorities)
    return with_sums(bottom, levels, leaves // WIDTH)


def parents_of_range(levels: Levels, first: Array, count: int) -> Array:
    """The nodes of the second level above `count` consecutive leaves; some may occur twice."""
    nodes = first // WIDTH + jnp.arange(count // WIDTH + 2)
    return jnp.minimum(nodes, levels[0].size // WIDTH - 1)


def with_sums(bottom: Array, levels: Levels, nodes: Array) -> Levels:
    """The tree with other leaves: children of these nodes of the second level.

    All leaves are written before any is read again: otherwise XLA copies them, 300 us for a million.
    """
    new = [bottom]
    for sums in levels[1:]:
        children = take_rows(new[-1].reshape(-1, WIDTH), nodes)
        new.append(sums.at[nodes].set(children.sum(axis=1)))
        nodes = nodes // WIDTH
    return tuple(new)


def take_rows(array: Array, index: Array) -> Array:
    """The rows at these indices; those out of range are clipped."""
    return jnp.take(array, index, axis=0, mode="clip")
