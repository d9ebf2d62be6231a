"""What comes from the actors of the ray engine: records, what they say besides, and their deaths.

Ray tells of finished objects in threads of its own, which must not be kept waiting: only the usual record is
dealt with there. All else is left to one thread of the engine, in order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rollstream.engine.actor import Message
from rollstream.engine.errands import Errands
from rollstream.engine.errors import ActorDied
from rollstream.engine.future import Deferred, Future
from rollstream.engine.hub import Hub
from rollstream.engine.ray_link import BUILDING, DEATHS, RayLink, Sent
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
from rollstream.engine.ray_store import Stored, body_of, items_of, parcel_from
from rollstream.engine.supervision import EventCallback
from rollstream.engine.wire import Parcel, opened_error

DIRECTLY = 0.005
"""Seconds for which a reply is waited for directly."""
FRESH = 0.02
"""Seconds after which Ray is told to tell of a call that nobody has asked for."""
_OUTCOMES = {"restart": "restarted", "drop": "dropped", "raise": "raised"}


class RayHub(Hub):
    """The receiving half of the ray engine."""

    name = "ray"
    mourning = 1.0

    def __init__(self, *, threads: int | None = None, on_event: EventCallback | None = None):
        super().__init__(threads=threads, on_event=on_event)
        self._fetching: dict[int, Any] = {}
        self._numbers = count()
        self._fresh: dict[Future[Any], tuple[RayLink, int, Any]] = {}
        """Calls nobody has asked for yet, of which Ray has not been told to tell."""
        self._fresh_until: float | None = None
        self._errands = Errands("rollstream ray", self._due, self._tick, self._broken)

    def _later(self, function: Callable[[], None]) -> None:
        self._errands.later(function)

    # Clock -------------------------------------------------------------------------------------

    def _due(self) -> float | None:
        ends = [end for end in (self._next_deadline(), self._fresh_until) if end is not None]
        return min(ends, default=None)

    def _tick(self) -> None:
        if self._fresh_until is not None and time.monotonic() >= self._fresh_until:
            self._fresh_until = None
            self._have_all_told()
        self._kill_hung()

    # Calls: being told costs Ray a tenth of an empty one ----------------------------------------

    def _expect(self, link: RayLink, number: int, record: Any, future: Future[Any] | None) -> None:
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

    def _have_told(self, link: RayLink, number: int, record: Any) -> None:
        record._on_completed(partial(self._completed, link, number))

    def _have_all_told(self) -> None:
        while self._fresh:
            with suppress(KeyError):  # somebody asks for it now
                self._have_told(*self._fresh.popitem()[1])

    def _get(self, link: RayLink, number: int, record: Any, timeout: float | None) -> None:
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

    def _completed(self, link: RayLink, number: int, record: Any) -> None:
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
        self,
        link: RayLink,
        message: Message,
        value: Any,
        error: BaseException | None,
        start: float,
        end: float,
    ) -> None:
        link.since = time.monotonic()
        with link.counting:
            self._complete(link.actor, message, value, error, start + link.offset, end + link.offset)

    def _record_built(self, link: RayLink, record: Any) -> None:
        link.pending.pop(BUILDING)
        if isinstance(record, BaseException):
            self._fade(link, record)
            return
        item, _, host, logs, clock = record
        link.note_process(host, logs)
        link.offset = clock - (time.time() - time.perf_counter())
        self._take_built(link, None if item is None else self._error_from(item))
        self._bury_if_over(link)

    def _take_record(self, link: RayLink, number: int, record: Any) -> None:
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

    def _fetch(self, link: RayLink, sent: Sent, item: Any, start: float, end: float) -> None:
        """A flow will want the value: have it brought here before the flow is told."""
        number = next(self._numbers)
        self._fetching[number] = sent.value

        def arrived(body: Any) -> None:
            self._errands.later(partial(self._take_value, link, sent, body, item, start, end, number))

        sent.value._on_completed(arrived)

    def _take_value(
        self, link: RayLink, sent: Sent, body: Any, item: Any, start: float, end: float, number: int
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
        return opened_error(parcel_from(item), self)

    # What actors have to say besides -----------------------------------------------------------

    def _listen(self, link: RayLink) -> None:
        """Ask a cell for what it has to say next."""
        link.take = link.cell.take.remote()
        link.take._on_completed(lambda frames: self._errands.later(partial(self._take_frames, link, frames)))

    def _take_frames(self, link: RayLink, frames: Any) -> None:
        if isinstance(frames, BaseException):
            link.take = None
            self._fade(link, frames)
            return
        for kind, *fields in frames:
            try:
                self._frames[kind](self, link, *fields)
            except Exception as error:
                self._broken(error)
            link.heard += 1
        self._listen(link)
        self._take_held(link)

    def _take_held(self, link: RayLink) -> None:
        held, link.held = link.held, []
        for _, number, record in held:
            self._take_record(link, number, record)

    def _take_late(self, link: RayLink, number: int, failed: bool, item: Any) -> None:
        deferred = link.deferred.pop(number, None)
        if deferred is None:
            link.early[number] = (failed, item)
        elif failed:
            deferred.reject(self._error_from(item))
        else:
            deferred.resolve(parcel_from(item))

    def _frame_post(self, link: RayLink, target: str, item: Any, *about: Any) -> None:
        self._take_post(link, target, parcel_from(item), *about)

    def _reply(self, link: RayLink, number: int, parcel: Parcel, *, failed: bool) -> None:
        link.cell.reply.remote(number, failed, body_of(parcel), *items_of(parcel))

    _frames: ClassVar[Mapping[str, Callable[..., None]]] = {
        LATE: _take_late,
        POSTED: _frame_post,
        WAITING: Hub._take_waiting,
    }

    # Death -------------------------------------------------------------------------------------

    def _lose(self, link: RayLink, number: int, error: BaseException) -> None:
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
            self.in_flight.settle(sent.message, None, died if sent.message.future is not None else None)
        self._bury_if_over(link)

    def _fade(self, link: RayLink, error: BaseException) -> None:
        """An actor is dead: wait until what was sent to it has been accounted for."""
        if not link.dying:
            with link.lock:
                link.down = link.dying = True
            link.cause = error
            link.kill()
            self._have_all_told()
        self._bury_if_over(link)

    def _bury_if_over(self, link: RayLink) -> None:
        if link.dying and link.take is None and link.held:
            link.heard = sys.maxsize  # what it still had to say died with it
            self._take_held(link)
        elif link.over and not link.ended.is_set():
            link.dying = False
            link.deferred.clear()
            unhandled = [link.unhandled[number] for number in sorted(link.unhandled)]
            self._bury(link, unhandled, link.reason(), link.last_words())


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
