"""The inline transport: a message is handled when it is sent, in the driver's thread."""

from __future__ import annotations

from collections import deque
from typing import Any

from rollstream.engine.actor import DRIVER, Actor, Message
from rollstream.engine.sinks import ListSink
from rollstream.engine.slot import ActorContext, ActorSlot
from rollstream.engine.transport import Transport


class InlineTransport(Transport):
    """Synchronous and deterministic: a debugger steps from the plan into an actor and back.

    What an actor sends to another is handled as soon as the actor's own message is.
    """

    name = "inline"
    concurrent = False
    in_thread = True
    sink = staticmethod(ListSink)  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        self._queue: deque[tuple[Actor[Any], Message]] = deque()
        self._running: str | None = None

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
        """Queue a message for `run`."""
        self._queue.append((actor, message))

    def run(self) -> bool:
        """Handle every message that waits, unless one is being handled now."""
        if self._running is not None:
            return False
        queue = self._queue
        while queue:
            actor, message = queue.popleft()
            self._running = actor.name
            try:
                handle(actor, message, Exception)
            except BaseException:  # Ctrl-C, say: it is not the actor's to handle
                self.engine.in_flight.settle(message)
                raise
            finally:
                self._running = None
        return True

    def sender(self) -> str:
        """The actor whose message is being handled."""
        return self._running or DRIVER

    def can_progress(self) -> bool:
        """Nothing runs while the caller waits."""
        return False

    def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:  # noqa: ARG002
        """End the instances."""
        for actor in actors:
            end_slot(actor)


def build_slot(actor: Actor[Any]) -> None:
    """Build an actor's instance in this thread."""
    slot = ActorSlot(ActorContext(actor.name, actor.index, actor.count))
    slot.build(*actor.constructor)
    actor.connection, actor.up = slot, True


def handle(actor: Actor[Any], message: Message, catches: type[BaseException]) -> None:
    """Handle a message in this thread, and settle its reply."""
    slot: ActorSlot = actor.connection
    actor.engine.complete(actor, message, *slot.timed_run(message.operation, message.args, catches))


def end_slot(actor: Actor[Any]) -> None:
    """End an instance; an error of its `close` is kept like the error of a message."""
    try:
        actor.connection.end()
    except Exception as error:
        actor.engine.in_flight.fail(error)
