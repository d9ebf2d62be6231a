"""An engine for tests: one thread, and a seed that chooses when each message is handled."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

from rollstream.engine import Actor, Engine, Future
from rollstream.engine.actor import ActorSlot, Message
from rollstream.engine.base import DRIVER
from rollstream.engine.future import Sink
from rollstream.engine.supervision import EventCallback, SpawnOptions


class ChaosEngine(Engine):
    """Orders of events that real engines could show: one for each seed, the same for the same seed.

    Messages wait in their actors' mailboxes. Whenever a thread would run beside the driver (a message is
    sent, the driver looks for replies, the driver waits) the seed decides which of them are handled. Replies
    wait in turn, and are seen late and in any order. With `deaths`, an actor dies now and then instead of
    handling a message.
    """

    name = "chaos"

    def __init__(self, seed: int = 0, *, deaths: float = 0.0, on_event: EventCallback | None = None):
        super().__init__(on_event=on_event)
        self._deaths = deaths
        self._random = random.Random(seed)
        self._tasks: deque[Message] = deque()
        self._running: list[str] = []

    def sink(self) -> Sink:
        """A sink that shows replies late and in any order."""
        return _ChaosSink(self)

    def hopeless(self) -> bool:
        """Nothing left to handle."""
        return not self._runnable()

    def sender(self) -> str:
        """The actor whose method is running, innermost."""
        return self._running[-1] if self._running else DRIVER

    def chance(self, probability: float) -> bool:
        """Let the seed decide."""
        return self._random.random() < probability

    def pick(self, count: int) -> int:
        """Let the seed choose one of `count`."""
        return self._random.randrange(count)

    def stir(self) -> None:
        """Handle a few messages, or none."""
        while self._runnable() and self.chance(0.4):
            self.step()

    def step(self) -> bool:
        """Handle one message of some actor; false if there is none."""
        runnable = self._runnable()
        if not runnable:
            return False
        chosen = runnable[self.pick(len(runnable))]
        if chosen is None:
            self._handle_task(self._tasks.popleft())
            return True
        if self._deaths and self.chance(self._deaths):
            self.kill(chosen)
            return True
        self._running.append(chosen.name)
        try:
            self._handle(chosen, chosen.mailbox.popleft())
        finally:
            self._running.pop()
        return True

    def kill(self, actor: Actor[Any]) -> None:
        """Let an actor die as a process does: instance, mailbox and held replies are gone."""
        unhandled = list(actor.mailbox)
        actor.mailbox.clear()
        actor.cell.instance = None
        again = self._died(actor, unhandled, "was killed")
        if again is None:
            return
        actor.cell.context = replace(actor.cell.context, restarts=actor.restarts, local={})
        actor.cell.afterwards.clear()
        actor.cell.build()
        for message in again:
            if not message.counted:
                self.in_flight.post(message, actor)
        actor.mailbox.extendleft(reversed(again))

    def _runnable(self) -> list[Actor[Any] | None]:
        waiting: list[Actor[Any] | None] = [
            actor for actor in self.actors.values() if actor.mailbox and actor.name not in self._running
        ]
        return [*waiting, None] if self._tasks else waiting

    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        return self._build_here(cells, terms, deque)

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        actor.mailbox.append(message)
        self.stir()

    def _run_task(self, message: Message) -> None:
        self._tasks.append(message)
        self.stir()

    def _stop(self) -> None:
        for actor in self.actors.values():
            if actor.gone is None:
                self._end(actor)


class _ChaosSink:
    def __init__(self, engine: ChaosEngine):
        self._engine = engine
        self._futures: list[Future[Any]] = []
        self._woken = False

    def put(self, future: Future[Any], /) -> None:
        self._futures.append(future)

    def wake(self) -> None:
        self._woken = True

    def poll(self) -> Future[Any] | None:
        self._engine.stir()
        if self._futures and (self._engine.in_flight.idle() or self._engine.chance(0.6)):
            return self._futures.pop(self._engine.pick(len(self._futures)))
        return None

    def wait(self, timeout: float | None = None) -> Future[Any] | None:  # noqa: ARG002
        while not self._futures and not self._woken:
            if not self._engine.step():
                return None
        self._engine.stir()
        self._woken = False
        return self._futures.pop(self._engine.pick(len(self._futures))) if self._futures else None
