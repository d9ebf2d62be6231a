"""What comes from the actors of the ray engine: records, what they say besides, and their deaths.

Ray tells of finished objects in threads of its own, which must not be kept waiting: only the usual record is
dealt with there. All else is left to one thread of the engine, in order.
"""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rollstream.engine.actor import Actor, Message
from rollstream.engine.base import Engine
from rollstream.engine.errands import Errands
from rollstream.engine.errors import ActorDied, EngineClosed, EngineError, RemoteError
from rollstream.engine.future import Deferred, Future
from rollstream.engine.ray_link import BUILDING, DEATHS, Link, Sent
from rollstream.engine.ray_outpost import (
    DEFERRED,
    ERROR,
    HEADER,
    LATE,
    NUMBER,
    POSTED,
    REFUSED,
    STORED,
    VALUE,
    WAITING,
)
from rollstream.engine.ray_store import Buffers, RayRef, Stored, body_of, items_of, parcel_from, stowed
from rollstream.engine.supervision import EventCallback
from rollstream.engine.wire import Parcel, ParcelRef, opened_error, packed_error

DIRECTLY = 0.005
"""Seconds for which a reply is waited for directly."""
FRESH = 0.02
"""Seconds after which Ray is told to tell of a call that nobody has asked for."""
_OUTCOMES = {"restart": "restarted", "drop": "dropped", "raise": "raised"}


class RayHub(Engine):
    """The receiving half of the ray engine."""

    name = "ray"
    remote = True

    def __init__(self, *, on_event: EventCallback | None = None):
        super().__init__(on_event=on_event)
        self._links: list[Link] = []
        self._fetching: dict[int, Any] = {}
        self._numbers = count()
        self._fresh: dict[Future[Any], tuple[Link, int, Any]] = {}
        """Calls nobody has asked for yet, of which Ray has not been told to tell."""
        self._fresh_until: float | None = None
        self._errands = Errands("rollstream ray", self._due, self._tick, self._broken)

    @abstractmethod
    def _launch(self, link: Link, first: Iterable[Message] = ()) -> bool:
        """Start a cell, have it build its instance, and send it these messages."""

    @abstractmethod
    def _send_waiting(self, actor: Actor[Any]) -> None:
        """Send what is no longer held back."""

    # What travels ------------------------------------------------------------------------------

    def part(self, part: Any) -> Any:
        """A reference, opened when it is used."""
        return part if isinstance(part, (ParcelRef, Future)) else RayRef(self, part)

    def handle(self, name: str, index: int, cls: type) -> Actor[Any]:  # noqa: ARG002
        """The actor itself."""
        return self.actors[name]

    # Clock -------------------------------------------------------------------------------------

    def _due(self) -> float | None:
        ends = [end for _, end in self._deadlines()]
        if self._fresh_until is not None:
            ends.append(self._fresh_until)
        return min(ends, default=None)

    def _tick(self) -> None:
        if self._fresh_until is not None and time.monotonic() >= self._fresh_until:
            self._fresh_until = None
            self._have_all_told()
        self._look_for_hung()

    def _broken(self, error: BaseException) -> None:
        error.add_note("raised in the engine's own thread: this is a defect of rollstream")
        self.ledger.fail(error)

    def _refuse(self, messages: Iterable[Message]) -> None:
        for message in messages:
            error = EngineClosed(f"{message.label}: the engine was closed before it ran")
            self.ledger.settle(message, None, error if message.future is not None else None)

    # Calls: being told costs Ray a tenth of an empty one ----------------------------------------

    def _expect(self, link: Link, number: int, record: Any, future: Future[Any] | None) -> None:
        """See to it that a record is dealt with when it comes.

        Who calls mostly waits right away: that thread asks for the record itself, for a moment. Of any other
        record, and of what nobody asks for, Ray tells.
        """
        self._have_all_told()  # whoever called before has gone on to this
        if future is None or future.sink is not None or future.waiters:
            self._have_told(link, number, record)
            return
        self._fresh[future] = (link, number, record)
        if self._fresh_until is None:
            self._fresh_until = time.monotonic() + FRESH
            self._errands.look()

    def _have_told(self, link: Link, number: int, record: Any) -> None:
        record._on_completed(partial(self._completed, link, number))

    def _have_all_told(self) -> None:
        while self._fresh:
            with suppress(KeyError):  # somebody asks for it now
                self._have_told(*self._fresh.popitem()[1])

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

    # Records -----------------------------------------------------------------------------------

    def _completed(self, link: Link, number: int, record: Any) -> None:
        """A record has come. The usual case is dealt with at once, any other in the engine's thread."""
        if type(record) is bytes and record[0] == VALUE:
            _, said, start, end = HEADER.unpack_from(record)
            if said <= link.heard:
                if (sent := link.pending.pop(number, None)) is not None:
                    self._finish(link, sent.message, Parcel(record[HEADER.size :]), None, start, end)
                    if link.dying:
                        self._errands.later(partial(self._bury_if_over, link))
                return
        self._errands.later(partial(self._take_record, link, number, record))

    def _finish(
        self, link: Link, message: Message, value: Any, error: BaseException | None, start: float, end: float
    ) -> None:
        link.since = time.monotonic()
        with link.counting:
            self._complete(link.actor, message, value, error, start + link.offset, end + link.offset)

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
            link.kill()
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
        status, said, start, end, item = read(record)
        if said > link.heard:
            link.held.append((said, number, record))
            return
        sent = link.pending.pop(number)
        if status == REFUSED and link.stopping:
            self._refuse([sent.message])
        elif status == REFUSED:
            link.unhandled[number] = sent.message
        elif status == DEFERRED:
            [late] = NUMBER.unpack(item)
            deferred = link.deferred[late] = Deferred()
            self._finish(link, sent.message, deferred, None, start, end)
            if late in link.early:
                self._take_late(link, late, *link.early.pop(late))
        elif status == ERROR:
            self._finish(link, sent.message, None, self._error_from(item), start, end)
        elif status == STORED and sent.message.future is not None and sent.message.future.sink is not None:
            self._fetch(link, sent, item, start, end)
        else:
            self._finish(link, sent.message, value_of(status, item, sent), None, start, end)
        self._bury_if_over(link)

    def _fetch(self, link: Link, sent: Sent, item: Any, start: float, end: float) -> None:
        """A flow will want the value: have it brought here before the flow is told."""
        number = next(self._numbers)
        self._fetching[number] = sent.value

        def arrived(body: Any) -> None:
            self._errands.later(partial(self._take_value, link, sent, body, item, start, end, number))

        sent.value._on_completed(arrived)

    def _take_value(
        self, link: Link, sent: Sent, body: Any, item: Any, start: float, end: float, number: int
    ) -> None:
        del self._fetching[number]
        if isinstance(body, BaseException):
            outcome = _OUTCOMES[link.actor.terms.on_failure]
            text = f"the reply to {sent.message.label} was lost with the machine it lay on"
            link.actor.lost += 1
            self._finish(link, sent.message, None, ActorDied(link.actor.name, text, outcome), start, end)
        else:
            parcel = parcel_from(body, item[1:] if type(item) is list else ())
            self._finish(link, sent.message, parcel, None, start, end)

    def _error_from(self, item: Any) -> BaseException:
        parcel = parcel_from(item)
        try:
            return opened_error(parcel.fetched() if isinstance(parcel, Stored) else parcel, self)
        except Exception as problem:
            return RemoteError(f"there was an error that cannot be shown here: {problem!r}")

    # What actors have to say besides -----------------------------------------------------------

    def _listen(self, link: Link) -> None:
        """Ask a cell for what it has to say next."""
        link.take = link.cell.take.remote()
        link.take._on_completed(lambda frames: self._errands.later(partial(self._take_frames, link, frames)))

    def _take_frames(self, link: Link, frames: Any) -> None:
        if isinstance(frames, BaseException):
            link.take = None
            self._fade(link, frames)
            return
        for kind, *fields in frames:
            try:
                self._takes[kind](self, link, *fields)
            except Exception as error:
                self._broken(error)
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

    _takes: ClassVar[Mapping[str, Callable[..., None]]] = {
        LATE: _take_late,
        POSTED: _take_post,
        WAITING: _take_waiting,
    }

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
            pending = list(link.pending.values())
            if time.monotonic() >= end and pending:
                sent = pending[0]
                link.verdict = f"hung: {sent.message.label} took longer than {link.actor.terms.deadline:g} s"
                link.kill()

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
            text = f"{sent.message.label} was lost: {first_line(error)}"
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
            link.kill()
            self._have_all_told()
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


def read(record: Any) -> tuple[int, int, float, float, Any]:
    """What a record says, how much the actor had said before, times, and an item."""
    header, item = (record, record[HEADER.size :]) if type(record) is bytes else record
    return *HEADER.unpack_from(header), item


def value_of(status: int, item: Any, sent: Sent) -> Parcel:
    """The value of a message, as its record has it."""
    return parcel_from(item) if status == VALUE else Stored(sent.value, parcel_from(item).parts)


def first_line(error: BaseException) -> str:
    """What an error of Ray's says, without what it thinks of it."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
