"""The rules of an engine, each as a check: an engine that passes them all carries any flow.

No check shares memory with its actors, so that they may live anywhere on this machine, and none sleeps.

>>> import rollstream as rs
>>> check_engine(lambda: rs.engine("inline"))
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollstream.engine import Actor, Engine, EngineClosed, EngineError
from rollstream.testing.engine_actors import (
    Answerer,
    Caller,
    Door,
    Journal,
    Recorder,
    Relay,
    StrangeError,
    Timer,
    Unbuildable,
    note,
    tally,
)

__all__ = ["ENGINE_CHECKS", "check_engine"]

Factory = Callable[[], Engine]
Check = Callable[[Factory], None]

ENGINE_CHECKS: dict[str, Check] = {}
"""Every check by name: a function of something that opens a fresh engine. It raises if the rule is broken."""

PATIENCE = 60.0
"""Seconds after which a reply is taken for lost."""


def check_engine(factory: Factory) -> None:
    """Check that an engine keeps every rule.

    Args:
        factory: opens a fresh engine, over and over, for example `lambda: Engine(MyTransport())`.

    Raises:
        AssertionError: the engine breaks a rule, which the message names; the cause says how.
    """
    for name, check in ENGINE_CHECKS.items():
        try:
            check(factory)
        except Exception as error:
            raise AssertionError(f"the engine breaks the rule {name!r}: {check.__doc__}") from error


# How checks are written -------------------------------------------------------------------------


def _rule(check: Check) -> Check:
    """A check that opens engines itself."""
    ENGINE_CHECKS[check.__name__] = check
    return check


def _rule_inside(check: Callable[[Engine], None]) -> Check:
    """A check inside the scope of one engine."""

    @functools.wraps(check)
    def on_fresh_engine(factory: Factory) -> None:
        with factory() as engine:
            check(engine)

    return _rule(on_fresh_engine)


@contextmanager
def _raises(kind: type[Exception], *texts: str) -> Iterator[list[Exception]]:
    """Exactly this kind of error comes, and its text and notes contain these; the list will hold it."""
    caught: list[Exception] = []
    try:
        yield caught
    except Exception as error:
        caught.append(error)
    assert [type(error) for error in caught] == [kind], f"{kind.__name__} was due, but there was {caught}"
    shown = "\n".join([str(caught[0]), *getattr(caught[0], "__notes__", ())])
    assert all(text in shown for text in texts), f"{texts} should be in: {shown}"


def _ask(actor: Actor[Any], method: str, *args: Any) -> Any:
    return actor.call(method, *args).result(PATIENCE)


# The rules --------------------------------------------------------------------------------------


@_rule_inside
def actors_have_names_and_indices(engine: Engine) -> None:
    """Each actor has a name of its own and its index; the instance learns both, and how many there are."""
    [single], several, others = (engine.spawn(Recorder, count=count, name="worker") for count in (1, 3, 3))
    [taken] = engine.spawn(Recorder, name=several[0].name)
    assert len({actor.name for actor in [single, *several, *others, taken]}) == 8
    assert [actor.index for actor in [single, *several, *others]] == [0, 0, 1, 2, 0, 1, 2]
    assert _ask(single, "who")[:4] == ("worker", 0, 1, 0)
    for actor in [*several, *others]:
        assert _ask(actor, "who")[:4] == (actor.name, actor.index, 3, 0)


@_rule_inside
def constructors_get_their_arguments(engine: Engine) -> None:
    """Positional and keyword arguments reach every constructor."""
    for actor in engine.spawn(Recorder, (1, "two"), {"label": "three"}, count=2):
        assert _ask(actor, "seen") == [1, "two"]
        assert _ask(actor, "who")[4] == "three"


@_rule_inside
def a_failing_constructor_fails_the_spawn(engine: Engine) -> None:
    """`spawn` raises what a constructor raised and closes what was built; the engine goes on."""
    with tempfile.TemporaryDirectory() as folder:
        with _raises(StrangeError, "cannot be built"):
            engine.spawn(Unbuildable, (folder,), count=3)
        assert Path(folder, "0").read_text().split() == ["closed"]
    [recorder] = engine.spawn(Recorder)
    assert _ask(recorder, "note", 1) == 1


@_rule_inside
def calls_reply(engine: Engine) -> None:
    """A call returns what the method returned; instances share nothing."""
    one, other = engine.spawn(Recorder, count=2)
    replies = [one.call("note", 1), other.call("note", 2), one.call("note", None)]
    assert [reply.result(PATIENCE) for reply in replies] == [1, 2, None]
    assert (_ask(one, "seen"), _ask(other, "seen")) == ([1, None], [2])


@_rule_inside
def errors_reach_the_caller(engine: Engine) -> None:
    """An error keeps its type and text, names the actor and the method, and the actor goes on."""
    [recorder] = engine.spawn(Recorder, (1,))
    with _raises(StrangeError, "so it is", recorder.name, "fail"):
        _ask(recorder, "fail", "so it is")
    with _raises(TypeError):
        _ask(recorder, "note")
    assert _ask(recorder, "seen") == [1]


@_rule_inside
def unknown_methods_are_refused(engine: Engine) -> None:
    """A method the class does not have is an error of the sender, and the message says which there are."""
    [recorder] = engine.spawn(Recorder)
    for verb in (recorder.call, recorder.send):
        with _raises(EngineError, "missing", "note", "seen"):
            verb("missing")


@_rule_inside
def messages_keep_their_order(engine: Engine) -> None:
    """One sender's messages are handled in the order sent, whichever verbs it uses."""
    [recorder] = engine.spawn(Recorder)
    for number in range(0, 200, 4):
        recorder.call("note", number)
        assert recorder.send("note", number + 1) is None
        recorder.send("note", number + 2)
        recorder.apply(note, number + 3)
    assert _ask(recorder, "seen") == list(range(200))


@_rule_inside
def senders_keep_their_order(engine: Engine) -> None:
    """Messages that actors send are kept in order for each of them."""
    [recorder] = engine.spawn(Recorder)
    relays = engine.spawn(Relay, (recorder,), count=3)
    replies = [relay.call("send", *((relay.index, number) for number in range(50))) for relay in relays]
    engine.wait(replies, count=3, timeout=PATIENCE)
    seen = _ask(recorder, "seen")
    for relay in relays:
        assert [number for index, number in seen if index == relay.index] == list(range(50))


@_rule
def failing_sends_surface(factory: Factory) -> None:
    """The error of a message nobody awaits is raised before the scope is left, also if it comes late."""
    with _raises(StrangeError, "nobody waits"), factory() as engine:
        [recorder] = engine.spawn(Recorder)
        recorder.send("fail", "nobody waits")
    with _raises(StrangeError, "late"), factory() as engine:
        [door] = engine.spawn(Door)
        door.send("enter")
        _ask(door, "refuse", 0, "late")


@_rule_inside
def references_arrive_as_values(engine: Engine) -> None:
    """What `put` returns stands for the value in every verb."""
    stored = engine.put([1, 2])
    assert stored.get() == [1, 2]
    [recorder] = engine.spawn(Recorder, (stored,), {"label": engine.put("by keyword")})
    assert _ask(recorder, "who")[4] == "by keyword"
    recorder.send("note", stored)
    recorder.apply(note, stored)
    assert _ask(recorder, "note", stored) == [1, 2]
    assert _ask(recorder, "seen") == [[1, 2]] * 4


@_rule_inside
def futures_arrive_as_values(engine: Engine) -> None:
    """A reply to come stands for its value in every verb, and its error becomes the message's."""
    source, recorder = engine.spawn(Recorder, (1,), count=2)
    recorder.send("note", source.call("note", 2))
    recorder.apply(note, source.call("note", 3))
    assert _ask(recorder, "note", source.call("note", 4)) == 4
    assert _ask(recorder, "seen") == [1, 2, 3, 4]
    with _raises(StrangeError, "upstream"):
        _ask(recorder, "note", source.call("fail", "upstream"))


@_rule_inside
def apply_runs_beside_the_instance(engine: Engine) -> None:
    """A function gets the instance, and keeps things of its own in `context.local`, for each actor."""
    one, other = engine.spawn(Recorder, kwargs={"label": "here"}, count=2)
    assert one.apply(note, "applied").result(PATIENCE) == "applied"
    assert _ask(one, "seen") == ["applied"]
    assert one.apply(tally, 2).result(PATIENCE) == ("here", 2)
    assert one.apply(tally, 3).result(PATIENCE) == ("here", 5)
    assert other.apply(tally, 1).result(PATIENCE) == ("here", 1)


@_rule_inside
def handles_travel(engine: Engine) -> None:
    """An actor can be given a handle and send to it; a copy of a handle is the handle."""
    [recorder] = engine.spawn(Recorder)
    [relay] = engine.spawn(Relay, (recorder,))
    _ask(relay, "send", 1)
    _ask(relay, "send_to", recorder, 2)
    assert copy.copy(recorder) is recorder
    assert copy.deepcopy({"kept": [recorder]})["kept"][0] is recorder
    assert _ask(recorder, "seen") == [1, 2]


@_rule_inside
def wait_returns_when_enough_are_done(engine: Engine) -> None:
    """`wait` returns the done and the others, each in the order given; a timeout is no error."""
    [door] = engine.spawn(Door)
    first, second, third = replies = [door.call("enter") for _ in range(3)]
    assert engine.wait(replies, timeout=0.001) == ([], replies)
    door.send("admit", 1, "second")
    assert engine.wait(replies, timeout=PATIENCE) == ([second], [first, third])
    door.send("admit", 0, "first")
    assert engine.wait(replies, count=2, timeout=PATIENCE) == ([first, second], [third])
    assert engine.wait(replies, count=3, timeout=0.001) == ([first, second], [third])
    door.send("admit", 2, "third")
    assert engine.wait(replies, count=3, timeout=PATIENCE) == (replies, [])
    with _raises(EngineError, "4", "3"):
        engine.wait(replies, count=4)


@_rule_inside
def deferred_replies_wait(engine: Engine) -> None:
    """Callers wait for a deferred reply while the actor goes on; each gets its own, once."""
    [door] = engine.spawn(Door)
    first, second, third = (door.call("enter") for _ in range(3))
    assert _ask(door, "count") == 3
    with _raises(TimeoutError, "enter"):
        first.result(timeout=0.001)
    for guest, value in enumerate(["one", "two"]):
        _ask(door, "admit", guest, value)
    _ask(door, "refuse", 2, "full")
    assert (first.result(PATIENCE), second.result(PATIENCE)) == ("one", "two")
    with _raises(StrangeError, "full"):
        third.result(PATIENCE)
    with _raises(EngineError, "twice"):
        _ask(door, "admit", 0, "again")
    assert first.result() == "one"


@_rule_inside
def a_failed_reply_fails_whatever_waits_for_it(engine: Engine) -> None:
    """Messages that carry a reply, and those that carry their replies, fail with it; others go on."""
    [door], [recorder] = engine.spawn(Door), engine.spawn(Recorder)
    chain = [door.call("enter")]
    for _ in range(3):
        chain.append(recorder.call("note", chain[-1]))
    after = recorder.call("note", "after")
    _ask(door, "refuse", 0, "full")
    for reply in chain:
        with _raises(StrangeError, "full"):
            reply.result(PATIENCE)
    assert after.result(PATIENCE) == "after"
    assert _ask(recorder, "seen") == ["after"]


@_rule_inside
def actors_answer_each_other_with_deferred_replies(engine: Engine) -> None:
    """An actor that needs another's answer sends, defers its own reply, and completes it when told."""
    [answerer] = engine.spawn(Answerer)
    callers = engine.spawn(Caller, (answerer,), count=3)
    replies = [caller.call("ask", caller, number) for number in range(10) for caller in callers]
    assert engine.results(replies) == [2 * number for number in range(10) for _ in callers]


@_rule_inside
def actors_do_not_wait_for_each_other(engine: Engine) -> None:
    """A call from inside an actor is refused, with the way out."""
    [recorder] = engine.spawn(Recorder)
    [relay] = engine.spawn(Relay, (recorder,))
    with _raises(EngineError, "Recorder.note", "Deferred"):
        _ask(relay, "ask", recorder, 1)
    assert _ask(recorder, "seen") == []


@_rule
def delayed_messages_come(factory: Factory) -> None:
    """What anybody sends for later comes; leaving the scope waits for it, and raises its errors."""
    with tempfile.TemporaryDirectory() as folder:
        with factory() as engine:
            [timer], [journal] = engine.spawn(Timer), engine.spawn(Journal, (folder,))
            for delays in ([0.0], [0.002, 0.001, 0.0]):
                assert sorted(_ask(timer, "start", *delays)) == sorted(delays)
            journal.send_later(0.001, "write", "driver's")
            [recorder] = engine.spawn(Recorder)
            journal.send_later(0.0, "write", recorder.call("note", "reply's"))
            _ask(timer, "start_for", journal, "actor's")
            with _raises(EngineError, "missing", "note"):
                timer.send_later(0.0, "missing")
        assert sorted(Path(folder, "0").read_text().split()) == ["actor's", "closed", "driver's", "reply's"]
    with _raises(StrangeError, "too late"), factory() as engine:
        _ask(engine.spawn(Timer)[0], "fail", "too late")


@_rule_inside
def statistics_count(engine: Engine) -> None:
    """The engine counts each actor's messages and failures."""
    recorder, idle = engine.spawn(Recorder, count=2, name="recorder")
    recorder.send("note", 1)
    with _raises(StrangeError):
        _ask(recorder, "fail", "counted")
    _ask(recorder, "seen")
    busy, free = engine.statistics().actors
    assert (busy.name, busy.messages, busy.failures, busy.restarts) == (recorder.name, 3, 1, 0)
    assert (free.name, free.messages, free.failures, free.busy) == (idle.name, 0, 0, 0.0)
    _ask(recorder, "seen")
    assert busy.messages == 3, "statistics are a snapshot"


@_rule
def leaving_the_scope_ends_every_actor(factory: Factory) -> None:
    """Messages already sent are handled first; then every instance is closed, once."""
    with tempfile.TemporaryDirectory() as folder:
        with factory() as engine:
            for actor in engine.spawn(Journal, (folder,), count=3):
                for number in range(20):
                    actor.send("write", str(number))
        expected = [*map(str, range(20)), "closed"]
        assert [Path(folder, str(index)).read_text().split() for index in range(3)] == [expected] * 3


@_rule
def errors_leave_the_scope_unchanged(factory: Factory) -> None:
    """The error that ends a scope goes through it as it is, and every instance is closed all the same."""
    error = StrangeError("mine")
    with tempfile.TemporaryDirectory() as folder:
        with _raises(StrangeError) as caught, factory() as engine:
            _ask(engine.spawn(Journal, (folder,))[0], "write", "started")
            raise error
        assert caught[0] is error
        assert Path(folder, "0").read_text().split() == ["started", "closed"]


@_rule
def a_closed_engine_says_so(factory: Factory) -> None:
    """After the scope every verb and every reply that never came raises `EngineClosed`; it closes once."""
    with factory() as engine:
        [recorder] = engine.spawn(Recorder)
        reply = engine.spawn(Door)[0].call("enter")
    engine.close()
    verbs: list[Callable[[], object]] = [
        lambda: recorder.call("seen"),
        lambda: recorder.send("note", 1),
        lambda: recorder.apply(note, 1),
        lambda: engine.spawn(Recorder),
        lambda: engine.put(1),
        lambda: engine.__enter__(),
        lambda: reply.result(PATIENCE),
    ]
    for verb in verbs:
        with _raises(EngineClosed, "closed"):
            verb()
