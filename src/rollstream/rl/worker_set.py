"""Rollout workers, the learner they sample for, and replay shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rollstream.engine import Actor, Engine, RollstreamError
from rollstream.replay.service import ReplayShards
from rollstream.rl.learner import Learner
from rollstream.rl.worker import RolloutWorker, WorkerSpec


class Heartbeat:
    """Decides after every item whether the plan yields a heartbeat although no report is due."""

    is_due: Callable[[], bool] = staticmethod(lambda: False)


class WorkerSet:
    """The actors of a training: rollout workers, and replay shards if it has some; and the learner."""

    def __init__(self, engine: Engine, spec: WorkerSpec, learner: Learner, count: int, **spawn_options: Any):
        spawn_options = {"on_failure": "restart", **spawn_options}
        spec = replace(spec, own_process=engine.remote)
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
