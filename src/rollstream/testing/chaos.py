"""A transport for tests: one thread, and a seed that chooses what happens next."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from rollstream.engine import Actor, Engine
from rollstream.engine.actor import Message
from rollstream.engine.channel import Channel
from rollstream.engine.framed import Connection, FramedTransport
from rollstream.engine.framed_host import FramedHost
from rollstream.engine.memory import Segment
from rollstream.engine.options import EventCallback
from rollstream.engine.sinks import Sink

POOL = 1 << 16
"""Bytes of shared memory per actor: small, so that tests run out of it."""


def chaos_engine(seed: int = 0, *, deaths: float = 0.0, on_event: EventCallback | None = None) -> Engine:
    """An engine whose schedule is chosen by a seed: any order of events that real engines could show.

    Args:
        seed: the same seed gives the same schedule.
        deaths: the probability that an actor dies at a step, perhaps with half of a reply sent.
        on_event: called with an `ActorEvent` when an actor dies.
    """
    return Engine(ChaosTransport(seed, deaths), on_event=on_event)


class ChaosTransport(FramedTransport):
    """The protocol of the processes engine on one thread: every step is a choice of the seed.

    Actors live in this process, but everything is serialized as for another one: messages and replies
    travel as bytes that arrive late and in pieces, arrays through shared memory. A step delivers some bytes
    to an actor or to the driver, lets an actor handle a message or die, or lets the driver notice a death.
    """

    name = "chaos"
    in_thread = True

    def __init__(self, seed: int = 0, deaths: float = 0.0):
        super().__init__(POOL)
        self._deaths = deaths
        self._random = random.Random(seed)
        self._hosts: dict[str, _ChaosHost] = {}
        self._later: deque[Callable[[], None]] = deque()
        self._stepping = False

    # The schedule ------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        """Let the seed decide."""
        return self._random.random() < probability

    def pick(self, count: int) -> int:
        """Let the seed choose one of `count`."""
        return self._random.randrange(count)

    def run(self) -> bool:
        while not self._stepping and self.chance(0.6) and self.step():
            pass
        return False

    def step(self) -> bool:
        """Let one thing happen; false if nothing can."""
        steps = self._steps()
        if not steps:
            return False
        self._stepping = True
        try:
            if self._deaths and self.chance(self._deaths) and (mortal := self._mortal()):
                mortal[self.pick(len(mortal))].break_off()
            else:
                steps[self.pick(len(steps))]()
            self.collect()
        finally:
            self._stepping = False
        return True

    def can_progress(self) -> bool:
        return bool(self._steps())

    def _steps(self) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = [self._run_later] if self._later else []
        if self.delayed:
            steps.append(self._send_delayed)
        for host in self._hosts.values():
            steps += host.steps()
        return steps

    def _mortal(self) -> list[_ChaosHost]:
        """Actors that can die: all but those whose first instance is being built."""
        return [host for host in self._hosts.values() if host.is_mortal()]

    def _run_later(self) -> None:
        self._later.popleft()()

    def _send_delayed(self) -> None:
        """Time passes: send the message that is due first."""
        if (due := self.delayed.take()) is not None:
            self.engine.dispatcher.send_delayed(*due)

    def piece(self, data: bytearray) -> bytes:
        """Some of the bytes that wait, or all of them."""
        size = len(data) if self.chance(0.7) else 1 + self.pick(len(data))
        piece = bytes(data[:size])
        del data[:size]
        return piece

    # What a transport does ---------------------------------------------------------------------

    def connect(self, actor: Actor[Any], incarnation: int) -> Connection | None:
        if actor.stopping:
            return None
        to_driver: deque[int] = deque()
        to_actor: deque[int] = deque()
        arena = f"{actor.name}#{incarnation}"
        self._hosts[actor.name] = _ChaosHost(self, actor, arena, _MemoryPort(to_driver, to_actor))
        return Connection(Channel(_MemoryPort(to_actor, to_driver), self._maps, self._gone), f"{arena}/")

    def write(self, actor: Actor[Any], data: bytes) -> None:
        self._hosts[actor.name].take_bytes(data)

    def deliver_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        self.delayed.add(actor, message, self.delayed.time + seconds)

    def later(self, function: Callable[[], None]) -> None:
        self._later.append(function)

    def serves(self) -> bool:
        return True

    def sink(self) -> Sink:
        return _ChaosSink(self)

    def kill(self, actor: Actor[Any]) -> None:
        """Let an actor die as a process does; the driver reads what it had written, then notices."""
        if (host := self._hosts.get(actor.name)) is not None:
            host.die("was killed")

    def wait_started(self, started: SimpleQueue[BaseException | None], count: int) -> list[Any]:
        while started.qsize() < count:
            assert self.step(), "an instance is never built"
        return [started.get() for _ in range(count)]

    def wait_ended(self, actor: Actor[Any], timeout: float | None) -> bool:  # noqa: ARG002
        while not actor.ended.is_set() and self.step():
            pass
        return actor.ended.is_set()

    def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:
        self.end_all([actor for actor in actors if not actor.ended.is_set()], 0.0 if hurry else None)
        self.close_memory()


class _ChaosHost(FramedHost):
    def __init__(self, transport: ChaosTransport, actor: Actor[Any], arena: str, port: _MemoryPort):
        self._maps: dict[str, Segment] = {}
        super().__init__(transport.name, actor.name, arena, POOL, Channel(port, self._maps))
        self._transport = transport
        self._handle = actor
        self.inbound, self.outbound = bytearray(), bytearray()
        self._reason = ""
        """How it ended, if it has."""
        self._noticed = False
        """Whether the driver knows."""

    def steps(self) -> list[Callable[[], None]]:
        """What can happen next, of what concerns this actor."""
        steps: list[Callable[[], None]] = []
        if self.outbound:
            steps.append(self._to_driver)
        elif self._reason and not self._noticed:
            steps.append(self._notice)
        if not self._reason:
            if self.inbound:
                steps.append(self._from_driver)
            if self.stopping:
                steps.append(self._goodbye)
            elif self.has_message():
                steps.append(self.handle_next)
        return steps

    def _notice(self) -> None:
        self._noticed = True
        self._transport.connection_lost(self._handle, self._reason)

    def take_bytes(self, data: bytes) -> None:
        """Bytes from the driver, to be delivered later."""
        if not self._reason:
            self.inbound += data

    def die(self, reason: str) -> None:
        """End at once."""
        if not self._reason:
            self._reason = reason
            self.inbound.clear()
            self.slot = None
            self._arena.close()
            self.channel.lent.clear()
            self._maps.clear()
            self._mailbox.clear()

    def is_mortal(self) -> bool:
        """Whether it runs, and was built at least once."""
        return not self._reason and not self.stopping and self._handle.started is None

    def break_off(self) -> None:
        """Die while bytes are written: the driver gets some of them."""
        del self.outbound[self._transport.pick(len(self.outbound) + 1) :]
        self.die("was killed")

    def _to_driver(self) -> None:
        self._transport.receive(self._handle, self._transport.piece(self.outbound))

    def _from_driver(self) -> None:
        self.receive(self._transport.piece(self.inbound))

    def _goodbye(self) -> None:
        self.say_goodbye()
        self.die("ended with exit code 0")

    def write(self, data: bytes) -> None:
        if not self._reason:
            self.outbound += data

    def read(self) -> None:
        while self.outbound:
            self._to_driver()
        self.receive(bytes(self.inbound))
        self.inbound.clear()

    def can_wait(self) -> bool:
        return not self._reason


class _MemoryPort:
    """Passes file descriptors within this process."""

    def __init__(self, outgoing: deque[int], incoming: deque[int]):
        self._outgoing = outgoing
        self._incoming = incoming

    def send(self, fd: int) -> None:
        self._outgoing.append(os.dup(fd))

    def receive(self) -> int:
        return self._incoming.popleft()

    def close(self) -> None:
        for descriptors in (self._incoming, self._outgoing):
            while descriptors:
                os.close(descriptors.popleft())


class _ChaosSink:
    def __init__(self, transport: ChaosTransport):
        self._transport = transport
        self._futures: list[Any] = []
        self._woken = False

    def put(self, future: Any, /) -> None:
        self._futures.append(future)

    def wake(self) -> None:
        self._woken = True

    def poll(self) -> Any | None:
        self._transport.run()
        if self._futures and (self._transport.engine.idle() or self._transport.chance(0.6)):
            return self._futures.pop(self._transport.pick(len(self._futures)))
        return None

    def wait(self, timeout: float | None = None) -> Any | None:  # noqa: ARG002
        while not self._futures and not self._woken:
            if not self._transport.step():
                return None
        self._transport.run()
        self._woken = False
        return self._futures.pop(self._transport.pick(len(self._futures))) if self._futures else None
