"""Nodes: the resumable state machines a flow consists of.

`pull` never waits. It returns a packet (a value and its origin), `None` if none is ready, or `END`. After
`None` a node keeps what it has, and continues at the next pull. Nodes answer for themselves what runs where,
so a new kind of node is one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

from rollstream.engine import Actor, Future
from rollstream.engine.future import Sink
from rollstream.flow.operator import Operator, Packet
from rollstream.flow.stages import Stage
from rollstream.flow.statistics import NodeStatistics
from rollstream.flow.trace import SpanTracer


class End(Enum):
    """The type of `END`."""

    END = "end"


END: Final = End.END
Pulled: TypeAlias = Packet | Literal[End.END] | None


class Scheduler(Protocol):
    """What nodes need of the flow that runs them."""

    sink: Sink
    progress: int
    """Counts everything after which it is worth pulling again."""

    @property
    def tracer(self) -> SpanTracer | None:
        """The recorder of spans, if the run is traced."""
        ...

    @property
    def actors(self) -> Mapping[str, Actor[Any]]:
        """Every actor of the engine by name."""
        ...

    def poll(self) -> None:
        """Pass every reply that has come to its node; never waits."""
        ...

    def stalled(self) -> bool:
        """Whether nothing is running, so that waiting would change nothing."""
        ...

    def shard_key(self, name: str) -> str:
        """A key for a node's shards that no other flow uses."""
        ...


class Gate(Protocol):
    """Admits or withholds requests: one side of a rate limiter."""

    def admit(self) -> bool:
        """Count one more request, if it is allowed now."""
        ...

    def cancel(self) -> None:
        """Uncount a request that no item will answer."""
        ...


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
    flow: Scheduler
    """Set by `open`."""

    def __init__(self, name: str, location: str, upstreams: Iterable[Node] = ()):
        super().__init__(name, location)
        self.upstreams = list(upstreams)
        self.opened = False
        self.stopped = False

    # What it stands for ------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The name of its state in a snapshot."""
        return self.name

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

    # While a plan is built ---------------------------------------------------------------------

    def absorb(self, stage: Stage) -> bool:  # noqa: ARG002
        """Take in a stage that comes after it, if it can run that itself."""
        return False

    def gate_requests(self, gate: Gate) -> bool:  # noqa: ARG002
        """Ask a rate limiter before each request, if it makes requests itself."""
        return False

    # While a flow runs -------------------------------------------------------------------------

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

    def arrived(self, future: Future[Any]) -> None:
        """Take in the reply to a request."""
        raise NotImplementedError

    def stop(self) -> None:
        """Issue no more requests and let go of resources: nobody pulls again."""
        if not self.stopped:
            self.stopped = True
            for upstream in self.upstreams:
                upstream.stop()

    def running(self) -> bool:
        """Whether its consumer waits for a request of this node."""
        return False

    def unanswered(self) -> int:
        """Admitted requests that a snapshot leaves out, because their replies are deferred."""
        return 0

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
