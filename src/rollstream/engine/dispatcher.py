"""Sending: a message is delivered at once, or held back until the replies it carries are there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rollstream.engine.actor import DRIVER, Actor, Message
from rollstream.engine.errors import Deadlock, EngineError
from rollstream.engine.future import Future

if TYPE_CHECKING:
    from rollstream.engine.engine import Engine


class Dispatcher:
    """Sends the messages of one engine, in order for every sender and actor."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._in_flight = engine.in_flight
        self._transport = engine.transport
        self._run = engine.transport.run if engine.transport.in_thread else None
        self._failed: deque[tuple[Message, BaseException]] = deque()
        """Messages that carry a failed reply, to be settled without an actor's lock."""

    def post(self, actor: Actor[Any], message: Message, sticky: str | None = None) -> None:
        """Send a message; `sticky` makes it the last of its kind, handled again after a restart."""
        if self._in_flight.closed:
            self._engine.require_open()
        if actor.gone is not None:
            self._refuse_gone(actor, message)
            return
        codec = self._transport.codec
        if codec is not None and message.payload is None:
            message.payload = codec.pack_message(message)
        message.sticky = sticky
        if self._engine.tracer is not None and message.posted is None:
            message.posted = (self._transport.sender(), time.perf_counter())
        try:
            self._in_flight.add(message, actor)
            self._deliver_or_hold(actor, message)
            done = self._run is not None and self._run()
        except BaseException as error:
            self._engine.interrupted |= not isinstance(error, Exception)
            raise
        if done and message.future is None:
            self._engine.raise_failure()

    def post_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        """Send a message after so many seconds; it is in flight from now on."""
        if self._in_flight.closed:
            self._engine.require_open()
        codec = self._transport.codec
        if codec is not None and message.payload is None:
            message.payload = codec.pack_message(message)
        if self._engine.tracer is not None and message.posted is None:
            message.posted = (self._transport.sender(), time.perf_counter())
        self._in_flight.add(message, actor)
        self._transport.deliver_later(actor, message, seconds)

    def send_delayed(self, actor: Actor[Any], message: Message) -> None:
        """Send a message whose time has come."""
        if actor.gone is not None:
            self._engine.supervisor.lose(actor, [message], actor.gone)
            return
        self._deliver_or_hold(actor, message)

    def _deliver_or_hold(self, actor: Actor[Any], message: Message) -> None:
        futures = self._futures_in(message)
        with actor.lock:
            late = futures and self._in_flight.hold(actor, futures)
            now = actor.up and not late and not actor.held
            if now and not futures and message.sticky is None:
                self._transport.deliver(actor, message)
            elif now:
                self.deliver(actor, message, futures)
            elif actor.gone is None:
                actor.held.append(message)
        if now:
            if self._failed:
                self._settle_failed()
        elif actor.gone is not None:  # it died meanwhile
            self._refuse_gone(actor, message)
        else:
            self._transport.later(partial(self.send_held, actor))

    def deliver(
        self, actor: Actor[Any], message: Message, futures: Sequence[Future[Any]] | None = None
    ) -> None:
        """Hand a message to the transport; one that carries a failed reply will fail itself."""
        for future in self._futures_in(message) if futures is None else futures:
            if future.error is not None:
                future.read = True
                self._failed.append((message, future.error))
                return
        if message.sticky is not None:  # from now on: until here, an earlier one of its kind holds
            actor.sticky.pop(message.sticky, None)
            actor.sticky[message.sticky] = message
        self._transport.deliver(actor, message)

    def send_held(self, actor: Actor[Any]) -> None:
        """Send what is no longer held back, in order."""
        with actor.lock:
            if not actor.up:
                return
            futures: Sequence[Future[Any]] = ()
            while actor.held:
                futures = self._futures_in(actor.held[0])
                if self._in_flight.hold(actor, futures):
                    break
                self.deliver(actor, actor.held.popleft(), futures)
            self._in_flight.set_held(actor, len(actor.held), futures)
        if self._failed:
            self._settle_failed()
        if self._run is not None:
            self._run()

    def _settle_failed(self) -> None:
        while self._failed:
            message, error = self._failed.popleft()
            self._in_flight.settle(message, None, error)

    def release(self, actor: Actor[Any]) -> None:
        """A reply that a held message carries is there."""
        self._transport.later(partial(self.send_held, actor))

    def _futures_in(self, message: Message) -> Sequence[Future[Any]]:
        if message.payload is not None:
            return message.payload.futures() if message.payload.parts else ()
        for argument in message.args:
            if isinstance(argument, Future):
                return [argument for argument in message.args if isinstance(argument, Future)]
        return ()

    def _refuse_gone(self, actor: Actor[Any], message: Message) -> None:
        """A message to an actor that died and was not restarted: a broadcast continues, a call fails."""
        assert actor.gone is not None
        self._engine.supervisor.lose(actor, [message], actor.gone)
        if actor.gone.outcome == "raised" and message.future is None:
            raise actor.gone

    def make_room(self, actor: Actor[Any]) -> None:
        """Wait until an actor is less far behind. Actors never wait here: two could wait for each other."""
        if self._transport.sender() != DRIVER:
            return
        sink = self._transport.sink()
        self._in_flight.watch(sink)
        try:
            while self._in_flight.crowded(actor, self._engine.mailbox_size, sink):
                if self._in_flight.idle():
                    raise Deadlock(
                        f"{actor.name} has {actor.outstanding} messages waiting and cannot continue"
                    )
                sink.wait()
                self._engine.require_open()
        finally:
            self._in_flight.unwatch(sink)

    def forward(
        self,
        sender: Actor[Any],
        target: str,
        payload: Any,
        label: str,
        sticky: str | None,
        seconds: float | None,
    ) -> None:
        """An actor in another process sends a message: pass it on unopened, at once or after some seconds."""
        message = Message("", (), None, label)
        message.payload = payload
        if self._engine.tracer is not None:
            message.posted = (sender.name, time.perf_counter())
        try:
            if seconds is None:
                self.post(self._engine.actors[target], message, sticky)
            else:
                self.post_later(self._engine.actors[target], message, seconds)
        except EngineError as error:  # the other is gone, or the engine is closed
            self._in_flight.settle(message, None, error)
