"""The books of an engine: what is under way, what failed unseen, who waits. Plain state under one lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from rollstream.engine.actor import Actor, Message
from rollstream.engine.errors import EngineClosed, EngineError
from rollstream.engine.future import Deferred, Future, Inbox, Sink


class InFlight:
    """Counts messages, hands replies on, and keeps the failures of messages nobody awaits.

    One lock makes `idle` exact: a reply is in the sinks of those who wait for it before the message stops
    counting. An engine that delivers messages in another way keeps its books here all the same.
    """

    def __init__(self) -> None:
        self.closed = False
        self.failures: list[BaseException] = []
        """Errors of messages without a reply."""
        self.outstanding = 0
        """Messages sent and not yet handled."""
        self._lock = threading.Lock()
        self._watchers: list[Sink] = []
        self._blocked: dict[Inbox, Actor[Any] | None] = {}
        self._crowded: dict[Sink, tuple[Actor[Any], int]] = {}
        self._held: dict[str, int] = {}
        self._deferred: dict[Message, str] = {}
        self._failed: list[Future[Any]] = []

    def post(self, message: Message, actor: Actor[Any] | None = None) -> None:
        """A message was sent to an actor, or is a task of nobody's."""
        with self._lock:
            message.counted = True
            self.outstanding += 1
            if actor is not None:
                message.actor = actor
                actor.outstanding += 1

    def settle(self, message: Message, value: Any = None, error: BaseException | None = None) -> None:
        """A message was handled: hand on its reply, or keep its error."""
        future, told = message.future, None
        if error is not None and (future is None or future.sink is None):  # a flow says more than this
            error.add_note(f"raised while {message.label} was handled")
        with self._lock:
            if message.counted:
                self._handled(message)
            if future is not None:
                future.reply, future.error, future.done = value, error, True
                if (told := future.sink) is not None:
                    told.put(future)
                elif error is not None:
                    self._failed = [*(known for known in self._failed if not known.read), future]
                for waiter in future.waiters:
                    waiter.put(future)
                    self._blocked.pop(waiter, None)
            elif error is not None and not (self.closed and isinstance(error, EngineClosed)):
                self.failures.append(error)
                self._wake_all()
            if not self.outstanding or self._blocked or self._held:
                self._wake_if_idle(told)

    def _handled(self, message: Message) -> None:
        message.counted = False
        self.outstanding -= 1
        if message.actor is not None:
            message.actor.outstanding -= 1
        if self._crowded:
            for sink, (actor, limit) in self._crowded.items():
                if actor.outstanding < limit:
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
            if message.counted:
                self._handled(message)
            self._wake_if_idle()

    def abandon(self, error: EngineError, receiver: str | None = None) -> None:
        """Deferred replies, of one actor or all, will not come: tell who waits for them."""
        for message, whose in list(self._deferred.items()):
            if receiver in (None, whose):
                self._settle_late(message, None, error.about(message.label))

    def _settle_late(self, message: Message, value: Any, error: BaseException | None) -> None:
        if self._deferred.pop(message, None) is not None:  # not abandoned meanwhile
            self.settle(message, value, error)

    # Held back: messages that carry replies still to come --------------------------------------

    def follow(self, futures: Sequence[Future[Any]], inbox: Inbox) -> bool:
        """Whether some futures are pending; then the inbox is given each of them, under the lock."""
        with self._lock:
            pending = [future for future in futures if not future.done]
            for future in pending:
                future.waiters += (inbox,)
        return bool(pending)

    def hold(self, actor: Actor[Any], count: int, futures: Sequence[Future[Any]] = ()) -> None:
        """So many messages to an actor wait for replies, of which the first needs these: they do not run."""
        with self._lock:
            self.release(actor)
            if count and not (futures and all(future.done for future in futures)):
                self._held[actor.name] = count
                self._wake_if_idle()

    def release(self, actor: Actor[Any]) -> None:
        """Messages held back may run now. For an inbox given to `follow`: the lock is held there."""
        self._held.pop(actor.name, None)

    # Waiting -----------------------------------------------------------------------------------

    def idle(self) -> bool:
        """Whether nothing runs: no message is left but those of actors that wait."""
        with self._lock:
            return self._idle()

    def _idle(self) -> bool:
        if not self._blocked and not self._held:
            return self.outstanding == 0
        stuck = {actor.name: actor.outstanding for actor in self._blocked.values() if actor is not None}
        held = sum(count for name, count in self._held.items() if name not in stuck)
        return self.outstanding == sum(stuck.values()) + held

    def stuck(self) -> bool:
        """Whether messages are left, all of actors that wait, and no reply held back could change that."""
        with self._lock:
            return self.outstanding > 0 and not self._deferred and self._idle()

    def watch(self, sink: Sink) -> None:
        """Wake this sink when the engine goes idle or closes, and when a message nobody awaits fails."""
        with self._lock:
            self._watchers.append(sink)

    def unwatch(self, sink: Sink) -> None:
        """Undo `watch`."""
        with self._lock:
            self._unwatch(sink)

    def _unwatch(self, sink: Sink) -> None:
        self._crowded.pop(sink, None)
        if sink in self._watchers:
            self._watchers.remove(sink)

    def expect(
        self, futures: Sequence[Future[Any]], count: int, sink: Sink, blocked: Actor[Any] | None
    ) -> bool:
        """Whether fewer than `count` futures are done; then the others' replies will come to the sink.

        `blocked` is the actor that waits for them, if one does: nothing sent to it runs meanwhile.
        """
        with self._lock:
            if sum(future.done for future in futures) >= count:
                return False
            if sink not in self._watchers:
                self._watchers.append(sink)
                for future in futures:
                    future.waiters += (sink,)
            if blocked is not None:
                self._blocked[sink] = blocked
                self._wake_if_idle(sink)
        return True

    def block(self, actor: Actor[Any], inbox: Inbox, futures: Sequence[Future[Any]]) -> None:
        """An actor elsewhere waits for futures whose replies come to the inbox: it does not run meanwhile."""
        with self._lock:
            if not any(future.done for future in futures):
                self._blocked[inbox] = actor
                self._wake_if_idle()

    def unblock(self, inbox: Inbox) -> None:
        """Undo `block`: whoever waited is gone."""
        with self._lock:
            self._blocked.pop(inbox, None)

    def crowded(self, actor: Actor[Any], limit: int, sink: Sink) -> bool:
        """Whether `limit` messages wait for an actor; then the sink is woken when there are fewer."""
        with self._lock:
            self._crowded.pop(sink, None)
            if actor.outstanding < limit:
                return False
            self._crowded[sink] = (actor, limit)
        return True

    def forget(self, futures: Sequence[Future[Any]], sink: Sink) -> None:
        """Undo `expect`."""
        with self._lock:
            self._unwatch(sink)
            self._blocked.pop(sink, None)
            for future in futures:
                if not future.done:
                    future.waiters = tuple(waiter for waiter in future.waiters if waiter is not sink)
                else:
                    future.waiters = ()

    def _wake_if_idle(self, told: Sink | None = None) -> None:
        if self._idle():
            for sink in self._watchers:
                if sink is not told:
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
        """No more messages: wake who waits. Failed calls whose replies nobody read become failures."""
        with self._lock:
            self.failures += [future.error for future in self._failed if not future.read and future.error]
            self.closed = True
            self._wake_all()
