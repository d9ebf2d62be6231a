"""The process an actor of the processes engine lives in.

One thread does everything: it reads the socket, handles messages in order, and, while a method waits for
another actor's reply, goes on reading. A second thread only waits for the parent's end.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

from rollstream.engine.actor import Message, perform
from rollstream.engine.channel import Channel
from rollstream.engine.errors import EngineError
from rollstream.engine.future import Deferred, Future, Sink
from rollstream.engine.launch import DRIVERS_SIGNALS
from rollstream.engine.memory import Arena, Block, room_for
from rollstream.engine.outpost import Outpost
from rollstream.engine.wire import (
    Parcel,
    cannot_travel,
    futures_in,
    pack,
    packed_error,
    packed_message,
    unpack,
)

GRACE = 1.0
"""Seconds that threads an actor has left behind may take to end."""
BUILD, MESSAGE, REPLY, RETURNED, STOP = "build", "message", "reply", "returned", "stop"
BUILT, DONE, LATE, POST, WAITING, ENDED = "built", "done", "late", "post", "waiting", "ended"
WANTS, GREW = "wants", "grew"
VALUE, ERROR, DEFERRED = 0, 1, 2


class ProcessOutpost(Outpost):
    """The only thread that counts in an actor's process."""

    name = "processes"

    def __init__(self, name: str, arena: str, channel: Channel, pool: int):
        super().__init__(name)
        self._channel = channel
        self._arena = Arena(arena, pool)
        self._writing = threading.Lock()
        self._thread = threading.get_ident()
        self._mailbox: deque[tuple[Any, ...]] = deque()
        self._grown = 0
        self._longer, self._unasked = pool, 0
        """How many bytes to take beyond the pool before the driver is asked again."""
        self._wants = False
        """Whether the driver has been asked for memory that nobody reads any more."""

    def close_fork(self) -> None:
        """In a fork of this process: keep out of the actor's memory, and do not hide its end."""
        self.in_flight.closed = True
        self._channel.hang_up()

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
        self._send(ENDED, [self._wrapped_error(error) for error in self._end()])

    def read(self, timeout: float | None = None) -> None:
        """Read the socket until something has come, or for so many seconds."""
        channel = self._channel
        try:
            if not channel.receive(timeout):
                os._exit(0)  # the driver is gone
        except TimeoutError:
            return
        for kind, fields in channel.frames():
            if kind == REPLY:
                number, status, wrapped = fields
                self._take_reply(number, channel.unwrap(wrapped), failed=status == ERROR)
            elif kind == RETURNED:
                self._wants = False
            elif kind == STOP:
                self._stopping = True
                self.in_flight.close()
            elif kind in (BUILD, MESSAGE):
                self._mailbox.append((kind, *fields))

    def _handle_next(self, kind: str, *fields: Any) -> None:
        if kind == BUILD:
            self._try_to_build(*fields)
        else:
            self._handle_message(*fields)

    def _try_to_build(self, wrapped: Any, about: tuple[str, int, int, int]) -> None:
        try:
            self._build(self._opened(wrapped), about)
        except BaseException as error:
            self._send(BUILT, self._wrapped_error(error))
        else:
            self._send(BUILT, None)

    def _handle_message(self, number: int, wrapped: Any) -> None:
        if self._cell is None:
            return  # it could not be built: the driver knows, and will end this process
        try:
            operation, args = self._opened(wrapped)
        except BaseException as caught:
            caught.add_note("raised while the message was unpacked")
            value, error, start, end = None, caught, 0.0, 0.0
        else:
            value, error, start, end = perform(self._cell, operation, args, self.catches)
            del args
        if isinstance(value, Deferred):
            error = self._defer(number, value, start, end)
            if error is None:
                return
            value = None
        wrapped = self._wrapped(value, error)
        if error is not None:
            error.__traceback__ = None  # its frames hold what the message brought
        del value, error  # what it brought may go home with this frame
        self._send(DONE, number, *wrapped, start, end)

    def _defer(self, number: int, value: Deferred[Any], start: float, end: float) -> EngineError | None:
        """The reply comes later, unless that is an error already."""
        early: list[tuple[Any, BaseException | None]] = []
        told = False

        def complete(late: Any, late_error: BaseException | None) -> None:
            if told:
                self._send(LATE, number, *self._wrapped(late, late_error))
            else:
                early.append((late, late_error))

        try:
            value.then(complete)
        except EngineError as twice:
            return twice
        self._send(DONE, number, DEFERRED, None, start, end)
        told = True
        for outcome in early:
            complete(*outcome)
        return None

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

    def _store(self, buffers: list[memoryview]) -> Block:
        """Copy buffers into this actor's pool; if that is full, first ask for what is no longer read."""
        size = room_for(buffers)
        if not self._arena.fits(size) and threading.get_ident() == self._thread:
            self._ask_for_room(size)
        return self._arena.store(buffers)

    def _ask_for_room(self, size: int) -> None:
        """Wait for the driver's word; if that is of no use (others hold it), do not ask for a while."""
        if self._unasked > 0:
            self._unasked -= size
            return
        self._wants = True
        self._send(WANTS)
        while self._wants:
            self.read()
        self._longer = self._arena.pool if self._arena.fits(size) else 2 * self._longer
        self._unasked = self._longer - self._arena.pool

    def _wrapped(self, value: Any, error: BaseException | None) -> tuple[int, tuple[Any, ...]]:
        if error is None:
            try:
                parcel = self._pack(value)
                for future in futures_in(parcel):
                    future.result()
                return VALUE, self._channel.wrap(parcel)
            except (EngineError, OSError) as problem:
                error = problem
            except Exception as problem:
                error = cannot_travel(value, "the result", problem)
        return ERROR, self._wrapped_error(error)

    def _wrapped_error(self, error: BaseException) -> tuple[Any, ...]:
        where = f"{self._name}, process {os.getpid()}"
        return self._channel.wrap(packed_error(error, self, self._store, where))

    def _pack(self, value: Any) -> Parcel:
        return pack(value, self, self._store)

    def _opened(self, wrapped: Any) -> Any:
        return unpack(self._channel.unwrap(wrapped), self)

    def _pack_message(self, message: Message) -> Parcel:
        return packed_message(self, message, self._store)

    def _say_post(
        self, target: str, parcel: Parcel, number: int | None, label: str, kind: str | None
    ) -> None:
        with self._writing:
            wrapped = self._channel.wrap(parcel)
        self._send(POST, target, wrapped, number, label, kind)

    def _say_waiting(self, numbers: list[int]) -> None:
        self._send(WAITING, numbers)

    # Waiting -----------------------------------------------------------------------------------

    def sink(self) -> Sink:
        """A sink that reads the socket while it waits."""
        if threading.get_ident() != self._thread:
            raise EngineError(f"{self._name} can wait for replies in the thread that runs its methods only")
        return _SocketSink(self)


class _SocketSink:
    """A sink whose owner reads the socket itself while it waits."""

    def __init__(self, outpost: ProcessOutpost):
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends its actors,
    signal.signal(signal.SIGTERM, _leave_to_driver)  # and so is SIGTERM, which goes to a whole group, too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DRIVERS_SIGNALS)  # blocked until here
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    channel = Channel(socket.socket(fileno=control), socket.socket(fileno=fds), {})
    outpost = ProcessOutpost(name, f"{name}#{life}", channel, pool)
    os.register_at_fork(after_in_child=outpost.close_fork)
    os.register_at_fork(after_in_child=_end_by_sigterm)
    outpost.run()
    _leave_threads(name)


def _leave_to_driver(_: int, __: object) -> None:
    """Not ignored, which programs that an actor starts would inherit: they could not be terminated."""


def _end_by_sigterm() -> None:
    """A fork of an actor's process is ended as any other process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_threads(name: str) -> None:
    """Do not wait for long for threads that an actor has left behind, as the interpreter would."""
    end = time.monotonic() + GRACE
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, end - time.monotonic()))
    if left := [thread.name for thread in others if thread.is_alive()]:
        print(f"{name} has ended and left a thread running: {', '.join(left)}", file=sys.stderr, flush=True)
        atexit._run_exitfuncs()
        os._exit(0)


def _end_with_parent(lifeline: int) -> None:
    """Wait until the parent's end of a pipe is closed: by its death, if nothing else."""
    os.read(lifeline, 1)
    os._exit(0)
