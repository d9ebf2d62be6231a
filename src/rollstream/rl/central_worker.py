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
from rollstream.rl.inference_actor import InferenceActor, InferenceResult
from rollstream.rl.normalize import lacks_statistics
from rollstream.rl.params import Weights
from rollstream.rl.report import INFERENCE_BATCH_SIZES, INFERENCE_REQUESTS, INFERENCE_WAIT
from rollstream.rl.rollout import Rollout
from rollstream.rl.worker_spec import WorkerSpec

Queries: TypeAlias = Generator["_Query", InferenceResult, Any]
"""Yields queries, is sent the results, and returns something."""
_VALUE = 3
"""The position of the values among what `evaluated_step` returns."""


@dataclass
class _Query:
    """What is asked of the inference actor."""

    inputs: Inputs
    wants_statistics: bool = False


@dataclass
class _InferenceStatistics:
    """What the answers of a rollout say."""

    version: float = math.inf
    """The oldest version of the weights that acted."""
    requests: int = 0
    batches: int = 0
    """Sum of the sizes of the batches."""
    wait: float = 0.0

    def add(self, answer: InferenceResult) -> None:
        self.version = min(self.version, answer.version)
        self.requests += 1
        self.batches += answer.batch_size
        self.wait += answer.waited


class CentralWorker(EnvWorker):
    """Steps its environments with actions that it asks an inference actor for: `sample` returns a `Deferred`.

    Args:
        spec: What it is started with.
        inference: Chooses the actions.
    """

    def __init__(self, spec: WorkerSpec, inference: Actor[InferenceActor], *, context: ActorContext):
        super().__init__(spec, context)
        self._inference = inference
        self._index = context.index
        self._replies: deque[tuple[Deferred[Any], Context]] = deque()
        """Rollouts that were asked for. Several flows, one after the other, may have asked."""
        self._rollout: Queries | None = None
        """The rollout in progress."""
        self._asked: tuple[int, _Query] | None = None
        """The request that has not been answered, and its number."""
        # A restarted worker must not take an answer to the one before it for its own.
        self._numbers = itertools.count(context.restarts << 40)
        self._answered = _InferenceStatistics()
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

    def receive_actions(self, number: int, answer: InferenceResult) -> None:
        """The inference actor has answered. What was asked twice is answered twice: the first one counts."""
        if self._asked is not None and number == self._asked[0]:
            self._asked = None
            self._answered.add(answer)
            self._continue(answer)

    def ask_again(self) -> None:
        """The inference actor was restarted: what it had been asked is lost."""
        if self._estimate is not None:
            self._inference.send("add_statistics", self._estimate)
        if self._asked is not None:
            self._ask(*self._asked)

    def _ask(self, number: int, query: _Query) -> None:
        self._asked = number, query
        self._inference.send("act", self._index, number, query.inputs, query.wants_statistics)

    # Rollouts ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._rollout = self._generate_item(self._replies[0][1])
        self._continue(None)

    def _continue(self, answer: InferenceResult | None) -> None:
        """Step the environments until actions are needed again, or the rollout is complete."""
        assert self._rollout is not None
        item = error = None
        start, reply = time.perf_counter(), self._replies[0][0]
        try:
            query = self._rollout.send(answer)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            item = end.value
        except Exception as caught:
            error = caught
        else:
            self._ask(next(self._numbers), query)
        if answer is not None:
            reply.busy += time.perf_counter() - start
        if self._asked is not None:
            return
        self._rollout = None
        self._replies.popleft()
        if error is not None:
            reply.reject(error)
        else:
            reply.resolve(item)
        if self._replies and self._rollout is None:
            self._begin()

    def _generate_item(self, context: Context) -> Queries:
        """The steps of an item, which it returns."""
        start, sampled, version = time.perf_counter(), None, math.inf
        if not self._knows_statistics:
            yield from self._estimate_statistics()
        while sampled is None:
            self._answered = _InferenceStatistics()
            rollout = yield from self._generate_rollout()
            rollout.version = version = self._answered.version
            statistics = yield from self._evaluate(rollout)
            sampled = self._item(statistics, rollout)
        item, steps = sampled
        answered = self._answered
        context.note(version=version, steps=steps, sample_time=time.perf_counter() - start)
        context.note(
            **{
                INFERENCE_REQUESTS: answered.requests,
                INFERENCE_BATCH_SIZES: answered.batches,
                INFERENCE_WAIT: answered.wait,
            }
        )
        return item

    def _generate_rollout(self, length: int | None = None) -> Queries:
        """The steps of a rollout, which it returns."""
        steps = self._record_rollout(length)
        asked = next(steps)
        while not isinstance(asked, Rollout):
            answer = yield _Query(asked)
            asked = steps.send(answer.outputs)
        return asked

    def _evaluate(self, rollout: Rollout) -> Queries:
        """Have the values evaluated that postprocessing needs; returns the statistics of the weights."""
        wanted = self.spec.bootstrap_values or ()
        last_state = self.state if rollout.last_state is None else rollout.last_state
        statistics: Weights = {}
        if "last" in wanted:
            inputs = rollout.last_observation, last_state, self._blank_noise
            answer = yield _Query(inputs, self._normalizes)
            rollout.last_value, statistics = answer.outputs[_VALUE], answer.statistics
        if "final" in wanted:
            final_value = np.full(rollout.columns.shape, np.nan, np.float32)
            for rows, observations, *states in final_inputs(self.vector.observation_space, rollout):
                state = states[0] if states else last_state
                answer = yield _Query((observations, state, self._blank_noise))
                final_value[rows] = answer.outputs[_VALUE][: len(rows[0])]
            rollout.final_value = final_value
        return statistics

    def _estimate_statistics(self) -> Queries:
        """If there are no statistics that normalize yet, estimate some, from steps that count nowhere."""
        answer = yield _Query((self.observation, self.state, self._blank_noise), wants_statistics=True)
        if lacks_statistics(answer.statistics):
            policy: Any = self.policy
            rollout = yield from self._generate_rollout(self._statistics_length)
            with self._at_home():
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
        self._rollout = self._asked = None
        while self._replies:
            self._replies.popleft()[0].reject(
                RollstreamError("the worker was given another state in the middle of a rollout")
            )
