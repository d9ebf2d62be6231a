"""The inline transport: a message is handled when it is sent, in the driver's thread."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rollstream.engine.actor import DRIVER, Actor, Message
from rollstream.engine.sinks import ListSink, Sink
from rollstream.engine.slot import ActorContext, ActorSlot
from rollstream.engine.transport import Transport


class InlineTransport(Transport):
    """Synchronous and deterministic: a debugger steps from the plan into an actor and back.

    What an actor sends to another is handled as soon as the actor's own message is. What is sent for later is
    handled, soonest first, when the driver waits: nobody sleeps.
    """

    name = "inline"
    concurrent = False
    in_thread = True

    def __init__(self) -> None:
        self._queue: deque[tuple[Actor[Any], Message]] = deque()
        self._running: str | None = None
        self._message: tuple[Message, float] | None = None
        """The message that is being handled and when it began, by `time.perf_counter`."""

    def start(self, actors: list[Actor[Any]]) -> None:
        """Build instances here; if one cannot be built, those before it end again."""
        started: list[Actor[Any]] = []
        try:
            for actor in actors:
                build_slot(actor)
                started.append(actor)
        except BaseException:
            self.stop(started, hurry=False)
            raise

    def deliver(self, actor: Actor[Any], message: Message) -> None:
        self._queue.append((actor, message))

    def deliver_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        self.delayed.add(actor, message, self.delayed.time + seconds)

    def run(self) -> bool:
        """Handle every message that waits, unless one is being handled now."""
        if self._running is not None:
            return False
        queue, clock = self._queue, time.perf_counter
        while queue:
            actor, message = queue.popleft()
            self._running = actor.name
            value = error = None
            start = clock()
            self._message = message, start
            try:
                value = actor.connection.run(message.operation, message.args)
            except Exception as caught:
                error = caught
            except BaseException:  # Ctrl-C, say: it is not the actor's to handle
                self.engine.in_flight.settle(message)
                raise
            finally:
                self._running = None
                self._message = None
            self.engine.complete(actor, message, value, error, start, clock())
        return True

    def run_delayed(self) -> None:
        """Let time pass until the next delayed message is due, and handle it."""
        if self._running is None and (due := self.delayed.take()) is not None:
            self.engine.dispatcher.send_delayed(*due)
            self.run()

    def sink(self) -> Sink:
        return _InlineSink(self)

    def current(self, actor: Actor[Any]) -> tuple[Message, float] | None:
        running = self._message if self._running == actor.name else None
        return running and (running[0], time.monotonic() - (time.perf_counter() - running[1]))

    def sender(self) -> str:
        return self._running or DRIVER

    def can_progress(self) -> bool:
        return len(self.delayed) > 0

    def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:  # noqa: ARG002
        for actor in actors:
            end_slot(actor)


class _InlineSink(ListSink):
    """Whatever can arrive without further messages is already there: waiting is for delayed ones."""

    __slots__ = ("_transport",)

    def __init__(self, transport: InlineTransport):
        super().__init__()
        self._transport = transport

    def wait(self, timeout: float | None = None) -> Any | None:  # noqa: ARG002
        """Take the next future; if there is none, handle the next delayed message first."""
        if not self._futures:
            self._transport.run_delayed()
        return self.poll()


def build_slot(actor: Actor[Any]) -> None:
    """Build an actor's instance in this thread."""
    slot = ActorSlot(ActorContext(actor.name, actor.index, actor.count, actor=actor))
    slot.build(*actor.constructor)
    actor.connection, actor.up = slot, True


def end_slot(actor: Actor[Any]) -> None:
    """End an instance; an error of its `close` is kept like the error of a message."""
    try:
        actor.connection.end()
    except Exception as error:
        actor.engine.in_flight.fail(error)
