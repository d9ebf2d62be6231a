"""Workers of several tasks, which adapt the weights to each of them by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from rollstream.engine import ActorContext, RollstreamError
from rollstream.flow import Context
from rollstream.rl.batch import Batch
from rollstream.rl.jit import jit
from rollstream.rl.normalize import lacks_statistics
from rollstream.rl.packed_tree import PublishedWeights
from rollstream.rl.params import Weights
from rollstream.rl.policy import EvaluatingPolicy, SequencePolicy
from rollstream.rl.spaces import Observation
from rollstream.rl.worker import RolloutWorker
from rollstream.rl.worker_spec import WorkerSpec

Array = Any
ADAPTATION_COLUMNS = ("observation", "action", "log_prob", "advantage")
"""What weights are adapted to."""


@dataclass(frozen=True)
class TaskRollouts:
    """The steps of a worker, `[T, tasks * environments per task]`."""

    batch: Batch
    worker: int
    task_set: int
    """Which of the worker's sets of tasks they are of; a worker that was restarted has others."""
    adaptations: int
    """How often the weights were adapted before."""


class TaskWorker(RolloutWorker):
    """A worker whose environments are of several tasks, an equal number of each.

    It acts with weights of its own in each task: those it received, adapted to what it has sampled there.
    """

    def __init__(self, spec: WorkerSpec, *, context: ActorContext):
        assert spec.tasks is not None
        assert spec.adapt is not None
        self._count = spec.tasks
        self._tasks: list[Any] = []
        super().__init__(spec, context=context)
        policy = self.policy
        if not (policy.jit and isinstance(policy, EvaluatingPolicy) and policy.evaluates_steps()):
            raise RollstreamError(
                f"adapting to tasks needs a policy that JAX can compile and that evaluates its steps, and "
                f"{type(policy).__name__} does not: give it an evaluated_step"
            )
        if isinstance(policy, SequencePolicy) or lacks_statistics(policy.init(0)):
            raise RollstreamError(
                f"adapting to tasks needs a policy without memory and without running statistics that "
                f"normalize, and {type(policy).__name__} has some: leave them out"
            )
        if self._device is not None:
            raise RollstreamError("workers of several tasks act on the host: set acting='host'")
        self._numpy_policy, self._acts_in_jax = None, True
        self._step_tasks = jit(partial(_step_tasks, policy.evaluated_step, self._count))
        self._adapt_tasks = jit(partial(_adapt_tasks, spec.adapt(policy), self._count))
        self._adapted: Weights = {}
        self._batch: Batch | None = None
        self._task_set = context.restarts << 32
        self._adaptations = 0

    def _start_episodes(self, seeds: list[int]) -> Observation:
        if not self._tasks:
            self._tasks = self.vector.sample_tasks(self._generator, self._count)
        each = self.spec.num_envs // self._count
        return self.vector.reset_to_tasks(seeds, [task for task in self._tasks for _ in range(each)])

    def _use(self, received: Weights | PublishedWeights) -> None:
        super()._use(received)
        self._act_with(
            {name: np.stack([np.asarray(own)] * self._count) for name, own in self._weights.items()}
        )

    def _act_with(self, weights: Weights) -> None:
        """Act with weights of each task, on the host."""
        self._adapted = jax.device_put(weights, self._jax_device)
        self._act = partial(self._step_tasks, self._adapted)

    def sample(self, context: Context) -> TaskRollouts:
        """A rollout of every environment."""
        self._batch = batch = super().sample(context)
        return TaskRollouts(batch, self._identity[1], self._task_set, self._adaptations)

    def adapt(self) -> None:
        """Adapt the weights to the last rollout of each task, and start new episodes.

        A worker that was restarted after its rollout has nothing to adapt to.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            return
        with self._on_device():
            self._act_with(self._adapt_tasks(self._adapted, dict(batch.select(ADAPTATION_COLUMNS))))
        self._adaptations += 1
        self._reset(int(self._generator.integers(1 << 31)))

    def next_tasks(self) -> None:
        """Choose other tasks, with the weights received last."""
        self._tasks, self._batch = [], None
        if self._received is None:
            self._received = self._weights
        self._task_set, self._adaptations = self._task_set + 1, 0
        self._reset(int(self._generator.integers(1 << 31)))

    def state_dict(self) -> dict[str, Any]:
        """The worker's state, between two sets of tasks, with the tasks that come next."""
        return super().state_dict() | {"tasks": self._tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._tasks = list(state["tasks"])
        super().load_state_dict(state)


def _step_tasks(
    step: Callable[..., Any], count: int, weights: Weights, observation: Observation, state: Any, noise: Any
) -> Any:
    """A policy's step with the weights of each task, `[count, ...]`, for as many environments of each."""
    inputs = jax.tree.map(partial(_by_task, count), (observation, state, noise))
    return jax.tree.map(lambda own: own.reshape(-1, *own.shape[2:]), jax.vmap(step)(weights, *inputs))


def _adapt_tasks(
    adapt: Callable[..., Weights], count: int, weights: Weights, batch: Mapping[str, Any]
) -> Weights:
    return jax.vmap(adapt)(weights, steps_by_task(batch, count))


def _by_task(count: int, rows: Array) -> Array:
    return rows.reshape(count, -1, *rows.shape[1:])


def steps_by_task(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Steps `[T, B, ...]` of `count` tasks, one after the other, as `[count, T * B / count, ...]`."""

    def steps(column: Array) -> Array:
        parts = column.reshape(column.shape[0], count, -1, *column.shape[2:]).swapaxes(0, 1)
        return parts.reshape(count, -1, *parts.shape[3:])

    return {name: jax.tree.map(steps, column) for name, column in batch.items()}
