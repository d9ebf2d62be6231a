"""The engine as an actor of the ray engine knows it."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from ray._private.worker import global_worker

from rollstream.engine.actor import Actor, Message, perform, run_task
from rollstream.engine.errors import EngineError
from rollstream.engine.future import Deferred, Future, Sink
from rollstream.engine.outpost import Outpost
from rollstream.engine.ray_store import (
    Buffers,
    body_of,
    is_large,
    item_of,
    items_of,
    parcel_from,
    stowed,
)
from rollstream.engine.threads import QueueSink
from rollstream.engine.wire import (
    Parcel,
    cannot_travel,
    pack,
    packed_error,
    packed_message,
    unpack,
)

VALUE, STORED, ERROR, DEFERRED, REFUSED = range(5)
"""What a record says of a message: its value is in the record, or an object of its own; it failed; its reply
comes later; it was not handled."""
LATE, POSTED, WAITING = "late", "posted", "waiting"
"""What an actor says besides: a deferred reply, a message to another actor, that it waits for replies."""
NUMBER = struct.Struct("<I")
"""How a record says which of the cell's messages has a deferred reply."""
HEADER = struct.Struct("<BIdd")
"""How a record begins: what it says, how much the actor has said besides so far, when it began and ended."""


class RayOutpost(Outpost):
    """What an actor's process knows of its engine: handles work here, and their messages go by the driver."""

    name = "ray"

    def __init__(self, name: str, *, sends: bool = True):
        super().__init__(name)
        self._sends = sends
        self._handled = 0
        self._said = 0
        self._saying = threading.Lock()
        self._outbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    # What the driver asks for ------------------------------------------------------------------

    def build(self, about: tuple[str, int, int, int], body: Any, items: Sequence[Any]) -> Any:
        """Make the instance: an error or none, and what the driver should know of this process."""
        error = None
        try:
            self._build(self._opened(body, items), about)
        except BaseException as problem:
            error = self._error_item(problem)
        worker = global_worker
        logs = [worker.get_out_file_path(), worker.get_err_file_path()]
        return error, os.getpid(), socket.gethostname(), logs, time.time() - time.perf_counter()

    def handle_message(self, body: Any, items: Sequence[Any]) -> tuple[Any, Any]:
        """Handle one message: its record and its value."""
        number = self._handled
        self._handled += 1
        if self._stopping or self._cell is None:
            return HEADER.pack(REFUSED, self._said, 0.0, 0.0), b""
        try:
            operation, args = self._opened(body, items)
        except BaseException as error:
            error.add_note("raised while the message was unpacked")
            return self._record(ERROR, self._error_item(error), 0.0, 0.0), b""
        value, error, start, end = perform(self._cell, operation, args, self.catches)
        if isinstance(value, Deferred):
            try:
                value.then(lambda late, problem: self._say(LATE, number, *self._late(late, problem)))
            except EngineError as twice:
                error = twice
            else:
                return self._record(DEFERRED, NUMBER.pack(number), start, end), b""
        return self._reply(value, error, start, end)

    def run_task(self, body: Any, items: Sequence[Any]) -> tuple[Any, Any]:
        """Run a stateless function."""
        start, value, error = time.perf_counter(), None, None
        try:
            function, args = self._opened(body, items)
            value = run_task(function, args)
        except BaseException as problem:
            error = problem
        return self._reply(value, error, start, time.perf_counter())

    def take(self) -> list[Any]:
        """Wait until the actor has something to say, and take all of it."""
        frames = [self._outbox.get()]
        while not self._outbox.empty():
            frames.append(self._outbox.get())
        return frames

    def take_reply(self, number: int, failed: bool, body: Any, items: Sequence[Any]) -> None:
        """The reply to something this actor asked of another."""
        self._take_reply(number, parcel_from(body, items), failed=failed)

    def stop(self) -> None:
        """Refuse what has not begun; whoever waits for a reply is told that none will come."""
        self._stopping = True
        self.in_flight.close()

    def end(self) -> list[Any]:
        """Let the instance go; errors that nobody has seen, and that of its `close`."""
        return [self._error_item(error) for error in self._end()]

    # Records -----------------------------------------------------------------------------------

    def _reply(self, value: Any, error: BaseException | None, start: float, end: float) -> tuple[Any, Any]:
        if error is None:
            try:
                parcel = pack(value, self, Buffers)
            except Exception as problem:
                error = cannot_travel(value, "the result", problem)
            else:
                if not is_large(parcel):
                    return self._record(VALUE, item_of(parcel), start, end), b""
                return self._record(STORED, [b"", *items_of(parcel)], start, end), body_of(parcel)
        return self._record(ERROR, self._error_item(error), start, end), b""

    def _record(self, status: int, item: Any, start: float, end: float) -> Any:
        """Bytes, which Ray passes on as they are, unless there are references or buffers in the record."""
        header = HEADER.pack(status, self._said, start, end)
        if type(item) is list and len(item) == 1:
            item = item[0]
        return header + item if type(item) is bytes else (header, item)

    def _late(self, value: Any, error: BaseException | None) -> tuple[bool, Any]:
        if error is None:
            try:
                return False, item_of(self._pack(value))
            except Exception as problem:
                error = cannot_travel(value, "the result", problem)
        return True, self._error_item(error)

    def _pack(self, value: Any) -> Parcel:
        return stowed(pack(value, self, Buffers))

    def _pack_message(self, message: Message) -> Parcel:
        return stowed(packed_message(self, message, Buffers))

    def _error_item(self, error: BaseException) -> Any:
        return item_of(stowed(packed_error(error, self, Buffers, f"{self._name}, process {os.getpid()}")))

    def _opened(self, body: Any, items: Sequence[Any]) -> Any:
        return unpack(parcel_from(body, items), self)

    def _say(self, *frame: Any) -> None:
        with self._saying:
            self._said += 1
            self._outbox.put(frame)

    # Handles in this process -------------------------------------------------------------------

    def handle(self, name: str, index: int, cls: type) -> Actor[Any]:
        """A handle whose messages go by way of the driver."""
        if not self._sends:
            raise EngineError(f"a task cannot use the handle {name}: give it to an actor instead")
        return super().handle(name, index, cls)

    def sink(self) -> Sink:
        """A sink that tells the driver before it waits."""
        return _AnnouncedSink(self)

    def _say_post(
        self, target: str, parcel: Parcel, number: int | None, label: str, kind: str | None
    ) -> None:
        self._say(POSTED, target, item_of(parcel), number, label, kind)

    def _say_waiting(self, numbers: list[int]) -> None:
        self._say(WAITING, numbers)


class _AnnouncedSink(QueueSink):
    """A sink whose owner tells the driver before it waits."""

    __slots__ = ("_outpost",)

    def __init__(self, outpost: RayOutpost):
        super().__init__()
        self._outpost = outpost

    def wait(self, timeout: float | None = None) -> Future[Any] | None:
        if timeout is None and self._queue.empty():
            self._outpost.announce()
        return super().wait(timeout)
