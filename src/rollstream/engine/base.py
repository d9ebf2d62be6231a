"""The engine: a scope in which actors live, and the few verbs by which one talks to them."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from rollstream.engine.actor import Actor, ActorContext, ActorSlot, Message, rebuild, run_task
from rollstream.engine.errors import ActorDied, Deadlock, EngineClosed, EngineError
from rollstream.engine.future import Deferred, Future, Ref, Sink
from rollstream.engine.in_flight import InFlight
from rollstream.engine.supervision import ActorEvent, EventCallback, Policy, SpawnOptions

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
Self = TypeVar("Self", bound="Engine")
DRIVER = "driver"
"""The name of whoever is not an actor: the thread that runs a flow, usually."""


PATIENCE = 5.0
"""Seconds after which whoever closes an engine is told what it waits for."""


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """What one actor has done so far."""

    name: str
    messages: int
    failures: int
    restarts: int
    lost: int
    """Messages it was sent and could not handle, because it died."""
    queued: int
    """Messages sent to it and not yet handled."""
    busy: float


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A frozen snapshot of an engine: its actors, and the messages not yet handled."""

    engine: str
    outstanding: int
    actors: tuple[ActorStatistics, ...]
    events: tuple[ActorEvent, ...] = ()
    """Actors that died, in order, and what became of them."""
    grown: int = 0
    """How often shared memory did not suffice, because the flow held on to what was sent."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What fixes the number of threads that numeric libraries start in an actor's process."""


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
    remote: ClassVar[bool] = False
    """Whether actors live in other processes, so that messages are packed and replies opened."""
    local_processes: ClassVar[bool] = False
    """Whether each actor has a process of its own, on this machine."""
    mailbox_size: ClassVar[int] = 1000
    """How many messages an actor may be behind before the driver's `send` waits for it."""
    catches: ClassVar[type[BaseException]] = Exception
    """What a method may raise into its reply; Ctrl-C, in the sender's own thread, is the sender's."""

    def __init__(self, *, on_event: EventCallback | None = None) -> None:
        if on_event is not None and not callable(on_event):
            raise EngineError(f"on_event={on_event!r}: give a function of an ActorEvent")
        self.on_event = on_event
        """Told of every actor that dies."""
        self.events: list[ActorEvent] = []
        self.tracer: MessageTracer | None = None
        self.actors: dict[str, Actor[Any]] = {}
        self.in_flight = InFlight()
        self.interrupted = False
        """Whether Ctrl-C came in the middle of a message: then the count of messages may be wrong."""
        self._flows: list[Callable[[], None]] = []
        """Flows that are still open, each as the function that closes it."""
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
        on_failure: Policy = "raise",
        max_restarts: int = 10,
        deadline: float | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> list[Actor[A]]:
        """Start `count` actors, each an instance of `cls(*args, **kwargs)`.

        A constructor with a parameter called `context` is given its `ActorContext` (index, count, name).
        Actors are named `name`, or `name[0]`, `name[1]`, ... when there are several.

        Args:
            cls: the class.
            args: positional arguments of its constructor.
            kwargs: keyword arguments of its constructor.
            count: how many actors.
            name: the actors' name; that of the class if left out.
            on_failure: what becomes of an actor whose process dies. `raise`: the flow ends with `ActorDied`.
                `restart`: it is built again from the same arguments, then handles its sticky messages again;
                what it had not handled is lost, and counted. `drop`: the others go on without it.
            max_restarts: how often one actor is built again before its death is raised.
            deadline: seconds one message may take, after which the actor counts as hung and is killed.
            resources: what the actor needs of a cluster, for example `{"num_cpus": 1, "num_gpus": 0.5}`;
                engines of one machine do not ration.
        """
        self.require_open()
        if not isinstance(cls, type):
            raise EngineError(f"spawn takes a class, and {cls!r} is none")
        if not isinstance(args, Sequence) or isinstance(args, str):
            raise EngineError(
                f"args={args!r}: give the constructor's arguments as a tuple; how many is count="
            )
        if not isinstance(count, int) or count < 1:
            raise EngineError(f"count={count!r}: spawn a whole number of actors, at least one")
        terms = SpawnOptions(on_failure, max_restarts, deadline, resources or {})
        names = self._take_names(name or cls.__name__, count)
        contexts = [ActorContext(actor, index, count) for index, actor in enumerate(names)]
        cells = [ActorSlot(cls, tuple(args), kwargs or {}, context) for context in contexts]
        actors: list[Actor[A]] = self._start(cells, terms)
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
        self.in_flight.post(message)
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
                if from_driver and self.in_flight.failures:
                    for future in futures:
                        future.read = True  # an error of theirs is not to come up again at the end
                    self.in_flight.raise_failure()
                if not self.in_flight.expect(futures, count, sink, blocked):
                    break
                if self.closed:
                    self._require_hope([future.label for future in futures if not future.done])
                left = None if end is None else max(0.0, end - time.monotonic())
                if sink.wait(left) is not None:  # only what is waited for comes here
                    if count == 1 or all(future.done for future in futures):
                        break
                    continue
                if end is not None and (time.monotonic() >= end or self.hopeless()):
                    break
                self._require_hope([future.label for future in futures if not future.done])
                if from_driver and end is None and self.in_flight.stuck():
                    raise Deadlock(
                        f"{futures[0].label} waits for an actor that waits for another, and so on in a circle"
                    )
        finally:
            self.in_flight.forget(futures, sink)
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
        sticky = [(message.operation, message.args) for message in actor.sticky.values()]
        return actor.ask(rebuild, sticky, name="restart")

    def statistics(self) -> EngineStatistics:
        """What every actor has done so far; readable from any thread."""
        rows = tuple(
            ActorStatistics(
                actor.name,
                actor.messages,
                actor.failures,
                actor.restarts,
                actor.lost,
                actor.outstanding,
                actor.busy,
            )
            for actor in list(self.actors.values())
        )
        return EngineStatistics(self.name, self.in_flight.outstanding, rows, tuple(self.events))

    def close(self, *, drain: bool = True) -> None:
        """End every actor. With `drain`, messages already sent are handled first, and failures raised."""
        if self.closed:
            return
        try:
            for close in list(self._flows):
                close()
            if drain:
                self._drain()
        finally:
            self.in_flight.close()
            self._stop()
            self.in_flight.abandon(EngineClosed("the engine was closed before the reply came"))
        if drain:
            self.in_flight.raise_failure()

    @property
    def closed(self) -> bool:
        """Whether the scope was left."""
        return self.in_flight.closed

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
        if self.in_flight.closed:
            self.require_open()
        if actor.gone is not None:
            self._refuse_lost(actor, message, actor.gone)
            return
        if self.remote:
            self.prepare(message)
        if kind is not None:
            actor.sticky.pop(kind, None)  # the last of its kind takes its place in the order sent
            actor.sticky[kind] = message
        if self.tracer is not None and message.posted is None:
            message.posted = (self.sender(), time.perf_counter())
        try:
            if self.concurrent:  # else it is handled before this returns
                self.in_flight.post(message, actor)
            self._deliver(actor, message)
        except BaseException:
            self.interrupted = True
            raise

    def join(self, sink: Sink, close: Callable[[], None]) -> None:
        """A flow begins: its sink is woken when the engine goes idle; it is closed before the engine is."""
        self.in_flight.watch(sink)
        self._flows.append(close)

    def leave(self, sink: Sink, close: Callable[[], None]) -> None:
        """A flow has ended: undo `join`."""
        self.in_flight.unwatch(sink)
        self._flows.remove(close)

    def idle(self) -> bool:
        """Whether no message is being handled or waits to be: deferred replies do not count."""
        return self.in_flight.idle()

    def raise_failure(self) -> None:
        """Raise the error of a message that nobody awaits, if there is one."""
        if self.in_flight.failures:
            self.in_flight.raise_failure()

    def payload(self, operation: str | Callable[..., Any], *args: Any, label: str) -> Any:
        """A message serialized once, to be sent again and again; `None` where messages do not travel.

        What cannot be serialized is an `EngineError` that names it.
        """
        if not self.remote:
            return None
        message = Message(operation, args, None, label)
        self.prepare(message)
        return message.parcel

    def request(
        self,
        actor: Actor[Any],
        operation: str | Callable[..., Any],
        args: tuple[Any, ...],
        *,
        label: str,
        sink: Sink,
        token: Any,
        payload: Any = None,
    ) -> Future[Any]:
        """Run `operation(slot, *args)` beside an actor's instance; the reply comes to a sink."""
        future: Future[Any] = Future(self, label, actor.name, sink, token)
        message = Message(operation, args, future, label)
        message.parcel = payload
        self.post(actor, message)
        return future

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
        self.in_flight.watch(sink)
        try:
            while self.in_flight.crowded(actor, self.mailbox_size, sink):
                if self.in_flight.idle():
                    raise Deadlock(f"{actor.name} has {actor.outstanding} messages waiting and cannot go on")
                sink.wait()
                self.require_open()
        finally:
            self.in_flight.unwatch(sink)

    def require_open(self) -> None:
        """Raise if the engine is closed."""
        if self.closed:
            raise EngineClosed(
                f"this {self.name} engine is closed and its actors have ended; "
                f"keep the work inside its `with` block"
            )

    def prepare(self, message: Message) -> None:
        """Make a message ready to travel; what cannot travel is the sender's error. Remote engines only."""
        raise NotImplementedError

    def opened(self, future: Future[Any]) -> Any:
        """The value of a reply that has travelled. Remote engines only."""
        raise NotImplementedError

    # What an engine adds -----------------------------------------------------------------------

    @abstractmethod
    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        """Build every instance where it will live; raise if one cannot be built."""

    @abstractmethod
    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        """Get a message to its actor, after every earlier one of the same sender."""

    def _run_task(self, message: Message) -> None:
        """Run a stateless function: for engines that do not bring a `submit` of their own."""
        raise NotImplementedError

    @abstractmethod
    def _stop(self) -> None:
        """End all actors; messages not yet handled are refused."""

    def _drain(self) -> None:
        """Wait until every message sent so far is handled."""
        if self.interrupted:
            self.results([actor.ask(_nothing) for actor in self.actors.values()])
            return
        if self.in_flight.idle():
            return
        sink = self.sink()
        self.in_flight.watch(sink)
        reminder = threading.Timer(PATIENCE, self._say_what_is_waited_for)
        reminder.daemon = True
        reminder.start()
        try:
            while not self.in_flight.idle() and not self.in_flight.failures:
                sink.wait()
        finally:
            reminder.cancel()
            reminder.join()
            self.in_flight.unwatch(sink)

    def _say_what_is_waited_for(self) -> None:
        busy = [actor.name for actor in self.actors.values() if actor.outstanding]
        text = (
            f"the engine is closed once every message has been handled, and {', '.join(busy)} is still at "
            f"one; press Ctrl-C to end it, or give spawn a deadline"
        )
        print(text, file=sys.stderr, flush=True)

    # Handling a message ------------------------------------------------------------------------

    def _handle(self, actor: Actor[Any], message: Message) -> None:
        """Run a message beside its instance and settle its reply."""
        error = value = None
        start = time.perf_counter()
        try:
            value = actor.cell.run(message.operation, message.args)
        except self.catches as caught:
            error = caught
        self._complete(actor, message, value, error, start, time.perf_counter())

    def _complete(
        self,
        actor: Actor[Any],
        message: Message,
        value: Any,
        error: BaseException | None,
        start: float,
        end: float,
    ) -> None:
        """A message was handled: count it and settle its reply."""
        actor.messages += 1
        actor.busy += end - start
        if error is not None:
            actor.failures += 1
        if self.tracer is not None and message.posted is not None:
            self.tracer.message(message.label, message.posted[0], actor.name, message.posted[1], start, end)
        if message.operation is rebuild:
            actor.restarts += 1
            self.in_flight.abandon(EngineError(f"{actor.name} was restarted before it replied"), actor.name)
        if isinstance(value, Deferred):
            self.in_flight.defer(message, actor.name, value)
        else:
            self.in_flight.settle(message, value, error)

    # The death of an actor ---------------------------------------------------------------------

    def _died(
        self, actor: Actor[Any], unhandled: Sequence[Message], reason: str, details: str = ""
    ) -> list[Message] | None:
        """An actor has died: what a new instance has to handle first, or `None` if there will be none.

        Engines call this when they notice. Sticky messages are handled again; of the others that were not
        handled, who waits for a reply is told, and all are counted.
        """
        terms, again = actor.terms, None
        if terms.on_failure == "restart" and actor.deaths < terms.max_restarts:
            actor.deaths += 1
            actor.restarts += 1
            again = []
            for kind, message in list(actor.sticky.items()):  # others may be sending
                again.append(message if message in unhandled else message.repeated())
                if actor.sticky.get(kind) is message:
                    actor.sticky[kind] = again[-1]
        elif terms.on_failure == "restart":
            reason = f"{reason}, after {terms.max_restarts} restarts"
        outcome = "restarted" if again is not None else "dropped" if terms.on_failure == "drop" else "raised"
        lost = [message for message in unhandled if again is None or message not in again]
        actor.lost += len(lost)
        error = ActorDied(actor.name, f"{actor.name} {reason}{details}", outcome)
        if again is None:
            actor.gone = error
        self._tell(ActorEvent(actor.name, outcome, reason, len(lost), actor.restarts, time.time()))
        if outcome == "raised" and not any(message.future for message in lost):
            self.in_flight.fail(error)
        self._settle_lost(lost, error)
        return again

    def _settle_lost(self, lost: Sequence[Message], error: ActorDied) -> None:
        for message in lost:
            if message.future is None:
                self.in_flight.settle(message)
                continue
            message.future.read = error.outcome != "raised"
            self.in_flight.settle(message, None, error.about(message.label))
        self.in_flight.abandon(error, error.actor)

    def _refuse_lost(self, actor: Actor[Any], message: Message, gone: ActorDied) -> None:
        """A message to an actor that is no longer there."""
        actor.lost += 1
        self._settle_lost([message], gone)
        if gone.outcome == "raised" and message.future is None:
            raise gone

    def _tell(self, event: ActorEvent) -> None:
        self.events.append(event)
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception as error:
                error.add_note("raised by the callback on_event")
                self.in_flight.fail(error)

    # Tasks and instances in this process -------------------------------------------------------

    def _handle_task(self, message: Message) -> None:
        try:
            function = message.operation
            assert callable(function)
            value, error = run_task(function, message.args), None
        except self.catches as caught:
            value, error = None, caught
        except BaseException:
            self.in_flight.settle(message)
            raise
        self.in_flight.settle(message, value, error)

    def _build_here(
        self, cells: list[ActorSlot], terms: SpawnOptions, mailbox: Callable[[], Any] = lambda: None
    ) -> list[Actor[Any]]:
        """Build instances in this thread; if one cannot be built, those before it end again."""
        actors: list[Actor[Any]] = []
        try:
            for cell in cells:
                cell.build()
                actors.append(self._actor(cell, terms, mailbox()))
        except BaseException:
            for actor in actors:
                self._end(actor)
            raise
        return actors

    def _actor(self, cell: ActorSlot, terms: SpawnOptions, mailbox: Any = None) -> Actor[Any]:
        actor: Actor[Any] = Actor(self, cell, mailbox)
        actor.terms = terms
        return actor

    def _end(self, actor: Actor[Any]) -> None:
        """Let an instance go; what its `close` raises is kept like the error of a message."""
        try:
            actor.cell.end()
        except Exception as error:
            error.add_note(f"raised by {actor.name}.close")
            self.in_flight.fail(error)

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


def _nothing(_: ActorSlot) -> None:
    """A message that says only that those before it have been handled."""
