"""Writes, samples and priorities of replay on the device: pure functions in JAX.

Rows are a ring over time, step after step of all B environments: row `t * B + b` is a step of environment b,
and the row B further on is its next step. The newest observation is a row already, which the next write
completes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rollstream.replay.buffer import concatenate_frames
from rollstream.replay.priorities import PRIORITY_EPSILON
from rollstream.replay.signature import unflatten_columns
from rollstream.rl.batch import Columns
from rollstream.rl.device_sum_tree import (
    WIDTH,
    Levels,
    draw_leaves,
    parents_of_range,
    set_leaves,
    take_rows,
    with_sums,
)
from rollstream.rl.transfer_buffer import TransferBuffer

Array = Any
NO_FINAL = -1
_MIN_SCALED_PRIORITY, _MAX_SCALED_PRIORITY = 1e-30, 1e30
"""Scaled priorities stay within the range of float32, and so do their sums."""


@dataclass(frozen=True)
class RingLayout:
    """What is stored where, and how transitions are made of it. All of it is static under `jax.jit`."""

    num_envs: int
    """B, the environments of all workers."""
    rollout_length: int
    """T, the steps per write."""
    length: int
    """Steps of each environment in the ring, a multiple of T."""
    capacity: int
    """The newest steps of each environment of which transitions may be sampled, a multiple of T."""
    observations: tuple[str, ...]
    """Columns of observations."""
    n_step: int = 1
    frame_stack: int = 1
    frame_axis: int = -1
    priority_exponent: float = 0.0
    """alpha of prioritized replay; 0 for uniform sampling."""

    @property
    def num_rows(self) -> int:
        """Rows of the ring."""
        return self.length * self.num_envs


class Storage(NamedTuple):
    """The arrays of the ring."""

    columns: dict[str, Array]
    """`[rows, ...]`: observations, `action`, `reward`, `terminated`; `final`, the index of a final
    observation or -1; for n-step returns `ended`, for stacks of frames `age`, the steps since the episode's
    start."""
    finals: dict[str, Array]
    """Final observations of truncated episodes by column, `[slots, ...]`."""


class Priorities(NamedTuple):
    """Scaled priorities, to the power of alpha, as a sum tree; 0 for rows that are no transition."""

    levels: Levels
    max_priority: Array
    """The largest priority so far, which new transitions get."""


# Writing -----------------------------------------------------------------------------------------


def write_rollouts(
    layout: RingLayout,
    packing: TransferBuffer,
    storage: Storage,
    priorities: Priorities | None,
    buffer: Array,
) -> tuple[Storage, Priorities | None]:
    """Write T steps of all environments, and the observations after them.

    The buffer has the columns `[T, B, ...]`, the newest observations as `last_...`, and the `position` of the
    first step in the ring; with priorities also `items`, see `_admit`.
    """
    values = packing.unpack(buffer)
    first = values["position"] * layout.num_envs
    count = layout.rollout_length * layout.num_envs
    values["final"] = jnp.full(count, NO_FINAL, jnp.int32)
    columns = {}
    for name, column in storage.columns.items():
        rows = values[name].reshape(count, *column.shape[1:])
        column = jax.lax.dynamic_update_slice_in_dim(column, rows, first, 0)
        if name in layout.observations:
            after = (first + count) % layout.num_rows
            column = jax.lax.dynamic_update_slice_in_dim(column, values[f"last_{name}"], after, 0)
        columns[name] = column
    if priorities is not None:
        priorities = _admit(layout, priorities, values["position"], values["items"])
    return Storage(columns, storage.finals), priorities


def _admit(layout: RingLayout, priorities: Priorities, position: Array, items: Array) -> Priorities:
    """Give new transitions the maximum priority, and remove those that leave the ring.

    `items` are the transitions that this write completes, `[n - 1 + T, B]`: they may start in the n - 1 steps
    before it.
    """
    width, before = layout.num_envs, layout.n_step - 1
    count = layout.rollout_length * width
    scaled = _scaled_priorities(layout, priorities.max_priority)
    first, leaving = position * width, (position - layout.capacity) % layout.length * width
    steps = (position - before + jnp.arange(before)) % layout.length
    earlier = (steps[:, None] * width + jnp.arange(width)).reshape(-1)
    leaves = priorities.levels[0]
    completed = jnp.where(items[:before].reshape(-1), scaled, take_rows(leaves, earlier))
    new = jnp.where(items[before:], scaled, 0.0).reshape(count)
    leaves = jax.lax.dynamic_update_slice_in_dim(leaves.at[earlier].set(completed), new, first, 0)
    leaves = jax.lax.dynamic_update_slice_in_dim(leaves, jnp.zeros(count), leaving, 0)
    parents = [parents_of_range(priorities.levels, start, count) for start in (first, leaving)]
    nodes = jnp.concatenate([*parents, earlier // WIDTH])
    return priorities._replace(levels=with_sums(leaves, priorities.levels, nodes))


def write_finals(storage: Storage, rows: Array, slots: Array, values: dict[str, Array]) -> Storage:
    """Store observations that follow some rows in slots of their own; indices out of range are ignored."""
    finals = {name: own.at[slots].set(values[name], mode="drop") for name, own in storage.finals.items()}
    final = storage.columns["final"].at[rows].set(slots, mode="drop")
    return Storage(storage.columns | {"final": final}, finals)


# Sampling ----------------------------------------------------------------------------------------


def sample_transitions(
    layout: RingLayout, storage: Storage, priorities: Priorities | None, draws: Array
) -> tuple[Columns, Array]:
    """A batch of transitions with `relative_probability`, and their rows.

    Args:
        layout: The layout.
        storage: The arrays of the ring.
        priorities: Priorities; `None` for uniform sampling.
        draws: Random numbers in [0, 1), `[N, levels]`, or for uniform sampling rows `[N]`.
    """
    if priorities is None:
        rows, relative = draws, jnp.ones(len(draws), jnp.float32)
    else:
        rows, scaled = draw_leaves(priorities.levels, draws)
        relative = scaled / scaled.min()
    return Columns(gather_transitions(layout, storage, rows) | {"relative_probability": relative}), rows


def gather_transitions(layout: RingLayout, storage: Storage, rows: Array) -> dict[str, Any]:
    """The transitions that start with these rows, as `ReplayBuffer.sample` returns them."""
    columns = storage.columns
    steps, inside = _window(layout, columns, rows)
    length = inside.sum(axis=1)
    last = rows if layout.n_step == 1 else jnp.take_along_axis(steps, length[:, None] - 1, axis=1)[:, 0]
    batch = {
        "action": take_rows(columns["action"], rows),
        "reward": jnp.where(inside, take_rows(columns["reward"], steps), 0.0),
        "terminated": inside & take_rows(columns["terminated"], steps),
        "length": length.astype(jnp.float32),
    }
    final, after = take_rows(columns["final"], last), (last + layout.num_envs) % layout.num_rows
    for name in layout.observations:
        next_frame = _select(
            final != NO_FINAL, take_rows(storage.finals[name], final), take_rows(columns[name], after)
        )
        if layout.frame_stack == 1:
            batch[name], batch[f"next_{name}"] = take_rows(columns[name], rows), next_frame
            continue
        frames = _frames(layout, columns, name, rows)
        before = frames if layout.n_step == 1 else _frames(layout, columns, name, last)
        next_frames = jnp.concatenate([before[:, 1:], next_frame[:, None]], axis=1)
        batch[name] = concatenate_frames(frames, layout.frame_axis)
        batch[f"next_{name}"] = concatenate_frames(next_frames, layout.frame_axis)
    return unflatten_columns(batch)


def _window(layout: RingLayout, columns: dict[str, Array], rows: Array) -> tuple[Array, Array]:
    """The rows of n steps from each row on, `[N, n]`, and which of them come before the episode's end."""
    if layout.n_step == 1:
        return rows[:, None], jnp.ones((len(rows), 1), bool)
    steps = (rows[:, None] + layout.num_envs * jnp.arange(layout.n_step)) % layout.num_rows
    continues = jnp.cumprod(~take_rows(columns["ended"], steps[:, :-1]), axis=1).astype(bool)
    return steps, jnp.concatenate([jnp.ones((len(rows), 1), bool), continues], axis=1)


def _frames(layout: RingLayout, columns: dict[str, Array], name: str, rows: Array) -> Array:
    """The last k frames up to each row, `[N, k, ...]`; the first of an episode is repeated."""
    back = jnp.minimum(jnp.arange(layout.frame_stack)[::-1], take_rows(columns["age"], rows)[:, None])
    return take_rows(columns[name], (rows[:, None] - back * layout.num_envs) % layout.num_rows)


def update_priorities(
    layout: RingLayout, priorities: Priorities, rows: Array, new: Array, finite: Array
) -> Priorities:
    """Set the priorities of sampled transitions, unless an update was not `finite`."""
    new = jnp.where(finite > 0, new + PRIORITY_EPSILON, 0.0)
    scaled = jnp.where(finite > 0, _scaled_priorities(layout, new), take_rows(priorities.levels[0], rows))
    return Priorities(
        set_leaves(priorities.levels, rows, scaled), jnp.maximum(priorities.max_priority, new.max())
    )


def _scaled_priorities(layout: RingLayout, priorities: Array) -> Array:
    """Priorities to the power of alpha, clipped."""
    return jnp.clip(priorities**layout.priority_exponent, _MIN_SCALED_PRIORITY, _MAX_SCALED_PRIORITY)


def _select(condition: Array, chosen: Array, other: Array) -> Array:
    return jnp.where(condition.reshape(-1, *(1 for _ in chosen.shape[1:])), chosen, other)
