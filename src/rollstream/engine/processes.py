"""The processes engine: each actor is a process of its own, and arrays travel through shared memory.

The driver is the hub. Every actor has one socket to it; messages between actors pass through the driver, but
only as descriptors of memory, so nothing large does. One thread, the pump, waits for all sockets at once.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, ClassVar

from rollstream.engine import worker as outpost
from rollstream.engine.actor import Actor, ActorContext, Cell, Message, rebuild, resolve
from rollstream.engine.base import Engine, EngineStatistics
from rollstream.engine.channel import FORGET, Channel
from rollstream.engine.errors import ActorDied, EngineClosed, EngineError
from rollstream.engine.future import Deferred, Future, Sink
from rollstream.engine.launch import Process, thread_variables
from rollstream.engine.memory import Arena, Segment
from rollstream.engine.pump import Pump, PumpSink
from rollstream.engine.supervision import EventCallback, Terms
from rollstream.engine.threads import QueueSink
from rollstream.engine.wire import (
    Parcel,
    ParcelRef,
    futures_in,
    opened_error,
    opened_reply,
    pack,
    packed_error,
    packed_message,
    parcel_of,
)

POOL = 64 << 20
"""Bytes of shared memory a process sends from, unless told otherwise; only what is used is taken."""
GRACE = 1.0
"""Seconds an actor has for the message in hand when the engine is closed in a hurry."""
_BUILDING = -1


class Link:
    """The driver's side of one actor: its process, what was sent to it, and what it has not answered."""

    def __init__(
        self,
        engine: ProcessesEngine,
        actor: Actor[Any],
        recipe: Parcel,
        started: SimpleQueue[BaseException | None],
    ):
        self.actor = actor
        self.recipe: Parcel | None = recipe
        self.started: SimpleQueue[BaseException | None] | None = started
        """Told when the first instance is built, or cannot be."""
        self.lock = threading.Lock()
        """For sending, which the driver's thread and the pump both do."""
        self.process: Process
        self.channel: Channel
        self.arena = ""
        self.down = True
        """Whether there is no process to send to at the moment."""
        self.pending: dict[int, Message] = {}
        self.waiting: deque[Message] = deque()
        """Messages that carry replies still to come, and those behind them."""
        self.unsent: deque[bytes] = deque()
        self.deferred: dict[int, Deferred[Any]] = {}
        self.calls: dict[int, Future[Any]] = {}
        """What the actor itself asked of others."""
        self.answers = _Answers(engine, self)
        self.since = 0.0
        """When the message it is at was begun."""
        self.verdict: str | None = None
        """Why the driver killed it, if it did."""
        self.stopping = False
        self.ended = threading.Event()


class ProcessesEngine(Engine):
    """For all cores of one machine.

    Args:
        pool_bytes: shared memory that each process sends from. More is taken, counted and warned of, if the
            flow itself holds on to what was sent.
        threads: threads that numeric libraries (BLAS, OpenMP, XLA) may use in each actor. Left out, it is
            one, unless the environment says otherwise.
        on_event: called with an `ActorEvent` when an actor dies, in a thread of the engine.
    """

    name = "processes"
    remote = True

    def __init__(
        self, *, pool_bytes: int = POOL, threads: int | None = None, on_event: EventCallback | None = None
    ):
        super().__init__(on_event=on_event)
        if pool_bytes < 1 << 16:
            raise EngineError(f"pool_bytes={pool_bytes}: give at least 65536")
        if threads is not None and threads < 1:
            raise EngineError(f"threads={threads}: an actor needs at least one")
        self.pool_bytes = pool_bytes
        self.variables = thread_variables(threads)
        self._arena = Arena("driver", pool_bytes)
        self._maps: dict[str, Segment] = {}
        self._links: list[Link] = []
        self._helpers: list[Actor[Any]] = []
        self._numbers = count()
        self._lives = count()
        self._hurried = False
        self._timed = False
        """Whether some actor has a deadline."""
        self._starved: list[Sink] = []
        self._grown: dict[str, int] = {}
        self._pump: Pump | None = None

    # Verbs -------------------------------------------------------------------------------------

    def put(self, value: Any) -> ParcelRef:
        """Write a value into shared memory once; every reader sees the same bytes."""
        self.require_open()
        return ParcelRef(self, pack(value, self, self._store))

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a stateless function on a helper: a process like any other, at most one a core."""
        self.require_open()
        return self._helper().ask(_task, function, *args, name=getattr(function, "__name__", repr(function)))

    def restart(self, actor: Actor[Any]) -> Future[None]:
        """Replace an actor's instance by a fresh one, in the same process."""
        sticky = [ParcelRef(self, message.parcel) for message in actor.sticky.values()]
        return actor.ask(rebuild, sticky, name="restart")

    def statistics(self) -> EngineStatistics:
        """Also how often shared memory grew, and the environment of the actors."""
        grown = sum(self._grown.values()) + self._arena.grown
        return replace(super().statistics(), grown=grown, environment=dict(self.variables))

    def sink(self) -> Sink:
        """A sink whose owner serves the actors' sockets while it waits."""
        return QueueSink() if self._pump is None else PumpSink(self._pump)

    def close(self, *, drain: bool = True) -> None:
        """End every process. One that is in the middle of a message when it has to be quick is killed."""
        self._hurried = not drain
        super().close(drain=drain)

    # What travels ------------------------------------------------------------------------------

    def part(self, part: Any) -> Any:
        """A reference, opened when it is used."""
        return part if isinstance(part, (ParcelRef, Future)) else ParcelRef(self, part)

    def handle(self, name: str, index: int, cls: type) -> Actor[Any]:  # noqa: ARG002
        """The actor itself."""
        return self.actors[name]

    def prepare(self, message: Message) -> None:
        """Pack a message, unless it comes packed."""
        if message.parcel is None:
            message.parcel = packed_message(self, message, self._store)

    def opened(self, future: Future[Any]) -> Any:
        """Unpack a reply."""
        return opened_reply(self, future)

    def _store(self, buffers: list[memoryview]) -> Any:
        """Copy buffers into the driver's pool. While that is full of what is on its way, wait."""
        size = sum(buffer.nbytes for buffer in buffers)
        if not self._arena.fits(size) and self._pump is not None and not self._pump.mine():
            self._wait_for_room(size)
        block = self._arena.store(buffers)
        if self._arena.grown != self._grown.get("driver", 0):
            self._note_growth("driver", self._arena.grown)
        return block

    def _wait_for_room(self, size: int) -> None:
        sink = self.sink()
        self._starved.append(sink)
        self.ledger.watch(sink)
        try:
            while not self._arena.fits(size) and self._lends() and not self.ledger.idle():
                sink.wait()
                self.require_open()
        finally:
            self.ledger.unwatch(sink)
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
                f"{who} ran out of its {self.pool_bytes >> 20} MB of shared memory and took more, because "
                f"items it sent are still held (in a batch, a queue, an actor); if that is meant to be, give "
                f"rs.engine('processes', pool_bytes=...) more"
            )
            try:
                warnings.warn(text, ResourceWarning, stacklevel=2)
            except Warning as error:  # where warnings are errors, they are the driver's
                self.ledger.fail(error)

    # Sending -----------------------------------------------------------------------------------

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        link: Link = actor.mailbox
        futures = futures_in(message.parcel) if message.parcel.parts else []
        with link.lock:
            if actor.gone is None:
                late = bool(futures) and self.ledger.follow(futures, _Release(self, actor))
                if not late and not link.waiting and not link.down:
                    self._transmit(link, message, futures)
                    return
                link.waiting.append(message)
        if actor.gone is not None:
            self._refuse_lost(actor, message, actor.gone)
        else:
            self._later(partial(self._send_waiting, actor))

    def _transmit(self, link: Link, message: Message, futures: Iterable[Future[Any]] = ()) -> None:
        """Write a message to its process; the lock is held. One that carries a failed reply fails itself."""
        for future in futures:
            if future.error is not None:
                future.read = True
                self._later(partial(self.ledger.settle, message, None, future.error))
                return
        number = next(self._numbers)
        first = not link.pending
        if first:
            link.since = time.monotonic()
        link.pending[number] = message
        if first and link.actor.terms.deadline is not None:
            self._later(_nothing)  # whoever serves has to look at the clock
        wrapped = link.channel.wrap(message.parcel)
        self._write(link, link.channel.frame(outpost.MESSAGE, number, wrapped))

    def _write(self, link: Link, data: bytes) -> None:
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
        link.unsent.append(data)
        self._later(partial(self._watch, link))

    def _send_waiting(self, actor: Actor[Any]) -> None:
        """Send what is no longer held back; what is does not run."""
        link: Link = actor.mailbox
        with link.lock:
            if link.down:
                return
            while link.waiting:
                futures = futures_in(link.waiting[0].parcel)
                if not all(future.done for future in futures):
                    break
                self._transmit(link, link.waiting.popleft(), futures)
            self.ledger.hold(actor, len(link.waiting))

    def _later(self, function: Callable[[], None]) -> None:
        """Have whoever serves the sockets do something."""
        assert self._pump is not None
        self._pump.later(function)

    # Starting ----------------------------------------------------------------------------------

    def _start(self, cells: list[Cell], terms: Terms) -> list[Actor[Any]]:
        if self._pump is None:
            self._pump = Pump(self._time_left, self._tick, self._broken)
        self._timed = self._timed or terms.deadline is not None
        recipe = self._recipe(cells[0])  # the same for all
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        actors = [self._actor(cell, terms) for cell in cells]
        links: list[Link] = []
        try:
            for actor in actors:
                link = actor.mailbox = Link(self, actor, recipe, started)
                self._links.append(link)
                try:
                    self._launch(link)
                except OSError as error:
                    self._links.remove(link)
                    raise EngineError(
                        f"{actor.name} could not be started: {error}; an actor takes some memory and eight "
                        f"file descriptors of the driver (see ulimit -n)"
                    ) from error
                links.append(link)
            errors = [error for error in [started.get() for _ in actors] if error is not None]
            if errors:
                raise errors[0]
        except BaseException as error:
            self._end_links(links, GRACE if isinstance(error, Exception) else 0.0)
            raise
        return actors

    def _recipe(self, cell: Cell) -> Parcel:
        """What an instance is built from."""
        named = Message(
            "", (cell.cls, *cell.args, *cell.kwargs.values()), None, f"{cell.context.name}.__init__"
        )
        packed_message(self, named, lambda _: None)  # says what cannot travel
        parcel = pack((cell.cls, cell.args, cell.kwargs), self, self._store)
        for future in futures_in(parcel):
            future.result()
        return parcel

    def _launch(self, link: Link, first: Iterable[Message] = ()) -> bool:
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
            link.process, link.channel = process, Channel(process.socket, process.fds, self._maps)
            link.arena, link.verdict = f"{actor.name}#{life}/", None
            link.unsent.clear()
            about = (context.name, context.index, context.count, actor.restarts)
            assert link.recipe is not None
            wrapped = link.channel.wrap(link.recipe)
            self._write(link, link.channel.frame(outpost.BUILD, wrapped, about))
            for message in first:
                self._transmit(link, message, futures_in(message.parcel))
            link.down = False
        self._later(partial(self._register, link))
        return True

    def _helper(self) -> Actor[Any]:
        free = [helper for helper in self._helpers if not helper.outstanding]
        if not free and len(self._helpers) < (os.cpu_count() or 1):
            [name] = self._take_names("task", 1)
            context = ActorContext(name, len(self._helpers), 0)
            free = self._start([Cell(_Helper, (), {}, context)], Terms("restart", max_restarts=1 << 30))
            self._helpers += free
        return min(free or self._helpers, key=lambda helper: helper.outstanding)

    # Ending ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        try:
            self._end_links(list(self._links), GRACE if self._hurried or not self.ledger.idle() else None)
        finally:
            if self._pump is not None:
                self._pump.close()
            self._arena.close()
            self._maps.clear()
            for actor in self.actors.values():
                actor.sticky.clear()  # handles outlive the engine, memory should not
                actor.mailbox.recipe = None

    def _end_links(self, links: list[Link], grace: float | None) -> None:
        """Let processes end by themselves; after so many seconds, kill them."""
        try:
            for link in links:
                with link.lock:
                    link.stopping = True
                    if not link.down:
                        self._write(link, link.channel.frame(outpost.STOP))
            end = None if grace is None else time.monotonic() + grace
            for link in links:
                if not link.ended.wait(None if end is None else max(0.0, end - time.monotonic())):
                    link.process.kill()
        except BaseException:
            for link in links:
                link.process.kill()
            raise
        finally:
            for link in links:
                link.ended.wait()

    def _refuse(self, messages: Iterable[Message]) -> None:
        for message in messages:
            error = EngineClosed(f"{message.label}: the engine was closed before it ran")
            self.ledger.settle(message, None, error if message.future is not None else None)

    # What follows is done by whoever serves the sockets ----------------------------------------

    def _tick(self) -> None:
        """After every turn."""
        while self._arena.retired:
            self._forget([self._arena.retired.popleft()])
        for link, end in self._deadlines() if self._timed else ():
            if time.monotonic() >= end:
                message = next(iter(link.pending.values()))
                link.verdict = f"hung: {message.label} took longer than {link.actor.terms.deadline:g} s"
                link.process.kill()

    def _broken(self, error: BaseException) -> None:
        """Something went wrong in the engine itself: say so, and leave nobody waiting."""
        error.add_note("raised in the engine's own thread: this is a defect of rollstream")
        self.ledger.fail(error)
        for link in self._links:
            link.process.kill()
            if link.started is not None:
                link.started.put(error)

    @property
    def _sockets(self) -> selectors.BaseSelector:
        assert self._pump is not None
        return self._pump.selector

    def _register(self, link: Link) -> None:
        sock = link.channel.sock
        self._sockets.register(sock, selectors.EVENT_READ, partial(self._serve, link, sock))
        for which, stream in link.process.outputs.items():
            self._sockets.register(stream, selectors.EVENT_READ, partial(self._pass_on, link, which))
        self._watch(link)

    def _watch(self, link: Link) -> None:
        """Look out for room in a socket, or no longer."""
        if not link.down and link.channel.sock in self._sockets.get_map():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
            self._sockets.modify(link.channel.sock, events, partial(self._serve, link, link.channel.sock))

    def _pass_on(self, link: Link, which: str, _: int) -> None:
        stream = link.process.outputs[which]
        if not stream.closed and link.process.pass_on(which) == 0:
            self._sockets.unregister(stream)

    def _serve(self, link: Link, sock: socket.socket, events: int) -> None:
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
        for kind, fields in link.channel.frames():
            self._takes[kind](self, link, *fields)
        for sink in self._starved:
            sink.wake()
        if not alive:
            self._bury(link)

    def _send_unsent(self, link: Link) -> None:
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

    def _take_built(self, link: Link, wrapped: Any) -> None:
        error = None if wrapped is None else opened_error(link.channel.unwrap(wrapped), self)
        if link.started is not None:
            link.started.put(error)
            link.started = None
        elif error is not None:
            link.verdict = f"could not be built again ({type(error).__name__}: {error})"
            link.process.kill()
        elif (message := link.pending.pop(_BUILDING, None)) is not None:
            link.since = time.monotonic()
            self.ledger.settle(message)

    def _take_done(
        self, link: Link, number: int, status: int, wrapped: Any, start: float, end: float
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

    def _take_late(self, link: Link, number: int, status: int, wrapped: Any) -> None:
        deferred, parcel = link.deferred.pop(number), link.channel.unwrap(wrapped)
        if status == outpost.ERROR:
            deferred.reject(opened_error(parcel, self))
        else:
            deferred.resolve(parcel)

    def _take_post(
        self, link: Link, target: str, wrapped: Any, number: int | None, label: str, kind: str | None
    ) -> None:
        """An actor sends a message to another."""
        message = Message("", (), None, label)
        message.parcel = link.channel.unwrap(wrapped)
        if number is not None:
            message.future = link.calls[number] = Future(self, label, target, token=number)
            message.future.waiters = (link.answers,)
            message.future.read = True  # its sender has to see to it
        try:
            self.post(self.actors[target], message, kind)
        except EngineError as error:  # the other is gone, or the engine is closed
            self.ledger.settle(message, None, error)
        if message.posted is not None:
            message.posted = (link.actor.name, message.posted[1])

    def _answer(self, link: Link, future: Future[Any]) -> None:
        """Give an actor the reply to what it asked of another."""
        number = future.token
        if link.calls.pop(number, None) is not future:
            return  # it has been restarted since
        parcel, status = future.reply, outpost.VALUE
        if future.error is not None:
            parcel, status = packed_error(future.error, self, self._store, "the driver"), outpost.ERROR
        with link.lock:
            if not link.down:
                wrapped = link.channel.wrap(parcel)
                self._write(link, link.channel.frame(outpost.REPLY, number, status, wrapped))

    def _take_waiting(self, link: Link, numbers: list[int]) -> None:
        futures = [link.calls[number] for number in numbers if number in link.calls]
        if len(futures) == len(numbers):  # else one is on its way, and it does not wait for long
            self.ledger.block(link.actor, link.answers, futures)

    def _take_grew(self, link: Link, times: int) -> None:
        self._note_growth(link.actor.name, times)

    def _take_forget(self, link: Link, keys: list[str]) -> None:  # noqa: ARG002
        self._forget(keys)

    def _take_ended(self, link: Link, errors: list[Any]) -> None:
        link.stopping = True
        for wrapped in errors:
            self.ledger.fail(opened_error(link.channel.unwrap(wrapped), self))

    _takes: ClassVar[Mapping[str, Callable[..., None]]] = {
        outpost.BUILT: _take_built,
        outpost.DONE: _take_done,
        outpost.LATE: _take_late,
        outpost.POST: _take_post,
        outpost.WAITING: _take_waiting,
        outpost.GREW: _take_grew,
        outpost.ENDED: _take_ended,
        FORGET: _take_forget,
    }

    # Death -------------------------------------------------------------------------------------

    def _deadlines(self) -> list[tuple[Link, float]]:
        return [
            (link, link.since + deadline)
            for link in self._links
            if (deadline := link.actor.terms.deadline) is not None
            and link.pending
            and _BUILDING not in link.pending
            and not link.down
            and link.verdict is None
        ]

    def _time_left(self) -> float | None:
        """Seconds until the first actor counts as hung, if any can."""
        if not self._timed:
            return None
        ends = [end for _, end in self._deadlines()]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _bury(self, link: Link) -> None:
        """A process has closed its socket: it has ended, or does so now."""
        self._sockets.unregister(link.channel.sock)
        for stream in link.process.outputs.values():
            if stream in self._sockets.get_map():
                self._sockets.unregister(stream)
        if not link.stopping:
            link.process.kill()
        reason = link.process.wait()
        with link.lock:
            link.down = True
            building = link.pending.pop(_BUILDING, None)
            unhandled = list(link.pending.values())
            link.pending.clear()
            link.unsent.clear()
            link.deferred.clear()
            link.calls.clear()
            link.channel.close()
        self._forget([key for key in self._maps if key.startswith(link.arena)])
        if link.started is not None:
            text = f"{link.actor.name} {reason} while it was built{link.process.last_words()}"
            link.started.put(ActorDied(link.actor.name, text))
            link.started = None
        elif link.stopping or self.closed:
            self._refuse(unhandled)
        else:
            replaced = self._replace(link, unhandled, link.verdict or reason)
            if building is not None:
                self.ledger.settle(building)
            if replaced:
                return
        with link.lock:
            unhandled, link.waiting = list(link.waiting), deque()
        self.ledger.hold(link.actor, 0)
        if link.actor.gone is not None:
            for message in unhandled:
                self._refuse_lost(link.actor, message, link.actor.gone)
        else:
            self._refuse(unhandled)
        self._links.remove(link)
        link.ended.set()

    def _replace(self, link: Link, unhandled: list[Message], reason: str) -> bool:
        """Meet the death of an actor as its terms say: whether it lives on in a new process."""
        actor = link.actor
        building = Message("", (), None, "")
        self.ledger.post(building, actor)  # until it is built again, the engine is not idle
        again = self._died(actor, unhandled, reason, link.process.last_words())
        if again is None:
            self.ledger.settle(building)
            return False
        again = [message for message in again if message not in link.waiting]
        for message in again:
            if not message.counted:
                self.ledger.post(message, actor)
        link.pending[_BUILDING] = building
        if self._launch(link, again):
            self._send_waiting(actor)
            return True
        link.pending.clear()
        self._refuse([building, *again])
        return False

    def _forget(self, keys: list[str]) -> None:
        """Let every process forget segments that are gone."""
        for key in keys:
            self._maps.pop(key, None)
        for link in self._links:
            with link.lock:
                if not link.down and (frame := link.channel.forget(keys)) is not None:
                    self._write(link, frame)


class _Release:
    """Follows replies that a message carries: when one is there, what was held back is looked at again."""

    def __init__(self, engine: ProcessesEngine, actor: Actor[Any]):
        self._engine = engine
        self._actor = actor

    def put(self, _: Future[Any], /) -> None:
        self._engine.ledger.release(self._actor)
        self._engine._later(partial(self._engine._send_waiting, self._actor))


class _Answers:
    """Where the replies to one actor's questions come to, on their way to that actor."""

    def __init__(self, engine: ProcessesEngine, link: Link):
        self._engine = engine
        self._link = link

    def put(self, future: Future[Any], /) -> None:
        self._engine._later(partial(self._engine._answer, self._link, future))


def _nothing() -> None:
    """An errand that only makes whoever serves look up."""


class _Helper:
    """Where tasks run."""


def _task(_: Cell, function: Callable[..., Any], *args: Any) -> Any:
    return function(*resolve(args))
