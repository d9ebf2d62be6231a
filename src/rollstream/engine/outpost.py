"""What an actor's process knows of its engine, whichever that is."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from rollstream.engine.actor import Actor, ActorContext, ActorSlot, Message
from rollstream.engine.base import Engine
from rollstream.engine.errors import EngineError, ReentryError
from rollstream.engine.future import Future
from rollstream.engine.supervision import SpawnOptions
from rollstream.engine.wire import Parcel, ParcelRef, futures_in, opened_error, opened_reply


class Outpost(Engine):
    """Handles work here, and their messages go by way of the driver."""

    remote = True
    catches = BaseException

    def __init__(self, name: str):
        super().__init__()
        self._name = name
        self._cell: ActorSlot | None = None
        self._stopping = False
        self._calls: dict[int, Message] = {}
        self._numbers = count()
        self._awaited: Sequence[Future[Any]] = ()

    # What an engine adds -----------------------------------------------------------------------

    @abstractmethod
    def _pack(self, value: Any) -> Parcel:
        """A parcel whose large buffers are where others can read them."""

    @abstractmethod
    def _pack_message(self, message: Message) -> Parcel:
        """The same for a message; what cannot travel is named."""

    @abstractmethod
    def _say_post(
        self, target: str, parcel: Parcel, number: int | None, label: str, kind: str | None
    ) -> None:
        """Give the driver a message for another actor."""

    @abstractmethod
    def _say_waiting(self, numbers: list[int]) -> None:
        """Tell the driver that this actor waits for replies, and does not run meanwhile."""

    # The instance ------------------------------------------------------------------------------

    def _build(self, recipe: Any, about: tuple[str, int, int, int]) -> None:
        cls, args, kwargs = recipe
        cell = ActorSlot(cls, args, kwargs, ActorContext(*about))
        cell.build()
        self._cell = cell

    def _end(self) -> list[BaseException]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Let the instance go: errors that nobody has seen, and that of its `close`."""
        errors: list[BaseException] = []
        if not self.closed:
            self.in_flight.close()
        try:
            self.in_flight.raise_failure()
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
        return errors

    # Handles in this process -------------------------------------------------------------------

    def part(self, part: Any) -> Any:
        """A reference, opened when it is used."""
        return part if isinstance(part, (ParcelRef, Future)) else ParcelRef(self, part)

    def handle(self, name: str, index: int, cls: type) -> Actor[Any]:
        """A handle whose messages go by way of the driver."""
        return Actor(self, ActorSlot(cls, (), {}, ActorContext(name, index, 0)))

    def put(self, value: Any) -> ParcelRef:
        """Store a value once; it lives as long as this actor does."""
        self.require_open()
        return ParcelRef(self, self._pack(value))

    def post(self, actor: Actor[Any], message: Message, kind: str | None = None) -> None:
        """Send a message by way of the driver; nothing large in it goes there."""
        self.require_open()
        self.prepare(message)
        number = None
        if message.future is not None:
            number = next(self._numbers)
            self._calls[number] = message
            self.in_flight.post(message)
        self._say_post(actor.name, message.parcel, number, message.label, kind)

    def prepare(self, message: Message) -> None:
        """Pack the message; replies it carries are waited for."""
        message.parcel = self._pack_message(message)
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

    def _take_reply(self, number: int, parcel: Parcel, *, failed: bool) -> None:
        """The reply to something this actor asked of another."""
        message = self._calls.pop(number)
        if self.closed:
            return  # whoever waited for it has been told
        if failed:
            self.in_flight.settle(message, None, opened_error(parcel, self))
        else:
            self.in_flight.settle(message, parcel)

    # Waiting -----------------------------------------------------------------------------------

    def sender(self) -> str:
        """This actor."""
        return self._name

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
        """Tell the driver what is waited for, if anything is: sinks call this before they wait."""
        awaited = {id(future) for future in self._awaited if not future.done}
        numbers = [number for number, message in list(self._calls.items()) if id(message.future) in awaited]
        if numbers:
            self._say_waiting(numbers)

    # What only the driver does -----------------------------------------------------------------

    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        raise NotImplementedError

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        raise NotImplementedError
