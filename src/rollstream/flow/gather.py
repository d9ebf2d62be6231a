"""The gathers: they send requests to shards and take in the replies; they never wait."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any

from rollstream.engine import Actor, ActorDied, EngineError, Future
from rollstream.flow import shard
from rollstream.flow.errors import OperatorError
from rollstream.flow.node import END, Node, Pulled, Scheduler
from rollstream.flow.operator import Operator
from rollstream.flow.provenance import Origin, RowOrigin
from rollstream.flow.statistics import NodeStatistics, ShardStatistics


class ShardClient:
    """One shard as its gather sees it: requests in order, and counters as last reported."""

    __slots__ = ("actor", "counters", "earlier", "incarnation", "label", "pending", "recent")

    def __init__(self, actor: Actor[Any], method: str):
        self.actor = actor
        self.label = f"{actor.name}.{method}"
        self.pending: deque[Future[Any]] = deque()
        self.incarnation = 0
        self.counters: shard.Counters = []
        self.earlier: shard.Counters = []
        """The counters of earlier incarnations of a restarted actor."""
        self.recent: deque[shard.Counters] = deque(maxlen=_RECENT + 1)
        """Its last counters."""

    def restarted(self, incarnation: int, last: shard.Counters) -> None:
        """Keep the counters of the last incarnation; the new one counts from zero."""
        self.incarnation = incarnation
        self.earlier = _sum(self.earlier, shard.without_gauges(last))
        self.recent.clear()

    def total(self) -> shard.Counters:
        """The counters of all incarnations."""
        return _sum(self.earlier, self.counters)

    def statistics(self) -> ShardStatistics:
        """Items and busy seconds, of all incarnations and of the last items."""
        recent = [_work(counters) for counters in list(self.recent)]
        if len(recent) <= _RECENT:
            recent.insert(0, (0, 0.0))
        seconds = [
            (after[1] - before[1]) / max(1, after[0] - before[0]) for before, after in pairwise(recent)
        ]
        return ShardStatistics(self.actor.name, *_work(self.total()), median(seconds) if seconds else 0.0)


_RECENT = 16
"""Number of items that tell how fast a shard is now."""


def _work(counters: shard.Counters) -> tuple[int, float]:
    """Items of a shard's source, and seconds that its operators were busy."""
    return int(counters[1]), sum(counters[2::4])


def _sum(one: shard.Counters, other: shard.Counters) -> shard.Counters:
    return [left + right for left, right in zip(one, other, strict=True)] if one and other else one or other


class Gather(Node):
    """What both gathers share: shards on actors, requests to them, replies in each shard's order."""

    saved = (*Node.saved, "lost", "over")
    queues = ("ready",)
    requests_items = True

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
        self.clients = [ShardClient(actor, plan.method) for actor in actors]
        self.over = [False] * len(self.clients)
        self.engine = actors[0].engine
        self.ready: deque[tuple[int, Any, Origin]] = deque()
        """Shard, value and origin of each item."""
        self._payload: Any = None
        """The request, serialized once."""

    def operators(self) -> Sequence[Operator]:
        """The source and the operators that run on its shards, then the gather itself."""
        return [self.plan.source, *self.plan.stages, self]

    def actors(self) -> Sequence[Actor[Any]]:
        """One per shard."""
        return [client.actor for client in self.clients]

    def place(self, operator: Operator) -> Sequence[Actor[Any]]:
        """The gather itself runs on the driver."""
        return [] if operator is self else self.actors()

    def statistics(self) -> list[NodeStatistics]:
        """Counters as the shards last reported them, summed; the source has them by shard, too."""
        totals = [client.total() for client in self.clients if client.counters]
        columns = iter([sum(column) for column in zip(*totals, strict=True)])
        *sharded, own = self.operators()
        counters = list(zip(columns, columns, columns, columns, strict=True)) or [None] * len(sharded)
        actors = self.actors()
        rows = [operator.row(actors, each) for operator, each in zip(sharded, counters, strict=True)]
        shards = tuple([client.statistics() for client in self.clients if client.counters])
        return [replace(rows[0], shards=shards), *rows[1:], own.row([])]

    def open(self, flow: Scheduler) -> None:
        """Put the shards beside their actors."""
        super().open(flow)
        self.shard_key = f"{self.name}#{flow.token}"
        plan = replace(self.plan, traced=flow.tracer is not None)
        self._require_serializable()
        self._payload = self.engine.payload(shard.pull, self.shard_key, label=self.name)
        key = self.shard_key
        replies = [client.actor.ask(shard.install, key, plan, sticky=key) for client in self.clients]
        self.engine.wait(replies, count=len(replies))
        for index, reply in enumerate(replies):
            if isinstance(reply.error, ActorDied) and reply.error.outcome == "dropped":
                self.over[index] = True
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
        """Issue no more requests and remove the shards."""
        if not self.stopped and self.opened and not self.engine.closed:
            for actor in self.actors():
                with actor.lock:
                    actor.sticky.pop(self.shard_key, None)
                if actor.gone is None:
                    actor.tell(shard.install, self.shard_key, None, label=f"end {self.name}")
        super().stop()

    def _issue(self, index: int) -> None:
        client = self.clients[index]
        self.requested += 1
        client.pending.append(
            self.engine.request(
                client.actor,
                shard.pull,
                (self.shard_key,),
                label=client.label,
                sink=self.flow.sink,
                token=(self, index),
                payload=self._payload,
            )
        )

    def arrived(self, future: Future[Any]) -> None:
        """Take in every reply of that shard that is next in its order."""
        index = future.token[1]
        client = self.clients[index]
        while client.pending and client.pending[0].done:
            head, before = client.pending.popleft(), client.counters
            self.requested -= 1
            if head.error is not None:
                self._fail(index, head.error)
                continue
            packet, incarnation, client.counters, spans = head.value
            if incarnation != client.incarnation:
                client.restarted(incarnation, before)
            client.recent.append(client.counters)
            if spans and (tracer := self.flow.tracer) is not None:
                for span in spans:
                    tracer.span(span, client.actor.name)
            if packet is None:
                self._end_shard(index)
            else:
                self.ready.append((index, packet[0], packet[1]))

    def _fail(self, index: int, error: BaseException) -> None:
        """Raise an error; if the shard's actor died, ask the restarted one again, or continue without it."""
        if isinstance(error, OperatorError):  # the shard knows best which operator it was
            raise error
        if not isinstance(error, ActorDied):
            source, actor = self.plan.source, self.clients[index].actor
            raise OperatorError.of(error, source.name, source.location, actor.name)
        self.lost += 1
        if error.outcome == "raised":
            error.add_note(f"{self.name} ({self.location}) waited for it")
            raise error
        if error.outcome == "restarted" and not self.stopped:
            self._issue(index)
        else:
            self._end_shard(index)

    def _end_shard(self, index: int) -> None:
        """A shard answered a request with its end, or is gone."""
        self.over[index] = True

    def blocked(self) -> str | None:
        """Every reply deferred."""
        names = [client.actor.name for client in self.clients if client.pending]
        reason = f"{self.name} waits for {', '.join(names)}, whose reply is deferred or cannot come"
        return reason if names else None


class GatherAsync(Gather):
    """Items as they come, at most `num_async` of each shard requested and not yet handled."""

    kind = "gather_async"
    asynchronous = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.bound = f"num_async={self.num_async}"
        self._owed: deque[int] = deque()
        self._begun = False

    def pull(self) -> Pulled:
        """The item that came first. Its shard gets its next request when the consumer is back."""
        if self._owed or not self._begun:
            self.start()
        if not self.ready:
            self.flow.poll()
            if not self.ready:
                return None if self.requested or self._owed else END
        index, value, origin = self.ready.popleft()
        if not self.over[index]:
            self._owed.append(index)
        self.items += 1
        return value, origin

    def start(self, *, rows: bool = True) -> None:  # noqa: ARG002
        """Issue the requests that are owed, as far as the gate admits them."""
        if self.stopped:
            return
        if not self._begun:
            self._begin()
        while self._owed:
            if self.over[self._owed[0]]:  # it was dropped meanwhile
                self._owed.popleft()
            elif self.gate is None or self.gate.admit():
                self._issue(self._owed.popleft())
            else:
                break

    def _begin(self) -> None:
        """Every shard is owed `num_async` requests, less what a loaded state holds ready."""
        self._begun = True
        ready = Counter(index for index, *_ in self.ready)
        for round_ in range(self.num_async):
            self._owed += [i for i, over in enumerate(self.over) if not over and ready[i] <= round_]

    def _end_shard(self, index: int) -> None:
        super()._end_shard(index)
        if self.gate is not None:
            self.gate.cancel()

    def forget(self, lost: Callable[[Any], bool]) -> None:
        """Owe the shards a request for each of these items."""
        for entry in filter(lost, self.ready):
            if not self.over[entry[0]]:
                self._owed.append(entry[0])
            if self.gate is not None:
                self.gate.cancel()
        super().forget(lost)


class GatherSync(Gather):
    """Rows of one item per shard. Between two rows no shard is running."""

    kind = "gather_sync"
    saved = (*Gather.saved, "under_way")

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.bound = "one row"
        self.under_way = False

    def pull(self) -> Pulled:
        """A row, once every shard has sent its item; shards that have ended are left out."""
        if self.requested:
            self.flow.poll()
        else:
            self.start()
        if self.requested or not self.under_way:
            return None
        self.under_way = False
        if not self.ready:
            if self.gate is not None:
                self.gate.cancel()
            return END
        row = sorted(self.ready, key=itemgetter(0))
        self.ready.clear()
        self.items += 1
        return [value for _, value, _ in row], RowOrigin(tuple([origin for _, _, origin in row]))

    def start(self, *, rows: bool = True) -> None:
        """Request one item of every shard, unless a row is under way."""
        if self.stopped or self.requested or not rows:
            return
        if not self.under_way and self.gate is not None and not self.gate.admit():
            return
        self.under_way = True
        there = {index for index, _, _ in self.ready}
        for index, over in enumerate(self.over):
            if not over and index not in there:
                self._issue(index)
        self.flow.poll()

    def running(self) -> bool:
        """Whether the consumer waits for the row."""
        return self.requested > 0
