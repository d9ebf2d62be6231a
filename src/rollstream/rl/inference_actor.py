"""Central inference: an actor chooses the actions of all workers, as in SEED RL (arXiv:1910.06591).

Workers send what they observe, with their noise and the recurrent state. So all that an inference actor has
are weights: one that dies is started again, and workers resend their requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from rollstream.engine import Actor, ActorContext
from rollstream.rl.env_worker import Inputs
from rollstream.rl.jit import host_memory, jit
from rollstream.rl.normalize import combined_statistics, lacks_statistics, statistics_of
from rollstream.rl.packed_tree import PublishedWeights
from rollstream.rl.params import Weights
from rollstream.rl.worker_spec import WorkerSpec, policy_step


class InferenceResponse(NamedTuple):
    """What a policy chose for one worker."""

    outputs: tuple[Any, ...]
    """Actions and the new state; log probabilities and values if the policy evaluates its steps."""
    version: int
    """Of the weights."""
    batch_size: int
    """Number of requests in the batch."""
    waited: float
    """Seconds the request waited for others."""
    statistics: Weights
    """The running statistics among the weights, if the worker wants them."""


class _Request(NamedTuple):
    number: int
    """Identifies it for the worker that sent it."""
    inputs: Inputs
    wants_statistics: bool
    arrived: float


class InferenceActor:
    """Computes the actions of several workers together: of `batch_size` of them, or of fewer at the deadline.

    Args:
        spec: What the workers are started with.
        batch_size: Number of requests in a batch.
    """

    def __init__(self, spec: WorkerSpec, batch_size: int, *, context: ActorContext):
        if spec.own_process:  # it may share an accelerator with the learner
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        vector = spec.environment.make(1)  # for the spaces, as policies see them
        self._policy: Any = spec.policy(vector.observation_space, vector.action_space)
        vector.close()
        step = policy_step(spec, self._policy)
        self._step = jit(step, out_shardings=host_memory()) if self._policy.jit else step
        self._context = context
        self._num_envs = spec.num_envs
        self._batch_size = batch_size
        self._deadline = spec.inference_deadline / 1000
        self._workers: Sequence[Actor[Any]] = ()
        self._version = -1
        self._weights: Weights = {}
        self._received: Weights | PublishedWeights | None = None
        self._estimated = False
        """Whether the statistics are what workers have estimated, instead of the learner's."""
        self._waiting: dict[int, _Request] = {}
        """The request of each worker that waits, oldest first."""
        self._batches = 0
        self._timer_is_set = False

    def connect(self, workers: Sequence[Actor[Any]]) -> None:
        """Receive the workers. After a restart, those that wait have to resend their requests."""
        self._workers = workers
        if self._context.restarts:
            for worker in workers:
                worker.send("resend_request")

    # Weights -----------------------------------------------------------------------------------

    def set_weights(self, version: int, weights: Weights | PublishedWeights) -> None:
        """Receive a version of the weights; it is used from the next batch on."""
        self._version, self._received = version, weights

    def add_statistics(self, statistics: Weights) -> None:
        """A worker's estimate of the statistics that normalize, until the learner has some."""
        weights = self._current_weights()
        if lacks_statistics(weights):
            self._weights, self._estimated = weights | statistics, True
        elif self._estimated:
            self._weights = weights | combined_statistics(weights, statistics)

    def _current_weights(self) -> Weights:
        if (received := self._received) is not None:
            if isinstance(received, PublishedWeights):
                jits, device = self._policy.jit, jax.devices()[0]
                weights = received.on_device(device) if jits else received.on_host()
            else:
                weights = jax.device_put(received) if self._policy.jit else received
            self._estimated = self._estimated and lacks_statistics(weights)
            if self._estimated:  # the learner has not trained yet
                weights = weights | statistics_of(self._weights)
            self._weights, self._received = weights, None
        return self._weights

    # Requests ----------------------------------------------------------------------------------

    def act(self, worker: int, number: int, inputs: Inputs, wants_statistics: bool) -> None:
        """Choose the actions of a worker as soon as there are enough requests, or at the deadline."""
        self._waiting.pop(worker, None)  # one that resends its request waits behind the others
        self._waiting[worker] = _Request(number, inputs, wants_statistics, time.perf_counter())
        if len(self._waiting) >= self._batch_size:
            self._respond()
        elif not self._timer_is_set:
            self._set_timer(self._deadline)

    def _set_timer(self, seconds: float) -> None:
        """Only one at a time: a message per batch would cost as much as a request."""
        self._timer_is_set = True
        self._context.actor.send_later(max(0.0, seconds), "at_deadline", self._batches)

    def at_deadline(self, batch: int) -> None:
        """Respond to all that wait, if they did when the timer was set; else set it again, for the rest."""
        self._timer_is_set = False
        if not self._waiting:
            return
        if batch == self._batches:
            self._respond()
        else:
            oldest = next(iter(self._waiting.values()))
            self._set_timer(self._deadline - (time.perf_counter() - oldest.arrived))

    def _respond(self) -> None:
        """Compute a batch of all that waits, and send everybody their part."""
        waiting, self._waiting = self._waiting, {}
        self._batches += 1
        start, weights = time.perf_counter(), self._current_weights()
        parts = self._outputs(weights, [request.inputs for request in waiting.values()])
        for (worker, request), outputs in zip(waiting.items(), parts, strict=True):
            statistics = statistics_of(weights) if request.wants_statistics else {}
            response = InferenceResponse(
                outputs, self._version, len(waiting), start - request.arrived, statistics
            )
            self._workers[worker].send("receive_actions", request.number, response)

    def _outputs(self, weights: Weights, inputs: list[Inputs]) -> list[tuple[Any, ...]]:
        """What the policy returns for each of the inputs, computed together.

        JAX compiles for every shape, so batches are filled up to the next power of two, with copies.
        """
        count = len(inputs)
        if self._policy.jit:
            inputs = inputs + inputs[:1] * (min(1 << (count - 1).bit_length(), self._batch_size) - count)
        if len(inputs) == 1:
            return [jax.tree.map(np.asarray, self._step(weights, *inputs[0]))]
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *inputs)
        outputs = jax.tree.map(np.asarray, self._step(weights, *joined))
        starts = range(0, count * self._num_envs, self._num_envs)
        return [jax.tree.map(partial(_rows, start, start + self._num_envs), outputs) for start in starts]


def _rows(start: int, stop: int, array: Any) -> Any:
    return array[start:stop]
