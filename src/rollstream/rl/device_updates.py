"""The program that a learner compiles for replay on the device: sampling, updates and new priorities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollstream.rl.device_sampling import (
    Priorities,
    RingLayout,
    Storage,
    sample_transitions,
    update_priorities,
)
from rollstream.rl.params import Weights
from rollstream.rl.update_metrics import PackedMetrics
from rollstream.rl.update_programs import Update, run_updates, split, update_once

Array = Any


def updates_on_draws(
    turns: Sequence[Update],
    count: int,
    layout: RingLayout,
    trained: tuple[Weights, Any],
    finite: Array,
    priorities: Priorities | None,
    storage: Storage,
    draws: Array,
    random_inputs: Any,
    schedules: Mapping[str, Array],
    *,
    guards: bool,
) -> tuple[tuple[Weights, Any], Array, Priorities | None, PackedMetrics]:
    """Updates, each on transitions that an equal part of the draws chooses; see `updates_on_batch`.

    New priorities count from the next update on.

    Args:
        turns: The updates that take turns.
        count: Number of updates.
        layout: The layout of the ring.
        trained: The weights, and the learner's state, before.
        finite: 1 while no metric has been NaN or infinite, else 0.
        priorities: Priorities before; `None` for uniform sampling.
        storage: The arrays of the ring.
        draws: See `sample_transitions`.
        random_inputs: Random inputs of each update.
        schedules: Scheduled values by name.
        guards: Keep weights that an update would make NaN.

    Returns:
        What was trained, whether all metrics are finite, priorities, and the metrics.
    """

    def one(update: Update, carry: Any, inputs: tuple[Array, Any]) -> tuple[Any, PackedMetrics]:
        trained, priorities = carry
        own, noise = inputs
        batch, rows = sample_transitions(layout, storage, priorities, own)
        trained, packed = update_once(update, schedules, trained, batch, noise, guards=guards)
        if priorities is not None and "priority" in packed.arrays:
            new = packed.arrays["priority"]
            priorities = update_priorities(layout, priorities, rows, new, packed.finite)
        return (trained, priorities), replace(packed, arrays={})

    inputs = (draws if count == 1 else split(draws, count)), random_inputs
    carry = (trained, finite), priorities
    ((trained, finite), priorities), packed = run_updates(one, turns, count, carry, inputs)
    return trained, finite, priorities, packed
