"""Rollout workers and the learner they work for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rollstream.engine import Actor, Engine
from rollstream.rl.learner import Learner
from rollstream.rl.worker import RolloutWorker, WorkerSpec


class Heartbeat:
    """Decides after every item whether the plan yields a heartbeat although no report is due."""

    is_due: Callable[[], bool] = staticmethod(lambda: False)


class WorkerSet:
    """Actors that sample, and the learner whose weights they sample with."""

    def __init__(self, engine: Engine, spec: WorkerSpec, learner: Learner, count: int, **terms: Any):
        terms = {"on_failure": "restart", **terms}
        spec = replace(spec, apart=engine.remote)
        self.engine = engine
        self.spec = spec
        self.learner = learner
        self._stored: tuple[int, Any] = (-1, None)
        self.heartbeat = Heartbeat()
        self.actors: list[Actor[RolloutWorker]] = engine.spawn(
            RolloutWorker, (spec,), count=count, name="worker", **terms
        )
        self.publish()

    def publish(self, actors: Iterable[Actor[Any]] | None = None) -> None:
        """Send the newest weights, written once however many read them."""
        if self._stored[0] != self.learner.version:
            self._stored = self.learner.version, self.engine.put(self.learner.published())
        for actor in self.actors if actors is None else actors:
            actor.send("set_weights", *self._stored, sticky=True)

    def load(self, state: Mapping[str, Any]) -> None:
        """The learner goes on from a state, and workers with its weights."""
        self.learner.load_state_dict(state)
        self._stored = (-1, None)
        self.publish()
