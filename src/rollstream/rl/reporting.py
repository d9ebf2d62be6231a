"""Reports: what a plan yields, with metrics under the names of Stable-Baselines3."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollstream.engine import RollstreamError
from rollstream.flow import Context, Iter
from rollstream.rl.learner_actor import RemoteLearner
from rollstream.rl.report import (
    EPISODES,
    INFERENCE_BATCH_SIZES,
    INFERENCE_REQUESTS,
    INFERENCE_WAIT,
    PRIORITY,
    STALENESS,
    TRAIN,
    WEIGHTS,
    WILL_UPDATE,
    Report,
    staleness,
)
from rollstream.rl.update_metrics import UpdateMetrics
from rollstream.rl.worker_set import WorkerSet

EPISODE_WINDOW = 100
"""Number of episodes that returns, lengths and success rates are averaged over."""


def ReportMetrics(  # noqa: N802
    stream: Iter[Report],
    workers: WorkerSet,
    every: int = 1,
    name: str = "ReportMetrics",
    *,
    calls_per_rollout: int = 0,
) -> Iter[Report]:
    """Reports with counts of steps and the mean of the last 100 episodes, one per `every` items with steps.

    The last step of the training has a report, too, so that it can end there. When
    `workers.heartbeat.is_due()`, a heartbeat with only the steps is yielded in between: see `is_heartbeat`.

    Args:
        stream: Reports of the plan's operators.
        workers: The workers and the learner.
        every: Number of items with steps per report.
        name: Name of the node.
        calls_per_rollout: Number of calls of the learner that follow a rollout stored in a local replay
            buffer; its report waits for them, so that a training ends with all of its updates.
    """
    reporter = _Reporter(workers, every, calls_per_rollout)
    return stream.combine(reporter, name=name)


def is_heartbeat(report: Report) -> bool:
    """Whether it is a heartbeat, with only the steps so far, instead of a report."""
    return "time/heartbeat" in report


class _Reporter:
    """Counts steps and episodes, and averages metrics between reports."""

    def __init__(self, workers: WorkerSet, every: int, calls_per_rollout: int):
        self._workers = workers
        self._total = workers.learner.total_steps
        self._is_asynchronous = isinstance(workers.learner, RemoteLearner)
        self._every = every
        self._heartbeat = workers.heartbeat
        self._calls_per_rollout = calls_per_rollout
        self._calls_left = 0
        self._is_due = False
        self._steps = self._iterations = self._pending = self._episodes = 0
        self._window: deque[tuple[float, ...]] = deque(maxlen=EPISODE_WINDOW)
        """Return, length and success of the last episodes."""
        self._sums: dict[str, list[float]] = {}
        """Sum, count and latest value of each metric."""
        self._updates: list[UpdateMetrics] = []
        """Metrics of updates, read when a report is due."""
        self._staleness: list[float] = []
        """Staleness of the rollouts since the last report."""
        self._waiting: list[Report] = []
        """Reports that are added up when one is due: all at once takes less time than one by one."""

    def receivers(self) -> list[Any]:
        """Nobody gets messages."""
        return []

    def __call__(self, report: Report, context: Context) -> list[Report]:
        self._waiting.append(report)
        if steps := int(context.total("steps")):
            self._note_inference(report, context)
            if self._is_asynchronous and STALENESS not in report:  # stored in replay, and not trained on
                report |= staleness(self._workers.learner.version, [context.least("version")])
            before, self._steps = self._steps, self._steps + steps
            self._pending += 1
            self._is_due |= self._pending >= self._every or before < self._total <= self._steps
            self._calls_left = self._calls_per_rollout if report.get(WILL_UPDATE) else 0
        else:
            self._calls_left -= 1
        if self._is_due and self._calls_left <= 0:
            self._is_due = False
            return [self._report()]
        if self._steps < self._total and self._heartbeat.is_due():  # a training that ends makes all updates
            return [{"time/total_timesteps": self._steps, "time/heartbeat": 1}]
        return []

    @staticmethod
    def _note_inference(report: Report, context: Context) -> None:
        """Add what an inference actor's answers to these rollouts say, if there is one."""
        if requests := context.total(INFERENCE_REQUESTS):
            report["inference/batch_size"] = context.total(INFERENCE_BATCH_SIZES) / requests
            report["inference/wait_ms"] = 1000 * context.total(INFERENCE_WAIT) / requests

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for report in waiting:
            self._add(report)

    def _add(self, report: Report) -> None:
        report.pop(WILL_UPDATE, None)
        if (episodes := report.pop(EPISODES, None)) is not None and len(episodes):
            self._window.extend(map(tuple, episodes.tolist()))
            self._episodes += len(episodes)
        self._staleness += report.pop(STALENESS, ())
        metrics = report.pop(TRAIN, {})
        if isinstance(metrics, UpdateMetrics):
            self._updates.append(metrics)
        else:
            report |= {_train_name(name): value for name, value in metrics.items()}
        for name, operator in _CONSUMED.items():
            if name in report:
                raise RollstreamError(
                    f"nothing has used the {name} of a report: put .for_each({operator}) before ReportMetrics"
                )
        for name, value in report.items():
            if not math.isnan(value):
                total, count, _ = self._sums.get(name, (0.0, 0, 0.0))
                self._sums[name] = [total + value, count + 1, value]

    def _report(self) -> Report:
        self._add_waiting()
        report = {
            name: latest if name in _LATEST else total / count
            for name, (total, count, latest) in self._sums.items()
        }
        for names, rows, latest in self._read_updates():
            means = ((name, column[~np.isnan(column)]) for name, column in zip(names, rows.T, strict=True))
            report |= {_train_name(name): float(column.mean()) for name, column in means if column.size}
            report |= {_train_name(name): value for name, value in latest.items()}
        report |= staleness_distribution(self._staleness, of_zeros=self._is_asynchronous)
        self._pending, self._sums, self._updates, self._staleness = 0, {}, [], []
        self._iterations += 1
        if self._window:
            returns, lengths, successes = np.array(self._window).T
            report["rollout/ep_rew_mean"] = float(returns.mean())
            report["rollout/ep_len_mean"] = float(lengths.mean())
            if not np.isnan(successes).all():
                report["rollout/success_rate"] = float(np.nanmean(successes))
        report["rollout/episodes"] = self._episodes
        report["time/total_timesteps"] = self._steps
        report["time/iterations"] = self._iterations
        return report

    def _read_updates(self) -> list[tuple[tuple[str, ...], np.ndarray[Any, Any], Mapping[str, float]]]:
        """Names, scalars `[updates, n]` and latest values of the updates since the last report."""
        for metrics in self._updates:
            metrics.copy_to_host_async()
        kinds: dict[tuple[str, ...], list[UpdateMetrics]] = {}
        for metrics in self._updates:
            kinds.setdefault(metrics.names, []).append(metrics)
        return [
            (names, np.concatenate([own.rows() for own in kind]).astype(float), kind[-1].latest)
            for names, kind in kinds.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        self._add_waiting()
        counts = [self._steps, self._iterations, self._pending, self._episodes]
        due = [int(self._is_due), self._calls_left]
        sums = {name: list(own) for name, own in self._sums.items()}
        return {
            "counts": counts,
            "due": due,
            "window": [list(one) for one in self._window],
            "sums": sums,
            "staleness": list(self._staleness),
            "updates": [[list(names), rows, dict(latest)] for names, rows, latest in self._read_updates()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._iterations, self._pending, self._episodes = state["counts"]
        self._is_due, self._calls_left = bool(state["due"][0]), state["due"][1]
        self._window.extend(tuple(one) for one in state["window"])
        self._sums = dict(state["sums"])
        self._staleness = list(state["staleness"])
        self._updates = [UpdateMetrics.of_rows(*own) for own in state["updates"]]


def staleness_distribution(staleness: Sequence[float], *, of_zeros: bool = False) -> Report:
    """Mean staleness of rollouts, and median, 90th percentile and maximum; not `of_zeros` unless it is so.

    >>> for metric in staleness_distribution([0, 1, 1, 6]).items():
    ...     print(*metric)
    weights/staleness 2.0
    weights/staleness_p50 1.0
    weights/staleness_p90 6.0
    weights/staleness_max 6.0
    >>> staleness_distribution([0, 0])
    {'weights/staleness': 0.0}
    """
    if not staleness:
        return {}
    mean = {STALENESS: sum(staleness) / len(staleness)}
    if not any(staleness) and not of_zeros:
        return mean
    names = (f"{STALENESS}_{part}" for part in ("p50", "p90", "max"))
    quantiles = np.quantile(np.array(staleness, float), [0.5, 0.9, 1.0], method="higher")
    return mean | dict(zip(names, quantiles.tolist(), strict=True))


def _train_name(name: str) -> str:
    return "rollout/exploration_rate" if name == "epsilon" else f"train/{name}"


_CONSUMED = {WEIGHTS: "ReceiveWeights(workers)", PRIORITY: "UpdatePriorities(replay)"}
"""What reports bring to other operators, and which."""
_LATEST = frozenset(
    {
        "rollout/exploration_rate",
        "train/n_updates",
        "train/learning_rate",
        "replay/size",
        "replay/lost_items",
        "replay/samples_per_insert",
    }
)
"""Metrics of which a report has the latest value instead of the mean."""
