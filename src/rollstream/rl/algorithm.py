"""What an algorithm is: its settings, worker, learner and plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import gymnasium

from rollstream.engine import Engine, RollstreamError
from rollstream.flow import Iter
from rollstream.limits import OptionalMilliseconds, OptionalPositiveInt
from rollstream.replay.service import ReplayShards
from rollstream.rl.acting import Acting
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.learner import Learner
from rollstream.rl.learner_actor import LearnerActor, RemoteLearner
from rollstream.rl.operators import Report
from rollstream.rl.worker import PolicyMaker, WorkerSpec
from rollstream.rl.worker_set import WorkerSet

INFERENCE = ("inference_batch", "inference_deadline")
"""What a task says of the inference actor."""


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
    acting: Acting = "auto"
    """Where workers in the driver's process act: on the `host` or on JAX's default `device`. `auto` is an
    accelerator if there is one and the network is large, else the host. With `central`, an inference actor
    acts for all workers, wherever they are."""
    inference_batch: OptionalPositiveInt = None
    """Number of workers whose actions the inference actor chooses together; by default half of them."""
    inference_deadline: OptionalMilliseconds = None
    """Milliseconds after which it does not wait for more of them; by default 2."""

    def envs_per_worker(self, num_envs: int) -> int:
        """How many of the environments each worker has."""
        workers = max(1, self.workers)
        if num_envs % workers:
            plural, fitting = "s" * (num_envs > 1), [n for n in range(1, num_envs + 1) if num_envs % n == 0]
            raise RollstreamError(
                f"{num_envs} environment{plural} cannot be divided evenly among {workers} workers; numbers "
                f"of workers that fit: {', '.join(map(str, fitting))}"
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

    def with_num_envs(self, num_envs: int) -> Any:
        """These settings with another number of environments, and what has to change with it."""
        return replace(cast(Any, self), num_envs=num_envs)

    def for_workers(self, workers: int) -> Any:
        """These settings with the number of environments rounded up to a multiple of the workers."""
        workers = max(1, workers)
        rounded = math.ceil(self.num_envs / workers) * workers
        return self if rounded == self.num_envs else self.with_num_envs(rounded)

    def steps_before_learning(self, workers: int) -> int:  # noqa: ARG002
        """Environment steps before the first update."""
        return 0


C = TypeVar("C", bound=AlgorithmConfig)


def _call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; if it is the user's, its error becomes one sentence with the line that failed."""
    try:
        return function(*args)
    except RollstreamError:
        raise
    except Exception as error:
        if getattr(function, "__module__", "").startswith("rollstream."):
            raise
        raise RollstreamError(f"{name} failed: {type(error).__name__}: {error}") from error


def _with_acting(spec: WorkerSpec, task: Task) -> WorkerSpec:
    """The spec with what the task says of acting."""
    if task.acting != "auto":
        spec = replace(spec, acting=task.acting)
    given = {name: value for name in INFERENCE if (value := getattr(task, name)) is not None}
    if given and task.acting != "central":
        raise RollstreamError(
            f"{' and '.join(given)} configure{'s' * (len(given) == 1)} an inference actor, and acting is "
            f"{task.acting}: set acting='central', or leave {'them' if len(given) > 1 else 'it'} out"
        )
    return replace(spec, **given)


def _require_members(kind: str, value: Any, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not hasattr(value, name)]:
        raise RollstreamError(
            f"the {kind} is of type {type(value).__name__}, and a {kind} has {', '.join(missing)}"
        )


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
    """Returns the dataflow that trains. Building it starts nothing; see `build`."""
    replay: Callable[[WorkerSet, C], ReplayShards] | None = None
    """Spawns the replay shards, for plans with replay on actors: `workers.replay`."""
    learner_on_actor: bool = False
    """The learner is an actor of the engine, `workers.learner_actor`, and a stage of the plan."""
    environment: str | None = None
    """An environment for examples and pictures, if CartPole-v1 and Pendulum-v1 do not suit it."""

    def build(self, workers: WorkerSet, config: C) -> Iter[Report]:
        """Build the plan; raise if it is not a stream."""
        plan = _call(f"plan of {self.name}", self.plan, workers, config)
        if not isinstance(plan, Iter):
            raise RollstreamError(
                f"the plan of {self.name} returns {type(plan).__name__}; end it with "
                f"return ReportMetrics(stream, workers)"
            )
        return plan

    def workers(self, engine: Engine, config: C, task: Task, **spawn_options: Any) -> WorkerSet:
        """Create the learner, and spawn the workers and replay shards."""
        spec = _call(f"worker of {self.name}", self.worker, config, task)
        if not isinstance(spec, WorkerSpec):
            raise RollstreamError(f"worker of {self.name} returns {type(spec).__name__}, not a WorkerSpec")
        spaces = task.spaces()
        policy = _call("policy", spec.policy, *spaces) if task.policy else spec.policy(*spaces)
        _require_members("policy", policy, ("init", "initial_state", "noise", "step", "jit"))
        learner = self._make_learner(engine, config, task, policy, spec, spaces)
        spec = _with_acting(spec, task)
        workers = WorkerSet(engine, spec, learner, max(1, task.workers), **spawn_options)
        if self.replay is not None:
            workers.replay = self.replay(workers, config)
        return workers

    def _make_learner(
        self, engine: Engine, config: C, task: Task, policy: Any, spec: WorkerSpec, spaces: Any
    ) -> Learner | RemoteLearner:
        if self.learner_on_actor:
            make = partial(_learner_of, self.name, self.learner, config, task, spec.policy, spaces)
            resources = engine.transport.accelerator(2 if task.acting == "central" else 1)
            [actor] = engine.spawn(LearnerActor, (make, engine.remote), name="learner", resources=resources)
            return RemoteLearner(actor, policy, task.steps)
        return _checked_learner(self.name, self.learner, config, task, policy)


def _learner_of(
    name: str,
    make: Callable[..., Learner],
    config: AlgorithmConfig,
    task: Task,
    policy: PolicyMaker,
    spaces: Any,
) -> Learner:
    """The learner, with a policy of its own: where it trains, in another process perhaps."""
    learner = _checked_learner(name, make, config, task, policy(*spaces))
    _require_members("learner on an actor", learner, ("collate", "load_state_dict"))
    return learner


def _checked_learner(name: str, make: Callable[..., Learner], *args: Any) -> Learner:
    learner = _call(f"learner of {name}", make, *args)
    _require_members("learner", learner, ("train", "get_weights", "version", "state_dict"))
    return learner
