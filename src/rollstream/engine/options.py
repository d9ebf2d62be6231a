"""How actors are spawned, what happens when one dies, and what is reported about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, TypeAlias

from rollstream.engine.errors import EngineError

OnFailure: TypeAlias = Literal["raise", "restart", "drop"]
ON_FAILURE: tuple[OnFailure, ...] = ("raise", "restart", "drop")


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """What happens when an actor dies, and what it needs of a cluster."""

    on_failure: OnFailure = "raise"
    max_restarts: int = 10
    deadline: float | None = None
    """Seconds one message may take before the actor counts as hung and is killed."""
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_failure not in ON_FAILURE:
            raise EngineError(f"on_failure={self.on_failure!r}: choose one of {', '.join(ON_FAILURE)}")
        if not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise EngineError(f"max_restarts={self.max_restarts!r}: give a whole number, 0 or more")
        if self.deadline is not None and not (_is_number(self.deadline) and 0 < self.deadline < inf):
            raise EngineError(f"deadline={self.deadline!r}: give the seconds one message may take")
        if not isinstance(self.resources, Mapping):
            raise EngineError(
                f"resources={self.resources!r}: give them by name, for example {{'num_cpus': 1}}"
            )
        for name, amount in self.resources.items():
            if not _is_number(amount) or amount < 0:
                raise EngineError(f"resources={dict(self.resources)}: {name} must be a number, 0 or more")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class ActorEvent:
    """The death of an actor, and what happened next."""

    actor: str
    outcome: Literal["raised", "restarted", "dropped"]
    reason: str
    """How it ended: its exit code or signal, or that it hung."""
    lost: int
    """Messages that were sent to it and not handled."""
    restarts: int
    """How often it has been restarted, this time included."""
    time: float
    """Seconds since the epoch."""

    def __str__(self) -> str:
        lost = f", {self.lost} message{'s' * (self.lost > 1)} lost" if self.lost else ""
        return f"{self.actor} {self.reason}: {self.outcome}{lost}"


EventCallback: TypeAlias = Callable[[ActorEvent], None]


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """Counters of one actor."""

    name: str
    messages: int
    failures: int
    restarts: int
    lost: int
    """Messages it was sent and did not handle, because it died."""
    queued: int
    """Messages sent to it and not yet handled."""
    busy: float
    """Seconds spent handling messages."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A frozen snapshot of an engine."""

    engine: str
    outstanding: int
    """Messages sent and not yet handled."""
    actors: tuple[ActorStatistics, ...]
    events: tuple[ActorEvent, ...] = ()
    """Deaths of actors, in order."""
    grown: int = 0
    """How often shared memory had to grow, because the flow holds on to what was sent."""
    bytes_moved: int = 0
    """Bytes that the driver has sent or received; what it passes on by reference does not count."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that fix the number of threads of numeric libraries in an actor's process."""
