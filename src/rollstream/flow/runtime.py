"""A flow while it runs: one loop pulls the graph, one place waits, and nothing else does."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.engine import Actor, ActorDied, Deadlock, Engine, Future
from rollstream.engine.base import DRIVER
from rollstream.engine.inline import ListSink
from rollstream.flow import shard
from rollstream.flow.actor_refs import actors_in
from rollstream.flow.errors import PlanError, StateError
from rollstream.flow.gather import Gather
from rollstream.flow.node import OVER, Chain, Node, ancestors
from rollstream.flow.trace import Tracer
from rollstream.flow.via import Via

_FORMAT = 1
_TRIES = 3
"""How often an actor that dies is asked for its state."""


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
        self.sink = ListSink() if engine is None else engine.sink()
        self.directory: Mapping[str, Actor[Any]] = {} if engine is None else engine.actors
        self.nodes: list[Node] = []
        self.progress = 0
        """Counts everything after which it is worth pulling again."""
        self.closed = False
        self.over = False
        """Whether it ended by itself."""
        self.started = 0.0
        self.ended: float | None = None
        self._active = False
        self._token = secrets.token_hex(4)
        if engine is not None:
            engine.join(self.sink, self.close)
            if tracer is not None:
                engine.tracer = tracer

    def key(self, name: str) -> str:
        """A key for a node's shards that no other flow uses."""
        return f"{name}#{self._token}"

    def add(self, root: Node) -> None:
        """Take in a root and what is upstream of it, sources first."""
        name_nodes(root)
        for node in ancestors(root):
            if node.flow is None:
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
        if self.closed or root.stopped:
            raise StopIteration
        if not self.started:
            self.started = time.perf_counter()
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
                elif packet is OVER:
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
                self.tracer.span(None, "next", begin, time.perf_counter())
        root.stop()
        if all(node.stopped for node in self.nodes):
            self.over = True
            self.close()
        raise StopIteration

    def poll(self) -> None:
        """Hand every reply that has come to its node; never waits."""
        while (future := self.sink.poll()) is not None:
            self._dispatch(future)

    def stalled(self) -> bool:
        """Whether nothing is running: what is not ready now cannot become so by waiting."""
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
            raise Deadlock(self._reasons())
        if self.progress != mark:
            return
        start = time.perf_counter()
        assert self.engine is not None
        future = self.sink.wait()
        self.engine.require_open()
        end = time.perf_counter()
        if self.tracer is not None:
            self.tracer.span(None, "wait", start, end)
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

    def _reasons(self) -> str:
        reasons = [reason for node in self.nodes if (reason := node.blocked()) is not None]
        return "nothing runs and nothing can: " + ("; ".join(reasons) or "no node can say why")

    # The end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop every node; write the trace."""
        if self.closed:
            return
        self.closed = True
        self.ended = time.perf_counter()
        for node in reversed(self.nodes):
            node.stop()
        if self.engine is not None:
            self.engine.leave(self.sink, self.close)
        if self.tracer is not None:
            if self.engine is not None and self.engine.tracer is self.tracer:
                self.engine.tracer = None
            self.tracer.write()

    # State -------------------------------------------------------------------------------------

    def state_dict(self, folder: Path | None = None) -> dict[str, Any]:
        """Everything needed to go on later: nodes, shards and actors, as plain data that is nobody else's."""
        self._require_between_items("saved")
        if self.closed and not self.over:
            raise StateError("the flow was stopped before its end, so there is nothing to go on from")
        self._settle()
        nodes = {node.name: node.state_dict() for node in self.nodes}
        shards = {
            gather.name: self._ask_all(
                (port.actor for port in gather.ports), shard.shard_state, self.key(gather.name)
            )
            for gather in self._gathers()
        }
        here = self.engine is not None and self.engine.local_processes
        folder = folder.absolute() if folder is not None and here else None  # actors may work elsewhere
        actors = self._ask_all(self.directory.values(), shard.actor_state, folder)
        states = {name: own for name, own in zip(self.directory, actors, strict=True) if own is not None}
        operators = self._operators()
        whole = {
            "format": _FORMAT,
            "operators": operators,
            "nodes": nodes,
            "shards": shards,
            "actors": states,
        }
        return copy.deepcopy(whole)  # the flow goes on, and may change what it holds

    def finish_save(self) -> list[str]:
        """Wait until actors have written their files; return what went wrong."""
        return [reason for reason in self._ask_all(self.directory.values(), shard.finish_save) if reason]

    def load_state_dict(self, state: Mapping[str, Any], folder: Path | None = None) -> None:
        """Stand where a saved flow stood. Only for a flow that has not begun."""
        self._require_between_items("loaded")
        if self.started:
            raise StateError(
                "a state can only be loaded into a fresh flow; build the plan again and load it there"
            )
        try:
            self._load(copy.deepcopy(state), folder)
        except BaseException as error:
            self.close()
            if isinstance(error, (KeyError, TypeError, AttributeError, ValueError)):
                raise StateError(f"this is not a flow's state, or it is damaged: {error!r}") from error
            raise

    def _load(self, state: Mapping[str, Any], folder: Path | None) -> None:
        if state["format"] != _FORMAT:
            raise StateError(f"this state has format {state['format']!r}, not {_FORMAT}")
        _require_same("operators", state["operators"], self._operators())
        _require_same("actors", state["actors"], [name for name in state["actors"] if name in self.directory])
        here = self.engine is None or not self.engine.local_processes
        futures = [
            self.directory[name].ask(shard.load_actor_state, shard.found(own, folder, here))
            for name, own in state["actors"].items()
        ]
        for node in self.nodes:
            own = state["nodes"][node.name]
            if own["stopped"]:
                node.stop()
            node.load_state_dict(own)
        for gather in self._gathers():
            for port, own in zip(gather.ports, state["shards"][gather.name], strict=True):
                if own is not None:
                    futures.append(port.actor.ask(shard.load_shard_state, self.key(gather.name), own))
        self._ask(futures)

    def _gathers(self) -> list[Gather]:
        return [node for node in self.nodes if isinstance(node, Gather) and not node.stopped]

    def _operators(self) -> list[str]:
        return [operator.name for node in self.nodes for operator in operators(node)]

    def _ask_all(self, actors: Iterable[Actor[Any]], operation: Any, *args: Any) -> list[Any]:
        """One answer an actor; `None` for one that was dropped."""
        asked = [(actor, None if actor.gone else actor.ask(operation, *args)) for actor in actors]
        waited = [future for _, future in asked if future is not None]
        if self.engine is not None:  # for all of them: what else went wrong is told with the first error
            self.engine.wait(waited, count=len(waited))
        return [self._answered(actor, future, operation, args) for actor, future in asked]

    def _answered(
        self, actor: Actor[Any], future: Future[Any] | None, operation: Any, args: tuple[Any, ...]
    ) -> Any:
        """What an actor says; one that died meanwhile and came back is asked again, a few times."""
        for left in reversed(range(_TRIES)):
            if future is None:
                break
            try:
                return self._ask([future])[0]
            except ActorDied as died:
                if died.outcome == "raised" or not left:
                    raise
                future = None if actor.gone else actor.ask(operation, *args)
        return None

    def _ask(self, futures: Iterable[Future[Any]]) -> list[Any]:
        futures = list(futures)
        return self.engine.results(futures) if self.engine is not None else []

    def _settle(self) -> None:
        """Wait for what is in flight; replies become ready items. Nothing new is asked for."""
        while not self.closed and not self.stalled():
            assert self.engine is not None
            if not self.engine.idle() and (future := self.sink.wait()) is not None:
                self._dispatch(future)
            self.engine.raise_failure()

    def _require_between_items(self, verb: str) -> None:
        if self._active:
            raise StateError(
                f"a state is {verb} from outside the flow, between two items; inside an operator the item "
                f"in hand would be lost"
            )


def name_nodes(root: Node) -> None:
    """Give every operator a name of its own, counting up where two would share one."""
    taken: set[str] = set()

    def free(name: str) -> str:
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{name}-{number}"
        taken.add(candidate)
        return candidate

    for node in ancestors(root):
        if node.flow is not None:
            taken.update(operator.name for operator in operators(node))
    for node in ancestors(root):
        if node.flow is None:
            for operator in operators(node):
                operator.name = free(operator.base)
            if isinstance(node, Chain):
                node.name = f"chain of {node.stages[0].name}"


def operators(node: Node) -> list[Any]:
    """The operators a node stands for, in the order items pass them: what people see as nodes."""
    if isinstance(node, Chain):
        return list(node.stages)
    if isinstance(node, Gather):
        return [node.plan, *node.plan.stages, node]
    return [node]


def engine_of(root: Node) -> Engine | None:
    """The one engine of a plan's actors."""
    engines: dict[int, Engine] = {}
    for node in ancestors(root):
        actors = [p.actor for p in node.ports] if isinstance(node, Gather) else []
        actors = node.actors if isinstance(node, Via) else actors
        engines.update((id(actor.engine), actor.engine) for actor in actors)
    if len(engines) > 1:
        names = ", ".join(repr(engine) for engine in engines.values())
        raise PlanError(f"a flow has one engine, and this one has actors of several: {names}")
    return next(iter(engines.values()), None)


def engine_for(root: Node) -> Engine | None:
    """The engine of a plan; if it has no actors itself, that of actors its operators hold."""
    if (engine := engine_of(root)) is not None:
        return engine
    stages = [stage for node in ancestors(root) if isinstance(node, Chain) for stage in node.stages]
    held = (actor.engine for stage in stages for actor in actors_in(stage.function))
    return next((engine for engine in held if not engine.closed), None)


def _require_same(what: str, saved: Sequence[str] | Mapping[str, Any], here: list[str]) -> None:
    if list(saved) != here:
        missing, extra = [n for n in saved if n not in here], [n for n in here if n not in saved]
        parts = [f"saved but not here: {', '.join(missing)}"] if missing else []
        parts += [f"here but not saved: {', '.join(extra)}"] if extra else []
        reason = "; ".join(parts) or f"saved as {', '.join(saved)}; here {', '.join(here)}"
        raise StateError(f"the state belongs to another plan; {what} {reason}")
