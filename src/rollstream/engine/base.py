"""The engine: a scope in which actors live, and the few verbs by which one talks to them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from rollstream.engine.actor import Actor, ActorContext, Cell, Message, resolve
from rollstream.engine.errors import Deadlock, EngineClosed, EngineError
from rollstream.engine.future import Deferred, Future, Ref, Sink
from rollstream.engine.ledger import Ledger

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
Self = TypeVar("Self", bound="Engine")
DRIVER = "driver"
"""The name of whoever is not an actor: the thread that runs a flow, usually."""


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """What one actor has done so far."""

    name: str
    messages: int
    failures: int
    restarts: int
    queued: int
    """Messages sent to it and not yet handled."""
    busy: float


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A frozen snapshot of an engine: its actors, and the messages not yet handled."""

    engine: str
    outstanding: int
    actors: tuple[ActorStatistics, ...]


class MessageTracer(Protocol):
    """Told of every message an engine handled while it is installed."""

    def message(
        self, label: str, sender: str, receiver: str, posted: float, start: float, end: float
    ) -> None:
        """One handled message, times from `time.perf_counter`."""
        ...


class Engine(ABC):
    """A scope for actors. Leave it and every actor has ended.

    Subclasses say how a message gets to its actor (`_deliver`), how a thread waits (`sink`) and
    what starting and ending an actor takes. Everything else is the same on every engine.
    """

    name: ClassVar[str]
    concurrent: ClassVar[bool] = True
    """Whether actors run beside the driver."""
    mailbox_size: ClassVar[int] = 1000
    """How many messages an actor may be behind before the driver's `send` waits for it."""
    catches: ClassVar[type[BaseException]] = Exception
    """What a method may raise into its reply; Ctrl-C, in the sender's own thread, is the sender's."""

    def __init__(self) -> None:
        self.tracer: MessageTracer | None = None
        self.actors: dict[str, Actor[Any]] = {}
        self.ledger = Ledger()
        self.interrupted = False
        """Whether Ctrl-C came in the middle of a message: then the count of messages may be wrong."""
        self.leaving: list[Callable[[], None]] = []
        """Called before the scope is left: flows that are still open close here."""
        self._names: set[str] = {DRIVER}
        self._naming = threading.Lock()

    # The verbs ---------------------------------------------------------------------------------

    def spawn(
        self,
        cls: type[A],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        count: int = 1,
        name: str | None = None,
    ) -> list[Actor[A]]:
        """Start `count` actors, each an instance of `cls(*args, **kwargs)`.

        A constructor with a parameter called `context` is given its `ActorContext` (index, count, name).
        Actors are named `name`, or `name[0]`, `name[1]`, ... when there are several.
        """
        self.require_open()
        if not isinstance(cls, type):
            raise EngineError(f"spawn takes a class, and {cls!r} is none")
        if not isinstance(args, Sequence) or isinstance(args, str):
            raise EngineError(
                f"args={args!r}: give the constructor's arguments as a tuple; how many is count="
            )
        if count < 1:
            raise EngineError(f"count={count}: spawn at least one actor")
        names = self._take_names(name or cls.__name__, count)
        contexts = [ActorContext(actor, index, count) for index, actor in enumerate(names)]
        cells = [Cell(cls, tuple(args), kwargs or {}, context) for context in contexts]
        actors: list[Actor[A]] = self._start(cells)
        self.actors.update((actor.name, actor) for actor in actors)
        return actors

    def put(self, value: T) -> Ref[T]:
        """Store a value once; the reference can stand for it in any message."""
        self.require_open()
        return Ref(value)

    def submit(self, function: Callable[..., R], *args: Any) -> Future[R]:
        """Run a stateless function somewhere."""
        self.require_open()
        label = getattr(function, "__name__", repr(function))
        future: Future[R] = Future(self, label)
        message = Message(function, args, future, label)
        self.ledger.post(message)
        self._run_task(message)
        return future

    def wait(
        self, futures: Sequence[Future[T]], count: int = 1, timeout: float | None = None
    ) -> tuple[list[Future[T]], list[Future[T]]]:
        """Block until `count` of the futures are done; return the done ones and the others.

        After `timeout` seconds it returns with what there is.
        """
        if count > len(futures):
            raise EngineError(f"count={count}, but there are only {len(futures)} futures to wait for")
        sink, sender = self.sink(), self.sender()
        from_driver = sender == DRIVER
        blocked = None if from_driver or timeout is not None else self.actors.get(sender)
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                if from_driver and self.ledger.failures:
                    self.ledger.raise_failure()
                if not self.ledger.expect(futures, count, sink, blocked):
                    break
                if self.closed:
                    self._require_hope([future.label for future in futures if not future.done])
                left = None if end is None else max(0.0, end - time.monotonic())
                if sink.wait(left) is None:
                    if end is not None and (time.monotonic() >= end or self.hopeless()):
                        break
                    self._require_hope([future.label for future in futures if not future.done])
        finally:
            self.ledger.forget(futures, sink)
        for future in futures:
            future.read = future.read or future.done
        return [f for f in futures if f.done], [f for f in futures if not f.done]

    def _require_hope(self, labels: list[str]) -> None:
        """Raise if nothing can end a wait."""
        if labels and self.closed:
            raise EngineClosed(f"{', '.join(labels)}: the engine was closed before the reply came")
        if labels and self.hopeless():
            raise Deadlock(
                f"no reply to {', '.join(labels)} can come: it is deferred, and nothing else runs while "
                f"this thread waits. Send the message that completes it before waiting."
            )

    def results(self, futures: Sequence[Future[T]]) -> list[T]:
        """The results of all; raises the first error once every reply has come."""
        self.wait(futures, count=len(futures))
        return [future.result() for future in futures]

    def restart(self, actor: Actor[Any]) -> Future[None]:
        """Replace an actor's instance by a fresh one, then repeat its sticky messages."""
        return actor.ask(_rebuild, actor, list(actor.sticky.values()), name="restart")

    def statistics(self) -> EngineStatistics:
        """What every actor has done so far; readable from any thread."""
        rows = tuple(
            ActorStatistics(
                actor.name,
                actor.cell.messages,
                actor.cell.failures,
                actor.cell.context.restarts,
                actor.outstanding,
                actor.cell.busy,
            )
            for actor in list(self.actors.values())
        )
        return EngineStatistics(self.name, self.ledger.outstanding, rows)

    def close(self, *, drain: bool = True) -> None:
        """End every actor. With `drain`, messages already sent are handled first, and failures raised."""
        if self.closed:
            return
        try:
            for leave in list(self.leaving):
                leave()
            if drain:
                self._drain()
        finally:
            self.ledger.close()
            self._stop()
            self.ledger.abandon(EngineClosed("the engine was closed before the reply came"))
        if drain:
            self.ledger.raise_failure()

    @property
    def closed(self) -> bool:
        """Whether the scope was left."""
        return self.ledger.closed

    def __enter__(self: Self) -> Self:
        self.require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'closed' if self.closed else f'{len(self.actors)} actors'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self

    # For flows ---------------------------------------------------------------------------------

    @abstractmethod
    def sink(self) -> Sink:
        """A place for finished futures on which the calling thread can wait."""

    def post(self, actor: Actor[Any], message: Message, kind: str | None = None) -> None:
        """Send a message; `kind` makes it sticky."""
        if self.ledger.closed:
            self.require_open()
        if kind is not None:
            actor.sticky.pop(kind, None)  # the last of its kind takes its place in the order sent
            actor.sticky[kind] = message
        if self.tracer is not None:
            message.posted = (self.sender(), time.perf_counter())
        try:
            if self.concurrent:  # else it is handled before this returns
                self.ledger.post(message, actor)
            self._deliver(actor, message)
        except BaseException:
            self.interrupted = True
            raise

    def hopeless(self) -> bool:
        """Whether nothing can happen while the calling thread waits."""
        return False

    def sender(self) -> str:
        """The name of the actor whose method is running in this thread, or `driver`."""
        return DRIVER

    def make_room(self, actor: Actor[Any]) -> None:
        """Wait until an actor is less far behind. Actors never wait here: two could wait for each other."""
        if self.sender() != DRIVER:
            return
        sink = self.sink()
        self.ledger.watch(sink)
        try:
            while self.ledger.crowded(actor, self.mailbox_size, sink):
                if self.ledger.idle():
                    raise Deadlock(f"{actor.name} has {actor.outstanding} messages waiting and cannot go on")
                sink.wait()
                self.require_open()
        finally:
            self.ledger.unwatch(sink)

    def require_open(self) -> None:
        """Raise if the engine is closed."""
        if self.closed:
            raise EngineClosed(
                f"this {self.name} engine is closed and its actors have ended; "
                f"keep the work inside its `with` block"
            )

    # What an engine adds -----------------------------------------------------------------------

    @abstractmethod
    def _start(self, cells: list[Cell]) -> list[Actor[Any]]:
        """Build every instance where it will live; raise if one cannot be built."""

    @abstractmethod
    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        """Get a message to its actor, after every earlier one of the same sender."""

    @abstractmethod
    def _run_task(self, message: Message) -> None:
        """Run a stateless function."""

    @abstractmethod
    def _stop(self) -> None:
        """End all actors; messages not yet handled are refused."""

    def _drain(self) -> None:
        """Wait until every message sent so far is handled."""
        if self.interrupted:
            self.results([actor.ask(_nothing) for actor in self.actors.values()])
            return
        sink = self.sink()
        self.ledger.watch(sink)
        try:
            while not self.ledger.idle() and not self.ledger.failures:
                sink.wait()
        finally:
            self.ledger.unwatch(sink)

    # Handling a message ------------------------------------------------------------------------

    def _handle(self, actor: Actor[Any], message: Message) -> None:
        """Run a message beside its instance and settle its reply."""
        cell = actor.cell
        error = value = None
        start = time.perf_counter()
        try:
            value = cell.run(message.operation, message.args)
        except self.catches as caught:
            error = caught
            cell.failures += 1
        end = time.perf_counter()
        cell.messages += 1
        cell.busy += end - start
        if self.tracer is not None and message.posted is not None:
            self.tracer.message(message.label, message.posted[0], actor.name, message.posted[1], start, end)
        if isinstance(value, Deferred):
            self.ledger.defer(message, actor.name, value)
        else:
            self.ledger.settle(message, value, error)

    def _handle_task(self, message: Message) -> None:
        try:
            function = message.operation
            assert callable(function)
            value, error = function(*resolve(message.args)), None
        except self.catches as caught:
            value, error = None, caught
        except BaseException:
            self.ledger.settle(message)
            raise
        self.ledger.settle(message, value, error)

    def _build_here(self, cells: list[Cell], mailbox: Callable[[], Any] = lambda: None) -> list[Actor[Any]]:
        """Build instances in this thread; if one cannot be built, those before it end again."""
        actors: list[Actor[Any]] = []
        try:
            for cell in cells:
                cell.build()
                actors.append(Actor(self, cell, mailbox()))
        except BaseException:
            for actor in actors:
                self._end(actor)
            raise
        return actors

    def _end(self, actor: Actor[Any]) -> None:
        """Let an instance go; what its `close` raises is kept like the error of a message."""
        try:
            actor.cell.end()
        except Exception as error:
            error.add_note(f"raised by {actor.name}.close")
            self.ledger.fail(error)

    def _take_names(self, name: str, count: int) -> list[str]:
        with self._naming:
            base = self._free_name(name)
            names = [base] if count == 1 else [f"{base}[{index}]" for index in range(count)]
            self._names.update(names)
        return names

    def _free_name(self, name: str) -> str:
        taken = {*self._names, *(actor.partition("[")[0] for actor in self._names)}
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{name}-{number}"
        return candidate


def _rebuild(cell: Cell, actor: Actor[Any], sticky: list[Message]) -> None:
    try:
        cell.rebuild(sticky)
    finally:
        error = EngineError(f"{actor.name} was restarted before it replied")
        actor.engine.ledger.abandon(error, actor.name)


def _nothing(_: Cell) -> None:
    """A message that says only that those before it have been handled."""
