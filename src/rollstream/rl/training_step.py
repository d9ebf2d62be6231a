"""One training step of a learner on whatever reaches it: a batch, a replay batch, a draw on the device."""

from __future__ import annotations

from typing import Any

from rollstream.flow import Context
from rollstream.replay.buffer import ReplayBatch
from rollstream.replay.priorities import PRIORITY_EPSILON
from rollstream.rl.batch import Batch, Columns
from rollstream.rl.device_replay import DeviceDraw
from rollstream.rl.episode_statistics import ended_episodes
from rollstream.rl.learner import Learner
from rollstream.rl.report import EPISODES, PRIORITY, TRAIN, Report, staleness
from rollstream.rl.rollout import Rollout

PROBABILITY_SCALE = "probability_scale"
"""A note of replay batches from shards: what makes `relative_probability` comparable between them."""


def train_on(learner: Learner, batch: Any, context: Context, updates: int = 1) -> Report:
    """Train a learner; metrics, with the episodes of a batch, or the new priorities of a replay batch.

    Args:
        learner: The learner.
        batch: A batch, a replay batch, a draw from replay on the device, or what the learner collates.
        context: The batch's provenance.
        updates: Number of updates per replay batch, each with an equal part of it, in one compiled program.
    """
    rollouts = [own for own in batch if isinstance(own, Rollout)] if type(batch) is list else []
    versions = [own.version for own in rollouts] or [context.least("version")]
    report = staleness(learner.version, versions)
    if isinstance(batch, DeviceDraw):
        learner.steps = max(learner.steps, batch.env_steps)
        report[TRAIN] = learner.train_on_draw(batch, updates=updates)
    elif isinstance(batch, ReplayBatch):
        learner.steps = max(learner.steps, batch.env_steps)  # epsilon and beta count the newest rollout
        report[TRAIN] = metrics = learner.train(replay_columns(batch, context), 0, updates=updates)
        if PRIORITY in metrics:
            report[PRIORITY] = batch.keys, metrics[PRIORITY] + PRIORITY_EPSILON
    else:
        batch = batch.validated() if isinstance(batch, Batch) else learner.collate(batch)
        report[TRAIN] = learner.train(batch, int(context.total("steps")) or None)
        report[EPISODES] = ended_episodes(batch)
    return report


def replay_columns(batch: ReplayBatch, context: Context) -> Columns:
    """The columns of a replay batch, with probabilities comparable between shards."""
    columns = Columns(batch.columns)
    if scale := context.total(PROBABILITY_SCALE):
        columns["relative_probability"] = columns["relative_probability"] * scale
    return columns
