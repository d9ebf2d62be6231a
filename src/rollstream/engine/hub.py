"""What engines with actors in other processes share: the driver is the hub of all messages.

An engine says how a process is started, how a message gets there and how its end is noticed. What is held
back, who is told of replies, and how a death is met is the same.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, TypeAlias

from rollstream.engine.actor import Actor, ActorSlot, Message, rebuild
from rollstream.engine.base import Engine, EngineStatistics
from rollstream.engine.errors import ActorDied, EngineClosed, EngineError
from rollstream.engine.future import Future
from rollstream.engine.launch import thread_variables
from rollstream.engine.supervision import EventCallback, SpawnOptions
from rollstream.engine.wire import Parcel, ParcelRef, futures_in, opened_reply, parcel_of

GRACE = 1.0
"""Seconds an actor has for the message in hand when the engine is closed in a hurry."""

Started: TypeAlias = SimpleQueue[BaseException | None]


class Link(ABC):
    """The driver's side of one actor, through all its lives: what was sent to it and is not yet handled."""

    def __init__(self, engine: Hub, actor: Actor[Any], recipe: Parcel, started: Started):
        self.actor = actor
        self.recipe: Parcel | None = recipe
        """What an instance is built from."""
        self.started: Started | None = started
        """Told when the first instance is built, or cannot be."""
        self.answers = _Answers(engine, self)
        """Where the replies to what the actor asked of others come to."""
        self.calls: dict[int, Future[Any]] = {}
        """What the actor asked of others."""
        self.lock = threading.Lock()
        """For sending, which several threads do."""
        self.down = True
        """Whether there is nobody to send to at the moment."""
        self.waiting: deque[Message] = deque()
        """Messages that carry replies still to come, and those behind them."""
        self.building: Message | None = None
        """Stands in the books while a dead actor is built again."""
        self.since = 0.0
        """When the message it is at was begun."""
        self.verdict: str | None = None
        """Why the driver killed it, if it did."""
        self.stopping = False
        self.ended = threading.Event()

    @abstractmethod
    def first(self) -> Message | None:
        """The message it is at."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""


class Hub(Engine):
    """An engine whose actors live in other processes."""

    remote = True
    mourning: ClassVar[float | None] = None
    """Seconds to wait for news of the end of an actor that was killed."""

    def __init__(self, *, threads: int | None = None, on_event: EventCallback | None = None):
        super().__init__(on_event=on_event)
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise EngineError(f"threads={threads!r}: an actor needs a whole number, at least one")
        self.variables = thread_variables(threads)
        """The environment that fixes how many threads numeric libraries start in an actor."""
        self._links: list[Any] = []
        self._timed = False
        """Whether some actor has a deadline."""
        self._hurried = False

    # What an engine adds -----------------------------------------------------------------------

    @abstractmethod
    def _pack(self, value: Any) -> Parcel:
        """A parcel whose large buffers are where others can read them."""

    @abstractmethod
    def _pack_message(self, message: Message) -> Parcel:
        """The same for a message; what cannot travel is named."""

    @abstractmethod
    def _pack_error(self, error: BaseException) -> Parcel:
        """The same for an error, with its traceback."""

    @abstractmethod
    def _new_link(self, actor: Actor[Any], recipe: Parcel, started: Started) -> Link:
        """The driver's side of an actor to come."""

    @abstractmethod
    def _launch(self, link: Any, first: Iterable[Message] = ()) -> bool:
        """Start a process, have it build its instance, and send it these messages; false when closing."""

    @abstractmethod
    def _transmit(self, link: Any, message: Message) -> None:
        """Send a message; the link's lock is held."""

    @abstractmethod
    def _reply(self, link: Any, number: int, parcel: Parcel, *, failed: bool) -> None:
        """Give an actor the reply to what it asked of another."""

    @abstractmethod
    def _ask_to_end(self, link: Any) -> None:
        """Let an actor end by itself; the link's lock is held."""

    @abstractmethod
    def _later(self, function: Callable[[], None]) -> None:
        """Have whoever takes in replies do something."""

    # Verbs -------------------------------------------------------------------------------------

    def put(self, value: Any) -> ParcelRef:
        """Store a value once, where every actor can read it."""
        self.require_open()
        return ParcelRef(self, self._pack(value))

    def restart(self, actor: Actor[Any]) -> Future[None]:
        """Replace an actor's instance by a fresh one, in the same process."""
        sticky = [ParcelRef(self, message.parcel) for message in actor.sticky.values()]
        return actor.ask(rebuild, sticky, name="restart")

    def statistics(self) -> EngineStatistics:
        """Also the environment of the actors."""
        return replace(super().statistics(), environment=dict(self.variables))

    def close(self, *, drain: bool = True) -> None:
        """End every actor. One that is in the middle of a message when it has to be quick is killed."""
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
            message.parcel = self._pack_message(message)

    def opened(self, future: Future[Any]) -> Any:
        """Unpack a reply."""
        return opened_reply(self, future)

    # Sending -----------------------------------------------------------------------------------

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        link: Link = actor.mailbox
        futures = futures_in(message.parcel) if message.parcel.parts else []
        with link.lock:
            if actor.gone is None:
                look = partial(self._send_waiting, link)
                late = bool(futures) and self.in_flight.follow(futures, Release(self, actor, look))
                if not late and not link.waiting and not link.down:
                    self._send(link, message, futures)
                    return
                link.waiting.append(message)
        if actor.gone is not None:
            self._refuse_lost(actor, message, actor.gone)
        else:
            self._later(partial(self._send_waiting, link))

    def _send(self, link: Link, message: Message, futures: Iterable[Future[Any]]) -> None:
        """Send a message; the lock is held. One that carries a failed reply fails itself."""
        error = failure_in(futures)
        if error is None:
            self._transmit(link, message)
        else:
            self._later(partial(self.in_flight.settle, message, None, error))

    def _send_waiting(self, link: Link) -> None:
        """Send what is no longer held back; what is does not run."""
        with link.lock:
            if link.down:
                return
            futures: list[Future[Any]] = []
            while link.waiting:
                futures = futures_in(link.waiting[0].parcel)
                if not all(future.done for future in futures):
                    break
                self._send(link, link.waiting.popleft(), futures)
            self.in_flight.hold(link.actor, len(link.waiting), futures)

    # Starting and ending -----------------------------------------------------------------------

    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        self._timed = self._timed or terms.deadline is not None
        recipe = self._recipe(cells[0])  # the same for all
        started: Started = SimpleQueue()
        actors = [self._actor(cell, terms) for cell in cells]
        links: list[Link] = []
        try:
            for actor in actors:
                link = actor.mailbox = self._new_link(actor, recipe, started)
                self._links.append(link)
                try:
                    self._launch(link)
                except BaseException:
                    self._links.remove(link)
                    raise
                links.append(link)
            errors = [error for error in [started.get() for _ in actors] if error is not None]
            if errors:
                raise errors[0]
        except BaseException as error:
            self._end_links(links, GRACE if isinstance(error, Exception) else 0.0)
            raise
        return actors

    def _recipe(self, cell: ActorSlot) -> Parcel:
        """What an instance is built from, with the replies it carries."""
        arguments = (*cell.args, *cell.kwargs.values())
        self._pack_message(Message("", arguments, None, f"{cell.context.name}.__init__"))  # or says why not
        parcel = self._pack((cell.cls, cell.args, cell.kwargs))
        for future in futures_in(parcel):
            future.result()
        return parcel

    def _end_links(self, links: list[Any], grace: float | None) -> None:
        """Let actors end by themselves; after so many seconds, kill them."""
        try:
            for link in links:
                with link.lock:
                    link.stopping = True
                    if not link.down:
                        self._ask_to_end(link)
            end = None if grace is None else time.monotonic() + grace
            for link in links:
                if not link.ended.wait(None if end is None else max(0.0, end - time.monotonic())):
                    link.kill()
        except BaseException:
            for link in links:
                link.kill()
            raise
        finally:
            for link in links:
                link.ended.wait(self.mourning)

    def _refuse(self, messages: Iterable[Message]) -> None:
        for message in messages:
            error = EngineClosed(f"{message.label}: the engine was closed before it ran")
            self.in_flight.settle(message, None, error if message.future is not None else None)

    def _forget_all(self) -> None:
        """Handles outlive the engine; what they hold on to should not."""
        for actor in self.actors.values():
            actor.sticky.clear()
            actor.mailbox.recipe = None

    # What comes from actors --------------------------------------------------------------------

    def _take_built(self, link: Link, error: BaseException | None) -> None:
        """An instance was built, or could not be."""
        link.since = time.monotonic()
        if link.started is not None:
            link.started.put(error)
            link.started = None
        elif error is not None:
            link.verdict = f"could not be built again ({type(error).__name__}: {error})"
            link.kill()
        elif link.building is not None:
            building, link.building = link.building, None
            self.in_flight.settle(building)

    def _take_post(
        self, link: Link, target: str, parcel: Parcel, number: int | None, label: str, kind: str | None
    ) -> None:
        """An actor sends a message to another."""
        message = Message("", (), None, label)
        message.parcel = parcel
        if number is not None:
            message.future = link.calls[number] = Future(self, label, target, token=number)
            message.future.waiters = (link.answers,)
            message.future.read = True  # its sender has to see to it
        if self.tracer is not None:
            message.posted = (link.actor.name, time.perf_counter())
        try:
            self.post(self.actors[target], message, kind)
        except EngineError as error:  # the other is gone, or the engine is closed
            self.in_flight.settle(message, None, error)

    def _answer(self, link: Link, future: Future[Any]) -> None:
        """Give an actor the reply to what it asked of another."""
        number = future.token
        if link.calls.get(number) is not future:
            return  # it has been restarted since
        del link.calls[number]
        if future.error is None:
            self._reply(link, number, parcel_of(future), failed=False)
        else:
            self._reply(link, number, self._pack_error(future.error), failed=True)

    def _take_waiting(self, link: Link, numbers: list[int]) -> None:
        """An actor waits for replies of others."""
        futures = [link.calls[number] for number in numbers if number in link.calls]
        if len(futures) == len(numbers):  # else one is on its way, and it does not wait for long
            self.in_flight.block(link.actor, link.answers, futures)

    # Death -------------------------------------------------------------------------------------

    def _deadlines(self) -> list[tuple[Link, float]]:
        """When each actor counts as hung, where that can be."""
        return [
            (link, link.since + deadline)
            for link in list(self._links)
            if (deadline := link.actor.terms.deadline) is not None
            and link.building is None
            and link.started is None
            and link.verdict is None
            and not link.down
            and link.first() is not None
        ]

    def _next_deadline(self) -> float | None:
        return min((end for _, end in self._deadlines()), default=None) if self._timed else None

    def _kill_hung(self) -> None:
        if self._timed:
            for link, end in self._deadlines():
                if time.monotonic() >= end and (message := link.first()) is not None:
                    link.verdict = f"hung: {message.label} took longer than {link.actor.terms.deadline:g} s"
                    link.kill()

    def _bury(self, link: Link, unhandled: list[Message], reason: str, last_words: str) -> None:
        """An actor's process has ended: meet that as its terms say."""
        building, link.building = link.building, None
        link.calls.clear()
        self.in_flight.unblock(link.answers)
        if link.started is not None:
            text = f"{link.actor.name} {reason} while it was built{last_words}"
            link.started.put(ActorDied(link.actor.name, text))
            link.started = None
        elif link.stopping or self.closed:
            self._refuse(unhandled)
        else:
            replaced = self._replace(link, unhandled, reason, last_words)
            if building is not None:
                self.in_flight.settle(building)
            if replaced:
                return
        with link.lock:
            left = list(link.waiting)
            link.waiting.clear()
        self.in_flight.hold(link.actor, 0)
        if link.actor.gone is not None:
            link.actor.lost += len(left)
            self._settle_lost(left, link.actor.gone)
        else:
            self._refuse(left)
        self._links.remove(link)
        link.ended.set()

    def _replace(self, link: Link, unhandled: list[Message], reason: str, last_words: str) -> bool:
        """Whether an actor lives on in a new process."""
        building = Message("", (), None, "")
        self.in_flight.post(building, link.actor)  # until it is built again, the engine is not idle
        again = self._died(link.actor, unhandled, reason, last_words)
        if again is None:
            self.in_flight.settle(building)
            return False
        again = [message for message in again if message not in link.waiting]
        for message in again:
            if not message.counted:
                self.in_flight.post(message, link.actor)
        link.building = building
        try:
            launched = self._launch(link, again)
        except Exception as error:
            text = f"{link.actor.name} {reason}, and could not be started again: {error}"
            link.actor.gone = ActorDied(link.actor.name, text)
            self.in_flight.fail(link.actor.gone)
            link.building = None
            self._settle_lost([building, *again], link.actor.gone)
            return False
        if launched:
            self._send_waiting(link)
            return True
        link.building = None
        self._refuse([building, *again])
        return False

    def _broken(self, error: BaseException) -> None:
        """Something went wrong in the engine itself: say so, and leave nobody waiting."""
        error.add_note("raised in the engine's own thread: this is a defect of rollstream")
        self.in_flight.fail(error)
        for link in list(self._links):
            if link.started is not None:
                link.started.put(error)


class Release:
    """Follows replies that a message carries: when one is there, what was held back is looked at again."""

    def __init__(self, engine: Hub, holder: Any, look: Callable[[], None]):
        self._engine = engine
        self._holder = holder
        self._look = look

    def put(self, _: Future[Any], /) -> None:
        """One is there."""
        self._engine.in_flight.release(self._holder)
        self._engine._later(self._look)


class _Answers:
    """Where the replies to one actor's questions come to, on their way to that actor."""

    def __init__(self, engine: Hub, link: Link):
        self._engine = engine
        self._link = link

    def put(self, future: Future[Any], /) -> None:
        self._engine._later(partial(self._engine._answer, self._link, future))


def failure_in(futures: Iterable[Future[Any]]) -> BaseException | None:
    """The error of the first that failed; it has been seen now."""
    for future in futures:
        if future.error is not None:
            future.read = True
            return future.error
    return None
