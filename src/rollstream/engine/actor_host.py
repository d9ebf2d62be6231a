"""The host of an actor in another process: it builds the instance and handles the driver's messages."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

from rollstream.engine.actor import Actor, Message
from rollstream.engine.errors import EngineClosed, EngineError
from rollstream.engine.serialization import Codec, Payload
from rollstream.engine.slot import ActorContext, ActorSlot

VALUE, ERROR, DEFERRED = 0, 1, 2
"""What a reply holds: a value, an error, or nothing yet."""


class ActorHost(ABC):
    """One actor's side of its engine. Handles work here: their messages go by way of the driver."""

    mailbox_size: ClassVar[int] = sys.maxsize
    codec: Codec

    def __init__(self, name: str, actor: str):
        self.name = name
        """The engine's name."""
        self.actor = actor
        self.slot: ActorSlot | None = None
        self.closed = False

    @abstractmethod
    def post_to_driver(
        self, target: str, payload: Payload, label: str, sticky: str | None, seconds: float | None
    ) -> None:
        """Give the driver a message for another actor, to be sent after so many seconds."""

    # What the driver asks for ------------------------------------------------------------------

    def build(self, constructor: Payload, context: tuple[str, int, int, int]) -> BaseException | None:
        """Build the instance; return the error if it cannot be built."""
        slot = ActorSlot(ActorContext(*context, put=self.put))
        try:
            cls, args, kwargs = self.codec.unpack(constructor)
            slot.context.actor = self.find_actor(self.actor, slot.context.index, cls)
            slot.build(cls, args, kwargs)
        except BaseException as error:
            return error
        self.slot = slot
        return None

    def handle(self, payload: Payload) -> tuple[Any, BaseException | None, float, float]:
        """Handle a message: its value or error, and when it began and ended."""
        assert self.slot is not None
        try:
            operation, args = self.codec.unpack(payload)
        except BaseException as error:
            error.add_note("raised while the message was unpacked")
            return None, error, 0.0, 0.0
        return self.slot.timed_run(operation, args)

    def result(self, value: Any, error: BaseException | None) -> tuple[int, Payload]:
        """A reply: `VALUE` or `ERROR`, and its payload."""
        if error is None:
            try:
                return VALUE, self.codec.pack_result(value)
            except Exception as problem:
                error = problem
        return ERROR, self.codec.pack_error(error)

    def end(self) -> list[BaseException]:
        """End the instance: the error of its `close`, if there is one."""
        self.closed = True
        errors: list[BaseException] = []
        if self.slot is not None:
            try:
                self.slot.end()
            except BaseException as error:
                errors.append(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        return errors

    # Handles in this process -------------------------------------------------------------------

    def find_actor(self, name: str, index: int, cls: type) -> Actor[Any]:
        """A handle whose messages go by way of the driver."""
        return Actor(self, name, index, cls)

    def sender(self) -> str:
        """This actor."""
        return self.actor

    def post(self, actor: Actor[Any], message: Message, sticky: str | None = None) -> None:
        """Send a message by way of the driver; large arrays in it do not go there."""
        self._post(actor, message, sticky, None)

    def post_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        """Send a message by way of the driver, which keeps it for so many seconds."""
        self._post(actor, message, None, seconds)

    def _post(self, actor: Actor[Any], message: Message, sticky: str | None, seconds: float | None) -> None:
        if self.closed:
            raise EngineClosed(f"{message.label}: the engine is closed and its actors have ended")
        self.post_to_driver(actor.name, self.codec.pack_message(message), message.label, sticky, seconds)

    def put(self, value: Any) -> Any:
        """Store a value once; the reference can be returned or sent, and the driver passes it on unopened."""
        return self.codec.put(value)

    def make_room(self, actor: Actor[Any]) -> None:  # noqa: B027
        """Actors never wait for each other."""

    def wait(self, futures: Sequence[Any], count: int = 1, timeout: float | None = None) -> NoReturn:  # noqa: ARG002
        """Refused: an actor handles one message at a time."""
        raise EngineError(
            f"{self.actor} is an actor and cannot wait for replies; return a Deferred() instead"
        )

    def open_reply(self, future: Any) -> NoReturn:
        """No futures exist here."""
        raise EngineError(f"{future!r} belongs to the driver")

    def spawn(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the driver spawns actors, or an actor opens an engine of its own."""
        raise EngineError(f"{self.actor} cannot spawn actors on the engine it lives on; open one here")
