"""Rollout workers, the learner they sample for, and replay shards."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rollstream.engine import Actor, Engine, Ref, RollstreamError
from rollstream.replay.service import ReplayShards
from rollstream.rl.acting import choose_acting
from rollstream.rl.central_worker import CentralWorker
from rollstream.rl.inference_actor import InferenceActor
from rollstream.rl.learner import Learner
from rollstream.rl.learner_actor import LearnerActor, RemoteLearner
from rollstream.rl.packed_tree import PublishedWeights
from rollstream.rl.params import Weights
from rollstream.rl.task_worker import TaskWorker
from rollstream.rl.worker import RolloutWorker
from rollstream.rl.worker_spec import WorkerSpec, require_central


class Heartbeat:
    """Decides after every item whether the plan yields a heartbeat although no report is due."""

    is_due: Callable[[], bool] = staticmethod(lambda: False)


class WorkerSet:
    """The actors of a training: rollout workers, and replay shards if it has some; and the learner.

    The learner is here, in the driver, or on an actor of its own.
    """

    def __init__(
        self,
        engine: Engine,
        spec: WorkerSpec,
        learner: Learner | RemoteLearner,
        count: int,
        **spawn_options: Any,
    ):
        spawn_options = {"on_failure": "restart", **spawn_options}
        acting = choose_acting(
            spec.acting, learner.policy, learner.weights, spec.num_envs, own_process=engine.remote
        )
        threads = _env_threads(engine, count) if spec.env_threads is None else spec.env_threads
        spec = replace(spec, own_process=engine.remote, acting=acting, env_threads=threads)
        self.engine = engine
        self.spec = spec
        self.learner = learner
        if isinstance(learner, Learner):
            learner.publishes_on_device = acting in ("device", "central") and not engine.remote
        self.heartbeat = Heartbeat()
        self._replay: ReplayShards | None = None
        self._stored: tuple[int, Any] = (-1, None)
        """The newest version of the weights, as it is sent."""
        self._sent: dict[str, tuple[int, Any]] = {}
        """The version that each actor was sent last."""
        self.inference: Actor[InferenceActor] | None = None
        """The actor that acts for the workers, with `acting="central"`."""
        self.actors: list[Actor[Any]]
        if acting == "central":
            self._spawn_central(count, spawn_options)
        else:
            kind = RolloutWorker if spec.tasks is None else TaskWorker
            self.actors = engine.spawn(kind, (spec,), count=count, name="worker", **spawn_options)
        self.send_weights()

    def _spawn_central(self, count: int, spawn_options: Mapping[str, Any]) -> None:
        """Workers that step environments, and the inference actor that acts for them."""
        require_central(self.spec, self.learner.policy)
        batch_size = self.spec.inference_batch or max(1, count // 2)
        if batch_size > count:
            raise RollstreamError(
                f"inference_batch is {batch_size}, and {count} worker{'s' * (count > 1)} can send {count} "
                f"request{'s' * (count > 1)} at a time: set it to at most {count}"
            )
        # It may compile for longer than a worker may take for a step.
        options = {**spawn_options, "deadline": None, "on_failure": "restart"}  # nobody acts without it
        options["resources"] = self.engine.transport.accelerator(2)
        [self.inference] = self.engine.spawn(
            InferenceActor, (self.spec, batch_size), name="inference", **options
        )
        self.actors = self.engine.spawn(
            CentralWorker, (self.spec, self.inference), count=count, name="worker", **spawn_options
        )
        self.inference.send("connect", self.actors, sticky=True)

    @property
    def weights_receivers(self) -> list[Actor[Any]]:
        """The actors that act, and so receive weights: the inference actor, or the workers."""
        return self.actors if self.inference is None else [self.inference]

    @property
    def replay(self) -> ReplayShards:
        """The replay shards of an algorithm that has them."""
        if self._replay is None:
            raise RollstreamError("there are no replay shards: give the Algorithm a function replay=...")
        return self._replay

    @replay.setter
    def replay(self, shards: ReplayShards) -> None:
        self._replay = shards

    def stored_items(self, actor: str) -> int:
        """The number of items that an actor had stored when last heard of, if it is a replay shard."""
        return 0 if self._replay is None else self._replay.sizes.get(actor, 0)

    def send_weights(self, actors: Iterable[Actor[Any]] | None = None) -> None:
        """Send the newest weights to some workers, or to all; they are stored once for all readers.

        Workers in this process get the learner's own arrays. An inference actor gets each version once.
        """
        learner = self.learner
        if self._stored[0] != learner.version:
            self._stored = learner.version, self._published(learner)
        if self.inference is not None:
            if self._sent.get(self.inference.name) is not self._stored:
                self._send(self.inference, self._stored)
            return
        for actor in self.actors if actors is None else actors:
            self._send(actor, self._stored)

    def _send(self, actor: Actor[Any], stored: tuple[int, Any]) -> None:
        self._sent[actor.name] = stored
        actor.send("set_weights", *stored, sticky=True)

    def _published(self, learner: Learner | RemoteLearner) -> Ref[Weights] | Weights | PublishedWeights:
        """The newest weights: a reference, or the learner's own arrays for workers in this process."""
        if isinstance(learner, RemoteLearner):
            return learner.published
        if self.engine.remote:
            return self.engine.put(learner.get_weights())
        return learner.published() if isinstance(learner, Learner) else learner.get_weights()

    @property
    def local_learner(self) -> Learner:
        """The learner, if it is here."""
        if isinstance(self.learner, RemoteLearner):
            raise RollstreamError(
                'the learner is on an actor, so train there: stream.via(workers.learner_actor, "train")'
            )
        return self.learner

    @property
    def remote_learner(self) -> RemoteLearner:
        """What is known here of the learner, if it is on an actor."""
        if not isinstance(self.learner, RemoteLearner):
            raise RollstreamError(
                "the learner is in the driver: train with TrainOneStep(workers), or give the Algorithm "
                "learner_on_actor=True"
            )
        return self.learner

    @property
    def learner_actor(self) -> Actor[LearnerActor]:
        """The learner's actor: `stream.via(workers.learner_actor, "train", in_flight=2)`."""
        return self.remote_learner.actor

    def weights_state(self) -> dict[str, Any]:
        """The weights that a learner on an actor published last, and those that each actor was sent last.

        The actors sampled with the latter what comes next, while the learner may be some versions ahead.
        """
        learner = self.remote_learner
        versions = dict([*self._sent.values(), (learner.version, learner.published)])
        return {
            "published": learner.version,
            "sent": {name: version for name, (version, _) in self._sent.items()},
            "weights": [[version, weights] for version, weights in versions.items()],
        }

    def load_weights_state(self, state: Mapping[str, Any]) -> None:
        """Restore the published weights, and send every actor those it had; new actors get the published."""
        learner, versions = self.remote_learner, dict(state["weights"])
        learner.version = state["published"]
        learner.published = versions[learner.version]
        self._stored = learner.version, learner.published
        for actor in self.weights_receivers:
            version = state["sent"].get(actor.name, learner.version)
            self._send(actor, self._stored if version == learner.version else (version, versions[version]))

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the learner, and send its weights to the workers."""
        self.local_learner.load_state_dict(state)
        self._stored = (-1, None)
        self.send_weights()


def _env_threads(engine: Engine, workers: int) -> int | None:
    """Threads of each worker's vector environment, if it has a pool of its own; `None` for its default.

    Workers with processes of their own share the cores. Workers on threads get twice their share: about half
    of them act while the others step. Inline, one worker steps at a time.
    """
    if engine.name == "ray":  # workers may be on other machines
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not engine.concurrent:
        return cores
    return min(cores, math.ceil(cores * (1 if engine.remote else 2) / workers))
