"""Every engine keeps the same rules; then what is particular to each, and the tools that check all this."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

import rollstream as rs
from rollstream.engine import (
    Actor,
    ActorContext,
    Deferred,
    Engine,
    Future,
    InlineEngine,
    ReentryError,
    ThreadsEngine,
)
from rollstream.engine.actor import ActorSlot, Message
from rollstream.engine.in_flight import InFlight
from rollstream.engine.supervision import SpawnOptions
from rollstream.testing import ChaosEngine
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

    def note_through(self, handle: Actor["Recorder"], item: Any) -> None:
        handle.call("note", item).result()

    def pass_on(self, through: Actor["Recorder"], handle: Actor["Recorder"], item: Any) -> None:
        through.call("note_through", handle, item).result()

    def defer(self) -> rs.Deferred[Any]:
        self.seen.append(rs.Deferred())
        return self.seen[-1]


# The rules of all engines ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ENGINES, "processes"])
@pytest.mark.parametrize("rule", ENGINE_CHECKS)
def test_rule(rule: str, name: str) -> None:
    ENGINE_CHECKS[rule](lambda: rs.engine(name))


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


def test_inline_refuses_reentry() -> None:
    seen: list[int] = []
    with rs.engine("inline") as engine:
        recorder, other = engine.spawn(Recorder, (seen,), count=2)
        with pytest.raises(ReentryError, match=r"Recorder\[0\].note was sent while Recorder\[0\]"):
            recorder.call("note_through", recorder, 1).result()
        with pytest.raises(ReentryError):
            recorder.call("pass_on", other, recorder, 1).result()
        assert engine.idle()
        recorder.call("note_through", other, 2).result()
    assert seen == [2]


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


def test_threads_run_tasks_beside_the_driver() -> None:
    event = threading.Event()
    with rs.engine("threads") as engine:
        reply = engine.submit(event.wait, 60)
        event.set()
        assert reply.result(timeout=60)


def test_threads_give_each_actor_a_thread_with_its_name() -> None:
    with rs.engine("threads") as engine:
        recorders = engine.spawn(Recorder, ([],), count=2, name="worker")
        threads = [recorder.call("thread").result() for recorder in recorders]
        assert [thread.name for thread in threads] == ["worker[0]", "worker[1]"]
        assert [recorder.call("thread").result() for recorder in recorders] == threads
    assert not any(thread.is_alive() for thread in threads)


def test_threads_tell_an_actor_that_waits_for_itself() -> None:
    seen: list[int] = []
    with rs.engine("threads") as engine:
        [recorder] = engine.spawn(Recorder, (seen,))
        with pytest.raises(ReentryError, match=r"Recorder waits for Recorder.note"):
            recorder.call("note_through", recorder, 1).result()
    assert seen == [1], "the message itself was sent, and is handled afterwards"


def test_threads_repeat_what_was_sticky_when_it_was_asked_for() -> None:
    seen: list[str] = []
    event = threading.Event()
    with rs.engine("threads") as engine:
        [recorder] = engine.spawn(Recorder, (seen,))
        recorder.send("note", "one", sticky=True)
        recorder.send("wait", event)
        recorder.restart()
        recorder.send("note", "between")
        recorder.send("note", "two", sticky=True)
        event.set()
    assert seen == ["one", "one", "between", "two"]


class Releases(ThreadsEngine):
    """Sets an event once it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def _stop(self) -> None:
        self.event.set()
        super()._stop()


def test_threads_refuse_what_was_not_handled_when_they_are_closed_in_a_hurry() -> None:
    seen: list[int] = []
    with Releases() as engine:
        [recorder] = engine.spawn(Recorder, (seen,))
        recorder.send("wait", engine.event)
        reply = recorder.call("note", 1)
        engine.close(drain=False)
    with pytest.raises(rs.EngineClosed, match=r"Recorder.note: the engine was closed before it ran"):
        reply.result()
    assert seen == []


# The conformance suite finds faults --------------------------------------------------------------


class DropsSends(InlineEngine):
    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        if message.future is None:
            self.in_flight.settle(message)
        else:
            super()._deliver(actor, message)


class HoldsSends(InlineEngine):
    """Handles sends when the next call comes, or at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Actor[Any], Message]] = []

    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        if message.future is None:
            self.held.append((actor, message))
        else:
            self.release()
            super()._deliver(actor, message)

    def release(self) -> None:
        while self.held:
            super()._deliver(*self.held.pop(0))

    def _drain(self) -> None:
        self.release()


class DropsSendsAtTheEnd(HoldsSends):
    def _drain(self) -> None:
        self.held.clear()


class Reorders(HoldsSends):
    def release(self) -> None:
        self.held.reverse()
        super().release()


class LetsCallsOvertakeSends(HoldsSends):
    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        held, self.held = self.held, []
        super()._deliver(actor, message)
        self.held += held
        if message.future is not None:
            self.release()


class KeepsBooks(InlineEngine):
    books: type[InFlight]

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = self.books()


class SwallowsFailures(KeepsBooks):
    class books(InFlight):  # noqa: N801
        def raise_failure(self) -> None:
            pass


class SwallowsErrors(KeepsBooks):
    class books(InFlight):  # noqa: N801
        def settle(self, message: Message, value: Any = None, error: BaseException | None = None) -> None:
            super().settle(message, value, None)


class ChangesErrors(KeepsBooks):
    class books(InFlight):  # noqa: N801
        def settle(self, message: Message, value: Any = None, error: BaseException | None = None) -> None:
            super().settle(message, value, error and RuntimeError(str(error)))


class SharesNames(InlineEngine):
    def _free_name(self, name: str) -> str:
        return name


class SharesInstances(InlineEngine):
    def _start(self, cells: list[ActorSlot], terms: SpawnOptions) -> list[Actor[Any]]:
        actors = super()._start(cells, terms)
        for cell in cells:
            cell.instance = cells[0].instance
        return actors


class ForgetsSticky(InlineEngine):
    def restart(self, actor: Actor[Any]) -> Future[None]:
        actor.sticky.clear()
        return super().restart(actor)


class KeepsEverything(InlineEngine):
    def post(self, actor: Actor[Any], message: Message, kind: str | None = None) -> None:
        is_restart = message.label.endswith(".restart")
        super().post(actor, message, None if is_restart else kind or str(len(actor.sticky)))


class RestartsNothing(InlineEngine):
    def restart(self, actor: Actor[Any]) -> Future[None]:
        actor.restarts += 1
        return actor.apply(lambda instance: None)


class ForgetsLocal(InlineEngine):
    def _handle(self, actor: Actor[Any], message: Message) -> None:
        actor.cell.context.local.clear()
        super()._handle(actor, message)


class CountsNothing(InlineEngine):
    def _handle(self, actor: Actor[Any], message: Message) -> None:
        super()._handle(actor, message)
        actor.messages = 0


class NeverCloses(InlineEngine):
    def _stop(self) -> None:
        pass


class StaysOpen(InlineEngine):
    def require_open(self) -> None:
        pass


class ReplacesErrors(InlineEngine):
    def close(self, *, drain: bool = True) -> None:
        super().close(drain=drain)
        if not drain:
            raise RuntimeError("closed in a hurry")


class MixesUpTheReady(InlineEngine):
    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        ready, pending = super().wait(futures, count, timeout)
        return ready[::-1], pending


class TimesOut(InlineEngine):
    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        ready, pending = super().wait(futures, count, timeout)
        if len(ready) < count:
            raise TimeoutError
        return ready, pending


BROKEN: dict[type[Engine], str] = {
    SharesNames: "actors_have_names_and_indices",
    SharesInstances: "actors_have_names_and_indices",
    SwallowsErrors: "errors_reach_the_caller",
    ChangesErrors: "errors_reach_the_caller",
    DropsSends: "messages_keep_their_order",
    Reorders: "messages_keep_their_order",
    LetsCallsOvertakeSends: "messages_keep_their_order",
    SwallowsFailures: "failing_sends_surface",
    ReplacesErrors: "failing_sends_surface",
    DropsSendsAtTheEnd: "failing_sends_surface",
    ForgetsLocal: "apply_runs_beside_the_instance",
    HoldsSends: "wait_returns_when_enough_are_done",
    MixesUpTheReady: "wait_returns_when_enough_are_done",
    TimesOut: "wait_returns_when_enough_are_done",
    ForgetsSticky: "restarts_repeat_sticky_messages",
    KeepsEverything: "restarts_repeat_sticky_messages",
    RestartsNothing: "restarts_repeat_sticky_messages",
    CountsNothing: "statistics_count",
    NeverCloses: "leaving_the_scope_ends_every_actor",
    StaysOpen: "a_closed_engine_says_so",
}


@pytest.mark.parametrize(("broken", "rule"), BROKEN.items())
def test_check_engine_names_the_rule_that_is_broken(broken: type[Engine], rule: str) -> None:
    with pytest.raises(AssertionError, match=f"the engine breaks the rule '{rule}': "):
        check_engine(broken)


# What happens at the edges ------------------------------------------------------------------------------


class Unusual(BaseException):
    """Not an `Exception`."""


class Edge:
    def __init__(self, *, context: ActorContext) -> None:
        if context.restarts == 1:
            raise ValueError("not twice")
        self.reply: Deferred[int] = Deferred()

    def never(self) -> Deferred[int]:
        return Deferred()

    def same(self) -> Deferred[int]:
        return self.reply

    def ask(self, other: Actor[Any]) -> Any:
        return other.call("never").result()

    def tell_and_ask(self, other: Actor[Any], seen: list[Any]) -> None:
        other.send("fail", "told")
        seen.append(other.call("one").result())

    def one(self) -> int:
        return 1

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def leave(self) -> None:
        raise Unusual


def test_an_actor_that_waits_in_vain_does_not_keep_the_scope_open() -> None:
    for clean in (True, False):
        with rs.engine("threads") as engine:
            first, second = engine.spawn(Edge, count=2)
            waiting = first.call("ask", second)
            assert second.call("one").result() == 1
            engine.close(drain=clean)
        with pytest.raises(rs.EngineClosed):
            waiting.result()


def test_an_actor_that_waits_in_vain_is_a_deadlock_of_the_flow() -> None:
    with rs.engine("threads") as engine:
        first, second = engine.spawn(Edge, count=2)
        plan = rs.flow.from_items([second]).via(first, "ask")
        with pytest.raises(rs.Deadlock, match=r"Edge\.ask"):
            next(plan)


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


def test_tasks_that_never_ran_say_so() -> None:
    queued: list[Future[int]] = []
    ready = threading.Event()

    def hold() -> None:
        ready.wait()
        with suppress(rs.EngineClosed):
            queued[0].result()

    engine = ThreadsEngine()
    engine._tasks = ThreadPoolExecutor(1)
    engine.submit(hold)
    queued.append(engine.submit(int))
    ready.set()
    engine.close(drain=False)
    with pytest.raises(rs.EngineClosed):
        queued[0].result()


@pytest.mark.parametrize("name", ENGINES)
def test_a_restart_that_fails_says_so(name: str) -> None:
    with rs.engine(name) as engine:
        [edge] = engine.spawn(Edge)
        with pytest.raises(ValueError, match="not twice"):
            edge.restart().result()
        with pytest.raises(rs.EngineError, match="Edge has no instance"):
            edge.call("one").result()
        edge.restart().result()
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
        first.send("tell_and_ask", second, seen)
    assert seen == [1]


class Slow:
    def __init__(self, event: threading.Event):
        self.event = event
        self.handled = 0

    def work(self) -> None:
        self.event.wait()
        self.handled += 1


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
    event = threading.Event()
    event.set()
    with ChaosEngine(5) as engine:
        [slow] = engine.spawn(Slow, (event,))
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


class Peer:
    def meet(self, other: Actor[Any]) -> None:
        self.other = other

    def ask(self) -> Any:
        return self.other.call("ask").result()


def test_actors_that_wait_for_each_other_are_a_deadlock_of_the_flow() -> None:
    with rs.engine("threads") as engine:
        first, second = engine.spawn(Peer, count=2)
        first.send("meet", second)
        second.send("meet", first)
        plan = rs.flow.from_actors([first], "ask").gather_async()
        with pytest.raises(rs.Deadlock, match=r"gather_async waits for .*Peer\[0\]"):
            next(plan)


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
            engine.spawn(Peer())  # pyright: ignore[reportArgumentType]
        with pytest.raises(rs.EngineError, match="how many is count="):
            engine.spawn(Peer, 4)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ENGINES)
def test_replies_held_back_by_an_instance_end_with_it(name: str) -> None:
    with rs.engine(name) as engine:
        [recorder] = engine.spawn(Recorder, ([],))
        reply = recorder.call("defer")
        recorder.restart().result()
        with pytest.raises(rs.EngineError, match=r"Recorder.defer: Recorder was restarted before it replied"):
            reply.result()


class Stuck:
    def __init__(self, other: Actor[Any]):
        self.other = other

    def work(self) -> Any:
        return self.other.call("never").result()


def test_a_full_mailbox_that_nobody_empties_is_a_deadlock() -> None:
    with rs.engine("threads") as engine:
        [stuck] = engine.spawn(Stuck, engine.spawn(Edge))
        for _ in range(engine.mailbox_size):
            stuck.send("work")
        with pytest.raises(rs.Deadlock, match=r"Stuck has 1000 messages waiting"):
            stuck.send("work")
        engine.close(drain=False)


@pytest.mark.parametrize("name", ENGINES)
def test_a_reply_that_was_waited_for_has_been_seen(name: str) -> None:
    with rs.engine(name) as engine:
        [ready], _ = engine.wait([engine.spawn(Edge)[0].call("fail", "seen")])
        assert isinstance(ready.error, ValueError)


@pytest.mark.parametrize("name", ENGINES)
def test_a_task_may_raise_anything(name: str) -> None:
    def leave() -> None:
        raise Unusual

    with rs.engine(name) as engine, pytest.raises(Unusual):
        engine.submit(leave).result()


class Asking:
    def __init__(self, other: Any):
        self.answer = other if isinstance(other, int) else other.call("one").result()

    def get(self) -> int:
        return self.answer


@pytest.mark.parametrize("name", ENGINES)
def test_a_constructor_may_ask_other_actors(name: str) -> None:
    with rs.engine(name) as engine:
        [edge] = engine.spawn(Edge)
        for argument in (edge, edge.call("one")):
            assert engine.spawn(Asking, (argument,))[0].call("get").result() == 1


class Late:
    def wait(self, began: threading.Event, closing: threading.Event, other: Actor[Any]) -> Any:
        began.set()
        closing.wait()
        return other.call("never").result()


def test_a_wait_that_begins_while_the_engine_closes_ends() -> None:
    began, closing = threading.Event(), threading.Event()
    engine = ThreadsEngine()
    [edge], [late] = engine.spawn(Edge), engine.spawn(Late)
    reply = late.call("wait", began, closing, edge)
    began.wait()
    engine.join(engine.sink(), closing.set)
    engine.close(drain=False)
    with pytest.raises(rs.EngineClosed):
        reply.result()


def test_the_scope_closes_also_when_a_flow_cannot() -> None:
    def fail() -> None:
        raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"), rs.engine("threads") as engine:  # noqa: PT012
        engine.spawn(Edge)
        engine.join(engine.sink(), fail)
    assert engine.closed


def test_ctrl_c_in_the_middle_of_a_message_does_not_keep_the_scope_open() -> None:
    class Interrupted(ThreadsEngine):
        def _deliver(self, actor: Actor[Any], message: Message) -> None:
            if message.label.endswith("one"):
                raise KeyboardInterrupt
            super()._deliver(actor, message)

    with Interrupted() as engine:
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
        with pytest.raises(rs.EngineError, match=r"Quitter.quit called sys.exit\(3\), and what runs"):
            quitter.call("quit").result()
        with pytest.raises(rs.EngineError, match=r"the constructor of Quitter-2 called sys.exit\(4\)"):
            engine.spawn(Quitter, (4,))
        with pytest.raises(rs.EngineError, match=r"exit called sys.exit\(5\)"):
            engine.submit(sys.exit, 5).result()


@pytest.mark.parametrize("name", ["threads", "processes"])
def test_actors_that_wait_for_each_other_are_a_deadlock_without_a_flow(name: str) -> None:
    engine = rs.engine(name)
    first, second = engine.spawn(Circular, count=2)
    first.call("know", first).result()
    with pytest.raises(rs.Deadlock, match="in a circle"):
        first.call("meet", second).result()
    engine.close(drain=False)


class Circular:
    def meet(self, other: Any) -> Any:
        """Have the other ask back, which waits for this one."""
        return other.call("ask", self.me).result()

    def ask(self, other: Any) -> Any:
        return other.call("one").result()

    def one(self) -> int:
        return 1

    def know(self, me: Any) -> None:
        self.me = me


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
        ({"resources": {"num_cpus": -1}}, "how much num_cpus is a number"),
    ],
)
def test_terms_are_checked(options: dict[str, Any], text: str) -> None:
    with rs.engine("inline") as engine, pytest.raises(rs.EngineError, match=text):
        engine.spawn(Failing, **options)


@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
def test_a_callback_is_checked(name: str) -> None:
    with pytest.raises(rs.EngineError, match="on_event=5: give a function"):
        rs.engine(name, on_event=5)


def test_who_closes_is_told_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(sys.modules["rollstream.engine.base"], "PATIENCE", 0.01)
    with rs.engine("threads") as engine:
        [edge] = engine.spawn(Waiting, (gate,))
        edge.send("wait")
        say = engine._say_what_is_waited_for
        monkeypatch.setattr(engine, "_say_what_is_waited_for", lambda: (say(), gate.set()))
    assert "Waiting is still at one; press Ctrl-C" in capsys.readouterr().err


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
