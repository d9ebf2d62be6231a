"""An actor's end of its connection, as frames: `FramedTransport` is the driver's."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections import deque
from typing import Any

from rollstream.engine.actor_host import DEFERRED, ActorHost
from rollstream.engine.channel import Channel
from rollstream.engine.errors import EngineError
from rollstream.engine.future import Deferred
from rollstream.engine.memory import Arena, Block, room_for
from rollstream.engine.serialization import Codec, Payload

BUILD, MESSAGE, RETURNED, STOP = "build", "message", "returned", "stop"
"""Frames to an actor: build the instance, handle a message, memory is free again, end."""
BUILT, DONE, LATE, POST, ENDED, WANTS, GREW = "built", "done", "late", "post", "ended", "wants", "grew"
"""Frames from an actor: the instance is built, a message was handled, a deferred reply, a message to another
actor, the end, a request for memory to be returned, and that its pool had to grow."""


class FramedHost(ActorHost):
    """An actor's end of the connection."""

    def __init__(self, name: str, actor: str, arena: str, pool: int, channel: Channel):
        super().__init__(name, actor)
        self.channel = channel
        self.stopping = False
        self.codec = Codec(self, self._store, f"{actor}, process {os.getpid()}")
        self._arena = Arena(arena, pool)
        self._writing = threading.Lock()
        self._mailbox: deque[tuple[Any, ...]] = deque()
        self._grown = 0
        self._patience, self._unasked = pool, 0
        """How many bytes to take beyond the pool before the driver is asked again."""
        self._awaits_memory = False

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send bytes to the driver."""

    @abstractmethod
    def read(self) -> None:
        """Wait for bytes from the driver, and `receive` them."""

    @abstractmethod
    def can_wait(self) -> bool:
        """Whether the calling thread may `read`."""

    # From the driver ---------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview) -> None:
        for kind, fields in self.channel.feed(data):
            if kind == RETURNED:
                self._awaits_memory = False
            elif kind == STOP:
                self.stopping = self.closed = True
            elif kind in (BUILD, MESSAGE):
                self._mailbox.append((kind, *fields))

    def has_message(self) -> bool:
        """Whether a message waits to be handled."""
        return bool(self._mailbox)

    def handle_next(self) -> None:
        """Handle the message that came first."""
        kind, *fields = self._mailbox.popleft()
        if kind == BUILD:
            wrapped, context = fields
            error = self.build(self.channel.unwrap(wrapped), context)
            self.send(BUILT, None if error is None else self._wrapped_error(error))
        elif self.slot is not None:  # else it could not be built: the driver knows, and ends this process
            self._handle_message(*fields)

    def _handle_message(self, number: int, wrapped: Any) -> None:
        value, error, start, end = self.handle(self.channel.unwrap(wrapped))
        del wrapped
        if isinstance(value, Deferred):
            error = self._defer(number, value, start, end)
            if error is None:
                return
            value = None
        reply = self._wrapped_result(value, error)
        if error is not None:
            error.__traceback__ = None  # its frames hold the message's arrays
        del value, error  # so that their memory is returned with this frame
        self.send(DONE, number, *reply, start, end)

    def _defer(self, number: int, value: Deferred[Any], start: float, end: float) -> EngineError | None:
        """The reply comes later; `DONE` is sent before it."""
        early: list[tuple[Any, BaseException | None]] = []
        told, telling = False, threading.Lock()  # a thread of the actor may complete it

        def complete(late: Any, late_error: BaseException | None) -> None:
            with telling:
                if not told:
                    early.append((late, late_error))
                    return
            self.send(LATE, number, *self._wrapped_result(late, late_error))

        try:
            value.then(complete)
        except EngineError as twice:
            return twice
        self.send(DONE, number, DEFERRED, None, start, end)
        with telling:
            told = True
        for outcome in early:
            complete(*outcome)
        return None

    def say_goodbye(self) -> None:
        """End the instance and tell the driver."""
        self.send(ENDED, [self._wrapped_error(error) for error in self.end()])

    # To the driver -----------------------------------------------------------------------------

    def send(self, kind: str, *fields: Any) -> None:
        with self._writing:
            if self._arena.grown != self._grown:
                self._grown = self._arena.grown
                self.write(self.channel.frame(GREW, self._grown))
            while self._arena.retired:
                if (frame := self.channel.forget([self._arena.retired.popleft()])) is not None:
                    self.write(frame)
            self.write(self.channel.frame(kind, *fields))

    def post_to_driver(
        self, target: str, payload: Payload, label: str, sticky: str | None, seconds: float | None
    ) -> None:
        self.send(POST, target, self._wrap(payload), label, sticky, seconds)

    def _wrapped_result(self, value: Any, error: BaseException | None) -> tuple[int, Any]:
        status, payload = self.result(value, error)
        return status, self._wrap(payload)

    def _wrapped_error(self, error: BaseException) -> tuple[Any, ...]:
        return self._wrap(self.codec.pack_error(error))

    def _wrap(self, payload: Payload) -> tuple[Any, ...]:
        with self._writing:
            return self.channel.wrap(payload)

    def _store(self, buffers: list[memoryview]) -> Block:
        """Copy buffers into this actor's pool; if that is full, first ask for what is no longer read."""
        size = room_for(buffers)
        if not self._arena.fits(size) and self.can_wait():
            self._ask_for_memory(size)
        return self._arena.store(buffers)

    def _ask_for_memory(self, size: int) -> None:
        """Wait until the driver has returned what it can; if that is too little, do not ask for a while."""
        if self._unasked > 0:
            self._unasked -= size
            return
        self._awaits_memory = True
        self.send(WANTS)
        while self._awaits_memory:
            self.read()
        self._patience = self._arena.pool if self._arena.fits(size) else 2 * self._patience
        self._unasked = self._patience - self._arena.pool
