"""The gathers: they ask shards for items and are told of the replies; they never wait."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from rollstream.engine import Actor, ActorDied, EngineError, Future
from rollstream.flow import shard
from rollstream.flow.errors import OperatorError, StateError
from rollstream.flow.node import OVER, Node, Pulled
from rollstream.flow.provenance import Row, decode, encode
from rollstream.flow.state import Packet

if TYPE_CHECKING:
    from rollstream.flow.runtime import Flow


class Gate(Protocol):
    """Admits or withholds requests: one side of a rate limiter."""

    def admit(self) -> bool:
        """Whether one more item may be asked for; if so, it counts."""
        ...

    def cancel(self) -> None:
        """An item asked for will not come."""
        ...


class Port:
    """One actor as a gather sees it: its requests in order, and its counters as last reported."""

    __slots__ = ("actor", "before", "label", "life", "meters", "over", "pending")

    def __init__(self, actor: Actor[Any], method: str):
        self.actor = actor
        self.label = f"{actor.name}.{method}"
        self.pending: deque[Future[Any]] = deque()
        self.over = False
        self.life = 0
        self.meters: shard.Meters = []
        self.before: shard.Meters = []
        """What earlier lives of a restarted actor had counted."""

    def begin_life(self, life: int, last: shard.Meters) -> None:
        """The actor was restarted, and its counters with it. A queue's length is no count."""
        self.life = life
        counts = [0 if shard.is_gauge(index) else meter for index, meter in enumerate(last)]
        self.before = _sum(self.before, counts)

    def total(self) -> shard.Meters:
        """The counters of all lives."""
        return _sum(self.before, self.meters)


def _sum(one: shard.Meters, other: shard.Meters) -> shard.Meters:
    return [left + right for left, right in zip(one, other, strict=True)] if one and other else one or other


class Gather(Node):
    """What both gathers share: shards on actors, requests to them, replies in each shard's order."""

    saved = (*Node.saved, "lost")

    def __init__(
        self,
        name: str,
        location: str,
        actors: Sequence[Actor[Any]],
        plan: shard.ShardPlan,
        num_async: int = 1,
    ):
        super().__init__(name, location)
        self.plan = plan
        self.num_async = num_async
        self.ports = [Port(actor, plan.method) for actor in actors]
        self.engine = actors[0].engine
        self.gate: Gate | None = None
        self._requested = 0
        self._key = ""
        self._payload: Any = None
        """The request, serialized once."""

    def open(self, flow: Flow) -> None:
        """Put the shards beside their actors."""
        super().open(flow)
        self._key = flow.key(self.name)
        plan = replace(self.plan, traced=flow.tracer is not None)
        self._require_serializable()
        self._payload = self.engine.payload(shard.pull, self._key, label=self.name)
        replies = [port.actor.ask(shard.install, self._key, plan, sticky=self._key) for port in self.ports]
        self.engine.wait(replies, count=len(replies))
        for port, reply in zip(self.ports, replies, strict=True):
            if isinstance(reply.error, ActorDied) and reply.error.outcome == "dropped":
                port.over = True
            else:
                reply.result()

    def _require_serializable(self) -> None:
        """Raise, naming it, if an operator cannot go to another process."""
        for stage in self.plan.stages:
            try:
                self.engine.payload("", stage.function, label=stage.name)
            except EngineError as error:
                raise shard.cannot_be_copied(stage, error) from error

    def stop(self) -> None:
        """Issue no more requests and take the shards away."""
        if not self.stopped and self.flow is not None and not self.engine.closed:
            for port in self.ports:
                port.actor.sticky.pop(self._key, None)
                if port.actor.gone is not None:
                    continue
                port.actor.tell(shard.install, self._key, None, label=f"end {self.name}")
        super().stop()

    def _issue(self, index: int) -> None:
        port = self.ports[index]
        assert self.flow is not None
        self._requested += 1
        port.pending.append(
            self.engine.request(
                port.actor,
                shard.pull,
                (self._key,),
                label=port.label,
                sink=self.flow.sink,
                token=(self, index),
                payload=self._payload,
            )
        )

    def arrived(self, future: Future[Any]) -> None:
        """A reply is there: take in every reply of that shard that is next in its order."""
        index = future.token[1]
        port = self.ports[index]
        while port.pending and port.pending[0].done:
            head, before = port.pending.popleft(), port.meters
            self._requested -= 1
            if head.error is not None:
                self._fail(index, head.error)
                continue
            kind, value, origin, life, port.meters, spans = head.value
            if life != port.life:
                port.begin_life(life, before)
            if spans and self.flow is not None and self.flow.tracer is not None:
                for name, start, end in spans:
                    self.flow.tracer.span(port.actor.name, name, start, end)
            if kind == shard.END:
                port.over = True
                self._shard_over()
            else:
                self._take_in(index, (value, origin))

    def _fail(self, index: int, error: BaseException) -> None:
        """A request came to an error."""
        if isinstance(error, ActorDied):
            self._lose(index, error)
        elif isinstance(error, OperatorError):  # which operator it was, the shard knows best
            raise error
        else:
            actor = self.ports[index].actor
            raise OperatorError.of(error, self.plan.name, self.plan.location, actor.name)

    def _lose(self, index: int, died: ActorDied) -> None:
        """A shard's actor died with a request: ask the restarted one again, or go on without it."""
        self.lost += 1
        if died.outcome == "raised":
            died.add_note(f"{self.name} ({self.location}) waited for it")
            raise died
        if died.outcome == "restarted" and not self.stopped:
            self._issue(index)
        else:
            self.ports[index].over = True
            self._shard_over()

    def _take_in(self, index: int, packet: Packet) -> None:
        raise NotImplementedError

    def _shard_over(self) -> None:
        """A shard answered a request with its end."""

    def unanswered(self) -> int:
        """Admitted requests that a snapshot leaves out, because their replies are deferred."""
        return 0

    def blocked(self) -> str | None:
        """Every reply deferred."""
        names = [port.actor.name for port in self.ports if port.pending]
        return (
            f"{self.name} waits for {', '.join(names)}, whose reply is deferred or cannot come"
            if names
            else None
        )

    def state_dict(self) -> dict[str, Any]:
        """Which shards have ended."""
        return {**super().state_dict(), "over": [port.over for port in self.ports]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        if len(state["over"]) != len(self.ports):
            saved = len(state["over"])
            raise StateError(f"{self.name} was saved with {saved} shards and has {len(self.ports)} now")
        for port, over in zip(self.ports, state["over"], strict=True):
            port.over = over


class GatherAsync(Gather):
    """Items as they come, at most `num_async` of each shard asked for and not yet handled."""

    kind = "gather_async"
    asynchronous = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._ready: deque[tuple[int, Packet]] = deque()
        self._owed: deque[int] = deque()
        self._begun = False

    def pull(self) -> Pulled:
        """The item that came first. Its shard is asked again when the consumer is back."""
        if self._owed or not self._begun:
            self.start()
        if not self._ready:
            assert self.flow is not None
            self.flow.poll()
            if not self._ready:
                return None if self._requested or self._owed else OVER
        index, packet = self._ready.popleft()
        if not self.ports[index].over:
            self._owed.append(index)
        self.items += 1
        return packet

    def start(self, *, rows: bool = True) -> None:  # noqa: ARG002
        """Issue the requests that are owed, as far as the gate admits them."""
        if self.stopped:
            return
        if not self._begun:
            self._begin()
        while self._owed:
            if self.ports[self._owed[0]].over:  # it was dropped meanwhile
                self._owed.popleft()
            elif self.gate is None or self.gate.admit():
                self._issue(self._owed.popleft())
            else:
                break

    def unanswered(self) -> int:
        """Every request not yet answered."""
        return self._requested

    def held(self) -> int:
        """Items ready or asked for."""
        return self._requested + len(self._ready)

    def running(self) -> bool:
        """Whether the consumer waits for an item."""
        return self._requested > 0 and not self._ready

    def bound(self) -> str:
        """How many items of a shard are in flight at most."""
        return f"num_async={self.num_async}"

    def _begin(self) -> None:
        """Every shard is owed `num_async` requests, less what a loaded state holds ready."""
        self._begun = True
        ready = Counter(index for index, _ in self._ready)
        for round_ in range(self.num_async):
            self._owed += [i for i, port in enumerate(self.ports) if not port.over and ready[i] <= round_]

    def _take_in(self, index: int, packet: Packet) -> None:
        self._ready.append((index, packet))

    def _shard_over(self) -> None:
        if self.gate is not None:
            self.gate.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Also the items that are ready, with their shards."""
        ready = [[index, value, encode(origin)] for index, (value, origin) in self._ready]
        return {**super().state_dict(), "ready": ready}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self._ready = deque((index, (value, decode(origin))) for index, value, origin in state["ready"])


class GatherSync(Gather):
    """Rows of one item a shard. Between two rows no shard is running."""

    kind = "gather_sync"
    saved = (*Gather.saved, "under_way")

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._row: dict[int, Packet] = {}
        self.under_way = False

    def pull(self) -> Pulled:
        """A row, once every shard has given its item; shards that have ended are left out."""
        if self._requested:
            assert self.flow is not None
            self.flow.poll()
        else:
            self.start()
        if self._requested or not self.under_way:
            return None
        self.under_way = False
        if not self._row:
            if self.gate is not None:
                self.gate.cancel()
            return OVER
        packets = [self._row[index] for index in sorted(self._row)]
        self._row = {}
        self.items += 1
        return [value for value, _ in packets], Row(tuple(origin for _, origin in packets))

    def start(self, *, rows: bool = True) -> None:
        """Ask every shard for one item, unless a row is under way."""
        if self.stopped or self._requested or not rows:
            return
        if not self.under_way and self.gate is not None and not self.gate.admit():
            return
        self.under_way = True
        for index, port in enumerate(self.ports):
            if not port.over and index not in self._row:
                self._issue(index)
        assert self.flow is not None
        self.flow.poll()

    def held(self) -> int:
        """Items of the row under way."""
        return self._requested + len(self._row)

    def running(self) -> bool:
        """Whether the consumer waits for the row."""
        return self._requested > 0

    def bound(self) -> str:
        """A row at a time."""
        return "one row"

    def _take_in(self, index: int, packet: Packet) -> None:
        self._row[index] = packet

    def state_dict(self) -> dict[str, Any]:
        """Also the row under way."""
        row = [[index, value, encode(origin)] for index, (value, origin) in self._row.items()]
        return {**super().state_dict(), "row": row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self._row = {index: (value, decode(origin)) for index, value, origin in state["row"]}
