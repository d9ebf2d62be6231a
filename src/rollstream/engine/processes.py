"""The processes engine: each actor is a process of its own, and arrays travel through shared memory.

The driver is the hub. Every actor has one socket to it; messages between actors pass through the driver, but
only as descriptors of memory, so nothing large does. Who waits for a reply serves all sockets (`pump.py`).
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, ClassVar

from rollstream.engine import worker as outpost
from rollstream.engine.actor import Actor, ActorContext, ActorSlot, Message, run_task
from rollstream.engine.base import EngineStatistics
from rollstream.engine.channel import FORGET, Channel
from rollstream.engine.errors import EngineError
from rollstream.engine.future import Deferred, Future, Sink
from rollstream.engine.hub import GRACE, Hub, Link, Started
from rollstream.engine.launch import Process
from rollstream.engine.memory import Arena, Segment, room_for
from rollstream.engine.pump import Pump, PumpSink, hold_back, let_through
from rollstream.engine.supervision import EventCallback, SpawnOptions
from rollstream.engine.threads import QueueSink
from rollstream.engine.wire import (
    Parcel,
    futures_in,
    opened_error,
    pack,
    packed_error,
    packed_message,
    parcel_of,
)

POOL = 64 << 20
"""Bytes of shared memory a process sends from, unless told otherwise; only what is used is taken."""


class ProcessLink(Link):
    """The driver's side of one actor: its process, and what was sent there."""

    def __init__(self, engine: ProcessesEngine, actor: Actor[Any], recipe: Parcel, started: Started):
        super().__init__(engine, actor, recipe, started)
        self.process: Process
        self.channel: Channel
        self.arena = ""
        self.pending: dict[int, Message] = {}
        self.deferred: dict[int, Deferred[Any]] = {}
        self.unsent: deque[memoryview] = deque()
        """What its socket did not take."""

    def first(self) -> Message | None:
        """The message it is at."""
        return next(iter(list(self.pending.values())), None)

    def kill(self) -> None:
        """End its process at once."""
        self.process.kill()


class ProcessesEngine(Hub):
    """For all cores of one machine.

    Args:
        pool_bytes: shared memory that each process sends from. More is taken, counted and warned of, if the
            flow itself holds on to what was sent.
        threads: threads that numeric libraries (BLAS, OpenMP, XLA) may use in each actor. Left out, it is
            one, and for XLA two, unless the environment says otherwise.
        on_event: called with an `ActorEvent` when an actor dies, in whichever thread notices; it must not
            wait for actors.
    """

    name = "processes"
    local_processes = True

    def __init__(
        self, *, pool_bytes: int = POOL, threads: int | None = None, on_event: EventCallback | None = None
    ):
        super().__init__(threads=threads, on_event=on_event)
        if not isinstance(pool_bytes, int) or pool_bytes < 1 << 16:
            raise EngineError(f"pool_bytes={pool_bytes!r}: give a number of bytes, at least 65536")
        self.pool_bytes = pool_bytes
        self._process = os.getpid()
        _ENGINES.add(self)
        self._arena = Arena("driver", pool_bytes)
        self._maps: dict[str, Segment] = {}
        self._gone: deque[str] = deque()
        """Segments of actors that nobody reads any more."""
        self._helpers: list[Actor[Any]] = []
        self._numbers = count()
        self._lives = count()
        self._starved: list[Sink] = []
        self._grown: dict[str, int] = {}
        self._pump: Pump | None = None

    # Verbs -------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a stateless function on a helper: a process like any other, at most one a core."""
        self.require_open()
        return self._helper().ask(_task, function, *args, name=getattr(function, "__name__", repr(function)))

    def statistics(self) -> EngineStatistics:
        """Also how often shared memory grew."""
        return replace(super().statistics(), grown=sum(self._grown.values()))

    def sink(self) -> Sink:
        """A sink whose owner serves the actors' sockets while it waits."""
        return QueueSink() if self._pump is None else PumpSink(self._pump)

    def require_open(self) -> None:
        """Raise if the engine is closed, or another process's."""
        if self._process != os.getpid():
            raise EngineError(
                f"this engine belongs to process {self._process}, of which this one is a fork; open one here"
            )
        super().require_open()

    # What travels ------------------------------------------------------------------------------

    def _pack(self, value: Any) -> Parcel:
        return pack(value, self, self._store)

    def _pack_message(self, message: Message) -> Parcel:
        return packed_message(self, message, self._store)

    def _pack_error(self, error: BaseException) -> Parcel:
        return packed_error(error, self, self._store, "the driver")

    def _store(self, buffers: list[memoryview]) -> Any:
        """Copy buffers into the driver's pool. While that is full of what is on its way, wait."""
        size = room_for(buffers)
        if not self._arena.fits(size) and self._pump is not None and not self._pump.mine():
            self._wait_for_room(size)
        block = self._arena.store(buffers)
        if self._arena.grown != self._grown.get("driver", 0):
            self._note_growth("driver", self._arena.grown)
        return block

    def _wait_for_room(self, size: int) -> None:
        sink = self.sink()
        self._starved.append(sink)
        self.in_flight.watch(sink)
        try:
            while not self._arena.fits(size) and self._lends() and not self.in_flight.idle():
                sink.wait()
                self.require_open()
        finally:
            self.in_flight.unwatch(sink)
            self._starved.remove(sink)

    def _lends(self) -> bool:
        """Whether some message not yet handled has memory of the driver's pool."""
        unhandled = [message for link in list(self._links) for message in list(link.pending.values())]
        parcels = [message.parcel for message in unhandled if message.parcel is not None]
        parcels += [parcel_of(part) for parcel in parcels for part in parcel.parts]
        memories = [parcel.memory for parcel in parcels if parcel.memory is not None]
        return any(memory.segment.key.startswith("driver/") for memory in memories)

    def _note_growth(self, who: str, times: int) -> None:
        first = not self._grown
        self._grown[who] = times
        if first:
            text = (
                f"{who} ran out of its {self.pool_bytes / 2**20:.3g} MB of shared memory and took more: "
                f"items it sent are still held (in a batch, a queue, an actor); if that is meant so, give "
                f"rs.engine('processes', pool_bytes=...) more"
            )
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except Warning as error:  # where warnings are errors, they are the driver's
                self.in_flight.fail(error)

    # Sending -----------------------------------------------------------------------------------

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        hold_back()  # half a frame, or one that is not sent, would be the end of the channel
        try:
            super()._deliver(actor, message)
        finally:
            let_through()

    def _transmit(self, link: ProcessLink, message: Message) -> None:
        number = next(self._numbers)
        first = not link.pending
        if first:
            link.since = time.monotonic()
        link.pending[number] = message
        if first and link.actor.terms.deadline is not None:
            self._later(_nothing)  # whoever serves has to look at the clock
        wrapped = link.channel.wrap(message.parcel)
        self._write(link, link.channel.frame(outpost.MESSAGE, number, wrapped))

    def _reply(self, link: ProcessLink, number: int, parcel: Parcel, *, failed: bool) -> None:
        with link.lock:
            if not link.down:
                wrapped = link.channel.wrap(parcel)
                status = outpost.ERROR if failed else outpost.VALUE
                self._write(link, link.channel.frame(outpost.REPLY, number, status, wrapped))

    def _write(self, link: ProcessLink, data: bytes) -> None:
        """Send a frame without ever waiting; the lock is held. What does not fit is sent by the pump."""
        if not link.unsent:
            try:
                sent = link.channel.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # it has died: that will be seen, and what is pending is lost
            if sent == len(data):
                return
            data = data[sent:]
        link.unsent.append(memoryview(data))
        self._later(partial(self._watch, link))

    def _later(self, function: Callable[[], None]) -> None:
        """Have whoever serves the sockets do something."""
        assert self._pump is not None
        self._pump.later(function)

    # Starting ----------------------------------------------------------------------------------

    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        with self._naming:
            if self._pump is None:
                self._pump = Pump(self._time_left, self._tick, self._broken)
        try:
            return super()._start(cells, terms)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
                raise  # a constructor's own
            raise EngineError(
                f"an actor could not be started: {error}; each takes some memory and eight file descriptors "
                f"of the driver (see ulimit -n)"
            ) from error

    def _new_link(self, actor: Actor[Any], recipe: Parcel, started: Started) -> ProcessLink:
        return ProcessLink(self, actor, recipe, started)

    def _launch(self, link: ProcessLink, first: Iterable[Message] = ()) -> bool:
        """Start a process and have it build the instance; what is sent comes after that.

        False if the engine is being closed meanwhile.
        """
        actor, context, life = link.actor, link.actor.cell.context, next(self._lives)
        process = Process(actor.name, life, self.pool_bytes, self.variables)
        process.socket.setblocking(False)
        with link.lock:
            if link.stopping:
                process.kill()
                process.wait()
                process.socket.close()
                process.fds.close()
                return False
            link.process = process
            link.channel = Channel(process.socket, process.fds, self._maps, self._gone)
            link.arena, link.verdict = f"{actor.name}#{life}/", None
            link.unsent.clear()
            about = (context.name, context.index, context.count, actor.restarts)
            assert link.recipe is not None
            wrapped = link.channel.wrap(link.recipe)
            self._write(link, link.channel.frame(outpost.BUILD, wrapped, about))
            for message in first:
                self._send(link, message, futures_in(message.parcel))
            link.down = False
        self._later(partial(self._register, link))
        return True

    def _helper(self) -> Actor[Any]:
        free = [helper for helper in self._helpers if not helper.outstanding]
        if not free and len(self._helpers) < (os.cpu_count() or 1):
            [name] = self._take_names("task", 1)
            context = ActorContext(name, len(self._helpers), 0)
            free = self._start(
                [ActorSlot(_Helper, (), {}, context)], SpawnOptions("restart", max_restarts=1 << 30)
            )
            self._helpers += free
        return min(free or self._helpers, key=lambda helper: helper.outstanding)

    # Ending ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        try:
            self._end_links(list(self._links), GRACE if self._hurried or not self.in_flight.idle() else None)
        finally:
            if self._pump is not None:
                self._pump.close()
            self._arena.close()
            self._maps.clear()
            self._forget_all()

    def _ask_to_end(self, link: ProcessLink) -> None:
        self._write(link, link.channel.frame(outpost.STOP))

    # What follows is done by whoever serves the sockets ----------------------------------------

    def _tick(self) -> None:
        """After every turn."""
        for ended in (self._arena.retired, self._gone):
            while ended:
                self._forget([ended.popleft()])
        self._kill_hung()

    def _broken(self, error: BaseException) -> None:
        super()._broken(error)
        for link in list(self._links):
            link.kill()

    @property
    def _sockets(self) -> selectors.BaseSelector:
        assert self._pump is not None
        return self._pump.selector

    def _register(self, link: ProcessLink) -> None:
        sock = link.channel.sock
        self._sockets.register(sock, selectors.EVENT_READ, partial(self._serve, link, sock))
        for which, stream in link.process.outputs.items():
            self._sockets.register(stream, selectors.EVENT_READ, partial(self._pass_on, link, which))
        self._watch(link)

    def _watch(self, link: ProcessLink) -> None:
        """Look out for room in a socket, or no longer."""
        if not link.down and link.channel.sock in self._sockets.get_map():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
            self._sockets.modify(link.channel.sock, events, partial(self._serve, link, link.channel.sock))

    def _pass_on(self, link: ProcessLink, which: str, _: int) -> None:
        stream = link.process.outputs[which]
        if not stream.closed and link.process.pass_on(which) == 0:
            self._sockets.unregister(stream)

    def _serve(self, link: ProcessLink, sock: socket.socket, events: int) -> None:
        if sock.fileno() < 0:
            return  # it was closed while its turn came
        if events & selectors.EVENT_WRITE:
            self._send_unsent(link)
        if not events & selectors.EVENT_READ:
            return
        try:
            alive = link.channel.receive()
        except BlockingIOError:
            return
        except OSError:
            alive = False
        try:
            frames = link.channel.frames()
        except Exception as error:  # no file descriptor left for its memory, for one
            self.in_flight.fail(error)
            link.channel.drop_input()
            link.kill()
            return
        for kind, fields in frames:
            try:
                self._frames[kind](self, link, *fields)
            except Exception as error:
                self._broken(error)
        if not alive:
            self._end_of(link)
        for sink in list(self._starved):
            sink.wake()

    def _send_unsent(self, link: ProcessLink) -> None:
        with link.lock:
            while link.unsent:
                data = link.unsent[0]
                try:
                    sent = link.channel.sock.send(data)
                except BlockingIOError:
                    return
                except OSError:
                    link.unsent.clear()
                    break
                if sent < len(data):
                    link.unsent[0] = data[sent:]
                    return
                link.unsent.popleft()
        self._watch(link)

    # Frames that come from actors --------------------------------------------------------------

    def _frame_built(self, link: ProcessLink, wrapped: Any) -> None:
        error = None if wrapped is None else opened_error(link.channel.unwrap(wrapped), self)
        self._take_built(link, error)

    def _frame_done(
        self, link: ProcessLink, number: int, status: int, wrapped: Any, start: float, end: float
    ) -> None:
        message = link.pending.pop(number)
        link.since = time.monotonic()
        value = error = None
        if status == outpost.DEFERRED:
            value = link.deferred[number] = Deferred()
        elif status == outpost.ERROR:
            error = opened_error(link.channel.unwrap(wrapped), self)
        else:
            value = link.channel.unwrap(wrapped)
        self._complete(link.actor, message, value, error, start, end)

    def _frame_late(self, link: ProcessLink, number: int, status: int, wrapped: Any) -> None:
        deferred, parcel = link.deferred.pop(number), link.channel.unwrap(wrapped)
        if status == outpost.ERROR:
            deferred.reject(opened_error(parcel, self))
        else:
            deferred.resolve(parcel)

    def _frame_post(self, link: ProcessLink, target: str, wrapped: Any, *about: Any) -> None:
        self._take_post(link, target, link.channel.unwrap(wrapped), *about)

    def _frame_wants(self, link: ProcessLink) -> None:
        """An actor needs the memory it has lent: say what is no longer read."""
        with link.lock:
            self._write(link, link.channel.frame(outpost.RETURNED))

    def _frame_grew(self, link: ProcessLink, times: int) -> None:
        self._note_growth(link.actor.name, times)

    def _frame_forget(self, link: ProcessLink, keys: list[str]) -> None:  # noqa: ARG002
        self._forget(keys)

    def _frame_ended(self, link: ProcessLink, errors: list[Any]) -> None:
        link.stopping = True
        for wrapped in errors:
            self.in_flight.fail(opened_error(link.channel.unwrap(wrapped), self))

    _frames: ClassVar[Mapping[str, Callable[..., None]]] = {
        outpost.BUILT: _frame_built,
        outpost.DONE: _frame_done,
        outpost.LATE: _frame_late,
        outpost.POST: _frame_post,
        outpost.WAITING: Hub._take_waiting,
        outpost.WANTS: _frame_wants,
        outpost.GREW: _frame_grew,
        outpost.ENDED: _frame_ended,
        FORGET: _frame_forget,
    }

    # Death -------------------------------------------------------------------------------------

    def _time_left(self) -> float | None:
        """Seconds until the first actor counts as hung, if any can."""
        end = self._next_deadline()
        return None if end is None else max(0.0, end - time.monotonic())

    def _end_of(self, link: ProcessLink) -> None:
        """A process has closed its socket: it has ended, or does so now."""
        self._sockets.unregister(link.channel.sock)
        for stream in link.process.outputs.values():
            if stream in self._sockets.get_map():
                self._sockets.unregister(stream)
        if not link.stopping:
            link.kill()
        reason = link.process.wait()
        with link.lock:
            link.down = True
            unhandled = list(link.pending.values())
            link.pending.clear()
            link.unsent.clear()
            link.deferred.clear()
            link.channel.close()
        for key in [key for key in self._maps if key.startswith(link.arena)]:
            self._maps.pop(key, None)  # those still read live on, and are forgotten when they end
        self._bury(link, unhandled, link.verdict or reason, link.process.last_words())

    def _forget(self, keys: list[str]) -> None:
        """Let every process forget segments that are gone."""
        for link in self._links:
            with link.lock:
                if not link.down and (frame := link.channel.forget(keys)) is not None:
                    self._write(link, frame)


_ENGINES: weakref.WeakSet[ProcessesEngine] = weakref.WeakSet()


def _close_after_fork() -> None:
    """In a fork of this process, its actors are not to be talked to."""
    for engine in list(_ENGINES):
        engine.in_flight.closed = True


os.register_at_fork(after_in_child=_close_after_fork)


def _nothing() -> None:
    """An errand that only makes whoever serves look up."""


class _Helper:
    """Where tasks run."""


def _task(_: ActorSlot, function: Callable[..., Any], *args: Any) -> Any:
    return run_task(function, args)
