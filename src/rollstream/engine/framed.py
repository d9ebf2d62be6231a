"""The driver's end of its actors' connections, as frames: the protocol without the sockets.

The driver is the hub: messages between actors pass through it, but only as descriptions of shared memory, so
nothing large does. `ProcessesTransport` moves the bytes through sockets; the chaos transport of the tests
moves them, in pieces, through memory.
"""

from __future__ import annotations

import time
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, ClassVar

from rollstream.engine.actor import Actor, Message
from rollstream.engine.actor_host import DEFERRED, ERROR
from rollstream.engine.channel import FORGET, Channel
from rollstream.engine.framed_host import (
    BUILD,
    BUILT,
    DONE,
    ENDED,
    GREW,
    LATE,
    MESSAGE,
    POST,
    RETURNED,
    STOP,
    WANTS,
)
from rollstream.engine.future import Deferred
from rollstream.engine.memory import Arena, Segment, room_for
from rollstream.engine.serialization import Codec, payload_of
from rollstream.engine.sinks import Sink
from rollstream.engine.transport import RemoteTransport


class Connection:
    """The driver's end of one actor's connection, for one incarnation of the actor."""

    def __init__(self, channel: Channel, arena: str):
        self.channel = channel
        self.arena = arena
        """The prefix of the keys of the actor's shared memory."""
        self.pending: dict[int, Message] = {}
        """Messages sent and not yet handled."""
        self.deferred: dict[int, Deferred[Any]] = {}
        self.since = 0.0
        """When the actor began its current message."""


class FramedTransport(RemoteTransport):
    """The driver's side of the protocol. Subclasses start processes and move bytes."""

    def __init__(self, pool_bytes: int):
        self.pool_bytes = pool_bytes
        self._arena = Arena("driver", pool_bytes)
        self._maps: dict[str, Segment] = {}
        self._gone: deque[str] = deque()
        """Keys of actors' segments that nobody reads any more."""
        self._numbers = count()
        self._incarnations = count()
        self._starved: list[Sink] = []
        """Sinks of threads that wait for shared memory."""
        self._growth: dict[str, int] = {}

    def open(self, engine: Any) -> None:
        super().open(engine)
        self.codec = Codec(engine, self._store, "the driver")

    @abstractmethod
    def connect(self, actor: Actor[Any], incarnation: int) -> Connection | None:
        """Start a process and return a connection to it; `None` if the actor is being stopped."""

    @abstractmethod
    def write(self, actor: Actor[Any], data: bytes) -> None:
        """Send bytes to an actor without ever waiting. The actor's lock is held."""

    @abstractmethod
    def serves(self) -> bool:
        """Whether the calling thread is the one that takes in replies, and so must not wait."""

    @property
    def grown(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How often shared memory had to grow."""
        return sum(self._growth.values())

    # To actors ---------------------------------------------------------------------------------

    def launch(self, actor: Actor[Any], first: Iterable[Message] = ()) -> bool:
        """Start a process that builds the instance; what is sent comes after that."""
        connection = self.connect(actor, next(self._incarnations))
        if connection is None:
            return False
        with actor.lock:
            actor.connection = connection
            context = (actor.name, actor.index, actor.count, actor.restarts)
            wrapped = connection.channel.wrap(actor.constructor)
            self.write(actor, connection.channel.frame(BUILD, wrapped, context))
            for message in first:
                self.engine.dispatcher.deliver(actor, message)
            actor.up = True
        return True

    def deliver(self, actor: Actor[Any], message: Message) -> None:
        connection: Connection = actor.connection
        number = next(self._numbers)
        if not connection.pending:
            connection.since = time.monotonic()
            if actor.options.deadline is not None:
                self.later(_nothing)  # whoever serves has to look at the clock
        connection.pending[number] = message
        frame = connection.channel.frame(MESSAGE, number, connection.channel.wrap(message.payload))
        self.bytes_moved += len(frame)
        self.write(actor, frame)

    def ask_to_end(self, actor: Actor[Any]) -> None:
        self.write(actor, actor.connection.channel.frame(STOP))

    def current(self, actor: Actor[Any]) -> tuple[Message, float] | None:
        message = next(iter(list(actor.connection.pending.values())), None)
        return None if message is None else (message, actor.connection.since)

    # Shared memory -----------------------------------------------------------------------------

    def _store(self, buffers: list[memoryview]) -> Any:
        """Copy buffers into the driver's pool. While that is full of messages not yet handled, wait."""
        size = room_for(buffers)
        if not self._arena.fits(size) and not self.serves():
            self._wait_for_room(size)
        block = self._arena.store(buffers)
        self.bytes_moved += size
        if self._arena.grown != self._growth.get("driver", 0):
            self._note_growth("driver", self._arena.grown)
        return block

    def _wait_for_room(self, size: int) -> None:
        sink, in_flight = self.sink(), self.engine.in_flight
        self._starved.append(sink)
        in_flight.watch(sink)
        try:
            while not self._arena.fits(size) and self._lends() and not in_flight.idle():
                sink.wait()
                self.engine.require_open()
        finally:
            in_flight.unwatch(sink)
            self._starved.remove(sink)

    def _lends(self) -> bool:
        """Whether some message not yet handled has memory of the driver's pool."""
        connections = [actor.connection for actor in list(self.engine.actors.values()) if actor.up]
        unhandled = [message for each in connections for message in list(each.pending.values())]
        payloads = [message.payload for message in unhandled if message.payload is not None]
        payloads += [payload_of(part) for payload in payloads for part in payload.parts]
        memories = [payload.memory for payload in payloads if payload.memory is not None]
        return any(memory.segment.key.startswith("driver/") for memory in memories)

    def _note_growth(self, who: str, times: int) -> None:
        first = not self._growth
        self._growth[who] = times
        if first:
            text = (
                f"{who} ran out of its {self.pool_bytes / 2**20:.3g} MB of shared memory and took more: "
                f"items it sent are still held (in a batch, a queue, an actor); if that is intended, give "
                f"rs.engine('processes', pool_bytes=...) more"
            )
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except Warning as error:  # where warnings are errors, they are the driver's
                self.engine.in_flight.fail(error)

    def forget(self, keys: list[str]) -> None:
        """Let every process forget segments that are gone."""
        for actor in list(self.engine.actors.values()):
            with actor.lock:
                if actor.up and (frame := actor.connection.channel.forget(keys)) is not None:
                    self.write(actor, frame)

    def collect(self) -> None:
        """Give back segments that nobody reads any more, and kill actors that hang. Called now and then."""
        for ended in (self._arena.retired, self._gone):
            while ended:
                self.forget([ended.popleft()])
        if self.engine.timed_actors:
            self.engine.supervisor.kill_hung()

    def close_memory(self) -> None:
        """No more messages."""
        self._arena.close()
        self._maps.clear()

    # From actors -------------------------------------------------------------------------------

    def receive(self, actor: Actor[Any], data: bytes | memoryview) -> None:
        self.bytes_moved += len(data)
        try:
            frames = actor.connection.channel.feed(data)
        except Exception as error:  # no file descriptor left for its memory, for one
            self.engine.in_flight.fail(error)
            self.kill(actor)
            return
        for kind, fields in frames:
            try:
                self._frames[kind](self, actor, *fields)
            except Exception as error:
                self.engine.supervisor.broken(error)
        self._wake_starved()

    def connection_lost(self, actor: Actor[Any], reason: str, output: str = "") -> None:
        """An actor's process has ended."""
        connection: Connection = actor.connection
        with actor.lock:
            actor.up = False
            unhandled = list(connection.pending.values())
            connection.pending.clear()
            connection.channel.close()
        for key in [key for key in self._maps if key.startswith(connection.arena)]:
            self._maps.pop(key, None)  # segments still read live on, and are forgotten when they end
        self.engine.supervisor.died(actor, unhandled, reason, output)
        self._wake_starved()

    def _wake_starved(self) -> None:
        """Memory may be free again."""
        for sink in list(self._starved):
            sink.wake()

    def _on_built(self, actor: Actor[Any], wrapped: Any) -> None:
        actor.connection.since = time.monotonic()
        self.engine.supervisor.built(actor, None if wrapped is None else self._error(actor, wrapped))

    def _on_done(
        self, actor: Actor[Any], number: int, status: int, wrapped: Any, start: float, end: float
    ) -> None:
        connection: Connection = actor.connection
        message = connection.pending.pop(number)
        connection.since = time.monotonic()
        value = error = None
        if status == DEFERRED:
            value = connection.deferred[number] = Deferred()
        elif status == ERROR:
            error = self._error(actor, wrapped)
        else:
            value = connection.channel.unwrap(wrapped)
        self.engine.complete(actor, message, value, error, start, end)

    def _on_late(self, actor: Actor[Any], number: int, status: int, wrapped: Any) -> None:
        deferred = actor.connection.deferred.pop(number)
        if status == ERROR:
            deferred.reject(self._error(actor, wrapped))
        else:
            deferred.resolve(actor.connection.channel.unwrap(wrapped))

    def _on_post(
        self,
        actor: Actor[Any],
        target: str,
        wrapped: Any,
        label: str,
        sticky: str | None,
        seconds: float | None,
    ) -> None:
        payload = actor.connection.channel.unwrap(wrapped)
        self.engine.dispatcher.forward(actor, target, payload, label, sticky, seconds)

    def _on_wants(self, actor: Actor[Any]) -> None:
        """An actor needs the memory it has lent: an empty frame says what is no longer read."""
        with actor.lock:
            self.write(actor, actor.connection.channel.frame(RETURNED))

    def _on_ended(self, actor: Actor[Any], errors: list[Any]) -> None:
        actor.stopping = True
        for wrapped in errors:
            self.engine.in_flight.fail(self._error(actor, wrapped))

    def _on_grew(self, actor: Actor[Any], times: int) -> None:
        self._note_growth(actor.name, times)

    def _on_forget(self, actor: Actor[Any], keys: list[str]) -> None:  # noqa: ARG002
        self.forget(keys)

    def _error(self, actor: Actor[Any], wrapped: Any) -> BaseException:
        assert self.codec is not None
        return self.codec.unpack_error(actor.connection.channel.unwrap(wrapped))

    _frames: ClassVar[Mapping[str, Callable[..., None]]] = {
        BUILT: _on_built,
        DONE: _on_done,
        LATE: _on_late,
        POST: _on_post,
        WANTS: _on_wants,
        GREW: _on_grew,
        ENDED: _on_ended,
        FORGET: _on_forget,
    }


def _nothing() -> None:
    """Makes whoever serves look at the clock."""
