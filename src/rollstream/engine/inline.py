"""The inline engine: a message is handled when it is sent, in the sender's thread."""

from __future__ import annotations

from collections import deque
from typing import Any

from rollstream.engine.actor import Actor, ActorSlot, Message
from rollstream.engine.base import DRIVER, Engine
from rollstream.engine.errors import ReentryError
from rollstream.engine.future import Future, Sink
from rollstream.engine.supervision import EventCallback, SpawnOptions


class ListSink:
    """A sink for one thread: whatever will ever come without further messages is already there."""

    __slots__ = ("_futures", "put")

    def __init__(self) -> None:
        self._futures: deque[Future[Any]] = deque()
        self.put = self._futures.append

    def wake(self) -> None:
        """Nobody sleeps here."""

    def poll(self) -> Future[Any] | None:
        """Take the next future, if there is one."""
        return self._futures.popleft() if self._futures else None

    def wait(self, timeout: float | None = None) -> Future[Any] | None:  # noqa: ARG002
        """As `poll`: waiting would change nothing."""
        return self.poll()


class InlineEngine(Engine):
    """Synchronous and deterministic: a debugger walks from the plan into an actor and back."""

    name = "inline"
    concurrent = False

    def __init__(self, *, on_event: EventCallback | None = None) -> None:
        super().__init__(on_event=on_event)
        self._running: list[str] = []

    def sink(self) -> Sink:
        """A sink that never blocks."""
        return ListSink()

    def hopeless(self) -> bool:
        """Nothing runs while the caller waits."""
        return True

    def sender(self) -> str:
        """The actor whose method is running, innermost."""
        return self._running[-1] if self._running else DRIVER

    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        return self._build_here(cells, terms)

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        if actor.name in self._running:
            self.in_flight.settle(message)
            raise ReentryError(
                f"{message.label} was sent while {actor.name} handles a message, and the inline engine "
                f"handles messages at once; use engine('threads'), or send it after the method returned"
            )
        self._running.append(actor.name)
        try:
            self._handle(actor, message)
        except BaseException:  # Ctrl-C, say: it is not the actor's to handle
            self.in_flight.settle(message)
            raise
        finally:
            self._running.pop()
        if self.in_flight.failures and message.future is None:
            self.in_flight.raise_failure()

    def _run_task(self, message: Message) -> None:
        self._handle_task(message)

    def _stop(self) -> None:
        for actor in self.actors.values():
            self._end(actor)
