"""The operators that plans are written with, under the names of the RLlib Flow paper (arXiv:2011.12719)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollstream import flow
from rollstream.flow import Context, Iter, ParIter
from rollstream.replay.buffer import ReplayBatch
from rollstream.rl.batch import Batch
from rollstream.rl.policy import Weights
from rollstream.rl.worker_set import Heartbeat, WorkerSet

Report = dict[str, Any]
"""What is to be known after an iteration: numbers by the names people know from Stable-Baselines3."""
WINDOW = 100
"""Episodes over which returns are averaged."""


def ParallelRollouts(workers: WorkerSet) -> ParIter[Any]:  # noqa: N802
    """Batches of experience, or rollouts to remember, one shard a worker."""
    return flow.from_actors(workers.actors, "sample", name="ParallelRollouts")


class ConcatBatches:
    """Joins batches, environments side by side, until there are enough steps."""

    def __init__(self, min_steps: int):
        self.min_steps = min_steps
        self._kept: list[Batch] = []

    def __call__(self, batch: Batch) -> list[Batch]:
        """One batch, or none yet."""
        self._kept.append(batch)
        if sum(kept.steps for kept in self._kept) < self.min_steps:
            return []
        kept, self._kept = self._kept, []
        return [Batch.concatenate(kept)]

    def state_dict(self) -> dict[str, Any]:
        """What waits to be joined."""
        return {"kept": [dict(batch) for batch in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._kept = [Batch(batch) for batch in state["kept"]]


class SelectExperiences:
    """Keeps some columns; what is not learned from need not travel."""

    def __init__(self, *names: str):
        self.names = names

    def __call__(self, batch: Batch) -> Batch:
        """Only these columns."""
        return batch.only(self.names)


class StandardizeFields:
    """Brings columns to mean 0 and standard deviation 1 over the whole batch."""

    def __init__(self, names: Sequence[str]):
        self.names = names

    def __call__(self, batch: Batch) -> Batch:
        """A batch with these columns standardized; rows that are no steps do not count."""
        real = batch.get("real", True)
        changed = {}
        for name in self.names:
            column = batch[name]
            mean, deviation = column.mean(where=real), column.std(where=real)
            changed[name] = (column - mean) / max(1e-8, deviation)
        return Batch(batch | changed)


class _Learning:
    """What has the learner learn: its state is the learner's."""

    def __init__(self, workers: WorkerSet):
        self.workers = workers

    def state_dict(self) -> dict[str, Any]:
        """The learner's."""
        return self.workers.learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The learner's; workers are told its weights."""
        self.workers.load(state)

    def _staleness(self, context: Context) -> Report:
        """How many updates old the weights were that an item was sampled with, where that is known."""
        version = context.provenance.least("version")
        return {} if version is None else {"weights/staleness": self.workers.learner.version - version}

    def _report(self, metrics: Mapping[str, float]) -> Report:
        report = {f"train/{name}": float(value) for name, value in metrics.items()}
        return report | {"train/n_updates": self.workers.learner.version}


class TrainOneStep(_Learning):
    """Trains the learner on a batch, and sends the new weights to every worker, unless others do."""

    def __init__(self, workers: WorkerSet, *, publish: bool = True):
        super().__init__(workers)
        self._publish = publish

    def __call__(self, batch: Batch | ReplayBatch, context: Context) -> Report:
        """What is to be known of the update; and the episodes of a batch, or how surprising samples were."""
        learner, staleness = self.workers.learner, self._staleness(context)
        if isinstance(batch, ReplayBatch):
            metrics = learner.train(batch.columns, max(0, batch.env_steps - learner.steps))
            more = {"surprise": (batch.keys, metrics.pop("surprise"))} if "surprise" in metrics else {}
        else:
            steps, more = int(context.provenance.total("steps")), episodes(batch)
            metrics = learner.train(batch.validated(), steps or None)
        if self._publish:
            self.workers.publish()
        return self._report(metrics) | staleness | more


class ComputeGradients:
    """On a worker: the gradient of the loss on its batch, under its own weights."""

    def __call__(self, batch: Batch, context: Context) -> tuple[Weights, dict[str, Any], Report]:
        """Gradient, what is to be known of it, and the episodes of the batch."""
        return (*context.instance.compute_gradients(batch), episodes(batch))


class ApplyGradients(_Learning):
    """Takes one step by a gradient, and sends the new weights to the worker it came from."""

    def __call__(self, item: tuple[Weights, dict[str, Any], Report], context: Context) -> Report:
        """What is to be known of the update."""
        gradients, metrics, seen = item
        staleness, steps = self._staleness(context), int(context.provenance.total("steps"))
        metrics = self.workers.learner.apply(gradients, metrics, steps)
        self.workers.publish(context.actors)
        return self._report(metrics) | staleness | seen


class UpdateWeights:
    """Sends the newest weights to the workers an item came from; the item goes on."""

    def __init__(self, workers: WorkerSet):
        self.workers = workers

    def __call__(self, item: Any, context: Context) -> Any:
        """The item itself."""
        self.workers.publish(context.actors)
        return item


def episodes(batch: Batch) -> dict[str, Any]:
    """Returns and lengths of the episodes that ended in a batch, in the order they ended."""
    returns, lengths = batch["episode_return"], batch["episode_length"]
    ended = ~np.isnan(returns)
    return {"episodes": np.stack([returns[ended], lengths[ended]], axis=-1)}


def ReportMetrics(  # noqa: N802
    stream: Iter[Report], workers: WorkerSet, every: int = 1, name: str = "ReportMetrics"
) -> Iter[Report]:
    """Reports with running counts and the mean of the last episodes; one for every so many items with steps.

    One comes with the last step of the whole training, too, so that it can end there. When
    `workers.heartbeat.is_due()`, a heartbeat with only the steps is yielded in between: see `is_heartbeat`.
    """
    return stream.combine(_Reporter(workers.learner.total_steps, every, workers.heartbeat), name=name)


def is_heartbeat(report: Report) -> bool:
    """Whether it is a heartbeat, with only the steps so far, instead of a report."""
    return "time/heartbeat" in report


class _Reporter:
    """Counts steps and episodes as they reach the end of the plan."""

    def __init__(self, total: int, every: int, heartbeat: Heartbeat):
        self._total = total
        self._every = every
        self._heartbeat = heartbeat
        self._steps = self._iterations = self._waiting = self._episodes = 0
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._sums: dict[str, list[float]] = {}
        """Of every quantity: the sum, how many there were, the latest."""

    def __call__(self, report: Report, context: Context) -> list[Report]:
        before, steps = self._steps, int(context.provenance.total("steps"))
        self._steps += steps
        if (ended := report.pop("episodes", None)) is not None and len(ended):
            self._window.extend((float(one), float(length)) for one, length in ended)
            self._episodes += len(ended)
        for key, value in report.items():
            if math.isnan(value):
                continue
            total, count, _ = self._sums.get(key, (0.0, 0, 0.0))
            self._sums[key] = [total + value, count + 1, value]
        self._waiting += steps > 0
        if not steps or (self._waiting < self._every and not before < self._total <= self._steps):
            return (
                [{"time/total_timesteps": self._steps, "time/heartbeat": 1}]
                if self._heartbeat.is_due()
                else []
            )
        means = {
            key: latest if key in _LATEST else total / count
            for key, (total, count, latest) in self._sums.items()
        }
        self._waiting, self._sums = 0, {}
        self._iterations += 1
        if self._window:
            returns, lengths = np.array(self._window).T
            means["rollout/ep_rew_mean"] = float(returns.mean())
            means["rollout/ep_len_mean"] = float(lengths.mean())
        means["rollout/episodes"] = self._episodes
        means["time/total_timesteps"] = self._steps
        means["time/iterations"] = self._iterations
        return [means]

    def state_dict(self) -> dict[str, Any]:
        counts = [self._steps, self._iterations, self._waiting, self._episodes]
        sums = {name: list(own) for name, own in self._sums.items()}
        return {"counts": counts, "window": [list(one) for one in self._window], "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._iterations, self._waiting, self._episodes = state["counts"]
        self._window.extend(tuple(one) for one in state["window"])
        self._sums = dict(state["sums"])


_LATEST = frozenset(
    {
        "train/n_updates",
        "train/learning_rate",
        "train/epsilon",
        "replay/size",
        "replay/lost",
        "replay/samples_per_insert",
    }
)
