"""What is in flight on an engine, who waits, and what failed unseen: plain state under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollstream.engine.actor import Actor, Message
from rollstream.engine.errors import EngineClosed, EngineError
from rollstream.engine.future import Deferred, Future
from rollstream.engine.sinks import Sink


class InFlight:
    """Counts messages, passes replies on, and keeps the failures of messages nobody awaits.

    One lock makes `idle` exact: a reply is in the sinks of whoever waits for it before its message stops
    counting.

    Args:
        on_release: called, outside the lock, with an actor whose held messages may run now.
    """

    def __init__(self, on_release: Callable[[Actor[Any]], None]) -> None:
        self.closed = False
        self.failures: list[BaseException] = []
        """Errors of messages without a reply."""
        self.outstanding = 0
        """Messages sent and not yet handled."""
        self._on_release = on_release
        self._lock = threading.Lock()
        self._watchers: list[Sink] = []
        self._crowded: dict[Sink, tuple[Actor[Any], int]] = {}
        self._held: dict[str, int] = {}
        self._deferred: dict[Message, str] = {}
        self._failed: list[Future[Any]] = []

    def add(self, message: Message, actor: Actor[Any]) -> None:
        """A message was sent to an actor."""
        with self._lock:
            message.actor = actor
            self.outstanding += 1
            actor.outstanding += 1

    def settle(self, message: Message, value: Any = None, error: BaseException | None = None) -> None:
        """A message was handled: pass its reply on, or keep its error."""
        future, notified, dependents = message.future, None, ()
        if error is not None and (future is None or future.sink is None):  # a flow's error says more
            error.add_note(f"raised while {message.label} was handled")
        with self._lock:
            if (actor := message.actor) is not None:
                self._handled(message, actor)
            if future is not None:
                future.reply, future.error, future.done = value, error, True
                if (notified := future.sink) is not None:
                    notified.put(future)
                elif error is not None:
                    self._failed = [*(known for known in self._failed if not known.read), future]
                for waiter in future.waiters:
                    waiter.put(future)
                if dependents := future.dependents:
                    for actor in dependents:
                        self._held.pop(actor.name, None)
            elif error is not None and not (self.closed and isinstance(error, EngineClosed)):
                self.failures.append(error)
                self._wake_all()
            if (not self.outstanding or self._held) and self._watchers != [notified]:
                self._wake_if_idle(notified)
        for actor in dependents:
            self._on_release(actor)

    def _handled(self, message: Message, actor: Actor[Any]) -> None:
        message.actor = None
        self.outstanding -= 1
        actor.outstanding -= 1
        if self._crowded:
            for sink, (crowded, limit) in self._crowded.items():
                if crowded.outstanding < limit:
                    sink.wake()

    # Deferred replies --------------------------------------------------------------------------

    def defer(self, message: Message, receiver: str, reply: Deferred[Any]) -> None:
        """A message was handled, and its reply comes later."""
        self._deferred[message] = receiver
        try:
            reply.then(partial(self._settle_late, message))
        except EngineError as error:
            del self._deferred[message]
            self.settle(message, None, error)
            return
        with self._lock:
            if message.actor is not None:
                self._handled(message, message.actor)
            self._wake_if_idle()

    def abandon(self, error: EngineError, receiver: str | None = None) -> None:
        """Deferred replies, of one actor or all, will not come: fail their futures."""
        for message, whose in list(self._deferred.items()):
            if receiver in (None, whose):
                self._settle_late(message, None, error.about(message.label))

    def _settle_late(self, message: Message, value: Any, error: BaseException | None) -> None:
        if self._deferred.pop(message, None) is not None:  # not abandoned meanwhile
            self.settle(message, value, error)

    # Messages held back until a reply they carry is there ----------------------------------------

    def hold(self, actor: Actor[Any], futures: Sequence[Future[Any]]) -> bool:
        """Whether some futures are pending; then `on_release` is called when one of them is done."""
        with self._lock:
            pending = [future for future in futures if not future.done]
            for future in pending:
                if actor not in future.dependents:
                    future.dependents += (actor,)
            return bool(pending)

    def set_held(self, actor: Actor[Any], count: int, futures: Sequence[Future[Any]]) -> None:
        """So many messages to an actor wait for these futures: they do not run."""
        with self._lock:
            if count and not all(future.done for future in futures):
                self._held[actor.name] = count
                self._wake_if_idle()
            else:
                self._held.pop(actor.name, None)

    # Waiting -----------------------------------------------------------------------------------

    def idle(self) -> bool:
        """Whether nothing runs: no message is left but those held back."""
        with self._lock:
            return self._idle()

    def _idle(self) -> bool:
        return self.outstanding == (sum(self._held.values()) if self._held else 0)

    def watch(self, sink: Sink) -> None:
        """Wake this sink when the engine goes idle or closes, and when a message nobody awaits fails."""
        with self._lock:
            self._watchers.append(sink)

    def unwatch(self, sink: Sink) -> None:
        """Undo `watch`."""
        with self._lock:
            self._crowded.pop(sink, None)
            if sink in self._watchers:
                self._watchers.remove(sink)

    def expect(self, futures: Sequence[Future[Any]], count: int, sink: Sink) -> bool:
        """Whether fewer than `count` futures are done; then the others' replies will come to the sink."""
        with self._lock:
            if sum(future.done for future in futures) >= count:
                return False
            if sink not in self._watchers:
                self._watchers.append(sink)
                for future in futures:
                    future.waiters += (sink,)
            return True

    def forget(self, futures: Sequence[Future[Any]], sink: Sink) -> None:
        """Undo `expect`."""
        self.unwatch(sink)
        with self._lock:
            for future in futures:
                future.waiters = tuple(waiter for waiter in future.waiters if waiter is not sink)

    def crowded(self, actor: Actor[Any], limit: int, sink: Sink) -> bool:
        """Whether `limit` messages wait for an actor; then the sink is woken when there are fewer."""
        with self._lock:
            self._crowded.pop(sink, None)
            if actor.outstanding < limit:
                return False
            self._crowded[sink] = (actor, limit)
            return True

    def _wake_if_idle(self, notified: Sink | None = None) -> None:
        if self._idle():
            for sink in self._watchers:
                if sink is not notified:
                    sink.wake()

    def _wake_all(self) -> None:
        for sink in self._watchers:
            sink.wake()

    # Failures ----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Keep an error that no reply carries."""
        with self._lock:
            self.failures.append(error)
            self._wake_all()

    def raise_failure(self) -> None:
        """Raise the error of a message nobody awaited, if there is one; more of them become its notes."""
        with self._lock:
            failures, self.failures = self.failures, []
        for other in failures[1:]:
            failures[0].add_note(f"another message failed too: {type(other).__name__}: {other}")
        if failures:
            raise failures[0]

    def close(self) -> None:
        """No more messages: wake whoever waits. Failed calls whose replies nobody read become failures."""
        with self._lock:
            self.failures += [future.error for future in self._failed if not future.read and future.error]
            self.closed = True
            self._wake_all()
