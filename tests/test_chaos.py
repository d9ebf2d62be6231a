"""The protocol between driver and actors under seeded schedules, and bugs planted to see that it is tested.

Each seed is one schedule on one thread: bytes arrive late and in pieces, actors die at any step.
A failure is its seed, and happens again.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import numpy as np
import pytest

from rollstream.engine import Actor, ActorContext, ActorDied, Deferred, Engine, Future, channel, serialization
from rollstream.engine.actor import Message
from rollstream.engine.actor_host import DEFERRED
from rollstream.engine.dispatcher import Dispatcher
from rollstream.engine.framed import FramedTransport
from rollstream.engine.framed_host import DONE, LATE, FramedHost
from rollstream.engine.in_flight import InFlight
from rollstream.engine.serialization import Codec
from rollstream.engine.supervision import Supervisor
from rollstream.testing import chaos_engine

pytestmark = pytest.mark.filterwarnings("ignore:.*ran out of its:RuntimeWarning")

LARGE = 1000
"""Numbers in an array that travels through shared memory."""


class Member:
    """Checks everything it is sent: order, contents and settings."""

    def __init__(self, *, context: ActorContext):
        self.restarts = context.restarts
        self.version = -1
        self.others: list[Actor[Member]] = []
        self.last: dict[str, int] = {}
        self.kept: deque[tuple[Any, int]] = deque(maxlen=3)
        """Views of shared memory, which must not change while they are held."""
        self.waiting: list[tuple[int, Deferred[int]]] = []

    def meet(self, others: list[Actor[Member]]) -> None:
        self.others = others

    def configure(self, version: int) -> None:
        assert self.others, "sticky messages come in the order they were last sent"
        assert version > self.version
        self.version = version

    def make(self, sender: str, number: int, size: int) -> dict[str, Any]:
        self._count(sender, number)
        return {"number": number, "array": np.full(size, number), "version": self.version}

    def check(self, sender: str, number: int, made: dict[str, Any], expected: int) -> tuple[int, int]:
        self._count(sender, number)
        assert made["number"] == expected
        self.kept.append((made["array"], expected))
        assert all((array == number).all() for array, number in self.kept), "arrays stay as they were sent"
        return number, self.version

    def pass_on(self, sender: str, number: int, made: dict[str, Any], target: int, me: str) -> None:
        self._count(sender, number)
        for repeat in range(2):
            own = {"number": number + repeat, "array": np.full(len(made["array"]), number + repeat)}
            self.others[target].send("check", me, 2 * number + repeat, own, number + repeat)
            self.others[target].send("check", me, 2 * number + repeat, made, made["number"])

    def wait(self, sender: str, number: int) -> Deferred[int]:
        self._count(sender, number)
        self.waiting.append((number, Deferred()))
        reply = self.waiting[-1][1]
        if number % 3 == 0:  # it is complete before it is returned
            self.answer(sender, number)
        return reply

    def answer(self, sender: str, number: int) -> None:
        self._count(sender, number)
        while self.waiting:
            asked, reply = self.waiting.pop(0)
            reply.resolve(asked)

    def _count(self, sender: str, number: int) -> None:
        assert self.last.get(sender, -1) <= number, "messages of one sender come in order"
        self.last[sender] = number
        assert self.version >= 0, "sticky messages come before all others"


def play(seed: int, deaths: float = 0.02, moves: int = 30) -> Engine:
    """Random messages between the driver and three actors; every reply is checked."""
    dice = random.Random(seed)
    replies: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
    engine = chaos_engine(seed, deaths=deaths)
    with engine:
        members = engine.spawn(Member, count=3, name="member", on_failure="restart", max_restarts=1000)
        for member in members:
            member.send("meet", members, sticky=True)
            member.send("configure", 0, sticky=True)
        for number in range(1, moves):
            _move(engine, dice, members, number, replies)
        for member in members:
            member.send("answer", "driver", moves)
        while replies:
            future, check = replies.popleft()
            try:
                value = future.result()
            except ActorDied:
                assert deaths
            else:
                check(value)
            del future, check
        value = None  # a view of it would keep its memory
        transport: Any = engine.transport
        transport._deaths = 0.0
        while transport.step():
            pass
        sticky = [member.apply(lambda instance: instance.version) for member in members]
        for member, version in zip(members, sticky, strict=True):
            assert version.result() == member.sticky["configure"].args[0]
        assert engine.idle()
        _check_memory(engine)
    statistics = engine.statistics()
    assert statistics.outstanding == 0
    assert sum(event.lost for event in statistics.events) == sum(row.lost for row in statistics.actors)
    return engine


def _move(
    engine: Engine, dice: random.Random, members: list[Actor[Any]], number: int, replies: deque[Any]
) -> None:
    one, other = dice.sample(members, 2)
    size = dice.choice([3, LARGE])
    match dice.randrange(6):
        case 0:  # a reply that is forwarded to another actor, unopened
            made = one.call("make", "driver", number, size)
            reply = other.call("check", "driver", number, made, number)
            replies.append((reply, lambda value: _equal(value[0], number)))
            replies.append((made, lambda value: _equal(int(value["array"].sum()), number * size)))
        case 1:  # a value stored once and sent to all
            stored = engine.put({"number": number, "array": np.full(size, number)})
            for member in members:
                reply = member.call("check", "driver", number, stored, number)
                replies.append((reply, lambda value: _equal(value[0], number)))
        case 2:  # an actor sends to another
            made = {"number": number, "array": np.full(size, number)}
            one.send("pass_on", "driver", number, made, other.index, one.name)
        case 3:
            one.send("configure", number, sticky=True)
        case 4:
            replies.append((one.call("wait", "driver", number), lambda value: _equal(value, number)))
        case _:
            one.send("answer", "driver", number)


def _equal(one: Any, other: Any) -> None:
    assert one == other


def _check_memory(engine: Engine) -> None:
    """Every block that was lent has been returned, and is free again."""
    transport: Any = engine.transport
    for actor in engine.actors.values():
        actor.sticky.clear()
        actor.apply(lambda member: member.kept.clear()).result()
    gc.collect()
    for _ in range(3):  # a loan of a loan of a loan
        engine.results([actor.apply(_nothing) for actor in engine.actors.values()])
    arenas = {"the driver": transport._arena}
    arenas |= {actor: host._arena for actor, host in transport._hosts.items()}
    for arena in arenas.values():
        arena.fits(0)  # takes back what is free
    used = {owner: arena.used for owner, arena in arenas.items() if arena.used}
    assert not used, f"shared memory is free again: {used}"


def _nothing(_: Any) -> None:
    pass


@pytest.fixture(autouse=True)
def _old_objects_are_no_garbage() -> Iterator[None]:
    """Each schedule looks for garbage: not among what was there before, which may be much."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("deaths", [0.0, 0.02, 0.2])
def test_any_schedule(deaths: float) -> None:
    for seed in range(10):
        play(seed, deaths)


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("hundred", range(10))
def test_thousands_of_schedules(deaths: float, hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        play(seed, deaths)


def test_deaths_happen_and_are_survived() -> None:
    assert sum(len(play(seed, 0.05).events) for seed in range(5)) > 5


# Planted bugs ------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    """Register a planted bug."""
    BUGS[plant.__name__] = plant
    return plant


@bug
def a_loan_is_returned_while_views_live(patch: pytest.MonkeyPatch) -> None:
    views = serialization.Payload.fetch

    def early(self: Any) -> Any:
        if self.memory is not None and hasattr(self.memory, "_returned"):
            self.memory._returned.append(self.memory._loan)
        return views(self)

    patch.setattr(serialization.Payload, "fetch", early)


@bug
def loans_are_never_returned(patch: pytest.MonkeyPatch) -> None:
    frame = channel.Channel.frame

    def forgetful(self: Any, kind: str, *fields: Any) -> bytes:
        self._returned.clear()
        return frame(self, kind, *fields)

    patch.setattr(channel.Channel, "frame", forgetful)


@bug
def bytes_after_a_whole_frame_are_dropped(patch: pytest.MonkeyPatch) -> None:
    feed = channel.Channel.feed

    def careless(self: Any, received: Any) -> Any:
        frames = feed(self, received)
        if frames and len(self._input) < 8:
            self._input = b""
        return frames

    patch.setattr(channel.Channel, "feed", careless)


@bug
def references_arrive_as_something_else(patch: pytest.MonkeyPatch) -> None:
    part = Codec.part
    patch.setattr(Codec, "part", lambda self, own: part(self, own) if isinstance(own, Future) else 0)


@bug
def a_held_message_is_overtaken(patch: pytest.MonkeyPatch) -> None:
    def impatient(self: Any, actor: Any, message: Message) -> None:
        futures = self._futures_in(message)
        with actor.lock:
            if actor.up and not (futures and self._in_flight.hold(actor, futures)):
                self.deliver(actor, message, futures)
                return
            actor.held.append(message)
        self._transport.later(lambda: self.send_held(actor))

    patch.setattr(Dispatcher, "_deliver_or_hold", impatient)


@bug
def a_forwarded_reply_is_sent_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "hold", lambda self, actor, futures: False)


@bug
def an_actors_messages_come_after_its_reply(patch: pytest.MonkeyPatch) -> None:
    receive = FramedTransport.receive
    later: list[tuple[Any, ...]] = []

    def delayed(self: Any, *fields: Any) -> None:
        later.append(fields)

    def receive_then_post(self: Any, actor: Any, data: Any) -> None:
        receive(self, actor, data)
        if self.engine.in_flight.outstanding % 2:
            while later:
                on_post(self, *later.pop())

    on_post = FramedTransport._on_post
    patch.setattr(FramedTransport, "_frames", {**FramedTransport._frames, "post": delayed})
    patch.setattr(FramedTransport, "receive", receive_then_post)


@bug
def a_restart_forgets_sticky_messages(patch: pytest.MonkeyPatch) -> None:
    launch = FramedTransport.launch

    def forgetful(self: Any, actor: Any, first: Iterable[Message] = ()) -> bool:
        for message in first:
            self.engine.in_flight.settle(message)
        return launch(self, actor)

    patch.setattr(FramedTransport, "launch", forgetful)


@bug
def a_restart_repeats_sticky_messages_in_reverse(patch: pytest.MonkeyPatch) -> None:
    launch = FramedTransport.launch
    patch.setattr(
        FramedTransport, "launch", lambda self, actor, first=(): launch(self, actor, list(first)[::-1])
    )


@bug
def a_sticky_message_keeps_the_first_of_its_kind(patch: pytest.MonkeyPatch) -> None:
    post = Dispatcher.post

    def stubborn(self: Any, actor: Any, message: Message, sticky: str | None = None) -> None:
        post(self, actor, message, None if sticky in actor.sticky and message.args != (0,) else sticky)

    patch.setattr(Dispatcher, "post", stubborn)


@bug
def lost_messages_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Supervisor, "lose", lambda self, actor, messages, error: None)


@bug
def a_deferred_reply_overtakes_its_record(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Any, number: int, value: Deferred[Any], start: float, end: float) -> None:
        value.then(lambda late, error: self.send(LATE, number, *self._wrapped_result(late, error)))
        self.send(DONE, number, DEFERRED, None, start, end)

    patch.setattr(FramedHost, "_defer", hasty)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    plants = {code.co_name for code in BUGS[name].__code__.co_consts if isinstance(code, CodeType)}
    found: BaseException | None = None
    for seed in range(40):
        try:
            play(seed, 0.05)
        except (Exception, pytest.fail.Exception) as error:  # whatever breaks first
            found = error
            break
    monkeypatch.undo()
    gc.collect()
    assert found is not None, f"40 schedules did not find that {name.replace('_', ' ')}"
    last = traceback.extract_tb(found.__traceback__)[-1]
    assert last.name not in plants, f"the planted bug itself fails: {found!r}"
