"""A learner on an actor: a stage of the plan, in a process of its own, or on another machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rollstream.engine import Actor, ActorContext, Ref
from rollstream.flow import Context
from rollstream.rl.learner import Learner
from rollstream.rl.params import Weights
from rollstream.rl.report import PRIORITY, TRAIN, WEIGHTS, Report
from rollstream.rl.training_step import train_on


class LearnerActor:
    """Trains on what reaches it, and publishes every version of its weights once.

    Args:
        make: Creates the learner.
        own_process: Whether it has a process of its own.
    """

    def __init__(self, make: Callable[[], Learner], own_process: bool, *, context: ActorContext):
        if own_process:  # the driver may have taken most of an accelerator's memory already, or need some
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self._learner = make()
        self._put = context.put

    def train(self, batch: Any, context: Context) -> Report:
        """Train on a batch; a report with references to the new weights and priorities."""
        report = train_on(self._learner, batch, context)
        report[TRAIN] = {name: float(value) for name, value in report[TRAIN].items() if not np.ndim(value)}
        if PRIORITY in report:
            report[PRIORITY] = self._put(report[PRIORITY])
        return report | {WEIGHTS: self.publish()}

    def publish(self) -> tuple[int, Ref[Weights]]:
        """The version of the weights, and a reference to them."""
        return self._learner.version, self._put(self._learner.get_weights())

    def state_dict(self) -> dict[str, Any]:
        """The learner's state."""
        return self._learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the learner."""
        self._learner.load_state_dict(state)


class RemoteLearner:
    """What the driver knows of a learner on an actor: its policy, and the weights it published last."""

    def __init__(self, actor: Actor[LearnerActor], policy: Any, total_steps: int):
        self.actor = actor
        self.policy = policy
        self.total_steps = total_steps
        self.version: int
        self.published: Ref[Weights]
        self.receive(*actor.call("publish").result())

    def receive(self, version: int, weights: Ref[Weights]) -> None:
        """The learner has published a version."""
        self.version, self.published = version, weights

    @property
    def weights(self) -> Weights:
        """The weights published last."""
        return self.published.get()

    def get_weights(self) -> Weights:
        """The weights published last, as NumPy arrays."""
        return dict(self.weights)
