"""A flow while it runs: one loop pulls the graph, one place waits, and nothing else does."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollstream.engine import Actor, Deadlock, Engine, Future
from rollstream.engine.actor import DRIVER
from rollstream.flow import snapshot
from rollstream.flow.actor_refs import actors_in
from rollstream.flow.errors import PlanError, StateError
from rollstream.flow.node import END, Node, ancestors
from rollstream.flow.statistics import Statistics
from rollstream.flow.trace import Tracer


class Flow:
    """The nodes of a connected graph, the sink their replies come to, and the loop that drives them."""

    def __init__(self, engine: Engine | None, tracer: Tracer | None):
        if engine is not None and engine.sender() != DRIVER:
            raise PlanError(
                f"{engine.sender()} runs a flow on the engine it lives on, which would wait for itself; "
                f"open an engine of its own there: with rs.engine(...) as own"
            )
        self.engine = engine
        self.tracer = tracer
        self.actors: Mapping[str, Actor[Any]] = {} if engine is None else engine.actors
        self.nodes: list[Node] = []
        self.progress = 0
        """Counts everything after which it is worth pulling again."""
        self._closed = False
        self._finished = False
        """Whether it ended by itself."""
        self._started = 0.0
        self._ended: float | None = None
        self._active = False
        self.token = secrets.token_hex(4)
        if engine is not None:
            self.sink = engine.sink()
            engine.join(self.sink, self.close)
            if tracer is not None:
                engine.tracer = tracer

    def add(self, root: Node) -> None:
        """Add a root and everything upstream of it, sources first."""
        name_operators(root)
        for node in ancestors(root):
            if not node.opened:
                self.nodes.append(node)
                node.open(self)

    # The loop ----------------------------------------------------------------------------------

    def advance(self, root: Node) -> Any:
        """The next value of a root; the only place that waits."""
        if self._active:
            raise PlanError(
                "the flow was asked for its next item while it works on one: from inside one of its own "
                "operators, or from another thread"
            )
        if self._closed or root.stopped:
            raise StopIteration
        if not self._started:
            self._started = time.perf_counter()
        self._active = True
        begin = time.perf_counter() if self.tracer is not None else 0.0
        try:
            while True:
                if self.engine is not None:
                    self.engine.raise_failure()
                    self.poll()
                mark = self.progress
                packet = root.pull()
                if packet is None:
                    if self.progress == mark:
                        self._block()
                elif packet is END:
                    break
                else:
                    return packet[0]
        except BaseException as error:
            if self.engine is not None and not isinstance(error, Exception):
                self.engine.interrupted = True
            self.close()
            raise
        finally:
            self._active = False
            if self.tracer is not None:
                self.tracer.span(("next", begin, time.perf_counter()))
        root.stop()
        if all(node.stopped for node in self.nodes):
            self._finished = True
            self.close()
        raise StopIteration

    def poll(self) -> None:
        """Pass every reply that has come to its node; never waits. Only for flows with an engine."""
        while (future := self.sink.poll()) is not None:
            self._dispatch(future)

    def stalled(self) -> bool:
        """Whether nothing is running, so that waiting would change nothing."""
        if self.engine is None:
            return True
        if not self.engine.idle():
            return False
        mark = self.progress
        self.poll()
        return self.progress == mark

    def _block(self) -> None:
        mark = self.progress
        if self.stalled():
            reasons = [reason for node in self.nodes if (reason := node.blocked()) is not None]
            raise Deadlock("nothing runs and nothing can: " + ("; ".join(reasons) or "no node can say why"))
        if self.progress != mark:
            return
        start = time.perf_counter()
        assert self.engine is not None
        future = self.sink.wait()
        self.engine.require_open()
        end = time.perf_counter()
        if self.tracer is not None:
            self.tracer.span(("wait", start, end))
        for node in self.nodes:
            if node.running():
                node.waiting += end - start
        if future is not None:
            self._dispatch(future)

    def _dispatch(self, future: Future[Any]) -> None:
        self.progress += 1
        if self.tracer is not None:
            self.tracer.reply(future.label, future.receiver, time.perf_counter())
        future.token[0].arrived(future)

    def close(self) -> None:
        """Stop every node; complete the trace."""
        if self._closed:
            return
        self._closed = True
        self._ended = time.perf_counter()
        for node in reversed(self.nodes):
            node.stop()
        if self.engine is not None:
            self.engine.leave(self.sink, self.close)
        if self.tracer is not None:
            if self.engine is not None and self.engine.tracer is self.tracer:
                self.engine.tracer = None
            self.tracer.write()

    def statistics(self) -> Statistics:
        """The counters as they are now; safe from any thread."""
        elapsed = (self._ended or time.perf_counter()) - self._started if self._started else 0.0
        rows = tuple(row for node in list(self.nodes) for row in node.statistics())
        if self.engine is None:
            return Statistics(elapsed, rows, concurrent=False)
        return Statistics(elapsed, rows, self.engine.concurrent, tuple(self.engine.events))

    # State -------------------------------------------------------------------------------------

    def state_dict(self, folder: Path | None = None) -> dict[str, Any]:
        """Everything needed to resume: nodes, shards and actors, as plain data."""
        self._require_between_items("saved")
        if self._closed and not self._finished:
            raise StateError("the flow was stopped before its end, so there is no state to save")
        while not self._closed and not self.stalled():  # replies in flight become ready items
            assert self.engine is not None
            if not self.engine.idle() and (future := self.sink.wait()) is not None:
                self._dispatch(future)
            self.engine.raise_failure()
        return snapshot.save(self.engine, self.nodes, folder)

    def load_state_dict(
        self, state: Mapping[str, Any], folder: Path | None = None, renewed: Iterable[Actor[Any]] = ()
    ) -> None:
        """Restore a saved state. Only for a flow that has not begun."""
        self._require_between_items("loaded")
        if self._started:
            raise StateError(
                "a state can only be loaded into a fresh flow; build the plan again and load it there"
            )
        try:
            snapshot.load(self.engine, self.nodes, state, folder, renewed)
        except BaseException as error:
            self.close()
            if isinstance(error, (KeyError, TypeError, AttributeError, ValueError)):
                raise StateError(f"this is not a flow's state, or it is damaged: {error!r}") from error
            raise

    def _require_between_items(self, verb: str) -> None:
        if self._active:
            raise StateError(
                f"a state is {verb} from outside the flow, between two items; inside an operator the item "
                f"being handled would be lost"
            )


def flow_of(node: Node) -> Flow | None:
    """The flow that a node belongs to, once it has begun."""
    return node.flow if node.opened and isinstance(node.flow, Flow) else None


def name_operators(root: Node) -> None:
    """Name every operator uniquely, with a number where two would share a name; then the other nodes."""
    opened, fresh = [[n for n in ancestors(root) if n.opened is wanted] for wanted in (True, False)]
    taken = {each.name for node in opened for each in (*node.operators(), node)}
    operators = [operator for node in fresh for operator in node.operators()]
    for each in (*operators, *(node for node in fresh if node not in operators)):
        each.name, number = each.base, 1
        while each.name in taken:
            number += 1
            each.name = f"{each.base}-{number}"
        taken.add(each.name)


def require_one_engine(root: Node) -> Engine | None:
    """The engine of a plan's actors; an error if they live on several."""
    engines = {id(actor.engine): actor.engine for node in ancestors(root) for actor in node.actors()}
    if len(engines) > 1:
        names = ", ".join(repr(engine) for engine in engines.values())
        raise PlanError(f"a flow has one engine, and this one has actors of several: {names}")
    return next(iter(engines.values()), None)


def engine_of(root: Node) -> Engine | None:
    """The engine of a plan; if it has no actors itself, that of actors its operators refer to."""
    if (engine := require_one_engine(root)) is not None:
        return engine
    operators = [operator for node in ancestors(root) for operator in node.operators()]
    engines = (actor.engine for operator in operators for actor in actors_in(operator.function))
    return next((engine for engine in engines if not engine.closed), None)
