"""The programs that a learner compiles: one or several updates in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rollstream.engine import RollstreamError
from rollstream.rl.params import Weights
from rollstream.rl.update_metrics import PackedMetrics, pack
from rollstream.rl.updates import Metrics

Array = Any


class Update(Protocol):
    """A pure function that trains on a batch."""

    def __call__(
        self, weights: Weights, state: Any, batch: Any, random_inputs: Any, schedules: Mapping[str, Array], /
    ) -> tuple[Weights, Any, Metrics]:
        """Return the new weights, the new state of the learner and metrics."""
        ...


def updates_on_batch(
    turns: Sequence[Update],
    count: int,
    kind: Callable[[Any], Any] | None,
    trained: tuple[Weights, Any],
    finite: Array,
    priorities: None,
    batch: Any,
    random_inputs: Any,
    schedules: Mapping[str, Array],
    *,
    guards: bool,
) -> tuple[tuple[Weights, Any], Array, None, PackedMetrics]:
    """Updates, each with an equal part of the rows of a batch.

    Args:
        turns: The updates that take turns.
        count: Number of updates.
        kind: What the columns are made into; a plain dict of them is flattened faster.
        trained: The weights, and the learner's state, before.
        finite: 1 while no metric has been NaN or infinite, else 0.
        priorities: Those of replay on the device, which has another program.
        batch: The rows.
        random_inputs: Random inputs of each update.
        schedules: Scheduled values by name.
        guards: Keep weights that an update would make NaN.

    Returns:
        What was trained, whether all metrics are finite, no priorities, and the metrics.
    """

    def one(update: Update, carry: Any, inputs: tuple[Any, Any]) -> tuple[Any, PackedMetrics]:
        rows, noise = inputs
        rows = rows if kind is None else kind(rows)
        return update_once(update, schedules, carry, rows, noise, guards=guards)

    inputs = (batch if count == 1 else split(batch, count)), random_inputs
    (trained, finite), packed = run_updates(one, turns, count, (trained, finite), inputs)
    return trained, finite, priorities, packed


def update_once(
    update: Update,
    schedules: Mapping[str, Array],
    carry: tuple[tuple[Weights, Any], Array],
    batch: Any,
    noise: Any,
    *,
    guards: bool,
) -> tuple[tuple[tuple[Weights, Any], Array], PackedMetrics]:
    """One update of weights and state, and whether all so far were finite; with its metrics."""
    (weights, state), finite = carry
    trained, metrics = _require_update(update(weights, state, batch, noise, schedules))
    packed = pack(metrics, finite)
    if guards:
        trained = jax.tree.map(partial(jnp.where, packed.finite > 0), trained, (weights, state))
    return (trained, packed.finite), packed


def run_updates(
    one: Callable[[Update, Any, Any], tuple[Any, PackedMetrics]],
    turns: Sequence[Update],
    count: int,
    carry: Any,
    inputs: Any,
) -> tuple[Any, PackedMetrics]:
    """Call `one(update, carry, inputs)` for each of `count` updates, with inputs `[count, ...]`.

    A single update takes its inputs as they are. Metrics of items are joined.
    """
    if count == 1:
        return one(turns[0], carry, inputs)
    if count % len(turns):
        raise ValueError(f"{count} updates per call are not a multiple of the {len(turns)} that take turns")

    def cycle(carry: Any, inputs: Any) -> tuple[Any, PackedMetrics]:
        packed: list[PackedMetrics] = []
        for turn, update in enumerate(turns):
            carry, own = one(update, carry, jax.tree.map(lambda rows, turn=turn: rows[turn], inputs))
            packed.append(own)
        return carry, jax.tree.map(lambda *own: jnp.stack(own), *packed)

    carry, packed = jax.lax.scan(cycle, carry, split(inputs, count // len(turns)))
    arrays = {name: array.reshape(-1, *array.shape[3:]) for name, array in packed.arrays.items()}
    return carry, replace(packed, scalars=packed.scalars.reshape(count, -1), arrays=arrays)


def split(rows: Any, count: int) -> Any:
    """Equal parts `[count, ...]` of rows `[N, ...]`."""
    return jax.tree.map(lambda own: own.reshape(count, len(own) // count, *own.shape[1:]), rows)


def _require_update(result: Any) -> tuple[tuple[Weights, Any], Metrics]:
    """Weights and state, and metrics, that an update returned; raise if it returned something else."""
    found = f"{len(result)} results" if isinstance(result, tuple) else type(result).__name__
    if not isinstance(result, tuple) or len(result) != 3:
        raise RollstreamError(f"update must return weights, state and metrics, and returned {found}")
    weights, state, metrics = result
    for name, value in (("weights", weights), ("metrics", metrics)):
        if not isinstance(value, Mapping):
            raise RollstreamError(
                f"update must return weights, state and metrics, and its {name} are a "
                f"{type(value).__name__} instead of a dict"
            )
    return (weights, state), metrics
