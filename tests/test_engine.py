"""Every engine keeps the same rules; then what is particular to each, and the tools that check all this."""

import sys
import threading
from typing import Any

import pytest

import rollstream as rs
from rollstream.engine import Actor, ActorContext, Deferred, Engine
from rollstream.engine.actor import Message
from rollstream.engine.in_flight import InFlight
from rollstream.engine.inline import InlineTransport
from rollstream.engine.threads import ThreadsTransport
from rollstream.testing import chaos_engine
from rollstream.testing.engines import ENGINE_CHECKS, check_engine

ENGINES = ["inline", "threads"]


class Recorder:
    """Writes into a list of the test: these engines share memory with it."""

    def __init__(self, seen: list[Any]):
        self.seen = seen

    def note(self, item: Any) -> None:
        self.seen.append(item)

    def thread(self) -> threading.Thread:
        return threading.current_thread()

    def fail(self, error: BaseException) -> None:
        raise error

    def wait(self, event: threading.Event | threading.Barrier) -> None:
        event.wait(timeout=60)

    def note_and_send(self, handle: Actor["Recorder"], item: Any) -> None:
        handle.send("note", item)
        self.seen.append("sent")

    def defer(self) -> rs.Deferred[Any]:
        self.seen.append(rs.Deferred())
        return self.seen[-1]


class Clock:
    """Notes when its timers go off, which it sets for itself."""

    def __init__(self, *, context: ActorContext):
        self.actor, self.seen = context.actor, list[str]()

    def set(self, *timers: tuple[float, str]) -> None:
        for seconds, name in timers:
            self.actor.send_later(seconds, "ring", seconds, name)

    def ring(self, seconds: float, name: str) -> None:
        self.seen.append(name)
        if seconds == 3600.0:
            self.set((1.0, "later"), (0.5, "soon"))


# The rules of all engines ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ENGINES, "processes"])
@pytest.mark.parametrize("rule", ENGINE_CHECKS)
def test_rule(rule: str, name: str) -> None:
    ENGINE_CHECKS[rule](lambda: rs.engine(name))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", ENGINE_CHECKS)
def test_rule_under_chaos(rule: str, seed: int) -> None:
    ENGINE_CHECKS[rule](lambda: chaos_engine(seed))


@pytest.mark.parametrize("name", ENGINES)
def test_check_engine_accepts(name: str) -> None:
    check_engine(lambda: rs.engine(name))


def test_unknown_engine_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(rs.EngineError, match=r"'warp'.*inline, threads, processes"):
        rs.engine("warp")


@pytest.mark.parametrize("name", ENGINES)
def test_at_least_one_actor_is_spawned(name: str) -> None:
    with rs.engine(name) as engine, pytest.raises(rs.EngineError, match="at least one"):
        engine.spawn(Recorder, ([],), count=0)


class Unclosable(Recorder):
    """Writes down that it is closed, and fails."""

    def close(self) -> None:
        self.seen.append("closed")
        raise ValueError("cannot be closed")


@pytest.mark.parametrize("name", ENGINES)
def test_an_instance_that_cannot_be_closed_says_so_once_all_are_closed(name: str) -> None:
    seen: list[str] = []
    with pytest.raises(ValueError, match="cannot be closed"), rs.engine(name) as engine:
        engine.spawn(Unclosable, (seen,), count=2)
    assert seen == ["closed", "closed"]


@pytest.mark.parametrize("name", ENGINES)
def test_an_instance_that_cannot_be_closed_does_not_hide_the_error_that_ended_the_scope(name: str) -> None:
    seen: list[str] = []
    with pytest.raises(KeyError, match="mine"), rs.engine(name) as engine:  # noqa: PT012
        engine.spawn(Unclosable, (seen,), count=2)
        raise KeyError("mine")
    assert seen == ["closed", "closed"]


@pytest.mark.parametrize("name", ENGINES)
def test_waiting_in_vain_leaves_nothing_behind(name: str) -> None:
    with rs.engine(name) as engine:
        reply = engine.spawn(Recorder, ([],))[0].call("defer")
        for _ in range(10):
            engine.wait([reply], timeout=0)
        assert not reply.waiters


# Inline only -------------------------------------------------------------------------------------


def test_inline_handles_a_message_when_it_is_sent_in_the_thread_of_its_sender() -> None:
    seen: list[int] = []
    with rs.engine("inline") as engine:
        [recorder] = engine.spawn(Recorder, (seen,))
        recorder.send("note", 1)
        assert seen == [1]
        recorder.call("note", 2)
        assert seen == [1, 2]
        assert recorder.call("thread").result() is threading.current_thread()


def test_inline_raises_the_failure_of_a_send_right_there() -> None:
    with rs.engine("inline") as engine:
        [recorder] = engine.spawn(Recorder, ([],))
        with pytest.raises(ValueError, match="right here"):
            recorder.send("fail", ValueError("right here"))


def test_inline_handles_what_an_actor_sends_after_its_own_message() -> None:
    seen: list[Any] = []
    with rs.engine("inline") as engine:
        recorder, other = engine.spawn(Recorder, (seen,), count=2)
        recorder.send("note_and_send", other, "to another")
        recorder.send("note_and_send", recorder, "to itself")
        assert engine.idle()
    assert seen == ["sent", "to another", "sent", "to itself"]


def test_inline_knows_that_a_deferred_reply_cannot_come_while_its_caller_waits() -> None:
    with rs.engine("inline") as engine:
        [recorder] = engine.spawn(Recorder, ([],))
        reply = recorder.call("defer")
        with pytest.raises(rs.Deadlock, match=r"no reply to Recorder.defer can come"):
            reply.result()


def test_inline_lets_an_interrupt_through() -> None:
    with rs.engine("inline") as engine:
        [recorder] = engine.spawn(Recorder, ([],))
        with pytest.raises(KeyboardInterrupt):
            recorder.call("fail", KeyboardInterrupt())
        assert engine.idle()
        assert recorder.call("note", 1).result() is None


# Threads only ------------------------------------------------------------------------------------


def test_threads_run_actors_at_the_same_time() -> None:
    barrier = threading.Barrier(2)
    with rs.engine("threads") as engine:
        recorders = engine.spawn(Recorder, ([],), count=2)
        for reply in [recorder.call("wait", barrier) for recorder in recorders]:
            reply.result(timeout=60)


def test_threads_give_each_actor_a_thread_with_its_name() -> None:
    with rs.engine("threads") as engine:
        recorders = engine.spawn(Recorder, ([],), count=2, name="worker")
        threads = [recorder.call("thread").result() for recorder in recorders]
        assert [thread.name for thread in threads] == ["worker[0]", "worker[1]"]
        assert [recorder.call("thread").result() for recorder in recorders] == threads
    assert not any(thread.is_alive() for thread in threads)


def test_threads_refuse_what_was_not_handled_when_they_are_closed_in_a_hurry() -> None:
    seen: list[int] = []
    event = threading.Event()

    class Releases(ThreadsTransport):
        def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:
            event.set()
            super().stop(actors, hurry=hurry)

    with Engine(Releases()) as engine:
        [recorder] = engine.spawn(Recorder, (seen,))
        recorder.send("wait", event)
        reply = recorder.call("note", 1)
        engine.close(drain=False)
    with pytest.raises(rs.EngineClosed, match=r"Recorder.note: the engine was closed before it ran"):
        reply.result()
    assert seen == []


# The conformance suite finds faults --------------------------------------------------------------


class DropsSends(InlineTransport):
    def deliver(self, actor: Actor[Any], message: Message) -> None:
        if message.future is None:
            self.engine.in_flight.settle(message)
        else:
            super().deliver(actor, message)


class HoldsSends(InlineTransport):
    """Handles sends when the next call comes, or at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Actor[Any], Message]] = []

    def deliver(self, actor: Actor[Any], message: Message) -> None:
        if message.future is None:
            self.held.append((actor, message))
        else:
            self.release()
            super().deliver(actor, message)

    def release(self) -> None:
        while self.held:
            super().deliver(*self.held.pop(0))


class Reorders(HoldsSends):
    def release(self) -> None:
        self.held.reverse()
        super().release()


class LetsCallsOvertakeSends(HoldsSends):
    def deliver(self, actor: Actor[Any], message: Message) -> None:
        held, self.held = self.held, []
        super().deliver(actor, message)
        self.held += held
        if message.future is not None:
            self.release()


class SwallowsFailures(InFlight):
    def raise_failure(self) -> None:
        pass


class SwallowsErrors(InFlight):
    def settle(self, message: Message, value: Any = None, error: BaseException | None = None) -> None:
        super().settle(message, value, None)


class ChangesErrors(InFlight):
    def settle(self, message: Message, value: Any = None, error: BaseException | None = None) -> None:
        super().settle(message, value, error and RuntimeError(str(error)))


class SharesInstances(InlineTransport):
    def start(self, actors: list[Actor[Any]]) -> None:
        super().start(actors)
        for actor in actors:
            actor.connection.instance = actors[0].connection.instance


class ForgetsLocal(InlineTransport):
    def deliver(self, actor: Actor[Any], message: Message) -> None:
        actor.connection.context.local.clear()
        super().deliver(actor, message)


class CountsNothing(InlineTransport):
    def deliver(self, actor: Actor[Any], message: Message) -> None:
        super().deliver(actor, message)
        actor.messages = -1


class NeverCloses(InlineTransport):
    def stop(self, actors: list[Actor[Any]], *, hurry: bool) -> None:
        pass


class LetsActorsWait(InlineTransport):
    def sender(self) -> str:
        return "driver"


def engine_over(broken: type[Any]) -> Engine:
    """An engine with a broken transport, or with broken bookkeeping."""
    if issubclass(broken, InlineTransport):
        return Engine(broken())
    engine = Engine(InlineTransport())
    engine.in_flight.__class__ = broken
    return engine


BROKEN: dict[type[Any], str] = {
    SharesInstances: "actors_have_names_and_indices",
    SwallowsErrors: "errors_reach_the_caller",
    ChangesErrors: "errors_reach_the_caller",
    DropsSends: "messages_keep_their_order",
    Reorders: "messages_keep_their_order",
    LetsCallsOvertakeSends: "messages_keep_their_order",
    SwallowsFailures: "failing_sends_surface",
    ForgetsLocal: "apply_runs_beside_the_instance",
    HoldsSends: "failing_sends_surface",
    LetsActorsWait: "actors_do_not_wait_for_each_other",
    CountsNothing: "statistics_count",
    NeverCloses: "a_failing_constructor_fails_the_spawn",
}


@pytest.mark.parametrize(("broken", "rule"), BROKEN.items())
def test_check_engine_names_the_rule_that_is_broken(broken: type[Any], rule: str) -> None:
    with pytest.raises(AssertionError, match=f"the engine breaks the rule '{rule}': "):
        check_engine(lambda: engine_over(broken))


# What happens at the edges ------------------------------------------------------------------------------


class Unusual(BaseException):
    """Not an `Exception`."""


class Edge:
    def __init__(self) -> None:
        self.reply: Deferred[int] = Deferred()

    def never(self) -> Deferred[int]:
        return Deferred()

    def same(self) -> Deferred[int]:
        return self.reply

    def tell_and_note(self, other: Actor[Any], seen: list[Any]) -> None:
        other.send("fail", "told")
        seen.append(1)

    def one(self) -> int:
        return 1

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def leave(self) -> None:
        raise Unusual


def test_whatever_a_method_raises_reaches_the_caller() -> None:
    with rs.engine("threads") as engine:
        [edge] = engine.spawn(Edge)
        with pytest.raises(Unusual):
            edge.call("leave").result()
        assert edge.call("one").result() == 1


@pytest.mark.parametrize("name", ENGINES)
def test_one_deferred_reply_cannot_answer_two_calls(name: str) -> None:
    with rs.engine(name) as engine:
        [edge] = engine.spawn(Edge)
        edge.call("same")
        with pytest.raises(rs.EngineError, match="each call needs its own"):
            edge.call("same").result()
        assert edge.call("one").result() == 1


def test_several_failures_are_all_told() -> None:
    with pytest.raises(ValueError, match="one") as caught, rs.engine("threads") as engine:  # noqa: PT012
        [edge] = engine.spawn(Edge)
        edge.send("fail", "one")
        edge.send("fail", "two")
    assert any("two" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("name", ENGINES)
def test_a_failed_call_whose_reply_nobody_reads_surfaces(name: str) -> None:
    with pytest.raises(ValueError, match="unread"), rs.engine(name) as engine:
        engine.spawn(Edge)[0].call("fail", "unread")


def test_a_failure_is_not_raised_in_an_actor_that_has_nothing_to_do_with_it() -> None:
    seen: list[Any] = []
    with pytest.raises(ValueError, match="told"), rs.engine("threads") as engine:  # noqa: PT012
        first, second = engine.spawn(Edge, count=2)
        first.send("tell_and_note", second, seen)
    assert seen == [1]


class Slow:
    def __init__(self, event: threading.Event):
        self.event = event
        self.handled = 0

    def work(self) -> None:
        self.event.wait()
        self.handled += 1


class Quick:
    def work(self) -> None:
        pass


def test_a_mailbox_is_bounded() -> None:
    event = threading.Event()
    with rs.engine("threads") as engine:
        [slow] = engine.spawn(Slow, (event,))
        for _ in range(engine.mailbox_size):
            slow.send("work")
        assert engine.statistics().actors[0].queued == engine.mailbox_size
        opener = threading.Thread(target=event.set)
        opener.start()
        for _ in range(3 * engine.mailbox_size):
            slow.send("work")
            assert slow.outstanding <= engine.mailbox_size
        opener.join()
        assert slow.apply(lambda instance: instance.handled).result() == 4 * engine.mailbox_size


def test_a_mailbox_is_bounded_under_every_order_of_events() -> None:
    with chaos_engine(5) as engine:
        [slow] = engine.spawn(Quick)
        for _ in range(3000):
            slow.send("work")
            assert slow.outstanding <= engine.mailbox_size


def test_actors_spawned_at_the_same_time_have_names_of_their_own() -> None:
    with rs.engine("threads") as engine:

        def spawn() -> None:
            for _ in range(20):
                engine.spawn(Edge)

        threads = [threading.Thread(target=spawn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(engine.actors) == 80


def test_a_constructor_that_fails_is_named() -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError("no such rom")

    for name in ENGINES:
        with rs.engine(name) as engine, pytest.raises(OSError, match="no such rom") as caught:
            engine.spawn(Broken, name="player")
        assert caught.value.__notes__ == ["raised while player was built"]


def test_spawn_says_what_it_wants() -> None:
    with rs.engine("inline") as engine:
        with pytest.raises(rs.EngineError, match="takes a class"):
            engine.spawn(Failing())  # pyright: ignore[reportArgumentType]
        with pytest.raises(rs.EngineError, match="the number of actors is count="):
            engine.spawn(Failing, 4)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ENGINES)
def test_a_reply_that_was_waited_for_has_been_seen(name: str) -> None:
    with rs.engine(name) as engine:
        [ready], _ = engine.wait([engine.spawn(Edge)[0].call("fail", "seen")])
        assert isinstance(ready.error, ValueError)


def test_the_scope_closes_also_when_a_flow_cannot() -> None:
    def fail() -> None:
        raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"), rs.engine("threads") as engine:  # noqa: PT012
        engine.spawn(Edge)
        engine.join(engine.sink(), fail)
    assert engine.closed


def test_ctrl_c_in_the_middle_of_a_message_does_not_keep_the_scope_open() -> None:
    class Interrupted(ThreadsTransport):
        def deliver(self, actor: Actor[Any], message: Message) -> None:
            if message.label.endswith("one"):
                raise KeyboardInterrupt
            super().deliver(actor, message)

    with Engine(Interrupted()) as engine:
        [edge] = engine.spawn(Edge)
        with pytest.raises(KeyboardInterrupt):
            edge.send("one")
    assert engine.closed


def test_driver_is_not_a_name_for_an_actor() -> None:
    with rs.engine("threads") as engine:
        [edge] = engine.spawn(Edge, name="driver")
        assert edge.name != "driver"
        assert edge.call("one").result() == 1


class Quitter:
    def __init__(self, code: int | None = None):
        if code is not None:
            sys.exit(code)

    def quit(self) -> None:
        sys.exit(3)


@pytest.mark.parametrize("name", ["inline", "threads", "processes", "ray"])
def test_an_actor_cannot_end_the_program(name: str) -> None:
    with rs.engine(name) as engine:
        [quitter] = engine.spawn(Quitter)
        with pytest.raises(rs.EngineError, match=r"Quitter.quit called sys.exit\(3\), but an actor cannot"):
            quitter.call("quit").result()
        with pytest.raises(rs.EngineError, match=r"the constructor of Quitter-2 called sys.exit\(4\)"):
            engine.spawn(Quitter, (4,))


@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
def test_an_error_that_was_waited_for_does_not_come_up_again(name: str) -> None:
    with rs.engine(name) as engine:
        [edge] = engine.spawn(Failing)
        with pytest.raises(ValueError, match="sent"):
            _both(engine, edge)


def _both(engine: rs.Engine, failing: rs.Actor[Any]) -> None:
    failing.send("fail", "sent")
    engine.results([failing.call("fail", "called")])


class Failing:
    def fail(self, text: str) -> None:
        raise ValueError(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"count": 2.0}, "count=2.0: spawn a whole number"),
        ({"deadline": "3"}, "deadline='3': give the seconds"),
        ({"deadline": float("nan")}, "deadline=nan: give the seconds"),
        ({"max_restarts": 1.5}, "max_restarts=1.5: give a whole number"),
        ({"resources": [1]}, r"resources=\[1\]: give them by name"),
        ({"resources": {"num_cpus": -1}}, "num_cpus must be a number"),
    ],
)
def test_spawn_options_are_checked(options: dict[str, Any], text: str) -> None:
    with rs.engine("inline") as engine, pytest.raises(rs.EngineError, match=text):
        engine.spawn(Failing, **options)


@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
def test_a_callback_is_checked(name: str) -> None:
    with pytest.raises(rs.EngineError, match="on_event=5: give a function"):
        rs.engine(name, on_event=5)  # pyright: ignore[reportArgumentType]


def test_who_closes_is_told_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(sys.modules["rollstream.engine.engine"], "REMINDER", 0.01)
    with rs.engine("threads") as engine:
        [edge] = engine.spawn(Waiting, (gate,))
        edge.send("wait")
        say = engine._say_what_is_waited_for
        monkeypatch.setattr(engine, "_say_what_is_waited_for", lambda: (say(), gate.set()))
    assert "Waiting is not done yet. Press Ctrl-C" in capsys.readouterr().err


class Waiting:
    def __init__(self, gate: threading.Event):
        self.gate = gate

    def wait(self) -> None:
        self.gate.wait()


@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
def test_an_operator_on_a_shard_cannot_end_the_program(name: str) -> None:
    def leave(item: int) -> None:
        sys.exit(item)

    with rs.engine(name) as engine:
        shards = rs.flow.from_actors(engine.spawn(Counting), "next")
        with pytest.raises(rs.OperatorError, match=r"leave.*sys.exit\(1\)"):
            next(shards.for_each(leave).gather_sync())


class Counting:
    def next(self) -> int:
        return 1


# Time on engines with one thread -----------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_time_is_virtual_where_the_driver_runs_the_actors(seed: int | None) -> None:
    """Hours pass at once, in order, when the driver waits; until then the engine is not idle.

    Under chaos they may pass before the next message is under way.
    """
    with rs.engine("inline") if seed is None else chaos_engine(seed) as engine:
        [clock] = engine.spawn(Clock)
        timers = (7200.0, "last"), (3600.0, "first"), (3600.0, "second")
        clock.call("set", *timers).result()
        if seed is None:
            assert clock.apply(lambda own: own.seen).result() == []
            assert not engine.idle()
        sink = engine.sink()
        while not engine.idle():
            sink.wait()
        expected = ["first", "second", "soon", "soon", "later", "later", "last"]
        seen = clock.apply(lambda own: own.seen).result()
        assert seen == expected if seed is None else sorted(seen) == sorted(expected)
