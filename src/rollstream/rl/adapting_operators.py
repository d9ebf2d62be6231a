"""Operators of plans whose workers adapt to tasks; see `TaskWorker`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rollstream.flow import Context
from rollstream.rl.batch import Batch
from rollstream.rl.episode_statistics import ended_episodes
from rollstream.rl.operators import TrainingOperator
from rollstream.rl.report import EPISODES, TRAIN, Report
from rollstream.rl.task_worker import ADAPTATION_COLUMNS, TaskRollouts
from rollstream.rl.worker_set import WorkerSet


class InnerAdapt:
    """After each row of rollouts, lets every worker adapt to its own; then passes on all rows.

    Args:
        workers: The workers.
        steps: Number of adaptations.
    """

    def __init__(self, workers: WorkerSet, steps: int = 1):
        self.workers = workers
        self._steps = steps
        self._rows: list[Sequence[TaskRollouts]] = []

    def receivers(self) -> list[Any]:
        """The workers are told to adapt."""
        return self.workers.actors

    def __call__(self, row: Sequence[TaskRollouts]) -> list[list[Batch]]:
        """The rows, side by side of all workers; or none yet."""
        self._rows.append(row)
        if len(self._rows) <= self._steps:
            for actor in self.workers.actors:
                actor.send("adapt")
            return []
        rows, self._rows = self._rows, []
        if joined := _joined(rows):
            return [joined]
        next_tasks(self.workers)  # all workers have died on the way
        return []


def _joined(rows: Sequence[Sequence[TaskRollouts]]) -> list[Batch]:
    """A batch per row, without workers that were restarted between two rows."""
    by_worker = [{own.worker: own for own in row} for row in rows]
    whole = [
        worker
        for worker, last in by_worker[-1].items()
        if all(
            worker in row and (row[worker].task_set, row[worker].adaptations) == (last.task_set, index)
            for index, row in enumerate(by_worker)
        )
    ]
    return [Batch.concatenate([row[worker].batch for worker in whole]) for row in by_worker] if whole else []


class MetaUpdate(TrainingOperator):
    """Trains the learner on rows of rollouts; then all workers get the new weights, and other tasks."""

    def receivers(self) -> list[Any]:
        """The workers get weights and tasks."""
        return self.workers.actors

    def __call__(self, rows: Sequence[Batch], context: Context) -> Report:
        """Metrics, with the returns before and after the adaptation."""
        episodes = [ended_episodes(row) for row in rows]
        columns = jax.tree.map(
            lambda *own: np.stack(own), *(dict(row.select(ADAPTATION_COLUMNS)) for row in rows)
        )
        report: Report = {TRAIN: self.workers.local_learner.train(columns, int(context.total("steps")))}
        # Reports are of the last 100 episodes: those of one task would follow each other.
        report[EPISODES] = np.random.default_rng(0).permutation(episodes[-1])
        for name, own in (("before", episodes[0]), ("after", episodes[-1])):
            if len(own):
                report[f"adaptation/return_{name}"] = float(own[:, 0].mean())
        next_tasks(self.workers)
        return report


def next_tasks(workers: WorkerSet) -> None:
    """Send all workers the newest weights, with which they start other tasks."""
    workers.send_weights()
    for actor in workers.actors:
        actor.send("next_tasks")
