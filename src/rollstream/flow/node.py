"""Nodes: the resumable state machines a flow consists of.

`pull` never waits. It returns a packet (a value and its origin), `None` if none is ready, or `END`. After
`None` a node keeps what it has, and continues at the next pull. Nodes answer for themselves what runs where,
so a new kind of node is one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

from rollstream.engine import Actor
from rollstream.engine.sinks import Sink
from rollstream.flow.operator import Operator, Packet
from rollstream.flow.statistics import NodeStatistics
from rollstream.flow.trace import Tracer


class End(Enum):
    """The type of `END`."""

    END = "end"


END: Final = End.END
Pulled: TypeAlias = Packet | Literal[End.END] | None


class Scheduler(Protocol):
    """What nodes need of the flow that runs them."""

    sink: Sink
    tracer: Tracer | None
    actors: Mapping[str, Actor[Any]]
    token: str
    """Distinguishes the flow from all others."""
    progress: int
    """Counts everything after which it is worth pulling again."""

    def poll(self) -> None:
        """Pass every reply that has come to its node; never waits."""

    def stalled(self) -> bool:
        """Whether nothing is running, so that waiting would change nothing."""
        ...


class Gate(Protocol):
    """Admits or withholds requests: one side of a rate limiter."""

    def admit(self) -> bool:
        """Count one more request, if it is allowed now."""
        ...

    def cancel(self) -> None:
        """Uncount a request that no item will answer."""


class Node(Operator):
    """One node: its upstream nodes, what it stands for in the graph, and how it is pulled."""

    kind = "node"
    saved = ("items", "stopped")
    asynchronous = False
    """Whether items cross into this node asynchronously: the pink arrows of the paper's figures."""
    shared: ClassVar[bool] = False
    """Whether other nodes get the same items, so that this one may fall behind."""
    coupled: Node | None = None
    """The node a rate limiter couples it to, from inserts to samples."""
    shard_key = ""
    """The key of its shards on its actors, if it has some."""
    requests_items: ClassVar[bool] = False
    """Whether it requests its items itself, so that a `gate` can withhold the requests."""
    gate: Gate | None = None
    ready: Any = ()
    """Items that have come and can be pulled."""
    stages: Any = None
    """The stages it runs, if it can run more of them."""
    tracer: Tracer | None = None
    """Records the run, if it is to be traced."""
    flow: Scheduler
    """Set by `open`."""

    def __init__(self, name: str, location: str, upstreams: Iterable[Node] = ()):
        super().__init__(name, location)
        self.upstreams = list(upstreams)
        self.opened = False
        self.stopped = False

    def operators(self) -> Sequence[Operator]:
        """The operators it stands for, in the order items pass them."""
        return [self]

    def last_operator(self) -> Operator:
        """The operator its items come out of."""
        operators = self.operators()
        return operators[-1] if operators else self.upstreams[0].last_operator()

    def actors(self) -> Sequence[Actor[Any]]:
        """The actors it sends requests to."""
        return []

    def place(self, operator: Operator) -> Sequence[Actor[Any]]:  # noqa: ARG002
        """The actors that one of its operators runs on; none for the driver."""
        return self.actors()

    def statistics(self) -> list[NodeStatistics]:
        """The counters of its operators."""
        return [operator.row(self.place(operator)) for operator in self.operators()]

    def open(self, flow: Scheduler) -> None:
        """Begin."""
        self.flow = flow
        self.opened = True

    def pull(self) -> Pulled:
        """The next packet, if there is one now."""
        raise NotImplementedError

    def start(self, *, rows: bool = True) -> None:
        """Issue requests, now that the consumer is back; `rows` allows the next row of a `gather_sync`."""
        for upstream in self.upstreams:
            upstream.start(rows=rows)

    def stop(self) -> None:
        """Issue no more requests and let go of resources: nobody pulls again."""
        if not self.stopped:
            self.stopped = True
            for upstream in self.upstreams:
                upstream.stop()

    def running(self) -> bool:
        """Whether its consumer waits for a request of this node."""
        return self.requested > 0 and not self.ready

    def blocked(self) -> str | None:
        """Why this node cannot continue, if it cannot."""
        return None


def ancestors(node: Node) -> list[Node]:
    """A node and everything upstream of it, sources first, each once."""
    seen: dict[int, Node] = {}

    def visit(current: Node) -> None:
        if id(current) not in seen:
            for upstream in current.upstreams:
                visit(upstream)
            seen[id(current)] = current

    visit(node)
    return list(seen.values())
