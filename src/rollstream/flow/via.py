"""A stage on actors, such as a learner: a node like any other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from rollstream.engine import Actor, ActorDied, Future
from rollstream.engine.slot import wants_context
from rollstream.flow import shard
from rollstream.flow.errors import OperatorError, StateError
from rollstream.flow.node import OVER, Node, Pulled
from rollstream.flow.provenance import Row, provenance_of
from rollstream.flow.state import Packet


class Via(Node):
    """A stage on one or several actors, with up to `in_flight` items on their way, results in input order."""

    kind = "via"
    saved = (*Node.saved, "issued", "upstream_over", "lost")
    queues = ("ready",)

    def __init__(
        self,
        name: str,
        location: str,
        upstream: Node,
        actors: Sequence[Actor[Any]],
        method: str,
        in_flight: int,
    ):
        super().__init__(name, location, [upstream])
        self.actors = list(actors)
        self.method = method
        self.in_flight = in_flight
        self.asynchronous = in_flight > 1
        self._wants_context = wants_context(getattr(actors[0].cls, method))
        self.issued = 0
        self._pending: deque[tuple[Future[Any], Any]] = deque()
        self.ready: deque[Packet] = deque()
        self.upstream_over = False

    def pull(self) -> Pulled:
        """Keep the actors busy, then give the oldest result if it is there."""
        upstream = self.upstreams[0]
        while not self.upstream_over and len(self._pending) + len(self.ready) < self.in_flight:
            packet = upstream.pull()
            if packet is None:
                break
            if packet is OVER:
                self.upstream_over = True
            else:
                self._issue(packet)
        if not self.ready and self._pending:
            assert self.flow is not None
            self.flow.poll()
        if self.ready:
            self.items += 1
            return self.ready.popleft()
        return OVER if self.upstream_over and not self._pending else None

    def _issue(self, packet: Packet) -> None:
        assert self.flow is not None
        value, origin = packet
        if isinstance(origin, Row):  # what comes back may be no longer one element a shard
            origin = provenance_of(origin)
        actor = self.actors[self.issued % len(self.actors)]
        if actor.gone is not None:  # dropped: the others take its turns
            left = [other for other in self.actors if other.gone is None] or self.actors
            actor = left[self.issued % len(left)]
        self.issued += 1
        label = f"{actor.name}.{self.method}"
        about = (self.name, origin) if self._wants_context else None
        args = (self.method, value, about)
        future = actor.engine.request(
            actor, shard.run_method, args, label=label, sink=self.flow.sink, token=(self, None)
        )
        self._pending.append((future, origin))

    def arrived(self, _: Future[Any]) -> None:
        """A result is there: take in every result that is next in order."""
        while self._pending and self._pending[0][0].done:
            head, origin = self._pending.popleft()
            if isinstance(head.error, ActorDied):
                self._lose(head.error)
                continue
            if head.error is not None:
                raise OperatorError.of(head.error, self.name, self.location, head.receiver)
            value, busy = head.value
            self.busy += busy
            self.ready.append((value, origin))

    def _lose(self, died: ActorDied) -> None:
        """An actor died with an item: go on without the item, and without the actor if it is gone."""
        self.lost += 1
        if died.outcome == "raised" or all(actor.gone is not None for actor in self.actors):
            died.add_note(f"{self.name} ({self.location}) waited for it")
            raise died

    def stop(self) -> None:
        """Results on their way are nobody's any more."""
        self._pending.clear()
        super().stop()

    def held(self) -> int:
        """Items on their way and results not yet taken."""
        return len(self._pending) + len(self.ready)

    def running(self) -> bool:
        """Whether the consumer waits for a result."""
        return bool(self._pending) and not self.ready

    def bound(self) -> str:
        """How many items are on their way at most."""
        return f"in_flight={self.in_flight}"

    def blocked(self) -> str | None:
        """Every reply deferred."""
        return f"{self.name} waits for a deferred reply" if self._pending else None

    def state_dict(self) -> dict[str, Any]:
        """Refused while a reply is deferred: the item in hand would be lost."""
        if self._pending:
            raise StateError(
                f"{self.name} has an item whose reply is deferred; take the snapshot when it has been given"
            )
        return super().state_dict()
