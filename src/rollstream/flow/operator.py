"""Operators: what people see as the nodes of a graph, with their counters and their state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from rollstream.engine import Actor
from rollstream.flow.actor_refs import place_of
from rollstream.flow.provenance import Origin, decode, encode
from rollstream.flow.statistics import NodeStatistics

Packet: TypeAlias = tuple[Any, Origin]
"""A value and its origin."""


class Operator:
    """A name, the line of the plan that added it, counters, and state as plain data.

    The class attributes list what makes up the state: attributes in `saved` are stored as they are, those
    in `queues` as lists of tuples that end with an origin, those in `parts` by their own `state_dict`.
    """

    kind = "source"
    saved: ClassVar[tuple[str, ...]] = ("items",)
    queues: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()
    drops: ClassVar[bool] = False
    """Whether inputs without an output count as dropped."""

    def __init__(self, name: str, location: str, function: Any = None):
        self.name = self.base = name
        self.location = location
        self.function = function
        """The user's function, if there is one; it may hold actors to send messages to."""
        self.receivers: tuple[Actor[Any], ...] = ()
        """Actors that it exchanges messages with, for the graph."""
        self.bound = ""
        """The limit of the items held here, for the graph: `buffer=16`."""
        self.received = self.items = self.lost = self.requested = 0
        self.busy = self.waiting = 0.0

    def held(self) -> int:
        """The number of items that wait here or are requested."""
        return self.requested + sum(len(getattr(self, queue)) for queue in self.queues)

    def forget(self, lost: Callable[[Any], bool]) -> None:
        """Remove items with a value that is lost, and count them."""
        for name in self.queues:
            queue = getattr(self, name)
            kept = [entry for entry in queue if not lost(entry)]
            self.lost += len(queue) - len(kept)
            queue.clear()
            queue.extend(kept)

    def row(self, actors: Sequence[Actor[Any]], counters: Sequence[float] | None = None) -> NodeStatistics:
        """The statistics of this operator on these actors, or on the driver if there are none.

        `counters` are those of its copies: items received, items out, seconds busy, items held.
        """
        received, items, busy, held = counters or (self.received, self.items, self.busy, self.held())
        dropped = int(received - items) if self.drops else 0
        place, copies = place_of(actors), len(actors) or 1
        return NodeStatistics(
            self.name, self.kind, place, copies, int(items), dropped, self.lost, busy, self.waiting, int(held)
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        state = {name: _copied(getattr(self, name)) for name in self.saved}
        for name in self.queues:
            state[name] = [[*rest, encode(origin)] for *rest, origin in getattr(self, name)]
        return state | {name: getattr(self, name).state_dict() for name in self.parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name in self.saved:
            setattr(self, name, _copied(state[name]))
        for name in self.queues:
            setattr(self, name, deque((*rest, decode(origin)) for *rest, origin in state[name]))
        for name in self.parts:
            getattr(self, name).load_state_dict(state[name])


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
