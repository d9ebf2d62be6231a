"""Rollout workers, the learner they sample for, and replay shards."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rollstream.engine import Actor, Engine, RollstreamError
from rollstream.replay.service import ReplayShards
from rollstream.rl.acting import choose_acting
from rollstream.rl.learner import Learner
from rollstream.rl.worker import RolloutWorker, WorkerSpec


class Heartbeat:
    """Decides after every item whether the plan yields a heartbeat although no report is due."""

    is_due: Callable[[], bool] = staticmethod(lambda: False)


class WorkerSet:
    """The actors of a training: rollout workers, and replay shards if it has some; and the learner."""

    def __init__(self, engine: Engine, spec: WorkerSpec, learner: Learner, count: int, **spawn_options: Any):
        spawn_options = {"on_failure": "restart", **spawn_options}
        acting = choose_acting(
            spec.acting, learner.policy, learner.weights, spec.num_envs, own_process=engine.remote
        )
        threads = _env_threads(engine, count) if spec.env_threads is None else spec.env_threads
        spec = replace(spec, own_process=engine.remote, acting=acting, env_threads=threads)
        self.engine = engine
        self.spec = spec
        self.learner = learner
        self.heartbeat = Heartbeat()
        self._replay: ReplayShards | None = None
        self._stored: tuple[int, Any] = (-1, None)
        self.actors: list[Actor[RolloutWorker]] = engine.spawn(
            RolloutWorker, (spec,), count=count, name="worker", **spawn_options
        )
        self.send_weights()

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

        Workers in this process get the learner's own arrays.
        """
        learner = self.learner
        if self._stored[0] != learner.version:
            weights = learner.get_weights() if self.engine.remote else learner.weights
            self._stored = learner.version, self.engine.put(weights)
        for actor in self.actors if actors is None else actors:
            actor.send("set_weights", *self._stored, sticky=True)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the learner, and send its weights to the workers."""
        self.learner.load_state_dict(state)
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
