"""What an algorithm is: its settings, worker, learner and plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import gymnasium

from rollstream.engine import Engine, RollstreamError
from rollstream.flow import Iter
from rollstream.replay.service import ReplayShards
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner
from rollstream.rl.operators import Report
from rollstream.rl.worker import PolicyMaker, WorkerSpec
from rollstream.rl.worker_set import WorkerSet


@dataclass(frozen=True)
class Task:
    """What to train on, independent of the algorithm."""

    environment: EnvSpec
    steps: int
    """Environment steps of the whole training."""
    seed: int = 0
    workers: int = 0
    """Number of rollout workers; with 0, one samples in the driver's thread."""
    policy: PolicyMaker | None = None
    """Creates the policy, instead of the algorithm."""

    def envs_per_worker(self, num_envs: int) -> int:
        """How many of the environments each worker has."""
        workers = max(1, self.workers)
        if num_envs % workers:
            enough, plural = math.ceil(num_envs / workers) * workers, "s" * (num_envs > 1)
            raise RollstreamError(
                f"{num_envs} environment{plural} cannot be divided evenly among {workers} workers; set "
                f"num_envs to a multiple of {workers}, such as {enough}"
            )
        return num_envs // workers

    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """Observation and action space of one environment, as policies see them."""
        vector = self.environment.make(1)
        try:
            return vector.observation_space, vector.action_space
        finally:
            vector.close()


class AlgorithmConfig(Protocol):
    """Base of an algorithm's settings, which are a frozen dataclass.

    Each field has a docstring, which is its help on the command line, and may have a range
    (`rollstream.limits`).
    """

    num_envs: int
    rollout_length: int

    def steps_per_round(self, workers: int) -> int:  # noqa: ARG002
        """Environment steps that reach the learner together; a training takes a multiple of it."""
        return self.num_envs * self.rollout_length

    def steps_before_learning(self, workers: int) -> int:  # noqa: ARG002
        """Environment steps before the first update."""
        return 0


C = TypeVar("C", bound=AlgorithmConfig)


@dataclass(frozen=True)
class Algorithm(Generic[C]):
    """A name, and the functions that make an algorithm of its settings."""

    name: str
    config: type[C]
    worker: Callable[[C, Task], WorkerSpec]
    """Returns what the workers run: environments, policy, postprocessing."""
    learner: Callable[[C, Task, Any], Learner]
    """Returns the learner, given also the policy."""
    plan: Callable[[WorkerSet, C], Iter[Report]]
    """Returns the dataflow that trains. Building it starts nothing."""
    replay: Callable[[WorkerSet, C], ReplayShards] | None = None
    """Spawns the replay shards, for plans with replay on actors: `workers.replay`."""

    def workers(self, engine: Engine, config: C, task: Task, **spawn_options: Any) -> WorkerSet:
        """Create the learner, and spawn the workers and replay shards."""
        spec = self.worker(config, task)
        learner = self.learner(config, task, spec.policy(*task.spaces()))
        workers = WorkerSet(engine, spec, learner, max(1, task.workers), **spawn_options)
        if self.replay is not None:
            workers.replay = self.replay(workers, config)
        return workers
