"""A stage on actors, such as a learner: a node like any other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from rollstream.engine import Actor, ActorDied, Future
from rollstream.engine.slot import wants_context
from rollstream.flow import shard
from rollstream.flow.errors import OperatorError, StateError
from rollstream.flow.node import END, Node, Pulled
from rollstream.flow.operator import Packet
from rollstream.flow.provenance import RowOrigin, merged


class Via(Node):
    """A stage on one or several actors, with up to `in_flight` items at a time, results in input order."""

    kind = "via"
    saved = (*Node.saved, "lost", "issued", "upstream_over")
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
        self.method = method
        self.in_flight = in_flight
        self.bound = f"in_flight={in_flight}"
        self.asynchronous = in_flight > 1
        self.issued = 0
        self.ready: deque[Packet] = deque()
        self.upstream_over = False
        self._actors = actors
        self._wants_context = wants_context(getattr(actors[0].cls, method))
        self._pending: deque[tuple[Future[Any], Any]] = deque()

    def actors(self) -> Sequence[Actor[Any]]:
        """Those the stage runs on."""
        return self._actors

    def pull(self) -> Pulled:
        """Keep the actors busy, then return the oldest result if it is there."""
        upstream = self.upstreams[0]
        while not self.upstream_over and self.held() < self.in_flight:
            packet = upstream.pull()
            if packet is None:
                break
            if packet is END:
                self.upstream_over = True
            else:
                self._issue(packet)
        if not self.ready and self._pending:
            self.flow.poll()
        if self.ready:
            self.items += 1
            return self.ready.popleft()
        return END if self.upstream_over and not self._pending else None

    def _issue(self, packet: Packet) -> None:
        value, origin = packet
        if isinstance(origin, RowOrigin):  # the result may no longer be one element per shard
            origin = merged(origin)
        actor = self._actors[self.issued % len(self._actors)]
        if actor.gone is not None:  # dropped: the others take its turns
            left = [other for other in self._actors if other.gone is None] or self._actors
            actor = left[self.issued % len(left)]
        self.issued += 1
        args = (self.method, value, (self.name, origin) if self._wants_context else None)
        label = f"{actor.name}.{self.method}"
        future = actor.engine.request(
            actor, shard.run_method, args, label=label, sink=self.flow.sink, token=(self, None)
        )
        self.requested += 1
        self._pending.append((future, origin))

    def arrived(self, future: Future[Any]) -> None:  # noqa: ARG002
        """Take in every result that is next in order."""
        while self._pending and self._pending[0][0].done:
            head, origin = self._pending.popleft()
            self.requested -= 1
            if isinstance(head.error, ActorDied):
                self._lose(head.error)
            elif head.error is not None:
                raise OperatorError.of(head.error, self.name, self.location, head.receiver)
            else:
                value, busy = head.value
                self.busy += busy
                self.ready.append((value, origin))

    def _lose(self, died: ActorDied) -> None:
        """An actor died with an item: continue without the item, and without the actor if it is gone."""
        self.lost += 1
        if died.outcome == "raised" or all(actor.gone is not None for actor in self._actors):
            died.add_note(f"{self.name} ({self.location}) waited for it")
            raise died

    def stop(self) -> None:
        """Forget the results that have not come yet."""
        self.requested = 0
        self._pending.clear()
        super().stop()

    def blocked(self) -> str | None:
        """Every reply deferred."""
        return f"{self.name} waits for a deferred reply" if self._pending else None

    def state_dict(self) -> dict[str, Any]:
        """Refused while a reply is deferred: its item would be lost."""
        if self._pending:
            raise StateError(f"{self.name} waits for a deferred reply; take the snapshot when that has come")
        return super().state_dict()
