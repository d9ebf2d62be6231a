"""The ray engine: actors anywhere in a Ray cluster.

The driver is the hub, as on one machine: messages between actors pass through it, but what is large in them
lies in Ray's object store and only its reference does. So the books are exact, and a restarted actor is
simply another Ray actor behind the same name.

Ray tells of finished objects in threads of its own; what takes long, or has to be in order, is left to one
thread of the engine, which waits on a queue. Calls are a special case. Being told costs Ray a tenth of an
empty call, so the thread that waits for a single reply asks for it itself, for a moment; whatever nobody asks
for in that moment is told as usual.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from rollstream.engine.actor import Actor, Cell, Message, rebuild
from rollstream.engine.base import Engine, EngineStatistics
from rollstream.engine.errors import ActorDied, EngineClosed, EngineError

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
try:
    import ray
except ImportError as missing:
    raise EngineError("the ray engine needs Ray: pip install 'rollstream[ray]'") from missing
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rollstream.engine.future import Deferred, Future, Sink
from rollstream.engine.launch import thread_variables
from rollstream.engine.ray_cell import POST, SLOTS, RayCell, run_task
from rollstream.engine.ray_link import BUILDING, DEATHS, Link, Sent
from rollstream.engine.ray_outpost import (
    DEFERRED,
    ERROR,
    HEADER,
    LATE,
    POSTED,
    REFUSED,
    STORED,
    VALUE,
    WAITING,
)
from rollstream.engine.ray_store import (
    Buffers,
    RayRef,
    Stored,
    body_of,
    items_of,
    opened_once,
    parcel_from,
    stowed,
)
from rollstream.engine.supervision import EventCallback, Terms
from rollstream.engine.threads import QueueSink
from rollstream.engine.wire import (
    Parcel,
    ParcelRef,
    futures_in,
    opened_error,
    pack,
    packed_error,
    packed_message,
)

GRACE = 1.0
"""Seconds an actor has for the message in hand when the engine is closed in a hurry."""
SHORT_GRACE = 0.1
"""The same where the cluster ends with the engine, which takes Ray more than a second."""
DIRECTLY = 0.005
"""Seconds for which a reply is waited for directly."""
CELLS: Any = ray.remote(num_cpus=0, concurrency_groups={POST: 2})(RayCell)  # pyright: ignore[reportCallIssue]
TASKS: Any = ray.remote(num_returns=2, max_retries=0)(run_task)
_OPTIONS = ("num_cpus", "num_gpus", "memory")


class RayEngine(Engine):
    """For a cluster, or for one machine as if it were one.

    If Ray is initialised in this process already, as it is inside a Ray actor, the engine joins it and leaves
    it running; else it connects to a cluster, or starts one on this machine that ends with the engine.

    `spawn(..., resources={"num_cpus": 1, "num_gpus": 0.5, "memory": 2**30, "arm": 1})` passes what an actor
    needs to Ray; names other than the first three are custom resources. Without them an actor counts for
    nothing, so that many fit on few cores. Ray spreads actors over the machines; those that count for nothing
    it spreads at random.

    Args:
        address: of a cluster, or `auto` for the one this machine belongs to.
        threads: threads that numeric libraries (BLAS, OpenMP, XLA) may use in each actor. Left out, it is
            one, unless the environment says otherwise.
        on_event: called with an `ActorEvent` when an actor dies, in a thread of the engine.
    """

    name = "ray"
    remote = True

    def __init__(
        self,
        *,
        address: str | None = None,
        threads: int | None = None,
        on_event: EventCallback | None = None,
    ):
        super().__init__(on_event=on_event)
        if threads is not None and threads < 1:
            raise EngineError(f"threads={threads}: an actor needs at least one")
        self.variables = thread_variables(threads)
        self._links: list[Link] = []
        self._tasks: dict[int, Sent] = {}
        self._fetching: dict[int, Any] = {}
        self._numbers = count()
        self._hurried = False
        self._fresh: dict[Future[Any], tuple[Link, int, Any]] = {}
        """Calls nobody has asked for yet, of which Ray has not been told to tell."""
        self._fresh_until: float | None = None
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollstream ray", daemon=True)
        self._path = [os.path.abspath(entry) for entry in sys.path]
        _connect(address, self.variables)
        self._thread.start()

    # Verbs -------------------------------------------------------------------------------------

    def put(self, value: Any) -> RayRef:
        """Store a value once: a large one is one object of Ray's, however many read it."""
        self.require_open()
        return RayRef(self, stowed(pack(value, self, Buffers)))

    def restart(self, actor: Actor[Any]) -> Future[None]:
        """Replace an actor's instance by a fresh one, in the same process."""
        sticky = [RayRef(self, message.parcel) for message in actor.sticky.values()]
        return actor.ask(rebuild, sticky, name="restart")

    def statistics(self) -> EngineStatistics:
        """Also the environment of the actors."""
        return replace(super().statistics(), environment=dict(self.variables))

    def sink(self) -> Sink:
        """A sink that threads of Ray fill."""
        return QueueSink()

    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        """As the base; for a single reply, this thread first asks Ray itself."""
        if self._fresh:
            if len(futures) == 1 and not self.ledger.failures:
                if (fresh := self._fresh.pop(futures[0], None)) is not None:
                    self._get(*fresh, timeout)
            else:
                for future in futures:
                    if (fresh := self._fresh.pop(future, None)) is not None:
                        self._have_told(*fresh)
        return super().wait(futures, count, timeout)

    def close(self, *, drain: bool = True) -> None:
        """End every actor. One that is in the middle of a message when it has to be quick is killed."""
        self._hurried = not drain
        super().close(drain=drain)

    # What travels ------------------------------------------------------------------------------

    def part(self, part: Any) -> Any:
        """A reference, opened when it is used."""
        return part if isinstance(part, (ParcelRef, Future)) else RayRef(self, part)

    def handle(self, name: str, index: int, cls: type) -> Actor[Any]:  # noqa: ARG002
        """The actor itself."""
        return self.actors[name]

    def prepare(self, message: Message) -> None:
        """Pack a message, unless it comes packed."""
        if message.parcel is None:
            message.parcel = stowed(packed_message(self, message, Buffers))

    def opened(self, future: Future[Any]) -> Any:
        """Unpack a reply."""
        return opened_once(self, future)

    # Sending -----------------------------------------------------------------------------------

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        link: Link = actor.mailbox
        futures = futures_in(message.parcel) if message.parcel.parts else []
        with link.lock:
            if actor.gone is None:
                late = bool(futures) and self.ledger.follow(
                    futures, _Release(self, actor, partial(self._send_waiting, actor))
                )
                if not late and not link.waiting and not link.down:
                    self._transmit(link, message, futures)
                    return
                link.waiting.append(message)
        if actor.gone is not None:
            self._refuse_lost(actor, message, actor.gone)
        else:
            self._later(partial(self._send_waiting, actor))

    def _transmit(self, link: Link, message: Message, futures: Iterable[Future[Any]] = ()) -> None:
        """Have Ray carry a message; the lock is held. One that carries a failed reply fails itself."""
        if (error := _failure_in(futures)) is not None:
            self._later(partial(self.ledger.settle, message, None, error))
            return
        record, value = self._submit(link, message.parcel)
        number = link.sent
        link.sent += 1
        if not link.pending:
            link.since = time.monotonic()
            if link.actor.terms.deadline is not None:
                self._later(_look_at_the_clock)
        link.pending[number] = Sent(message, record, value)
        future = message.future
        if future is not None and future.sink is None and not future.waiters:
            self._fresh[future] = (link, number, record)
            if self._fresh_until is None:
                self._fresh_until = time.monotonic() + DIRECTLY
                self._later(_look_at_the_clock)
        else:
            record._on_completed(partial(self._completed, link, number))

    def _submit(self, link: Link, parcel: Parcel) -> Any:
        """Call the cell. A message that comes again and again is sent by number, which spares an argument."""
        body = body_of(parcel)
        if type(body) is not bytes or parcel.parts:
            return link.cell.handle.remote(body, *items_of(parcel))
        if (method := link.known.get(body)) is not None:
            return method.remote()
        if body in link.recent and len(link.known) < SLOTS:
            slot = len(link.known)
            link.known[body] = getattr(link.cell, f"repeat_{slot}")
            return link.cell.learn.remote(slot, body)
        link.recent.append(body)
        return link.cell.handle.remote(body)

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
        """Have the engine's thread do something."""
        self._todo.put(function)

    # Records: what follows may run in a thread of Ray's, and is short ---------------------------

    def _get(self, link: Link, number: int, record: Any, timeout: float | None) -> None:
        """Wait for a record in this thread, for a moment."""
        try:
            came = ray.get(record, timeout=DIRECTLY if timeout is None else min(timeout, DIRECTLY))
        except BaseException as error:
            self._have_told(link, number, record)
            if not isinstance(error, (GetTimeoutError, RayError)):
                raise
        else:
            self._completed(link, number, came)

    def _have_told(self, link: Link, number: int, record: Any) -> None:
        record._on_completed(partial(self._completed, link, number))

    def _completed(self, link: Link, number: int, record: Any) -> None:
        """A record has come. The usual case is dealt with at once, any other in the engine's thread."""
        if type(record) is bytes and record[0] == VALUE:
            _, said, start, end = HEADER.unpack_from(record)
            if said <= link.heard:
                if (sent := link.pending.pop(number, None)) is not None:
                    self._finish(link, sent.message, Parcel(record[HEADER.size :]), None, start, end)
                    if link.dying:
                        self._later(partial(self._bury_if_over, link))
                return
        self._later(partial(self._take_record, link, number, record))

    def _finish(
        self, link: Link, message: Message, value: Any, error: BaseException | None, start: float, end: float
    ) -> None:
        link.since = time.monotonic()
        with link.counting:
            self._complete(link.actor, message, value, error, start + link.offset, end + link.offset)

    # Starting ----------------------------------------------------------------------------------

    def _start(self, cells: list[Cell], terms: Terms) -> list[Actor[Any]]:
        recipe = self._recipe(cells[0])  # the same for all
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        actors = [self._actor(cell, terms) for cell in cells]
        links: list[Link] = []
        try:
            for actor in actors:
                link = actor.mailbox = Link(actor, recipe, _Answers(self, actor), started)
                self._launch(link)
                self._links.append(link)
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
        packed_message(self, named, Buffers)  # says what cannot travel
        parcel = stowed(pack((cell.cls, cell.args, cell.kwargs), self, Buffers))
        for future in futures_in(parcel):
            future.result()
        return parcel

    def _launch(self, link: Link, first: Iterable[Message] = ()) -> bool:
        """Start a cell and have it build the instance; what is sent comes after that.

        False if the engine is being closed meanwhile.
        """
        actor, context = link.actor, link.actor.cell.context
        with link.lock:
            if link.stopping:
                return False
            options = _options(actor.terms)
            cell = CELLS.options(**options).remote(context.name, self.variables, self._path)
            link.restarted(cell)
            about = (context.name, context.index, context.count, actor.restarts)
            built = cell.build.remote(about, body_of(link.recipe), *items_of(link.recipe))
            link.pending[BUILDING] = Sent(Message("", (), None, ""), built, None)
            built._on_completed(lambda record: self._later(partial(self._take_built, link, record)))
            self._listen(link)
            for message in first:
                self._transmit(link, message, futures_in(message.parcel))
            link.down = False
        return True

    def _listen(self, link: Link) -> None:
        """Ask a cell for what it has to say next."""
        link.take = link.cell.take.remote()
        link.take._on_completed(lambda frames: self._later(partial(self._take_frames, link, frames)))

    # Tasks -------------------------------------------------------------------------------------

    def _run_task(self, message: Message) -> None:
        try:
            self.prepare(message)
        except BaseException:
            self.ledger.settle(message)
            raise
        self._submit_task(next(self._numbers), message)

    def _submit_task(self, number: int, message: Message) -> None:
        """Have Ray run a task, once the replies it depends on are there."""
        futures = futures_in(message.parcel)
        holder: Any = _Holder(f"task {number}")
        if futures and self.ledger.follow(
            futures, _Release(self, holder, partial(self._submit_task, number, message))
        ):
            self.ledger.hold(holder, 1)
        elif (error := _failure_in(futures)) is not None:
            self.ledger.settle(message, None, error)
        elif message.counted and number not in self._tasks:
            body, items = body_of(message.parcel), items_of(message.parcel)
            record, value = TASKS.remote(self.variables, self._path, body, *items)
            self._tasks[number] = Sent(message, record, value)
            record._on_completed(lambda came: self._later(partial(self._take_task, number, came)))

    def _take_task(self, number: int, record: Any) -> None:
        if (sent := self._tasks.pop(number, None)) is None:
            return
        if isinstance(record, BaseException):
            died = ActorDied("task", f"{sent.message.label} was lost: {_first_line(record)}", "restarted")
            self.ledger.settle(sent.message, None, died)
            return
        status, _, _, _, item = _read(record)
        if status == ERROR:
            self.ledger.settle(sent.message, None, self._error_from(item))
        else:
            self.ledger.settle(sent.message, _value_of(status, item, sent))

    # Ending ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        try:
            hurried = self._hurried or not self.ledger.idle()
            grace = SHORT_GRACE if _ours else GRACE
            self._end_links(list(self._links), grace if hurried else None)
            self._cancel_tasks()
        finally:
            self._todo.put(None)
            self._thread.join()
            _disconnect()

    def _end_links(self, links: list[Link], grace: float | None) -> None:
        """Let actors end by themselves; after so many seconds, kill them."""
        try:
            for link in links:
                self._end_link(link)
            end = None if grace is None else time.monotonic() + grace
            for link in links:
                if not link.ended.wait(None if end is None else max(0.0, end - time.monotonic())):
                    _kill(link)
        except BaseException:
            for link in links:
                _kill(link)
            raise
        finally:
            for link in links:
                link.ended.wait(GRACE)

    def _end_link(self, link: Link) -> None:
        with link.lock:
            link.stopping = True
            if link.down:
                _kill(link)
                return
            if link.pending:
                link.cell.stop.remote()
            ended = link.cell.end.remote()
        ended._on_completed(lambda errors: self._later(partial(self._take_end, link, ended, errors)))

    def _take_end(self, link: Link, _: Any, errors: Any) -> None:
        for item in errors if isinstance(errors, list) else ():
            self.ledger.fail(self._error_from(item))
        _kill(link)

    def _refuse(self, messages: Iterable[Message]) -> None:
        for message in messages:
            error = EngineClosed(f"{message.label}: the engine was closed before it ran")
            self.ledger.settle(message, None, error if message.future is not None else None)

    def _cancel_tasks(self) -> None:
        for number in list(self._tasks):
            if (sent := self._tasks.pop(number, None)) is not None:
                with suppress(Exception):
                    ray.cancel(sent.record, force=True)
                self._refuse([sent.message])

    # The engine's thread: what follows runs there -------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                function = self._todo.get(timeout=self._time_left())
            except Empty:
                function = _look_at_the_clock
            if function is None:
                return
            try:
                function()
                self._tell_of_the_fresh()
                self._look_for_hung()
            except BaseException as error:
                error.add_note("raised in the engine's own thread: this is a defect of rollstream")
                self.ledger.fail(error)

    def _time_left(self) -> float | None:
        """Seconds until something has to be looked at, if anything has."""
        ends = [end for _, end in self._deadlines()]
        if self._fresh_until is not None:
            ends.append(self._fresh_until)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _tell_of_the_fresh(self) -> None:
        """Have Ray tell of calls that nobody has asked for."""
        if self._fresh_until is not None and time.monotonic() >= self._fresh_until:
            self._fresh_until = None
            self._have_all_told(lambda _: True)

    def _have_all_told(self, wanted: Callable[[Link], bool]) -> None:
        for future, (link, _, _) in list(self._fresh.items()):
            if wanted(link) and (fresh := self._fresh.pop(future, None)) is not None:
                self._have_told(*fresh)

    def _take_built(self, link: Link, record: Any) -> None:
        link.pending.pop(BUILDING)
        if isinstance(record, BaseException):
            self._fade(link, record)
            return
        item, _, host, logs, clock = record
        link.note_process(host, logs)
        link.offset = clock - (time.time() - time.perf_counter())
        error = None if item is None else self._error_from(item)
        if link.started is not None:
            link.started.put(error)
            link.started = None
        elif error is not None:
            link.verdict = f"could not be built again ({type(error).__name__}: {error})"
            _kill(link)
        link.since = time.monotonic()
        if error is None and (message := link.building) is not None:
            link.building = None
            self.ledger.settle(message)
        self._bury_if_over(link)

    def _take_record(self, link: Link, number: int, record: Any) -> None:
        if number not in link.pending:
            return
        if isinstance(record, BaseException):
            self._lose(link, number, record)
            return
        status, said, start, end, item = _read(record)
        if said > link.heard:
            link.held.append((said, number, record))
            return
        sent = link.pending.pop(number)
        if status == REFUSED and link.stopping:
            self._refuse([sent.message])
        elif status == REFUSED:
            link.unhandled[number] = sent.message
        elif status == DEFERRED:
            deferred: Deferred[Any] = Deferred()
            link.deferred[number] = deferred
            self._finish(link, sent.message, deferred, None, start, end)
            if number in link.early:
                self._take_late(link, number, *link.early.pop(number))
        elif status == ERROR:
            self._finish(link, sent.message, None, self._error_from(item), start, end)
        elif status == STORED and sent.message.future is not None and sent.message.future.sink is not None:
            self._fetch(link, sent, item, start, end)
        else:
            self._finish(link, sent.message, _value_of(status, item, sent), None, start, end)
        self._bury_if_over(link)

    def _fetch(self, link: Link, sent: Sent, item: Any, start: float, end: float) -> None:
        """A flow will want the value: have it brought here before the flow is told."""
        number = next(self._numbers)
        self._fetching[number] = sent.value

        def arrived(body: Any) -> None:
            self._later(partial(self._take_value, link, sent, body, item, start, end, number))

        sent.value._on_completed(arrived)

    def _take_value(
        self, link: Link, sent: Sent, body: Any, item: Any, start: float, end: float, number: int
    ) -> None:
        del self._fetching[number]
        if isinstance(body, BaseException):
            outcome = {"restart": "restarted", "drop": "dropped", "raise": "raised"}[
                link.actor.terms.on_failure
            ]
            text = f"the reply to {sent.message.label} was lost with the machine it lay on"
            link.actor.lost += 1
            self._finish(link, sent.message, None, ActorDied(link.actor.name, text, outcome), start, end)
        else:
            parcel = parcel_from(body, item[1:] if type(item) is list else ())
            self._finish(link, sent.message, parcel, None, start, end)

    def _error_from(self, item: Any) -> BaseException:
        parcel = parcel_from(item)
        return opened_error(parcel.fetched() if isinstance(parcel, Stored) else parcel, self)

    # What actors have to say besides -----------------------------------------------------------

    def _take_frames(self, link: Link, frames: Any) -> None:
        if isinstance(frames, BaseException):
            link.take = None
            self._fade(link, frames)
            return
        for kind, *fields in frames:
            if kind == LATE:
                self._take_late(link, *fields)
            elif kind == POSTED:
                self._take_post(link, *fields)
            elif kind == WAITING:
                self._take_waiting(link, *fields)
            link.heard += 1
        self._listen(link)
        self._take_held(link)

    def _take_held(self, link: Link) -> None:
        held, link.held = link.held, []
        for _, number, record in held:
            self._take_record(link, number, record)

    def _take_late(self, link: Link, number: int, failed: bool, item: Any) -> None:
        deferred = link.deferred.pop(number, None)
        if deferred is None:
            link.early[number] = (failed, item)
        elif failed:
            deferred.reject(self._error_from(item))
        else:
            deferred.resolve(parcel_from(item))

    def _take_post(
        self, link: Link, target: str, item: Any, number: int | None, label: str, kind: str | None
    ) -> None:
        """An actor sends a message to another."""
        message = Message("", (), None, label)
        message.parcel = parcel_from(item)
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

    def _answer(self, actor: Actor[Any], future: Future[Any]) -> None:
        """Give an actor the reply to what it asked of another."""
        link: Link = actor.mailbox
        number = future.token
        if link.calls.pop(number, None) is not future:
            return  # it has been restarted since
        parcel = future.reply
        if future.error is not None:
            parcel = stowed(packed_error(future.error, self, Buffers, "the driver"))
        elif not isinstance(parcel, Parcel):
            parcel = parcel.parcel
        link.cell.reply.remote(number, future.error is not None, body_of(parcel), *items_of(parcel))

    def _take_waiting(self, link: Link, numbers: list[int]) -> None:
        futures = [link.calls[number] for number in numbers if number in link.calls]
        if len(futures) == len(numbers):  # else one is on its way, and it does not wait for long
            self.ledger.block(link.actor, link.answers, futures)

    # Death -------------------------------------------------------------------------------------

    def _deadlines(self) -> list[tuple[Link, float]]:
        return [
            (link, link.since + deadline)
            for link in self._links
            if (deadline := link.actor.terms.deadline) is not None
            and link.pending
            and BUILDING not in link.pending
            and not link.down
            and link.verdict is None
        ]

    def _look_for_hung(self) -> None:
        for link, end in self._deadlines():
            if (
                time.monotonic() >= end
                and (sent := next(iter(list(link.pending.values())), None)) is not None
            ):
                link.verdict = f"hung: {sent.message.label} took longer than {link.actor.terms.deadline:g} s"
                _kill(link)

    def _lose(self, link: Link, number: int, error: BaseException) -> None:
        """Ray could not carry out a message: mostly because the actor is dead."""
        sent = link.pending.pop(number)
        if isinstance(error, DEATHS) and not isinstance(error, RayTaskError):
            link.unhandled[number] = sent.message
            self._fade(link, error)
            return
        if not isinstance(error, RayError) or isinstance(error, RayTaskError):
            error.add_note("raised around the actor's own code: this is a defect of rollstream")
            self._finish(link, sent.message, None, error, 0.0, 0.0)
        else:  # something in it was lost with whoever held it
            text = f"{sent.message.label} was lost: {_first_line(error)}"
            link.actor.lost += 1
            died = ActorDied(link.actor.name, text, "restarted")
            self.ledger.settle(sent.message, None, died if sent.message.future is not None else None)
        self._bury_if_over(link)

    def _fade(self, link: Link, error: BaseException) -> None:
        """An actor is dead: wait until what was sent to it has been accounted for."""
        if not link.dying:
            with link.lock:
                link.down = link.dying = True
            link.cause = error
            _kill(link)
            self._have_all_told(lambda other: other is link)
        self._bury_if_over(link)

    def _bury_if_over(self, link: Link) -> None:
        if link.dying and link.take is None and link.held:
            link.heard = sys.maxsize  # what it still had to say died with it
            self._take_held(link)
        elif link.over and not link.ended.is_set():
            self._bury(link)

    def _bury(self, link: Link) -> None:
        link.dying = False
        unhandled = [link.unhandled[number] for number in sorted(link.unhandled)]
        building, link.building = link.building, None
        link.deferred.clear()
        link.calls.clear()
        if link.started is not None:
            text = f"{link.actor.name} {link.reason()} while it was built{link.last_words()}"
            link.started.put(ActorDied(link.actor.name, text))
            link.started = None
        elif link.stopping or self.closed:
            self._refuse(unhandled)
        else:
            replaced = self._replace(link, unhandled)
            if building is not None:
                self.ledger.settle(building)
            if replaced:
                return
        with link.lock:
            unhandled = list(link.waiting)
            link.waiting.clear()
        self.ledger.hold(link.actor, 0)
        if link.actor.gone is not None:
            for message in unhandled:
                self._refuse_lost(link.actor, message, link.actor.gone)
        else:
            self._refuse(unhandled)
        self._links.remove(link)
        link.ended.set()

    def _replace(self, link: Link, unhandled: list[Message]) -> bool:
        """Meet the death of an actor as its terms say: whether it lives on in a new cell."""
        actor = link.actor
        building = Message("", (), None, "")
        self.ledger.post(building, actor)  # until it is built again, the engine is not idle
        again = self._died(actor, unhandled, link.reason(), link.last_words())
        if again is None:
            self.ledger.settle(building)
            return False
        again = [message for message in again if message not in link.waiting]
        for message in again:
            if not message.counted:
                self.ledger.post(message, actor)
        if self._launch(link, again):
            link.building = building
            self._send_waiting(actor)
            return True
        self._refuse([building, *again])
        return False


class _Release:
    """Follows replies that a message carries: when one is there, what was held back is looked at again."""

    def __init__(self, engine: RayEngine, actor: Any, look: Callable[[], None]):
        self._engine = engine
        self._actor = actor
        self._look = look

    def put(self, _: Future[Any], /) -> None:
        self._engine.ledger.release(self._actor)
        self._engine._later(self._look)


class _Answers:
    """Where the replies to one actor's questions come to, on their way to that actor."""

    def __init__(self, engine: RayEngine, actor: Actor[Any]):
        self._engine = engine
        self._actor = actor

    def put(self, future: Future[Any], /) -> None:
        self._engine._later(partial(self._engine._answer, self._actor, future))


class _Holder:
    """A task that waits, as the books see it."""

    def __init__(self, name: str):
        self.name = name


def _look_at_the_clock() -> None:
    """An errand of the engine's thread that makes it look when it is due next."""


def _failure_in(futures: Iterable[Future[Any]]) -> BaseException | None:
    for future in futures:
        if future.error is not None:
            future.read = True
            return future.error
    return None


def _read(record: Any) -> tuple[int, int, float, float, Any]:
    """What a record says, how much the actor had said before, times, and an item."""
    header, item = (record, record[HEADER.size :]) if type(record) is bytes else record
    return *HEADER.unpack_from(header), item


def _value_of(status: int, item: Any, sent: Sent) -> Parcel:
    if status == VALUE:
        return parcel_from(item)
    return Stored(sent.value, parcel_from(item).parts)


def _options(terms: Terms) -> dict[str, Any]:
    """What Ray is told of an actor's needs."""
    own = {name: value for name, value in terms.resources.items() if name in _OPTIONS}
    custom = {name: value for name, value in terms.resources.items() if name not in _OPTIONS}
    return {"num_cpus": 0, **own, "resources": custom or None, "scheduling_strategy": "SPREAD"}


def _kill(link: Link) -> None:
    with suppress(Exception):
        ray.kill(link.cell)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# The one connection of this process --------------------------------------------------------------

_connecting = threading.Lock()
_users = 0
_ours = False


def _connect(address: str | None, variables: dict[str, str]) -> None:
    """Join Ray if this process has it; else connect to a cluster, or start one."""
    global _users, _ours
    if address is not None and address.startswith("ray://"):
        raise EngineError(
            f"address={address!r}: Ray's client does not carry actors' messages; run this program on a "
            f"machine of the cluster and give address='auto'"
        )
    with _connecting:
        if not ray.is_initialized():
            _initialise(address, variables)
            _ours = True
        elif address not in (None, "auto", current := ray.get_runtime_context().gcs_address):
            raise EngineError(f"address={address!r}: this process is connected to Ray at {current} already")
        _users += 1


def _initialise(address: str | None, variables: dict[str, str]) -> None:
    own: dict[str, Any] = {} if address is not None else {"include_dashboard": False}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)  # a cluster started here passes them on to its workers
    try:
        ray.init(address=address or "local", log_to_driver=True, logging_level=logging.ERROR, **own)
    except Exception as error:
        raise EngineError(f"address={address!r}: cannot connect to Ray: {error}") from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _disconnect() -> None:
    """Let Ray go with the last engine, if an engine brought it."""
    global _users, _ours
    with _connecting:
        _users -= 1
        if _users == 0 and _ours:
            _ours = False
            ray.shutdown()
