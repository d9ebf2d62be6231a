"""The engine: a scope in which actors live, and the few verbs by which one talks to them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, final

from rollstream.engine.actor import DRIVER, Actor, ActorNames, Message, Operation
from rollstream.engine.dispatcher import Dispatcher
from rollstream.engine.errors import Deadlock, EngineClosed, EngineError
from rollstream.engine.future import Deferred, Future, Ref
from rollstream.engine.in_flight import InFlight
from rollstream.engine.options import (
    ActorEvent,
    ActorStatistics,
    EngineStatistics,
    EventCallback,
    OnFailure,
    SpawnOptions,
)
from rollstream.engine.sinks import Sink
from rollstream.engine.supervision import Supervisor
from rollstream.engine.transport import Transport

A = TypeVar("A")
T = TypeVar("T")
REMINDER = 5.0
"""Seconds after which closing an engine says what it waits for."""


class MessageTracer(Protocol):
    """Called with every message an engine handled while it is installed."""

    def message(
        self, label: str, sender: str, receiver: str, posted: float, start: float, end: float
    ) -> None:
        """One handled message, times from `time.perf_counter`."""
        ...


@final
class Engine:
    """A scope for actors. Leave it and every actor has ended.

    Open one with `rs.engine(name)`. What differs between engines is their `Transport`.
    """

    mailbox_size: ClassVar[int] = 1000
    """How many messages an actor may be behind before the driver's `send` waits for it."""

    def __init__(self, transport: Transport, *, on_event: EventCallback | None = None) -> None:
        if on_event is not None and not callable(on_event):
            raise EngineError(f"on_event={on_event!r}: give a function of an ActorEvent")
        self.transport = transport
        self.name = transport.name
        self.concurrent = transport.concurrent
        self.local_processes = transport.local_processes
        self.on_event = on_event
        """Called with an `ActorEvent` whenever an actor dies."""
        self.events: list[ActorEvent] = []
        self.tracer: MessageTracer | None = None
        self.actors: dict[str, Actor[Any]] = {}
        self.timed_actors: list[Actor[Any]] = []
        """Actors whose messages have a deadline."""
        self.in_flight = InFlight(lambda actor: self.dispatcher.release(actor))
        self.dispatcher = Dispatcher(self)
        self.supervisor = Supervisor(self)
        self.interrupted = False
        """Whether Ctrl-C came in the middle of a message: then the count of messages may be wrong."""
        self.sink = transport.sink
        self.sender = transport.sender
        self.idle = self.in_flight.idle
        self.silences = self.supervisor.silences
        self.post = self.dispatcher.post
        self.post_later = self.dispatcher.post_later
        self.make_room = self.dispatcher.make_room
        self._flows: list[Callable[[], None]] = []
        """Open flows, each as the function that closes it."""
        self._names = ActorNames()
        transport.open(self)
        self.remote = transport.codec is not None
        """Whether actors live in other processes, so that messages are serialized."""

    # The verbs ---------------------------------------------------------------------------------

    def spawn(
        self,
        cls: type[A],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        count: int = 1,
        name: str | None = None,
        on_failure: OnFailure = "raise",
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
            on_failure: what happens when an actor's process dies. `raise`: the flow ends with `ActorDied`.
                `restart`: it is built again from the same arguments, then handles its sticky messages again;
                messages it had not handled are lost, and counted. `drop`: the others continue without it.
            max_restarts: how often one actor is restarted before its death is raised.
            deadline: seconds one message may take, after which the actor counts as hung and is killed.
            resources: what the actor needs of a cluster, for example `{"num_cpus": 1, "num_gpus": 0.5}`;
                engines of one machine ignore it.
        """
        self.require_open()
        if not isinstance(cls, type):
            raise EngineError(f"spawn takes a class, not {cls!r}")
        if not isinstance(args, Sequence) or isinstance(args, str):
            raise EngineError(
                f"args={args!r}: give the constructor's arguments as a tuple; the number of actors is count="
            )
        if not isinstance(count, int) or count < 1:
            raise EngineError(f"count={count!r}: spawn a whole number of actors, at least one")
        options = SpawnOptions(on_failure, max_restarts, deadline, resources or {})
        actors: list[Actor[A]] = []
        for index, own in enumerate(self._names.take(name or cls.__name__, count)):
            actor = Actor(self, own, index, cls)
            actor.options, actor.count = options, count
            actor.constructor = (cls, tuple(args), kwargs or {})
            actors.append(actor)
        self.actors.update((actor.name, actor) for actor in actors)
        try:
            self.transport.start(actors)
        except BaseException:
            for actor in actors:
                del self.actors[actor.name]
            raise
        if deadline is not None:
            self.timed_actors += actors
        return actors

    def put(self, value: T) -> Ref[T]:
        """Store a value once; the reference can stand for it in any message."""
        self.require_open()
        codec = self.transport.codec
        return Ref(value) if codec is None else codec.put(value)

    def wait(
        self, futures: Sequence[Future[T]], count: int = 1, timeout: float | None = None
    ) -> tuple[list[Future[T]], list[Future[T]]]:
        """Block until `count` of the futures are done, at most `timeout` seconds; return (done, not done)."""
        if count > len(futures):
            raise EngineError(f"count={count}, but there are only {len(futures)} futures to wait for")
        if (sender := self.sender()) != DRIVER:
            raise EngineError(
                f"{sender} is an actor and cannot wait for replies; return a Deferred() instead"
            )
        sink = self.sink()
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                if self.in_flight.failures:
                    for future in futures:
                        future.read = True  # its error is not to come up again at the end
                    self.in_flight.raise_failure()
                if not self.in_flight.expect(futures, count, sink):
                    break
                if end is None or self.closed:
                    self._require_progress(futures)
                left = None if end is None else max(0.0, end - time.monotonic())
                if sink.wait(left) is not None or end is None:
                    continue
                if time.monotonic() >= end or not self.transport.can_progress():
                    break
        finally:
            self.in_flight.forget(futures, sink)
        for future in futures:
            future.read = future.read or future.done
        return [f for f in futures if f.done], [f for f in futures if not f.done]

    def _require_progress(self, futures: Sequence[Future[Any]]) -> None:
        """Raise if nothing can end a wait."""
        labels = ", ".join(future.label for future in futures if not future.done)
        if self.closed:
            raise EngineClosed(f"{labels}: the engine was closed before the reply came")
        if not self.transport.can_progress():
            raise Deadlock(
                f"no reply to {labels} can come: it is deferred, and nothing else runs while this thread "
                f"waits. Send the message that completes it before waiting."
            )

    def results(self, futures: Sequence[Future[T]]) -> list[T]:
        """The results of all; raises the first error once every reply has come."""
        self.wait(futures, count=len(futures))
        return [future.result() for future in futures]

    def statistics(self) -> EngineStatistics:
        """Counters of every actor; readable from any thread."""
        rows = tuple(
            ActorStatistics(a.name, a.messages, a.failures, a.restarts, a.lost, a.outstanding, a.busy)
            for a in list(self.actors.values())
        )
        transport, outstanding = self.transport, self.in_flight.outstanding
        environment = dict(transport.environment)
        return EngineStatistics(
            self.name,
            outstanding,
            rows,
            tuple(self.events),
            transport.grown,
            transport.bytes_moved,
            environment,
        )

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
            hurry = not drain or not self.in_flight.idle()
            self.in_flight.close()
            self.transport.stop(list(self.actors.values()), hurry=hurry)
            while (delayed := self.transport.delayed.take()) is not None:
                self.supervisor.refuse([delayed[1]])
            self.in_flight.abandon(EngineClosed("the engine was closed before the reply came"))
            for actor in self.actors.values():  # handles outlive the engine; what they hold should not
                actor.sticky.clear()
                actor.constructor = None
        if drain:
            self.in_flight.raise_failure()

    @property
    def closed(self) -> bool:
        """Whether the scope was left."""
        return self.in_flight.closed

    def __enter__(self) -> Engine:
        self.require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<Engine {self.name}, {'closed' if self.closed else f'{len(self.actors)} actors'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self

    # For flows: besides these, `sink`, `sender`, `idle`, `actors`, `events` and `tracer` -------------

    def join(self, sink: Sink, close: Callable[[], None]) -> None:
        """A flow begins: its sink is woken when the engine goes idle; it is closed before the engine is."""
        self.in_flight.watch(sink)
        self._flows.append(close)

    def leave(self, sink: Sink, close: Callable[[], None]) -> None:
        """A flow has ended: undo `join`."""
        self.in_flight.unwatch(sink)
        self._flows.remove(close)

    def raise_failure(self) -> None:
        """Raise the error of a message that nobody awaits, if there is one."""
        if self.in_flight.failures:
            self.in_flight.raise_failure()

    def require_open(self) -> None:
        """Raise if the engine is closed."""
        self.transport.require_usable()
        if self.closed:
            raise EngineClosed(
                f"this {self.name} engine is closed and its actors have ended; "
                f"keep the work inside its `with` block"
            )

    def payload(self, operation: Operation, *args: Any, label: str) -> Any:
        """A message serialized once, to be sent again and again; `None` where messages are not serialized.

        What cannot be serialized is an `EngineError` that names it.
        """
        codec = self.transport.codec
        return None if codec is None else codec.pack_message(Message(operation, args, None, label))

    def request(
        self,
        actor: Actor[Any],
        operation: Operation,
        args: tuple[Any, ...],
        *,
        label: str,
        sink: Sink,
        token: Any,
        payload: Any = None,
    ) -> Future[Any]:
        """Run `operation(slot, *args)` where an actor's instance lives; the reply comes to a sink."""
        future: Future[Any] = Future(self, label, actor.name, sink, token)
        message = Message(operation, args, future, label)
        message.payload = payload
        self.post(actor, message)
        return future

    # For transports ----------------------------------------------------------------------------

    def complete(
        self,
        actor: Actor[Any],
        message: Message,
        value: Any,
        error: BaseException | None,
        start: float,
        end: float,
    ) -> None:
        """A message was handled: count it and settle its reply."""
        spent = end - start
        actor.messages += 1
        actor.busy += spent
        if spent > actor.longest:
            actor.longest = spent
        if error is not None:
            actor.failures += 1
        if self.tracer is not None and message.posted is not None:
            self.tracer.message(message.label, message.posted[0], actor.name, message.posted[1], start, end)
        if isinstance(value, Deferred):
            self.in_flight.defer(message, actor.name, value)
        else:
            self.in_flight.settle(message, value, error)

    def find_actor(self, name: str, index: int, cls: type) -> Actor[Any]:  # noqa: ARG002
        """The handle that a serialized one stands for."""
        return self.actors[name]

    def open_reply(self, future: Future[Any]) -> Any:
        """The value of a reply, deserialized if it came from another process."""
        codec = self.transport.codec
        return future.reply if codec is None else codec.open_reply(future)

    def report(self, event: ActorEvent) -> None:
        """Record the death of an actor."""
        self.events.append(event)
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception as error:
                error.add_note("raised by the callback on_event")
                self.in_flight.fail(error)

    # Closing -----------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Wait until every message sent so far is handled."""
        if self.interrupted:
            self.results([actor.ask(_nothing) for actor in self.actors.values() if actor.gone is None])
            return
        if self.in_flight.idle():
            return
        sink = self.sink()
        self.in_flight.watch(sink)
        reminder = threading.Timer(REMINDER, self._say_what_is_waited_for)
        reminder.daemon = True
        reminder.start()
        try:
            while not self.in_flight.idle() and not self.in_flight.failures:
                sink.wait()
                if not self.transport.can_progress():
                    break
        finally:
            reminder.cancel()
            reminder.join()
            self.in_flight.unwatch(sink)

    def _say_what_is_waited_for(self) -> None:
        busy = [actor.name for actor in self.actors.values() if actor.outstanding]
        text = (
            f"the engine closes once every message has been handled; {', '.join(busy)} is not done yet. "
            f"Press Ctrl-C to end it, or give spawn a deadline"
        )
        print(text, file=sys.stderr, flush=True)


def _nothing(_: Any) -> None:
    """A message that says only that those before it have been handled."""
