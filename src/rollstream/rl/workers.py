"""Rollout workers and the learner they work for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rollstream.engine import Actor, Engine
from rollstream.rl.learner import Learner
from rollstream.rl.worker import RolloutWorker, WorkerSpec


class Workers:
    """Actors that sample, and the learner whose weights they sample with."""

    def __init__(self, engine: Engine, spec: WorkerSpec, learner: Learner, count: int, **terms: Any):
        terms = {"on_failure": "restart", **terms}
        spec = replace(spec, apart=engine.remote)
        self.engine = engine
        self.spec = spec
        self.learner = learner
        self._stored: tuple[Any, Any] = (None, None)
        self.actors: list[Actor[RolloutWorker]] = engine.spawn(
            RolloutWorker, (spec,), count=count, name="worker", **terms
        )
        self.publish()

    def publish(self, actors: Iterable[Actor[Any]] | None = None) -> None:
        """Send the newest weights, written once however many read them."""
        if self._stored[0] is not self.learner.weights:
            self._stored = self.learner.weights, self.engine.put(self.learner.published())
        for actor in self.actors if actors is None else actors:
            actor.send("set_weights", self.learner.version, self._stored[1], sticky=True)
