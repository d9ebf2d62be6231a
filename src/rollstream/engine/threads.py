"""The threads transport: each actor has a thread and a mailbox."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

from rollstream.engine.actor import DRIVER, Actor, Message
from rollstream.engine.delayed import DelayedMessages
from rollstream.engine.inline import build_slot, end_slot
from rollstream.engine.sinks import QueueSink
from rollstream.engine.transport import Transport


class ThreadsTransport(Transport):
    """For work that releases the interpreter lock: environments in C++, numerics, waiting.

    Python cannot end a thread from outside: leaving the scope waits for the current messages.
    """

    name = "threads"
    sink = staticmethod(QueueSink)  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}
        self._mailboxes: dict[str, SimpleQueue[Message | tuple[Message, float] | None]] = {}
        """Messages, and delayed ones with the time when they are due; `None` at the end."""
        self._current: dict[str, tuple[Message, float]] = {}

    def start(self, actors: list[Actor[Any]]) -> None:
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        for actor in actors:
            self._mailboxes[actor.name] = SimpleQueue()
            thread = threading.Thread(target=self._live, args=(actor, started), name=actor.name, daemon=True)
            self._threads[actor.name] = thread
            thread.start()
        try:
            errors = [error for error in [started.get() for _ in actors] if error is not None]
            if errors:
                raise errors[0]
        except BaseException:
            self.stop(actors, hurry=True)
            raise

    def _live(self, actor: Actor[Any], started: SimpleQueue[BaseException | None]) -> None:
        try:
            build_slot(actor)
        except BaseException as error:
            started.put(error)
            return
        started.put(None)
        engine, slot, delayed = self.engine, actor.connection, DelayedMessages()
        while (message := self._next_message(actor, delayed)) is not None:
            if engine.closed:
                engine.supervisor.refuse([message])
            else:
                self._current[actor.name] = message, time.monotonic()
                handled = slot.timed_run(message.operation, message.args)
                del self._current[actor.name]
                engine.complete(actor, message, *handled)
                del handled
            del message  # or the last one would be kept alive
        while (left := delayed.take()) is not None:
            engine.supervisor.refuse([left[1]])
        end_slot(actor)

    def _next_message(self, actor: Actor[Any], delayed: DelayedMessages) -> Message | None:
        """Wait for a message, or until a delayed one is due."""
        mailbox = self._mailboxes[actor.name]
        while True:
            timeout = None
            if delayed:
                if (due := delayed.take(time.monotonic())) is not None:
                    self.engine.dispatcher.send_delayed(*due)  # behind what has arrived before
                    continue
                timeout = max(0.0, (delayed.next_due() or 0.0) - time.monotonic())
            try:
                arrived = mailbox.get(timeout=timeout)
            except Empty:
                continue
            if not isinstance(arrived, tuple):
                return arrived
            delayed.add(actor, *arrived)

    def deliver(self, actor: Actor[Any], message: Message) -> None:
        self._mailboxes[actor.name].put(message)

    def deliver_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        """The actor's own thread waits for the time."""
        self._mailboxes[actor.name].put((message, time.monotonic() + seconds))

    def current(self, actor: Actor[Any]) -> tuple[Message, float] | None:
        return self._current.get(actor.name)

    def sender(self) -> str:
        name = threading.current_thread().name
        return name if self._threads.get(name) is threading.current_thread() else DRIVER

    def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:  # noqa: ARG002
        for actor in actors:
            self._mailboxes[actor.name].put(None)
        for actor in actors:
            self._threads[actor.name].join()
            mailbox = self._mailboxes[actor.name]
            while not mailbox.empty():  # sent while the engine was being closed
                if isinstance(message := mailbox.get(), Message):
                    self.engine.supervisor.refuse([message])
