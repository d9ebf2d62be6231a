"""What makes an algorithm: its settings, its workers and learner, and its plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import gymnasium

from rollstream.engine import Engine, RollstreamError
from rollstream.flow import Iter
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner
from rollstream.rl.operators import Report
from rollstream.rl.worker import PolicyMaker, WorkerSpec
from rollstream.rl.worker_set import WorkerSet

C = TypeVar("C")


@dataclass(frozen=True)
class Task:
    """What is to be learned, whichever the algorithm."""

    environment: EnvSpec
    steps: int
    """Environment steps of the whole training."""
    seed: int = 0
    workers: int = 0
    """Processes, threads or machines that sample; 0 is one in the driver's own thread."""
    policy: PolicyMaker | None = None
    """Instead of the algorithm's own."""

    def share(self, environments: int) -> int:
        """How many of them each worker has."""
        count = max(1, self.workers)
        if environments % count:
            enough, some = math.ceil(environments / count) * count, "s" * (environments > 1)
            raise RollstreamError(
                f"{environments} environment{some} cannot be shared out evenly among {count} workers; set "
                f"environments to a multiple of {count}, as {enough}"
            )
        return environments // count

    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """The observation and the action space of one environment, as policies see them."""
        vector = self.environment.make(1)
        try:
            return vector.observation_space, vector.action_space
        finally:
            vector.close()


@dataclass(frozen=True)
class Algorithm(Generic[C]):
    """A name, settings, and functions of them. Written down once at the end of an algorithm's file."""

    name: str
    config: type[C]
    """A frozen dataclass; the command line is made from it."""
    worker: Callable[[C, Task], WorkerSpec]
    """What workers are made from."""
    learner: Callable[[C, Task, Any], Learner]
    """The learner, given also the policy."""
    plan: Callable[[WorkerSet, C], Iter[Report]]
    """How experience flows, as one screen of operators."""

    def workers(self, engine: Engine, config: C, task: Task, **terms: Any) -> WorkerSet:
        """Spawn the workers, with a learner here."""
        spec = self.worker(config, task)
        learner = self.learner(config, task, spec.policy(*task.spaces()))
        return WorkerSet(engine, spec, learner, max(1, task.workers), **terms)
