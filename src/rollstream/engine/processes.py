"""The processes transport: each actor is a process of its own, and arrays travel through shared memory."""

from __future__ import annotations

import errno
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from rollstream.engine.actor import Actor, Message
from rollstream.engine.channel import Channel, SocketPort
from rollstream.engine.delayed import earliest
from rollstream.engine.errors import EngineError
from rollstream.engine.framed import Connection, FramedTransport
from rollstream.engine.interrupts import INTERRUPTS
from rollstream.engine.io_loop import IOLoop, IOLoopSink
from rollstream.engine.launch import Process, thread_variables
from rollstream.engine.process_main import CHUNK
from rollstream.engine.sinks import QueueSink, Sink

POOL = 64 << 20
"""Bytes of shared memory a process sends from, by default; only pages that are used are taken."""


class ProcessConnection(Connection):
    """A connection to a process."""

    def __init__(self, channel: Channel, arena: str, process: Process):
        super().__init__(channel, arena)
        self.process = process
        self.unsent: deque[memoryview] = deque()
        """Bytes that its socket did not take yet."""


class ProcessesTransport(FramedTransport):
    """For all cores of one machine.

    Args:
        pool_bytes: shared memory that each process sends from. If the flow holds on to what was sent, more is
            taken, counted and warned about.
        threads: threads that numeric libraries (BLAS, OpenMP, XLA) may use in each actor; by default one, and
            for XLA two, unless the environment says otherwise.
    """

    name = "processes"
    local_processes = True

    def __init__(self, *, pool_bytes: int = POOL, threads: int | None = None):
        if not isinstance(pool_bytes, int) or pool_bytes < 1 << 16:
            raise EngineError(f"pool_bytes={pool_bytes!r}: give a number of bytes, at least 65536")
        super().__init__(pool_bytes)
        self.environment = thread_variables(threads)
        self._pid = os.getpid()
        self._chunk = memoryview(bytearray(CHUNK))
        self._loop: IOLoop | None = None
        self._opening = threading.Lock()
        _OPEN.add(self)

    def require_usable(self) -> None:
        if self._pid != os.getpid():
            raise EngineError(
                f"this engine belongs to process {self._pid}, of which this one is a fork; open one here"
            )

    def sink(self) -> Sink:
        """A sink whose owner serves the actors' sockets while it waits."""
        return QueueSink() if self._loop is None else IOLoopSink(self._loop)

    def serves(self) -> bool:
        return self._loop is None or self._loop.is_mine()

    def later(self, function: Callable[[], None]) -> None:
        self.loop.later(function)

    @property
    def loop(self) -> IOLoop:
        """The loop that serves the sockets; there is one as soon as there is an actor."""
        assert self._loop is not None
        return self._loop

    # Starting and ending -----------------------------------------------------------------------

    def start(self, actors: list[Actor[Any]]) -> None:
        with self._opening:
            if self._loop is None:
                self._loop = IOLoop(self._time_left, self._tick, self._broken)
        try:
            super().start(actors)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
                raise  # a constructor's own
            raise EngineError(
                f"an actor could not be started: {error}; each takes some memory and eight file descriptors "
                f"of the driver (see ulimit -n)"
            ) from error

    def connect(self, actor: Actor[Any], incarnation: int) -> Connection | None:
        process = Process(actor.name, incarnation, self.pool_bytes, dict(self.environment))
        process.socket.setblocking(False)
        if actor.stopping:
            process.kill()
            process.wait()
            process.let_go()
            return None
        channel = Channel(SocketPort(process.fds), self._maps, self._gone)
        connection = ProcessConnection(channel, f"{actor.name}#{incarnation}/", process)
        self.later(partial(self._register, actor, connection))
        return connection

    def kill(self, actor: Actor[Any]) -> None:
        actor.connection.process.kill()

    def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:
        try:
            self.end_all(
                [actor for actor in actors if not actor.ended.is_set()], self.grace if hurry else None
            )
        finally:
            if self._loop is not None:
                self._loop.close()
            self.close_memory()

    # Sending -----------------------------------------------------------------------------------

    def deliver(self, actor: Actor[Any], message: Message) -> None:
        """Send a message, whole: half a frame would be the end of the connection."""
        INTERRUPTS.hold()
        try:
            super().deliver(actor, message)
        finally:
            INTERRUPTS.release()

    def write(self, actor: Actor[Any], data: bytes) -> None:
        """Send bytes without ever waiting; what the socket does not take is sent by whoever serves."""
        connection: ProcessConnection = actor.connection
        if not connection.unsent:
            try:
                sent = connection.process.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # it has died: that will be noticed, and what is pending is lost
            if sent == len(data):
                return
            data = data[sent:]
        connection.unsent.append(memoryview(data))
        self.later(partial(self._watch, actor, connection))

    # What follows is done by whoever serves the sockets ----------------------------------------

    def _time_left(self) -> float | None:
        """Seconds until a message is due, or the first actor counts as hung."""
        end = self.delayed.next_due()
        if self.engine.timed_actors:
            end = earliest(end, self.engine.supervisor.next_deadline())
        return None if end is None else max(0.0, end - time.monotonic())

    def _tick(self) -> None:
        if self.delayed:
            self.send_due()
        self.collect()

    def deliver_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        super().deliver_later(actor, message, seconds)
        self.loop.wake()  # whoever serves may sleep for longer

    def _broken(self, error: BaseException) -> None:
        self.engine.supervisor.broken(error)
        for actor in list(self.engine.actors.values()):
            if actor.up:
                self.kill(actor)

    def _register(self, actor: Actor[Any], connection: ProcessConnection) -> None:
        process, selector = connection.process, self.loop.selector
        selector.register(process.socket, selectors.EVENT_READ, partial(self._serve, actor, connection))
        for which, stream in process.outputs.items():
            selector.register(stream, selectors.EVENT_READ, partial(self._show_output, connection, which))
        self._watch(actor, connection)

    def _watch(self, actor: Actor[Any], connection: ProcessConnection) -> None:
        """Wait for room in a socket, or no longer."""
        selector, sock = self.loop.selector, connection.process.socket
        if sock.fileno() >= 0 and sock in selector.get_map():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            selector.modify(sock, events, partial(self._serve, actor, connection))

    def _show_output(self, connection: ProcessConnection, which: str, _: int) -> None:
        stream = connection.process.outputs[which]
        if not stream.closed and connection.process.show_output(which) == 0:
            self.loop.selector.unregister(stream)

    def _serve(self, actor: Actor[Any], connection: ProcessConnection, events: int) -> None:
        sock = connection.process.socket
        if sock.fileno() < 0:
            return  # it was closed earlier in this turn
        if events & selectors.EVENT_WRITE:
            self._send_unsent(actor, connection)
        if not events & selectors.EVENT_READ:
            return
        try:
            length = sock.recv_into(self._chunk)
        except BlockingIOError:
            return
        except OSError:
            length = 0
        if length:
            self.receive(actor, self._chunk[:length])
        else:
            self._end_of(actor, connection)

    def _send_unsent(self, actor: Actor[Any], connection: ProcessConnection) -> None:
        with actor.lock:
            while connection.unsent:
                data = connection.unsent[0]
                try:
                    sent = connection.process.socket.send(data)
                except BlockingIOError:
                    return
                except OSError:
                    connection.unsent.clear()
                    break
                if sent < len(data):
                    connection.unsent[0] = data[sent:]
                    return
                connection.unsent.popleft()
        self._watch(actor, connection)

    def _end_of(self, actor: Actor[Any], connection: ProcessConnection) -> None:
        """A process has closed its socket: it has ended, or does so now."""
        process, selector = connection.process, self.loop.selector
        for stream in (process.socket, *process.outputs.values()):
            if stream in selector.get_map():
                selector.unregister(stream)
        if not actor.stopping:
            process.kill()
        reason = process.wait()
        process.socket.close()
        self.connection_lost(actor, reason, process.last_output())

    def leave_fork(self) -> None:
        """In a fork of this process: do not talk to its actors, keep them alive, or hide their ends."""
        self.engine.in_flight.closed = True
        for actor in self.engine.actors.values():
            if actor.connection is not None:
                actor.connection.process.let_go()


_OPEN: weakref.WeakSet[ProcessesTransport] = weakref.WeakSet()
"""Needed by forks, of which the system tells the process as a whole."""


def _leave_all_in_fork() -> None:
    for transport in list(_OPEN):
        transport.leave_fork()


os.register_at_fork(after_in_child=_leave_all_in_fork)
