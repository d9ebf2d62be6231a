"""The process an actor of the processes engine lives in.

One thread does everything: it reads the socket, handles messages in order, and, while a method waits for
another actor's reply, goes on reading. A second thread only waits for the parent's end.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from rollstream.engine.actor import Actor, ActorContext, Cell, Message, perform
from rollstream.engine.base import Engine
from rollstream.engine.channel import Channel
from rollstream.engine.errors import EngineError, ReentryError
from rollstream.engine.future import Deferred, Future, Sink
from rollstream.engine.memory import Arena
from rollstream.engine.supervision import Terms
from rollstream.engine.wire import (
    Parcel,
    ParcelRef,
    cannot_travel,
    futures_in,
    opened_error,
    opened_reply,
    pack,
    packed_error,
    packed_message,
    unpack,
)

BUILD, MESSAGE, REPLY, STOP = "build", "message", "reply", "stop"
BUILT, DONE, LATE, POST, WAITING, GREW, ENDED = "built", "done", "late", "post", "waiting", "grew", "ended"
VALUE, ERROR, DEFERRED = 0, 1, 2


class Outpost(Engine):
    """What an actor's process knows of its engine: handles work here, and their messages go by the driver."""

    name = "processes"
    remote = True
    catches = BaseException

    def __init__(self, name: str, arena: str, channel: Channel, pool: int):
        super().__init__()
        self._name = name
        self._channel = channel
        self._arena = Arena(arena, pool)
        self._writing = threading.Lock()
        self._thread = threading.get_ident()
        self._mailbox: deque[tuple[Any, ...]] = deque()
        self._calls: dict[int, Message] = {}
        self._numbers = count()
        self._cell: Cell | None = None
        self._stopping = False
        self._grown = 0
        self._awaited: Sequence[Future[Any]] = ()

    # The loop ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle messages until the driver says stop, or is gone."""
        while True:
            if self._mailbox:
                self.read(timeout=0)  # the end overtakes what has not begun
            while not self._mailbox and not self._stopping:
                self.read()
            if self._stopping:
                break
            self._handle_next(*self._mailbox.popleft())
        self._end_all()

    def read(self, timeout: float | None = None) -> None:
        """Read the socket until something has come, or for so many seconds."""
        channel = self._channel
        if timeout is not None:
            channel.sock.settimeout(timeout)
        try:
            if not channel.receive():
                os._exit(0)  # the driver is gone
        except (BlockingIOError, TimeoutError):
            return
        finally:
            if timeout is not None:
                channel.sock.settimeout(None)
        for kind, fields in channel.frames():
            if kind == REPLY:
                self._take_reply(*fields)
            elif kind == STOP:
                self._stopping = True
                self.ledger.close()
            elif kind in (BUILD, MESSAGE):
                self._mailbox.append((kind, *fields))

    def _handle_next(self, kind: str, *fields: Any) -> None:
        if kind == BUILD:
            self._build(*fields)
        else:
            self._handle_message(*fields)

    def _build(self, wrapped: Any, context: tuple[str, int, int, int]) -> None:
        try:
            cls, args, kwargs = self._opened(wrapped)
            cell = Cell(cls, args, kwargs, ActorContext(*context))
            cell.build()
            self._cell = cell
        except BaseException as error:
            self._send(BUILT, self._wrapped_error(error))
        else:
            self._send(BUILT, None)

    def _handle_message(self, number: int, wrapped: Any) -> None:
        if self._cell is None:
            return  # it could not be built: the driver knows, and will end this process
        try:
            operation, args = self._opened(wrapped)
        except BaseException as error:
            error.add_note("raised while the message was unpacked")
            outcome = None, error, 0.0, 0.0
        else:
            outcome = perform(self._cell, operation, args, self.catches)
            del args
        del wrapped
        self._reply(number, *outcome)

    def _reply(self, number: int, value: Any, error: BaseException | None, start: float, end: float) -> None:
        early: list[tuple[Any, BaseException | None]] = []
        if isinstance(value, Deferred):
            told = False

            def complete(late: Any, late_error: BaseException | None) -> None:
                if told:
                    self._send(LATE, number, *self._wrapped(late, late_error))
                else:
                    early.append((late, late_error))

            try:
                value.then(complete)
            except EngineError as twice:
                self._send(DONE, number, *self._wrapped(None, twice), start, end)
                return
            self._send(DONE, number, DEFERRED, None, start, end)
            told = True
            for outcome in early:
                complete(*outcome)
            return
        wrapped = self._wrapped(value, error)
        del value, error
        self._send(DONE, number, *wrapped, start, end)

    def _end_all(self) -> None:
        errors = []
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
            stream.flush()
        self._send(ENDED, [self._wrapped_error(error) for error in errors])

    # To and from the driver --------------------------------------------------------------------

    def _send(self, kind: str, *fields: Any) -> None:
        with self._writing:
            if self._arena.grown != self._grown:
                self._grown = self._arena.grown
                self._write(self._channel.frame(GREW, self._grown))
            while self._arena.retired:
                if (frame := self._channel.forget([self._arena.retired.popleft()])) is not None:
                    self._write(frame)
            self._write(self._channel.frame(kind, *fields))

    def _write(self, data: bytes) -> None:
        try:
            self._channel.sock.sendall(data)
        except OSError:
            os._exit(0)  # the driver is gone

    def _wrapped(self, value: Any, error: BaseException | None) -> tuple[int, tuple[Any, ...]]:
        if error is None:
            try:
                return VALUE, self._channel.wrap(self._pack(value))
            except Exception as problem:
                error = cannot_travel(value, "the result", problem)
        return ERROR, self._wrapped_error(error)

    def _wrapped_error(self, error: BaseException) -> tuple[Any, ...]:
        where = f"{self._name}, process {os.getpid()}"
        return self._channel.wrap(packed_error(error, self, self._arena.store, where))

    def _pack(self, value: Any) -> Parcel:
        return pack(value, self, self._arena.store)

    def _opened(self, wrapped: Any) -> Any:
        return unpack(self._channel.unwrap(wrapped), self)

    # Handles in this process -------------------------------------------------------------------

    def part(self, part: Any) -> Any:
        """A reference, opened when it is used."""
        return part if isinstance(part, (ParcelRef, Future)) else ParcelRef(self, part)

    def handle(self, name: str, index: int, cls: type) -> Actor[Any]:
        """A handle whose messages go by way of the driver."""
        return Actor(self, Cell(cls, (), {}, ActorContext(name, index, 0)))

    def put(self, value: Any) -> ParcelRef:
        """Store a value once, in this process's own memory."""
        self.require_open()
        return ParcelRef(self, self._pack(value))

    def post(self, actor: Actor[Any], message: Message, kind: str | None = None) -> None:
        """Send a message by way of the driver."""
        self.require_open()
        self.prepare(message)
        number = None
        if message.future is not None:
            number = next(self._numbers)
            self._calls[number] = message
            self.ledger.post(message)
        with self._writing:
            wrapped = self._channel.wrap(message.parcel)
        self._send(POST, actor.name, wrapped, number, message.label, kind)

    def prepare(self, message: Message) -> None:
        """Pack the message; replies it carries are waited for."""
        message.parcel = packed_message(self, message, self._arena.store)
        for future in futures_in(message.parcel):
            future.result()

    def opened(self, future: Future[Any]) -> Any:
        """Unpack a reply."""
        return opened_reply(self, future)

    def restart(self, actor: Actor[Any]) -> Future[None]:
        """Refused: what is sticky is known to the driver."""
        raise EngineError(f"{actor.name} can be restarted by the driver only")

    def spawn(self, cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Refused: actors are spawned by the driver, or on an engine of one's own."""
        raise EngineError(f"{self._name} cannot spawn actors on the engine it lives on; open one here")

    def submit(self, function: Any, *args: Any) -> Any:  # noqa: ARG002
        """Refused, as `spawn`."""
        raise EngineError(f"{self._name} cannot submit tasks to the engine it lives on; open one here")

    def _take_reply(self, number: int, status: int, wrapped: Any) -> None:
        message = self._calls.pop(number)
        parcel = self._channel.unwrap(wrapped)
        if status == ERROR:
            self.ledger.settle(message, None, opened_error(parcel, self))
        else:
            self.ledger.settle(message, parcel)

    # Waiting -----------------------------------------------------------------------------------

    def sender(self) -> str:
        """This actor."""
        return self._name

    def sink(self) -> Sink:
        """A sink that reads the socket while it waits."""
        if threading.get_ident() != self._thread:
            raise EngineError(f"{self._name} can wait for replies in the thread that runs its methods only")
        return _SocketSink(self)

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
        numbers = [number for number, message in self._calls.items() if id(message.future) in awaited]
        if numbers:
            self._send(WAITING, numbers)

    def _start(self, cells: list[Cell], terms: Terms) -> list[Actor[Any]]:
        raise NotImplementedError

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        raise NotImplementedError

    def _run_task(self, message: Message) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        raise NotImplementedError


class _SocketSink:
    """A sink whose owner reads the socket itself while it waits."""

    def __init__(self, outpost: Outpost):
        self._outpost = outpost
        self._futures: deque[Future[Any]] = deque()
        self._woken = False
        self.put = self._futures.append

    def wake(self) -> None:
        self._woken = True

    def poll(self) -> Future[Any] | None:
        return self._futures.popleft() if self._futures else None

    def wait(self, timeout: float | None = None) -> Future[Any] | None:
        if not self._futures and not self._woken:
            if timeout is None:
                self._outpost.announce()
            self._outpost.read(timeout)
        self._woken = False
        return self.poll()


def main() -> None:
    """Run the actor that the parent process speaks of."""
    name, life, control, fds, lifeline, pool = sys.argv[1], *map(int, sys.argv[2:])
    del sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends its actors
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    channel = Channel(socket.socket(fileno=control), socket.socket(fileno=fds), {})
    Outpost(name, f"{name}#{life}", channel, pool).run()


def _end_with_parent(lifeline: int) -> None:
    """Wait until the parent's end of a pipe is closed: by its death, if nothing else."""
    os.read(lifeline, 1)
    os._exit(0)
