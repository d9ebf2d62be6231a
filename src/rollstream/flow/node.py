"""Nodes: the resumable state machines a flow is made of.

`pull` never waits. It gives a packet (a value and its origin), or `None`, not ready, or `OVER`. A node that
gives `None` keeps what it has and goes on from there at the next pull.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from rollstream.engine.slot import cannot_exit
from rollstream.flow.errors import OperatorError
from rollstream.flow.provenance import Row, provenance_of
from rollstream.flow.stages import Stage
from rollstream.flow.state import Packet, Stateful

if TYPE_CHECKING:
    from rollstream.flow.runtime import Flow


class SpanTracer(Protocol):
    """Told of every operator that handled an item."""

    def span(self, place: str | None, name: str, start: float, end: float) -> None:
        """One operator on one item; the driver's place is `None`."""
        ...


class Over(Enum):
    """The type of `OVER`."""

    OVER = "over"


OVER: Final = Over.OVER
Pulled: TypeAlias = Packet | Literal[Over.OVER] | None


class Node(Stateful):
    """One node: where its items come from, its counters, and how it is pulled."""

    kind = "node"
    saved = ("items", "stopped")
    asynchronous = False
    """Whether items cross into this node asynchronously: the pink arrows of the paper's figures."""

    def __init__(self, name: str, location: str, upstreams: Iterable[Node] = ()):
        self.name = self.base = name
        self.location = location
        self.upstreams = list(upstreams)
        self.flow: Flow | None = None
        self.stopped = False
        self.items = 0
        self.busy = 0.0
        self.waiting = 0.0
        self.lost = 0

    def pull(self) -> Pulled:
        """The next packet if there is one now."""
        raise NotImplementedError

    def start(self, *, rows: bool = True) -> None:
        """The consumer is back: issue requests, run no operator. Without `rows`, respect barriers."""
        for upstream in self.upstreams:
            upstream.start(rows=rows)

    def open(self, flow: Flow) -> None:
        """The flow begins."""
        self.flow = flow

    def stop(self) -> None:
        """Nobody will pull again: issue no more requests, let go of what is held."""
        if not self.stopped:
            self.stopped = True
            for upstream in self.upstreams:
                upstream.stop()

    def held(self) -> int:
        """How many items wait here or are on their way here."""
        return 0

    def running(self) -> bool:
        """Whether requests of this node are being worked on, and none is ready."""
        return False

    def bound(self) -> str:
        """What limits the items held here, for the graph."""
        return ""

    def blocked(self) -> str | None:
        """Why this node cannot go on, if it cannot."""
        return None


class Source(Node):
    """Items of a Python iterable, which is asked for its iterator when the flow begins."""

    kind = "source"

    def __init__(self, name: str, location: str, iterable: Iterable[Any]):
        super().__init__(name, location)
        self._iterable = iterable
        self._iterator: Iterator[Any] | None = None

    def pull(self) -> Pulled:
        """The next element."""
        start = time.perf_counter()
        try:
            if self._iterator is None:
                self._iterator = self._begin()
            value = next(self._iterator)
        except StopIteration:
            return OVER
        except Exception as error:
            raise OperatorError.of(error, self.name, self.location, None) from None
        origin = (self.name, "", self.items)
        self.items += 1
        end = time.perf_counter()
        self.busy += end - start
        if self.flow is not None and self.flow.tracer is not None:
            self.flow.tracer.span(None, self.name, start, end)
        return value, origin

    def _begin(self) -> Iterator[Any]:
        """An iterator that stands where this source stands: elements given before a resume are skipped."""
        iterator = iter(self._iterable)
        for _ in range(self.items):
            next(iterator)
        return iterator


class Polled(Source):
    """What a function gives, whenever it has something to give."""

    def __init__(self, name: str, location: str, function: Callable[[], Any]):
        super().__init__(name, location, iter(function, _NEVER))

    def pull(self) -> Pulled:
        """What there is now."""
        packet = super().pull()
        if packet is not None and packet is not OVER and packet[0] is None:
            self.items -= 1
            return None
        return packet

    def _begin(self) -> Iterator[Any]:
        return iter(self._iterable)

    def blocked(self) -> str | None:
        """Nothing to give."""
        return f"{self.name} ({self.location}) has nothing to give yet"


_NEVER: Final = object()


class Chain(Node):
    """A straight row of synchronous operators, run as one loop.

    Outputs that one stage made at once wait in its `out`; `stack` holds the indices of such stages, the
    deepest last, so that order is kept and each pull runs the chain for one item only.
    """

    kind = "chain"
    saved = (*Node.saved, "stack", "flushing")

    def __init__(self, upstream: Any, stages: Iterable[Stage], shard: str | None = None):
        super().__init__("chain", "", [upstream])
        self.upstream = upstream
        self.stages = list(stages)
        self.shard = shard
        self.tracer: SpanTracer | None = None
        self.stack: list[int] = []
        self.flushing: int | None = None

    def pull(self) -> Pulled:
        """Run items through the stages until one comes out."""
        stages, stack, clock, tracer = self.stages, self.stack, time.perf_counter, self.tracer
        count = len(stages)
        while True:
            if stack:
                index = stack[-1]
                stage = stages[index]
                value, origin = stage.out.popleft()
                stage.items += 1
                if not stage.out:
                    stack.pop()
                index += 1
            elif self.flushing is not None:
                if not self._flush():
                    return OVER
                continue
            else:
                packet = self.upstream.pull()
                if packet is None:
                    return None
                if packet is OVER:
                    self.flushing = 0
                    continue
                if not count:
                    return packet
                value, origin = packet
                index = 0
            stage = stages[0]
            try:
                last = clock()
                while index < count:
                    stage = stages[index]
                    stage.received += 1
                    if stage.plain is not None:
                        value = stage.plain(value)
                        if type(origin) is Row:  # it may be no longer one element a shard
                            origin = provenance_of(origin)
                    else:
                        packet = stage.push(value, origin)
                        if stage.out:
                            stack.append(index)
                        if stage.left == 0:
                            self._end(index)
                        if packet is None:
                            stage.busy += clock() - last
                            break
                        value, origin = packet
                    stage.items += 1
                    now = clock()
                    stage.busy += now - last
                    if tracer is not None:
                        tracer.span(self.shard, stage.name, last, now)
                    last = now
                    index += 1
                else:
                    return value, origin
            except Exception as error:
                raise OperatorError.of(error, stage.name, stage.location, self.shard) from None
            except SystemExit as error:
                if self.shard is None:  # the driver may end itself
                    raise
                refused = cannot_exit(stage.name, error)
                raise OperatorError.of(refused, stage.name, stage.location, self.shard) from None

    def _flush(self) -> bool:
        """Let the next stage give its last output; false when there is none left to ask."""
        assert self.flushing is not None
        while self.flushing < len(self.stages):
            stage, index = self.stages[self.flushing], self.flushing
            self.flushing += 1
            if (packet := stage.flush()) is not None:
                stage.out.append(packet)
                self.stack.append(index)
                return True
        return False

    def _end(self, index: int) -> None:
        """A stage wants no more input: what is before it stops, what is after it is flushed."""
        self.flushing = max(index + 1, self.flushing or 0)
        for early in self.stages[:index]:
            early.out.clear()
        self.stack[:] = [waiting for waiting in self.stack if waiting >= index]
        self.upstream.stop()

    def _look_for_end(self) -> None:
        for index, stage in enumerate(self.stages):
            if stage.left == 0:
                self._end(index)

    def start(self, *, rows: bool = True) -> None:
        """Not before the outputs that wait here are gone: they come from the item in hand."""
        if not self.stack and self.flushing is None:
            self.upstream.start(rows=rows)

    def open(self, flow: Flow) -> None:
        """Let the operators know the actors of the flow."""
        super().open(flow)
        self.tracer = flow.tracer
        for stage in self.stages:
            stage.directory = flow.directory
        self._look_for_end()

    def state_dict(self) -> dict[str, Any]:
        """Also the stages' states, by name."""
        return {**super().state_dict(), "stages": {stage.name: stage.state_dict() for stage in self.stages}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        for stage in self.stages:
            stage.load_state_dict(state["stages"][stage.name])


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
