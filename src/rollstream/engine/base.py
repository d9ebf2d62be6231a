"""The engine: a scope in which actors live, and the few verbs by which one talks to them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from rollstream.engine.actor import Actor, ActorContext, Cell, Message, resolve
from rollstream.engine.errors import Deadlock, EngineClosed, EngineError
from rollstream.engine.future import Deferred, Future, Ref, Sink

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
Self = TypeVar("Self", bound="Engine")


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """What one actor has done so far."""

    name: str
    messages: int
    failures: int
    restarts: int
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
    catches: ClassVar[type[BaseException]] = Exception
    """What a method may raise into its reply; Ctrl-C, in the sender's own thread, is the sender's."""

    def __init__(self) -> None:
        self.closed = False
        self.tracer: MessageTracer | None = None
        self.actors: dict[str, Actor[Any]] = {}
        self._lock = threading.Lock()
        self._outstanding = 0
        self.failures: list[BaseException] = []
        self._sinks: list[Sink] = []
        self._deferred: dict[Message, str] = {}
        self._blocked: set[Sink] = set()
        self._failed: list[Future[Any]] = []

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
        if count < 1:
            raise EngineError(f"count={count}: spawn at least one actor")
        base = self._free_name(name or cls.__name__)
        names = [base] if count == 1 else [f"{base}[{index}]" for index in range(count)]
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
        self._count(1)
        self._run_task(Message(function, args, future, label))
        return future

    def wait(
        self, futures: Sequence[Future[T]], count: int = 1, timeout: float | None = None
    ) -> tuple[list[Future[T]], list[Future[T]]]:
        """Block until `count` of the futures are done; return the done ones and the others.

        After `timeout` seconds it returns with what there is.
        """
        if count > len(futures):
            raise EngineError(f"count={count}, but there are only {len(futures)} futures to wait for")
        sink, from_driver = self.sink(), self.sender() == "driver"
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                if from_driver:
                    self.raise_failure()
                if self._enough(futures, count, None if from_driver or end is not None else sink, sink):
                    break
                left = None if end is None else max(0.0, end - time.monotonic())
                if sink.wait(left) is None:
                    if end is not None and (time.monotonic() >= end or self.hopeless()):
                        break
                    self._require_hope(futures)
        finally:
            with self._lock:
                self._blocked.discard(sink)
                if sink in self._sinks:
                    self._sinks.remove(sink)
                for future in futures:
                    if sink in future.waiters:
                        future.waiters.remove(sink)
        return [f for f in futures if f.done], [f for f in futures if not f.done]

    def _enough(self, futures: Sequence[Future[Any]], count: int, blocked: Sink | None, sink: Sink) -> bool:
        """Whether enough futures are done; if not, their replies will come to the sink.

        `blocked` is the sink of an actor that waits without a timeout: the message it handles does not run.
        """
        with self._lock:
            if sum(future.done for future in futures) >= count:
                return True
            if sink not in self._sinks:
                self._sinks.append(sink)
                for future in futures:
                    future.waiters.append(sink)
            if blocked is not None:
                self._blocked.add(blocked)
                if self._outstanding == len(self._blocked):
                    self._wake(sink)
        return False

    def _require_hope(self, futures: Sequence[Future[Any]]) -> None:
        """Raise if nothing can end the wait."""
        labels = ", ".join(future.label for future in futures if not future.done)
        if labels and self.closed:
            raise EngineClosed(f"{labels}: the engine was closed before the reply came")
        if labels and self.hopeless():
            raise Deadlock(
                f"no reply to {labels} can come: it is deferred, and nothing else runs while "
                f"this thread waits. Send the message that completes it before waiting."
            )

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
                actor.cell.busy,
            )
            for actor in list(self.actors.values())
        )
        return EngineStatistics(self.name, self._outstanding, rows)

    def close(self, *, drain: bool = True) -> None:
        """End every actor. With `drain`, messages already sent are handled first, and failures raised."""
        if self.closed:
            return
        try:
            if drain:
                self._drain()
        finally:
            with self._lock:
                unread = [future.error for future in self._failed if not future.read and future.error]
                self.failures += unread
                self.closed = True
                self._wake()
            self._stop()
            self._abandon(list(self._deferred), EngineClosed("the engine was closed before the reply came"))
        if drain:
            self.raise_failure()

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

    def watch(self, sink: Sink) -> None:
        """Wake this sink also when the engine goes idle and when an unawaited message fails."""
        with self._lock:
            self._sinks.append(sink)

    def unwatch(self, sink: Sink) -> None:
        """Undo `watch`."""
        with self._lock:
            if sink in self._sinks:
                self._sinks.remove(sink)

    def post(self, actor: Actor[Any], message: Message, kind: str | None = None) -> None:
        """Send a message; `kind` makes it sticky."""
        if self.closed:
            self.require_open()
        if kind is not None:
            actor.sticky.pop(kind, None)  # the last of its kind takes its place in the order sent
            actor.sticky[kind] = message
        if self.tracer is not None:
            message.posted = (self.sender(), time.perf_counter())
        with self._lock:
            self._outstanding += 1
        self._deliver(actor, message)

    def idle(self) -> bool:
        """Whether no message is queued or runs; deferred replies and actors that wait do not run."""
        with self._lock:
            return self._outstanding == len(self._blocked)

    def hopeless(self) -> bool:
        """Whether nothing can happen while the calling thread waits."""
        return False

    def raise_failure(self) -> None:
        """Raise the error of a message nobody awaited, if there is one; more of them are its notes."""
        if self.failures:
            with self._lock:
                failures, self.failures = self.failures, []
            for other in failures[1:]:
                failures[0].add_note(f"another message failed too: {type(other).__name__}: {other}")
            if failures:
                raise failures[0]

    def sender(self) -> str:
        """The name of the actor whose method is sending now, or `driver`."""
        return "driver"

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
        sink = self.sink()
        self.watch(sink)
        try:
            while not self.idle() and not self.failures:
                sink.wait()
        finally:
            self.unwatch(sink)

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
            self._defer(actor, message, value)
        else:
            self._settle(message, value, error)

    def _handle_task(self, message: Message) -> None:
        try:
            function = message.operation
            assert callable(function)
            value, error = function(*resolve(message.args)), None
        except Exception as caught:
            value, error = None, caught
        self._settle(message, value, error)

    def _settle(self, message: Message, value: Any, error: BaseException | None, handled: int = 1) -> None:
        """Hand on a reply. One lock makes `idle` exact: a reply is in its sink before the engine is idle."""
        if error is not None:
            error.add_note(f"raised while {message.label} was handled")
        future, told = message.future, None
        with self._lock:
            self._outstanding -= handled
            if future is not None:
                future.value, future.error, future.done = value, error, True
                if (told := future.sink) is not None:
                    told.put(future)
                elif error is not None:
                    self._failed = [*(known for known in self._failed if not known.read), future]
                for waiter in future.waiters:
                    waiter.put(future)
                    self._blocked.discard(waiter)
            elif error is not None and not (self.closed and isinstance(error, EngineClosed)):
                self.failures.append(error)
                self._wake()
            if self._outstanding == len(self._blocked):
                self._wake(told)

    def _defer(self, actor: Actor[Any], message: Message, reply: Deferred[Any]) -> None:
        """The message is handled, and its reply comes later."""
        self._deferred[message] = actor.name
        try:
            reply.then(partial(self._settle_late, message))
        except EngineError as error:
            del self._deferred[message]
            self._settle(message, None, error)
            return
        with self._lock:
            self._outstanding -= 1
            if self._outstanding == len(self._blocked):
                self._wake()

    def _settle_late(self, message: Message, value: Any, error: BaseException | None) -> None:
        if self._deferred.pop(message, None) is not None:  # not abandoned meanwhile
            self._settle(message, value, error, handled=0)

    def _abandon(self, messages: list[Message], error: EngineError) -> None:
        """Replies that were deferred will not come: tell who waits for them."""
        for message in messages:
            self._settle_late(message, None, type(error)(f"{message.label}: {error}"))

    def abandon_deferred(self, actor: Actor[Any], reason: str) -> None:
        """An instance is gone, and with it the replies it held back."""
        mine = [message for message, receiver in list(self._deferred.items()) if receiver == actor.name]
        self._abandon(mine, EngineError(reason))

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
            self.failures.append(error)

    def _wake(self, told: Sink | None = None) -> None:
        for sink in self._sinks:
            if sink is not told:
                sink.wake()

    def _count(self, change: int) -> None:
        with self._lock:
            self._outstanding += change

    def _free_name(self, name: str) -> str:
        taken = {*self.actors, *(actor.partition("[")[0] for actor in self.actors)}
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{name}-{number}"
        return candidate


def _rebuild(cell: Cell, actor: Actor[Any], sticky: list[Message]) -> None:
    cell.rebuild(sticky)
    actor.engine.abandon_deferred(actor, f"{actor.name} was restarted before it replied")
