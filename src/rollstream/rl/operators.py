"""The operators of plans, under the names of the RLlib Flow paper (arXiv:2011.12719)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rollstream import flow
from rollstream.engine import RollstreamError
from rollstream.flow import Context, Iter, ParIter, Stored
from rollstream.replay.buffer import ReplayBatch
from rollstream.rl.batch import Batch
from rollstream.rl.device_replay import DeviceDraw
from rollstream.rl.episode_statistics import ended_episodes
from rollstream.rl.params import Weights
from rollstream.rl.report import EPISODES, TRAIN, WEIGHTS, Report, staleness
from rollstream.rl.reporting import ReportMetrics, is_heartbeat
from rollstream.rl.training_step import train_on
from rollstream.rl.worker_set import WorkerSet

T = TypeVar("T")

__all__ = [
    "ApplyGradients",
    "ComputeGradients",
    "ConcatBatches",
    "ParallelRollouts",
    "ReceiveWeights",
    "Report",
    "ReportMetrics",
    "SelectExperiences",
    "StandardizeFields",
    "TrainOneStep",
    "UpdateWeights",
    "is_heartbeat",
    "without_stale",
]


def ParallelRollouts(workers: WorkerSet) -> ParIter[Any]:  # noqa: N802
    """Rollouts, one shard per worker: batches, or what the workers' postprocessing makes of them."""
    others = [] if workers.inference is None else [workers.inference]
    return flow.from_actors(workers.actors, "sample", name="ParallelRollouts", receivers=others)


class ConcatBatches:
    """Concatenates batches until they have at least `min_steps` steps."""

    def __init__(self, min_steps: int):
        self.min_steps = min_steps
        self._pending: list[Batch] = []

    def __call__(self, batch: Batch) -> list[Batch]:
        """The concatenated batch, or none yet."""
        self._pending.append(batch)
        if sum(pending.steps for pending in self._pending) < self.min_steps:
            return []
        pending, self._pending = self._pending, []
        return [Batch.concatenate(pending)]

    def state_dict(self) -> dict[str, Any]:
        """The pending batches."""
        return {"pending": [dict(batch) for batch in self._pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the pending batches."""
        self._pending = [Batch(batch) for batch in state["pending"]]


class SelectExperiences:
    """Keeps some columns, so that others need not travel."""

    def __init__(self, *names: str):
        self.names = names

    def __call__(self, batch: Batch) -> Batch:
        """The batch with these columns only."""
        return batch.select(self.names)


class StandardizeFields:
    """Standardizes columns to mean 0 and standard deviation 1 over the batch."""

    def __init__(self, names: Sequence[str]):
        self.names = names

    def __call__(self, batch: Batch) -> Batch:
        """The batch with standardized columns."""
        standardized = {}
        for name in self.names:
            column = np.asarray(batch[name])  # one number per step, also if it comes from a device
            standardized[name] = (column - column.mean()) / max(1e-8, column.std())
        return Batch(batch | standardized)


class TrainingOperator:
    """An operator whose state is the learner's."""

    def __init__(self, workers: WorkerSet):
        self.workers = workers

    def receivers(self) -> list[Any]:
        """Whoever acts gets messages."""
        return self.workers.weights_receivers

    def state_dict(self) -> dict[str, Any]:
        """The learner's state."""
        return self.workers.local_learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the learner, and send its weights to the workers."""
        self.workers.load(state)


class TrainOneStep(TrainingOperator):
    """Trains the learner on a batch and, unless `send_weights=False`, sends every worker the new weights.

    Args:
        workers: The learner, and the workers.
        updates: Number of updates per replay batch, each with an equal part of it, in one compiled program.
        send_weights: Send the new weights to all workers.
    """

    def __init__(self, workers: WorkerSet, *, updates: int = 1, send_weights: bool = True):
        super().__init__(workers)
        self._updates = updates
        self._send_weights = send_weights

    def __call__(self, batch: Batch | ReplayBatch | DeviceDraw, context: Context) -> Report:
        """Metrics; with the episodes of a batch, or the new priorities of a replay batch."""
        if isinstance(batch, Stored):
            raise RollstreamError(
                "TrainOneStep got a reference: leave out put(), or train with "
                'via(workers.learner_actor, "train")'
            )
        report = train_on(self.workers.local_learner, batch, context, self._updates)
        if self._send_weights:
            self.workers.send_weights()
        return report


class ComputeGradients:
    """Computes gradients of the loss on a batch, on the worker and under its weights."""

    def __call__(self, batch: Batch, context: Context) -> tuple[Weights, dict[str, Any], Report]:
        """Gradients, metrics, and the episodes of the batch."""
        return (*context.instance.compute_gradients(batch), {EPISODES: ended_episodes(batch)})


class ApplyGradients(TrainingOperator):
    """Applies gradients, and sends the new weights to the worker they came from."""

    def __call__(self, item: tuple[Weights, dict[str, Any], Report], context: Context) -> Report:
        """Metrics and episodes."""
        grads, metrics, episodes = item
        learner, steps = self.workers.local_learner, int(context.total("steps"))
        report = staleness(learner.version, [context.least("version")]) | episodes
        report[TRAIN] = learner.apply_gradients(grads, metrics, steps)
        self.workers.send_weights(context.actors)
        return report


class UpdateWeights:
    """Sends the newest weights to the workers that the item came from; passes the item on.

    Args:
        workers: Who knows the newest weights, and the workers.
        broadcast: Send them to all workers instead.
    """

    def __init__(self, workers: WorkerSet, *, broadcast: bool = False):
        self.workers = workers
        self._broadcast = broadcast

    def receivers(self) -> list[Any]:
        """Whoever acts gets messages."""
        return self.workers.weights_receivers

    def __call__(self, item: Any, context: Context) -> Any:
        """The item."""
        self.workers.send_weights(None if self._broadcast else context.actors)
        return item


class ReceiveWeights:
    """Keeps the reference to the weights that a learner on an actor has published; passes the report on.

    `UpdateWeights` sends them to workers. The driver does not open them for that.
    """

    def __init__(self, workers: WorkerSet):
        self.workers = workers

    def receivers(self) -> list[Any]:
        """Nobody gets messages."""
        return []

    def __call__(self, report: Report) -> Report:
        """The report without the weights."""
        self.workers.remote_learner.receive(*report.pop(WEIGHTS))
        return report

    def state_dict(self) -> dict[str, Any]:
        """The published weights, and those of every worker."""
        return self.workers.weights_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the published weights, and send every worker its own."""
        self.workers.load_weights_state(state)


def without_stale(stream: Iter[T], workers: WorkerSet, limit: int | None) -> Iter[T]:
    """Items whose weights are at most `limit` versions old, or all; others are dropped, and counted.

    Workers get the newest weights for dropped items, too: else theirs would never be newer.
    """
    if limit is None:
        return stream
    updated = stream.for_each(UpdateWeights(workers))
    return updated.max_staleness(limit, lambda: workers.learner.version)
