"""What to do when an actor dies, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, TypeAlias

from rollstream.engine.errors import EngineError

Policy: TypeAlias = Literal["raise", "restart", "drop"]
POLICIES: tuple[Policy, ...] = ("raise", "restart", "drop")


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """On what terms actors are spawned: how their death is met, and what they need of a cluster."""

    on_failure: Policy = "raise"
    max_restarts: int = 10
    deadline: float | None = None
    """Seconds one message may take before the actor counts as hung and is ended."""
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_failure not in POLICIES:
            raise EngineError(f"on_failure={self.on_failure!r}: choose one of {', '.join(POLICIES)}")
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
                raise EngineError(f"resources={dict(self.resources)}: how much {name} is a number, 0 or more")


@dataclass(frozen=True, slots=True)
class ActorEvent:
    """An actor died, and what became of it."""

    actor: str
    outcome: Literal["raised", "restarted", "dropped"]
    reason: str
    """How it ended: its exit code or signal, or that it hung."""
    lost: int
    """Messages that were sent to it and not handled."""
    restarts: int
    """How often it has been started again, this time included."""
    time: float
    """When, as `time.time` counts."""

    def __str__(self) -> str:
        lost = f", {self.lost} messages lost" if self.lost else ""
        return f"{self.actor} {self.reason}: {self.outcome}{lost}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


EventCallback: TypeAlias = Callable[[ActorEvent], None]
