"""Workers whose actions an inference actor chooses: they step environments, and have no weights."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from rollstream.engine import Actor, ActorContext, Deferred, RollstreamError
from rollstream.flow import Context
from rollstream.rl.env_worker import EnvWorker, Inputs
from rollstream.rl.gae import final_inputs
from rollstream.rl.inference_actor import InferenceActor, InferenceResponse
from rollstream.rl.normalize import lacks_statistics
from rollstream.rl.params import Weights
from rollstream.rl.report import INFERENCE_BATCH_SIZES, INFERENCE_REQUESTS, INFERENCE_WAIT
from rollstream.rl.rollout import Rollout
from rollstream.rl.worker_spec import WorkerSpec

Requests: TypeAlias = Generator["_Request", InferenceResponse, Any]
"""Yields requests, is sent the responses, and returns something."""
_VALUE = 3
"""The position of the values among what `evaluated_step` returns."""


@dataclass
class _Request:
    """What the inference actor is to compute."""

    inputs: Inputs
    wants_statistics: bool = False


@dataclass
class _InferenceStatistics:
    """What the responses of a rollout say."""

    version: float = math.inf
    """The oldest version of the weights that acted."""
    requests: int = 0
    batches: int = 0
    """Sum of the sizes of the batches."""
    wait: float = 0.0

    def add(self, response: InferenceResponse) -> None:
        self.version = min(self.version, response.version)
        self.requests += 1
        self.batches += response.batch_size
        self.wait += response.waited


class CentralWorker(EnvWorker):
    """Steps its environments with actions of an inference actor, so `sample` returns a `Deferred`.

    Args:
        spec: What it is started with.
        inference: Chooses the actions.
    """

    def __init__(self, spec: WorkerSpec, inference: Actor[InferenceActor], *, context: ActorContext):
        super().__init__(spec, context)
        self._inference = inference
        self._index = context.index
        self._replies: deque[tuple[Deferred[Any], Context]] = deque()
        """Rollouts that were requested. Several flows, one after the other, may have requested some."""
        self._rollout: Requests | None = None
        """The rollout in progress."""
        self._pending: tuple[int, _Request] | None = None
        """The request that has no response yet, and its number."""
        # A restarted worker must not take a response to the one before it for its own.
        self._numbers = itertools.count(context.restarts << 40)
        self._responses = _InferenceStatistics()
        self._blank_noise = self.policy.noise(np.random.default_rng(0), spec.num_envs)
        """For observations that are evaluated, not acted on: what is chosen there is not used."""
        self._normalizes = lacks_statistics(self.policy.init(0))
        self._knows_statistics = not self._normalizes
        self._estimate: Weights | None = None
        """The statistics that this worker has estimated."""
        self._reset()

    def sample(self, context: Context) -> Deferred[Any]:
        """A rollout of every environment, postprocessed, when it is complete."""
        reply: Deferred[Any] = Deferred()
        self._replies.append((reply, context))
        if self._rollout is None:
            self._begin()
        return reply

    # Messages ----------------------------------------------------------------------------------

    def receive_actions(self, number: int, response: InferenceResponse) -> None:
        """A response has come. A request that was sent twice has two: the first one counts."""
        if self._pending is not None and number == self._pending[0]:
            self._pending = None
            self._responses.add(response)
            self._continue(response)

    def resend_request(self) -> None:
        """The inference actor was restarted: the request that it had is lost."""
        if self._estimate is not None:
            self._inference.send("add_statistics", self._estimate)
        if self._pending is not None:
            self._send_request(*self._pending)

    def _send_request(self, number: int, request: _Request) -> None:
        self._pending = number, request
        self._inference.send("act", self._index, number, request.inputs, request.wants_statistics)

    # Rollouts ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._rollout = self._generate_item(self._replies[0][1])
        self._continue(None)

    def _continue(self, response: InferenceResponse | None) -> None:
        """Step the environments until actions are needed again, or the rollout is complete."""
        assert self._rollout is not None
        item = error = None
        start, reply = time.perf_counter(), self._replies[0][0]
        try:
            request = self._rollout.send(response)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            item = end.value
        except Exception as caught:
            error = caught
        else:
            self._send_request(next(self._numbers), request)
        if response is not None:
            reply.busy += time.perf_counter() - start
        if self._pending is not None:
            return
        self._rollout = None
        self._replies.popleft()
        if error is not None:
            reply.reject(error)
        else:
            reply.resolve(item)
        if self._replies and self._rollout is None:
            self._begin()

    def _generate_item(self, context: Context) -> Requests:
        """The steps of an item, which it returns."""
        start, sampled, version = time.perf_counter(), None, math.inf
        if not self._knows_statistics:
            yield from self._estimate_statistics()
        while sampled is None:
            self._responses = _InferenceStatistics()
            rollout = yield from self._generate_rollout()
            rollout.version = version = self._responses.version
            statistics = yield from self._evaluate(rollout)
            sampled = self._item(statistics, rollout)
        item, steps = sampled
        responses = self._responses
        context.note(version=version, steps=steps, sample_time=time.perf_counter() - start)
        context.note(
            **{
                INFERENCE_REQUESTS: responses.requests,
                INFERENCE_BATCH_SIZES: responses.batches,
                INFERENCE_WAIT: responses.wait,
            }
        )
        return item

    def _generate_rollout(self, length: int | None = None) -> Requests:
        """The steps of a rollout, which it returns."""
        steps = self._record_rollout(length)
        inputs = next(steps)
        while not isinstance(inputs, Rollout):
            response = yield _Request(inputs)
            inputs = steps.send(response.outputs)
        return inputs

    def _evaluate(self, rollout: Rollout) -> Requests:
        """Have the values evaluated that postprocessing needs; returns the statistics of the weights."""
        wanted = self.spec.bootstrap_values or ()
        last_state = self.state if rollout.last_state is None else rollout.last_state
        statistics: Weights = {}
        if "last" in wanted:
            inputs = rollout.last_observation, last_state, self._blank_noise
            response = yield _Request(inputs, self._normalizes)
            rollout.last_value, statistics = response.outputs[_VALUE], response.statistics
        if "final" in wanted:
            final_value = np.full(rollout.columns.shape, np.nan, np.float32)
            for rows, observations, *states in final_inputs(self.vector.observation_space, rollout):
                state = states[0] if states else last_state
                response = yield _Request((observations, state, self._blank_noise))
                final_value[rows] = response.outputs[_VALUE][: len(rows[0])]
            rollout.final_value = final_value
        return statistics

    def _estimate_statistics(self) -> Requests:
        """If there are no statistics that normalize yet, estimate some, from steps that count nowhere."""
        response = yield _Request((self.observation, self.state, self._blank_noise), wants_statistics=True)
        if lacks_statistics(response.statistics):
            policy: Any = self.policy
            rollout = yield from self._generate_rollout(self._statistics_length)
            with self._on_device():
                self._estimate = jax.tree.map(np.asarray, policy.batch_statistics(rollout.columns))
            self._inference.send("add_statistics", self._estimate)
            self._reset(1)
        self._knows_statistics = True

    # State -------------------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; a rollout in progress, of a flow that was closed, is given up."""
        self._give_up()
        super().load_state_dict(state)

    def start_anew(self, step: int) -> None:
        """Start new episodes; a rollout in progress is given up."""
        self._give_up()
        super().start_anew(step)

    def _give_up(self) -> None:
        self._rollout = self._pending = None
        while self._replies:
            self._replies.popleft()[0].reject(
                RollstreamError("the worker was given another state in the middle of a rollout")
            )
