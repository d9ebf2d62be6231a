"""Transports: how actors are started and stopped, how a message gets there and how its reply comes back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

from rollstream.engine.actor import DRIVER, Actor, Message
from rollstream.engine.delayed import DelayedMessages
from rollstream.engine.sinks import Sink

if TYPE_CHECKING:
    from rollstream.engine.engine import Engine
    from rollstream.engine.serialization import Codec


class Transport(ABC):
    """One way to run actors. The `Engine` has the verbs and the bookkeeping; it calls these few methods.

    A transport reports to its engine: `engine.complete` when a message was handled, `engine.supervisor` when
    an instance was built or an actor died, `engine.in_flight.fail` for errors that no reply carries.
    """

    name: ClassVar[str]
    concurrent: ClassVar[bool] = True
    """Whether actors run beside the driver; else a message is handled before `Engine.post` returns."""
    in_thread: ClassVar[bool] = False
    """Whether messages are handled in the driver's thread: `run` is called after every send."""
    local_processes: ClassVar[bool] = False
    """Whether each actor has a process of its own, on this machine."""
    codec: Codec | None = None
    """Serializes messages, where they leave the process."""
    environment: Mapping[str, str] = {}
    """Environment variables that actors are started with."""
    grown: int = 0
    """How often shared memory had to grow."""
    bytes_moved: int = 0
    """Bytes of messages and replies that the driver has sent or received, without what it passes on by
    reference."""

    def open(self, engine: Engine) -> None:
        """Called once by the engine that uses this transport."""
        self.engine = engine
        self.delayed = DelayedMessages()
        """Messages to be sent later."""

    @abstractmethod
    def start(self, actors: list[Actor[Any]]) -> None:
        """Build every instance where it will live; if one cannot be built, end the others and raise."""

    @abstractmethod
    def deliver(self, actor: Actor[Any], message: Message) -> None:
        """Get a message to its actor, after every earlier one. The actor's lock is held."""

    @abstractmethod
    def deliver_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        """Keep a message, and see to it that `send_due` is called when so many seconds have passed."""
        self.delayed.add(actor, message, time.monotonic() + seconds)

    def send_due(self) -> None:
        """Send the messages whose time has come."""
        while (due := self.delayed.take(time.monotonic())) is not None:
            self.engine.dispatcher.send_delayed(*due)

    @abstractmethod
    def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:
        """End the actors. In a `hurry`, whoever is in the middle of a message has little time left."""

    @abstractmethod
    def sink(self) -> Sink:
        """A place for finished futures on which the calling thread can wait."""

    def sender(self) -> str:
        """The name of the actor whose method is running in this thread, or `driver`."""
        return DRIVER

    def run(self) -> bool:
        """Handle messages, where that happens in the driver's thread (`in_thread`); false from inside one."""
        return False

    def can_progress(self) -> bool:
        """Whether anything can happen while the calling thread waits."""
        return True

    def later(self, function: Callable[[], None]) -> None:
        """Call a function soon, without the caller's locks."""
        function()

    def current(self, actor: Actor[Any]) -> tuple[Message, float] | None:  # noqa: ARG002
        """The message an actor is handling and when it began, by `time.monotonic`."""
        return None

    def accelerator(self, sharing: int = 1) -> dict[str, float]:  # noqa: ARG002
        """The `resources` by which an actor asks for an accelerator, if a cluster has one to give.

        `sharing` actors may have to share it.
        """
        return {}

    def require_usable(self) -> None:  # noqa: B027
        """Raise if this process cannot use the transport."""


class RemoteTransport(Transport):
    """A transport whose actors live in other processes and can die."""

    @abstractmethod
    def launch(self, actor: Actor[Any], first: Iterable[Message] = ()) -> bool:
        """Start a process that builds the instance and handles these messages first; false when closing."""

    @abstractmethod
    def kill(self, actor: Actor[Any]) -> None:
        """End an actor's process at once."""

    @abstractmethod
    def ask_to_end(self, actor: Actor[Any]) -> None:
        """Let an actor end by itself. The actor's lock is held."""

    death_notice: ClassVar[float | None] = None
    """Seconds to wait for notice of the death of an actor that was killed."""
    grace = 1.0
    """Seconds an actor has for its current message when the engine closes in a hurry."""

    def start(self, actors: list[Actor[Any]]) -> None:
        """Launch every process, then wait until all instances are built."""
        assert self.codec is not None
        constructor = self.codec.pack_constructor(actors[0])  # the same for all
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        launched: list[Actor[Any]] = []
        try:
            for actor in actors:
                actor.constructor, actor.started = constructor, started
                self.launch(actor)
                launched.append(actor)
            if errors := [error for error in self.wait_started(started, len(actors)) if error is not None]:
                raise errors[0]
        except BaseException as error:
            self.end_all(launched, self.grace if isinstance(error, Exception) else 0.0)
            raise

    def wait_started(
        self, started: SimpleQueue[BaseException | None], count: int
    ) -> list[BaseException | None]:
        return [started.get() for _ in range(count)]

    def end_all(self, actors: list[Actor[Any]], grace: float | None) -> None:
        """Let actors end by themselves; kill them after `grace` seconds."""
        try:
            for actor in actors:
                with actor.lock:
                    actor.stopping = True
                    if actor.up:
                        self.ask_to_end(actor)
            end = None if grace is None else time.monotonic() + grace
            for actor in actors:
                if not self.wait_ended(actor, None if end is None else max(0.0, end - time.monotonic())):
                    self.kill(actor)
        except BaseException:
            for actor in actors:
                self.kill(actor)
            raise
        finally:
            for actor in actors:
                self.wait_ended(actor, self.death_notice)

    def wait_ended(self, actor: Actor[Any], timeout: float | None) -> bool:
        """Whether an actor's process has ended within so many seconds."""
        return actor.ended.wait(timeout)
