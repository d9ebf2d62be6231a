"""Reports: metrics by name, and what else operators tell each other with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

Report: TypeAlias = dict[str, Any]
"""Metrics by name."""
TRAIN = "train"
"""In the report of an update: the learner's metrics by name."""
EPISODES = "episodes"
"""Return, length and success of the episodes that ended, `[N, 3]`."""
PRIORITY = "priority"
"""Keys of the items of a replay batch, and their new priorities; from an actor, a reference to both."""
WEIGHTS = "weights"
"""In the report of a learner on an actor: the version of its weights, and a reference to them."""
WILL_UPDATE = "will_update"
"""In the report of a stored rollout: whether replay may be sampled now, so that updates follow."""
INFERENCE_REQUESTS, INFERENCE_BATCH_SIZES, INFERENCE_WAIT = (
    "inference_requests",
    "inference_batch_sizes",
    "inference_wait",
)
"""Notes of rollouts whose actions an inference actor has chosen: the number of requests, the sum of the sizes
of the batches they were answered in, and the seconds they waited."""
STALENESS = "weights/staleness"
"""How many versions old the weights were that rollouts were sampled with, when the learner trained on them
or, if they were stored in replay, when they arrived."""


def staleness(newest: int, versions: Iterable[float | None]) -> Report:
    """How many versions behind `newest` the weights of rollouts are, as far as known."""
    known = [newest - version for version in versions if version is not None]
    return {STALENESS: known} if known else {}
