"""Every engine keeps the same rules; then what is particular to each, and the tools that check all this."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollstream as rs
from rollstream.engine import Actor, ActorContext, Engine, Future, InlineEngine, ReentryError, ThreadsEngine
from rollstream.engine.actor import Cell, Message
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


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("rule", ENGINE_CHECKS)
def test_rule(rule: str, name: str) -> None:
    ENGINE_CHECKS[rule](lambda: rs.engine(name))


@pytest.mark.parametrize("name", ENGINES)
def test_check_engine_accepts(name: str) -> None:
    check_engine(lambda: rs.engine(name))


def test_unknown_engine_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(rs.EngineError, match="'warp'.*inline, threads"):
        rs.engine("warp")


@pytest.mark.parametrize("name", ENGINES)
def test_at_least_one_actor_is_spawned(name: str) -> None:
    with rs.engine(name) as engine, pytest.raises(rs.EngineError, match="at least one"):
        engine.spawn(Recorder, ([],), count=0)


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


class Releases(ThreadsEngine):
    """Sets an event once it is closed."""

    event = threading.Event()

    def _stop(self) -> None:
        self.event.set()
        super()._stop()


def test_threads_refuse_what_was_not_handled_before_an_error_ended_the_scope() -> None:
    seen: list[int] = []
    replies: list[Future[Any]] = []
    with pytest.raises(KeyError), Releases() as engine:
        [recorder] = engine.spawn(Recorder, (seen,))
        recorder.send("wait", engine.event)
        replies.append(recorder.call("note", 1))
        raise KeyError
    with pytest.raises(rs.EngineClosed, match=r"Recorder.note: the engine was closed before it ran"):
        replies[0].result()
    assert seen == []


# The conformance suite finds faults --------------------------------------------------------------


class DropsSends(InlineEngine):
    def _deliver(self, actor: Actor[Any], message: Message) -> None:
        if message.future is None:
            self._count(-1)
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


class SwallowsFailures(InlineEngine):
    def raise_failure(self) -> None:
        self._failures.clear()


class SwallowsErrors(InlineEngine):
    def _settle(
        self, message: Message, value: Any, error: BaseException | None, *, was_deferred: bool = False
    ) -> None:
        super()._settle(message, value, None, was_deferred=was_deferred)


class ChangesErrors(InlineEngine):
    def _settle(
        self, message: Message, value: Any, error: BaseException | None, *, was_deferred: bool = False
    ) -> None:
        error = error and RuntimeError(str(error))
        super()._settle(message, value, error, was_deferred=was_deferred)


class SharesNames(InlineEngine):
    def _free_name(self, name: str) -> str:
        return name


class SharesInstances(InlineEngine):
    def _start(self, cells: list[Cell]) -> list[Actor[Any]]:
        actors = super()._start(cells)
        for cell in cells:
            cell.instance = cells[0].instance
        return actors


class ForgetsSticky(InlineEngine):
    def restart(self, actor: Actor[Any]) -> Future[None]:
        actor.sticky.clear()
        return super().restart(actor)


class KeepsEverything(InlineEngine):
    def post(self, actor: Actor[Any], message: Message, kind: str | None = None) -> None:
        restart = message.operation is Cell.rebuild
        super().post(actor, message, None if restart else kind or f"{len(actor.sticky)}")


class RestartsNothing(InlineEngine):
    def restart(self, actor: Actor[Any]) -> Future[None]:
        actor.cell.context.restarts += 1
        return actor.apply(lambda instance: None)


class ForgetsLocal(InlineEngine):
    def _handle(self, actor: Actor[Any], message: Message) -> None:
        actor.cell.context.local.clear()
        super()._handle(actor, message)


class CountsNothing(InlineEngine):
    def _handle(self, actor: Actor[Any], message: Message) -> None:
        super()._handle(actor, message)
        actor.cell.messages = 0


class NeverCloses(InlineEngine):
    def _stop(self) -> None:
        pass


class StaysOpen(InlineEngine):
    def _require_open(self) -> None:
        pass


class ReplacesErrors(InlineEngine):
    def close(self, *, drain: bool = True) -> None:
        super().close(drain=drain)
        if not drain:
            raise RuntimeError("closed in a hurry")


class SwapsReadyAndPending(InlineEngine):
    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        ready, pending = super().wait(futures, count, timeout)
        return ready[::-1], pending


class TimesOut(InlineEngine):
    def wait(self, futures: Any, count: int = 1, timeout: float | None = None) -> Any:
        ready, pending = super().wait(futures, count, timeout)
        if len(ready) < count:
            raise TimeoutError
        return ready, pending


BROKEN = [
    (DropsSends, "messages_keep_their_order"),
]


@pytest.mark.parametrize(("broken", "rule"), BROKEN)
def test_check_engine_names_the_rule_that_is_broken(broken: type[Engine], rule: str) -> None:
    with pytest.raises(AssertionError, match=f"the engine breaks the rule '{rule}': "):
        check_engine(broken)
