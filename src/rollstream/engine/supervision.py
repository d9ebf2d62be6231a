"""What an engine does when actors are built, hang and die."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rollstream.engine.actor import Actor, Message
from rollstream.engine.errors import ActorDied, EngineClosed
from rollstream.engine.options import ActorEvent

if TYPE_CHECKING:
    from rollstream.engine.engine import Engine
    from rollstream.engine.transport import RemoteTransport


class Supervisor:
    """Restarts, drops or raises, by the options of `spawn`; every lost message is counted."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._in_flight = engine.in_flight

    @property
    def _transport(self) -> RemoteTransport:
        return self._engine.transport  # pyright: ignore[reportReturnType]

    def built(self, actor: Actor[Any], error: BaseException | None) -> None:
        """An instance was built, or could not be."""
        if actor.started is not None:
            actor.started.put(error)
            actor.started = None
        elif error is not None:
            actor.verdict = f"could not be built again ({type(error).__name__}: {error})"
            self._transport.kill(actor)
        elif actor.rebuilding is not None:
            rebuilding, actor.rebuilding = actor.rebuilding, None
            self._in_flight.settle(rebuilding)

    # Death -------------------------------------------------------------------------------------

    def died(self, actor: Actor[Any], unhandled: list[Message], reason: str, output: str = "") -> None:
        """An actor's process has ended. `unhandled` are the messages it was sent and had not handled."""
        reason = actor.verdict or reason
        rebuilding, actor.rebuilding = actor.rebuilding, None
        if actor.started is not None:
            text = f"{actor.name} {reason} while it was built{output}"
            actor.started.put(ActorDied(actor.name, text))
            actor.started = None
        elif actor.stopping or self._engine.closed:
            self.refuse(unhandled)
        else:
            restarted = self._restart(actor, unhandled, reason, output)
            if rebuilding is not None:
                self._in_flight.settle(rebuilding)
            if restarted:
                return
        with actor.lock:
            held = list(actor.held)
            actor.held.clear()
        self._in_flight.set_held(actor, 0, ())
        if actor.gone is not None:
            self.lose(actor, held, actor.gone)
        else:
            self.refuse(held)
        actor.ended.set()

    def _restart(self, actor: Actor[Any], unhandled: list[Message], reason: str, output: str) -> bool:
        """Whether the actor lives on in a new process."""
        rebuilding = Message("", (), None, "")
        self._in_flight.add(rebuilding, actor)  # until it is built again, the engine is not idle
        first = self._decide(actor, unhandled, reason, output)
        if first is None:
            self._in_flight.settle(rebuilding)
            return False
        for message in first:
            if message.actor is None:
                self._in_flight.add(message, actor)
        actor.rebuilding, actor.verdict = rebuilding, None
        try:
            launched = self._transport.launch(actor, first)
        except Exception as error:
            text = f"{actor.name} {reason}, and could not be started again: {error}"
            actor.gone = ActorDied(actor.name, text)
            self._in_flight.fail(actor.gone)
            actor.rebuilding = None
            self.lose(actor, [rebuilding, *first], actor.gone)
            return False
        if launched:
            self._engine.dispatcher.send_held(actor)
            return True
        actor.rebuilding = None
        self.refuse([rebuilding, *first])
        return False

    def _decide(
        self, actor: Actor[Any], unhandled: Sequence[Message], reason: str, output: str
    ) -> list[Message] | None:
        """The messages that a new instance handles first, or `None` if there will be none.

        Sticky messages are handled again. Of the others, whoever waits for a reply gets `ActorDied`, and all
        are counted.
        """
        options, again = actor.options, None
        if options.on_failure == "restart" and actor.restarts < options.max_restarts:
            actor.restarts += 1
            with actor.lock:  # a flow that ends meanwhile takes its own away
                sticky = list(actor.sticky.values())
            again = [message if message in unhandled else message.repeated() for message in sticky]
        elif options.on_failure == "restart":
            reason = f"{reason}, after {options.max_restarts} restarts"
        outcome = (
            "restarted" if again is not None else "dropped" if options.on_failure == "drop" else "raised"
        )
        lost = [message for message in unhandled if again is None or message not in again]
        error = ActorDied(actor.name, f"{actor.name} {reason}{output}", outcome)
        if again is None:
            actor.gone = error
        self._engine.report(ActorEvent(actor.name, outcome, reason, len(lost), actor.restarts, time.time()))
        if outcome == "raised" and not any(message.future for message in lost):
            self._in_flight.fail(error)
        self.lose(actor, lost, error)
        return again

    def lose(self, actor: Actor[Any], messages: Sequence[Message], error: ActorDied) -> None:
        """Messages that a dead actor did not handle: fail their futures, and those of deferred replies."""
        actor.lost += sum(1 for message in messages if message.label)
        for message in messages:
            if message.future is None:
                self._in_flight.settle(message)
                continue
            message.future.read = error.outcome != "raised"
            self._in_flight.settle(message, None, error.about(message.label))
        self._in_flight.abandon(error, actor.name)

    def refuse(self, messages: Iterable[Message]) -> None:
        """Messages that were not handled because the engine was closed."""
        for message in messages:
            error = EngineClosed(f"{message.label}: the engine was closed before it ran")
            self._in_flight.settle(message, None, error if message.future is not None else None)

    # Deadlines ---------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When the first actor will count as hung, by `time.monotonic`."""
        return min((deadline for _, _, deadline in self._deadlines()), default=None)

    def kill_hung(self) -> None:
        """Kill actors whose current message has taken too long; their death is handled like any other."""
        now = time.monotonic()
        for actor, message, deadline in self._deadlines():
            if now >= deadline:
                actor.verdict = f"hung: {message.label} took longer than {actor.options.deadline:g} s"
                self._transport.kill(actor)

    def _deadlines(self) -> list[tuple[Actor[Any], Message, float]]:
        return [
            (actor, current[0], current[1] + actor.options.deadline)
            for actor in self._engine.timed_actors
            if actor.options.deadline is not None
            and actor.up
            and actor.rebuilding is None
            and actor.started is None
            and actor.verdict is None
            and (current := self._transport.current(actor)) is not None
        ]

    def silences(self) -> dict[str, float]:
        """How many seconds each actor has been at its current message; readable from any thread."""
        actors = [actor for actor in list(self._engine.actors.values()) if actor.connection is not None]
        currents = {actor.name: self._engine.transport.current(actor) for actor in actors}
        now = time.monotonic()
        return {name: now - current[1] for name, current in currents.items() if current is not None}

    def broken(self, error: BaseException) -> None:
        """Something failed in the engine itself: say so, and leave nobody waiting."""
        error.add_note("raised in the engine's own thread: this is a defect of rollstream")
        self._in_flight.fail(error)
        for actor in list(self._engine.actors.values()):
            if actor.started is not None:
                actor.started.put(error)
