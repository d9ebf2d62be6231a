"""The engine as an actor of the ray engine knows it."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Any

from ray._private.worker import global_worker

from rollstream.engine.actor import Actor, ActorContext, Cell, Message, perform, resolve
from rollstream.engine.base import Engine
from rollstream.engine.errors import EngineError, ReentryError
from rollstream.engine.future import Deferred, Future, Sink
from rollstream.engine.ray_store import (
    Buffers,
    RayRef,
    body_of,
    is_large,
    item_of,
    items_of,
    opened_once,
    parcel_from,
    stowed,
    unpacked,
)
from rollstream.engine.supervision import Terms
from rollstream.engine.threads import QueueSink
from rollstream.engine.wire import (
    Parcel,
    ParcelRef,
    cannot_travel,
    futures_in,
    opened_error,
    pack,
    packed_error,
    packed_message,
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


class Outpost(Engine):
    """What an actor's process knows of its engine: handles work here, and their messages go by the driver."""

    name = "ray"
    remote = True
    catches = BaseException

    def __init__(self, name: str, *, sends: bool = True):
        super().__init__()
        self._name = name
        self._sends = sends
        self._cell: Cell | None = None
        self._handled = 0
        self._said = 0
        self._saying = threading.Lock()
        self._outbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._calls: dict[int, Message] = {}
        self._numbers = count()
        self._stopping = False
        self._awaited: Sequence[Future[Any]] = ()

    # What the driver asks for ------------------------------------------------------------------

    def build(self, about: tuple[str, int, int, int], body: Any, items: Sequence[Any]) -> Any:
        """Make the instance: an error or none, and what the driver should know of this process."""
        error = None
        try:
            cls, args, kwargs = self._opened(body, items)
            cell = Cell(cls, args, kwargs, ActorContext(*about))
            cell.build()
            self._cell = cell
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
            value = function(*resolve(args))
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
        message = self._calls.pop(number)
        if self.closed:
            return  # whoever waited for it has been told
        parcel = parcel_from(body, items)
        if failed:
            self.ledger.settle(message, None, opened_error(parcel, self))
        else:
            self.ledger.settle(message, parcel)

    def stop(self) -> None:
        """Refuse what has not begun; whoever waits for a reply is told that none will come."""
        self._stopping = True
        self.ledger.close()

    def end(self) -> list[Any]:
        """Let the instance go; errors that nobody has seen, and that of its `close`."""
        errors = []
        if not self.closed:
            self.ledger.close()
        try:
            self.ledger.raise_failure()
        except BaseException as error:
            errors.append(error)
        if self._cell is not None:
            try:
                self._cell.end()
            except BaseException as error:
                error.add_note(f"raised by {self._name}.close")
                errors.append(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        return [self._error_item(error) for error in errors]

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
                return False, item_of(self._packed(value))
            except Exception as problem:
                error = cannot_travel(value, "the result", problem)
        return True, self._error_item(error)

    def _packed(self, value: Any) -> Parcel:
        return stowed(pack(value, self, Buffers))

    def _error_item(self, error: BaseException) -> Any:
        return item_of(stowed(packed_error(error, self, Buffers, f"{self._name}, process {os.getpid()}")))

    def _opened(self, body: Any, items: Sequence[Any]) -> Any:
        return unpacked(parcel_from(body, items), self)

    def _say(self, *frame: Any) -> None:
        with self._saying:
            self._said += 1
            self._outbox.put(frame)

    # Handles in this process -------------------------------------------------------------------

    def part(self, part: Any) -> Any:
        """A reference, opened when it is used."""
        return part if isinstance(part, (ParcelRef, Future)) else RayRef(self, part)

    def handle(self, name: str, index: int, cls: type) -> Actor[Any]:
        """A handle whose messages go by way of the driver."""
        if not self._sends:
            raise EngineError(f"a task cannot use the handle {name}: give it to an actor instead")
        return Actor(self, Cell(cls, (), {}, ActorContext(name, index, 0)))

    def put(self, value: Any) -> RayRef:
        """Store a value once; it lives as long as this actor does."""
        self.require_open()
        return RayRef(self, self._packed(value))

    def post(self, actor: Actor[Any], message: Message, kind: str | None = None) -> None:
        """Send a message by way of the driver; nothing large in it goes there."""
        self.require_open()
        self.prepare(message)
        number = None
        if message.future is not None:
            number = next(self._numbers)
            self._calls[number] = message
            self.ledger.post(message)
        self._say(POSTED, actor.name, item_of(message.parcel), number, message.label, kind)

    def prepare(self, message: Message) -> None:
        """Pack the message; replies it carries are waited for."""
        message.parcel = stowed(packed_message(self, message, Buffers))
        for future in futures_in(message.parcel):
            future.result()

    def opened(self, future: Future[Any]) -> Any:
        """Unpack a reply."""
        return opened_once(self, future)

    def restart(self, actor: Actor[Any]) -> Future[None]:
        """Refused: what is sticky is known to the driver."""
        raise EngineError(f"{actor.name} can be restarted by the driver only")

    def spawn(self, cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Refused: actors are spawned by the driver, or on an engine of one's own."""
        raise EngineError(f"{self._name} cannot spawn actors on the engine it lives on; open one here")

    def submit(self, function: Any, *args: Any) -> Any:  # noqa: ARG002
        """Refused, as `spawn`."""
        raise EngineError(f"{self._name} cannot submit tasks to the engine it lives on; open one here")

    # Waiting -----------------------------------------------------------------------------------

    def sender(self) -> str:
        """This actor."""
        return self._name

    def sink(self) -> Sink:
        """A sink that tells the driver before it waits."""
        return _AnnouncedSink(self)

    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        """As the base; the driver is told, since an actor that waits does not run."""
        for future in futures:
            if not future.done and future.receiver == self._name:
                raise ReentryError(
                    f"{self._name} waits for {future.label}, which only {self._name} itself could handle"
                )
        self._awaited = futures if timeout is None else ()
        try:
            return super().wait(futures, count, timeout)
        finally:
            self._awaited = ()

    def announce(self) -> None:
        """Tell the driver that this actor waits for replies, and does not run meanwhile."""
        awaited = {id(future) for future in self._awaited if not future.done}
        numbers = [number for number, message in list(self._calls.items()) if id(message.future) in awaited]
        if numbers:
            self._say(WAITING, numbers)

    def _start(self, cells: list[Cell], terms: Terms) -> list[Actor[Any]]:
        raise NotImplementedError

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        raise NotImplementedError


class _AnnouncedSink(QueueSink):
    """A sink whose owner tells the driver before it waits."""

    __slots__ = ("_outpost",)

    def __init__(self, outpost: Outpost):
        super().__init__()
        self._outpost = outpost

    def wait(self, timeout: float | None = None) -> Future[Any] | None:
        if timeout is None and self._queue.empty():
            self._outpost.announce()
        return super().wait(timeout)
