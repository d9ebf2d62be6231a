"""What is particular to actors that are processes: what travels and how, memory, scripts, the environment."""

import dataclasses
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollstream as rs
from rollstream import flow
from rollstream.engine import ActorContext, Deferred, ReentryError, RemoteError
from rollstream.engine.memory import Arena, Segment
from rollstream.engine.processes import ProcessesEngine


@pytest.fixture(scope="module")
def echo() -> Iterator[rs.Actor["Echo"]]:
    """An actor for tests that only talk to it."""
    with ProcessesEngine() as engine:
        [actor] = engine.spawn(Echo)
        actor.call("same", np.zeros(10_000)).result()  # both sides have their memory now
        yield actor


@pytest.fixture
def engine() -> Iterator[ProcessesEngine]:
    with ProcessesEngine() as opened:
        yield opened


class Echo:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def same(self, value: Any) -> Any:
        return value

    def fresh(self, size: int, value: int = 1) -> Any:
        return np.full(size, value, np.uint8)

    def keep(self, value: Any) -> None:
        self.kept.append(value)

    def sums(self) -> list[int]:
        return [int(kept.sum()) for kept in self.kept]

    def drop(self) -> None:
        self.kept.clear()

    def writeable(self, array: Any) -> bool:
        return bool(array.flags.writeable)

    def fail(self, error: BaseException) -> None:
        raise error

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text)
        print(text.upper(), file=sys.stderr)

    def unpicklable(self) -> Any:
        return {"a": [1, threading.Lock()]}

    def tell(self, other: rs.Actor[Any], times: int, size: int, fifo: str) -> None:
        for _ in range(times):
            other.send("same", np.zeros(size, np.uint8))
            other.send("touch", fifo)
            Path(fifo).read_text()  # no word from the driver meanwhile

    def touch(self, fifo: str) -> None:
        Path(fifo).write_text("read")

    def ask(self, other: rs.Actor[Any], method: str, *args: Any) -> Any:
        return other.call(method, *args).result()

    def converse(self, other: rs.Actor[Any], times: int, marker: str) -> None:
        for number in range(times):
            assert other.call("same", number).result() == number
        Path(marker).touch()


@dataclasses.dataclass
class Batch:
    observations: Any
    more: dict[str, Any]


class Pair(NamedTuple):
    left: Any
    right: Any


# Values ------------------------------------------------------------------------------------------

ARRAYS = {
    "small": np.arange(10),
    "large": np.arange(100_000, dtype=np.float32).reshape(100, 10, 100),
    "fortran": np.asfortranarray(np.arange(20_000).reshape(100, 200)),
    "strided": np.arange(40_000)[::3],
    "transposed": np.arange(24_000).reshape(20, 30, 40).transpose(1, 0, 2),
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 4), np.int16),
    "bool": np.arange(9000) % 2 == 0,
    "complex": np.full(5000, 1 + 2j),
    "big endian": np.arange(5000, dtype=">i4"),
    "structured": np.zeros(2000, [("a", "i4"), ("b", "f8", (2,))]),
    "dates": np.arange("2020-01-01", "2024-01-01", dtype="datetime64[D]"),
    "text": np.array(["one", "three"] * 3000),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_arrive_as_they_are_and_read_only(echo: rs.Actor[Echo], kind: str) -> None:
    array = ARRAYS[kind]
    back = echo.call("same", array).result()
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)
    assert not back.flags.writeable
    assert not echo.call("writeable", array).result()


def test_arrays_travel_in_any_nesting(echo: rs.Actor[Echo]) -> None:
    large, small = np.arange(50_000), np.arange(3)
    value = {"batch": Batch(large, {"x": (small, [large * 2])}), 1: Pair(large, None), "objects": [object]}
    back = echo.call("same", value).result()
    assert np.array_equal(back["batch"].observations, large)
    assert np.array_equal(back["batch"].more["x"][1][0], large * 2)
    assert isinstance(back[1], Pair)
    assert np.array_equal(back[1].left, large)
    again = np.array([None, "x", 3], dtype=object)
    assert list(echo.call("same", again).result()) == [None, "x", 3]


def test_what_is_large_does_not_go_over_the_socket(
    echo: rs.Actor[Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    write = ProcessesEngine._write
    monkeypatch.setattr(
        ProcessesEngine, "_write", lambda self, link, data: sent.append(len(data)) or write(self, link, data)
    )
    reply = echo.call("same", {"x": np.zeros(1_000_000)})
    assert reply.result()["x"].shape == (1_000_000,)
    assert max(sent) < 2000
    assert len(reply.reply.parcel.data) < 2000


@pytest.mark.parametrize("text", ["rollstream.engine.wire", "quick", "array", ""])
def test_any_text_travels(echo: rs.Actor[Echo], text: str) -> None:
    assert echo.call("same", text).result() == text
    assert echo.call("same", [text]).result() == [text]


def test_large_plain_values_work_too(echo: rs.Actor[Echo]) -> None:
    text = os.urandom(3_000_000)
    assert echo.call("same", text).result() == text
    numbers = list(range(200_000))
    assert echo.call("same", numbers).result() == numbers


# Memory ------------------------------------------------------------------------------------------


def test_memory_is_not_reused_while_a_view_of_it_lives(echo: rs.Actor[Echo]) -> None:
    first = echo.call("fresh", 300_000, 1).result()
    part = first[1000:2000].reshape(10, 100)[3:4]
    del first
    for value in range(2, 30):
        assert (echo.call("fresh", 250_000, value).result() == value).all()
    assert (part == 1).all()


def test_memory_is_given_back_when_the_last_view_dies(engine: ProcessesEngine) -> None:
    [keeper] = engine.spawn(Echo)
    gc.collect()
    before = engine._arena.used
    for value in (1, 2, 3):
        keeper.call("keep", np.full(100_000, value, np.uint8)).result()
    assert engine._arena.fits(1)
    assert engine._arena.used >= before + 300_000, "the actor has them"
    assert keeper.call("sums").result() == [100_000, 200_000, 300_000]
    keeper.call("drop").result()
    keeper.call("sums").result()
    assert engine._arena.fits(1)
    assert engine._arena.used == before


def test_put_writes_once_for_all_readers(engine: ProcessesEngine) -> None:
    keepers = engine.spawn(Echo, count=3)
    assert engine._arena.fits(1)
    before = engine._arena.used
    stored = engine.put({"weights": np.ones(200_000, np.uint8)})
    for keeper in keepers:
        assert keeper.apply(lambda echo, weights: echo.keep(weights["weights"]), stored).result() is None
    assert [keeper.call("sums").result() for keeper in keepers] == [[200_000]] * 3
    assert 200_000 <= engine._arena.used - before < 201_000
    assert (stored.get()["weights"] == 1).all()
    del stored
    for keeper in keepers:
        keeper.call("drop").result()
        keeper.call("sums").result()
    assert engine._arena.fits(1)
    assert engine._arena.used == before


def test_what_was_stored_does_not_change_with_its_original(engine: ProcessesEngine) -> None:
    original = np.zeros(10_000)
    stored = engine.put(original)
    original[:] = 1
    assert (stored.get() == 0).all()


def test_views_outlive_the_engine() -> None:
    with rs.engine("processes") as engine:
        kept = engine.spawn(Echo)[0].call("fresh", 100_000, 7).result()
    assert (kept == 7).all()


def test_results_go_from_actor_to_actor_without_being_opened(
    engine: ProcessesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = engine.spawn(Echo, count=2)
    opened: list[Any] = []
    monkeypatch.setattr(ProcessesEngine, "opened", lambda self, future: opened.append(future))
    before = engine._arena.used
    done = other.call("keep", one.call("fresh", 500_000, 2))
    other.send("keep", one.call("fresh", 500_000, 3))
    engine.wait([done])
    last = other.call("sums")
    engine.wait([last])
    monkeypatch.undo()
    assert last.result() == [1_000_000, 1_500_000]
    assert not opened
    assert engine._arena.used == before, "the driver copied nothing"


def test_a_pool_that_is_full_of_messages_makes_the_sender_wait() -> None:
    with rs.engine("processes", pool_bytes=4 << 20) as engine:
        assert isinstance(engine, ProcessesEngine)
        [slow] = engine.spawn(Slow)
        for value in range(60):
            slow.send("take", np.full(1 << 20, value % 100, np.uint8))
            assert engine._arena.used <= 4 << 20
        assert slow.call("taken").result() == [value % 100 for value in range(60)]
        assert engine.statistics().grown == 0


class Slow:
    def __init__(self) -> None:
        self.values: list[int] = []

    def take(self, array: Any) -> None:
        time.sleep(0.002)  # slower than the sender
        self.values.append(int(array[-1]))

    def taken(self) -> list[int]:
        return self.values


def test_a_pool_grows_and_says_so_when_the_flow_holds_its_items() -> None:
    with warnings.catch_warnings(record=True) as caught, rs.engine("processes", pool_bytes=1 << 20) as engine:
        warnings.simplefilter("always")
        workers = engine.spawn(Maker, (40,), count=2)
        batches = flow.from_actors(workers, "make").gather_async(2).batch(16)
        for batch in batches:
            for index, number, array in batch:
                assert (array == (index * 100 + number) % 251).all()
        assert engine.statistics().grown > 0
    [warning] = caught
    assert warning.category is RuntimeWarning
    assert "ran out of its 1 MB of shared memory" in str(warning.message)


class Maker:
    def __init__(self, items: int, size: int = 300_000, *, context: ActorContext):
        self.index, self.left, self.size = context.index, items, size
        self.number = 0

    def make(self) -> tuple[int, int, Any]:
        if not self.left:
            raise StopIteration
        self.left -= 1
        self.number += 1
        value = (self.index * 100 + self.number) % 251
        return self.index, self.number, np.full(self.size, value, np.uint8)


def test_an_actor_that_sends_for_long_is_given_back_what_was_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with ProcessesEngine(pool_bytes=1 << 20) as engine:
        one, other = engine.spawn(Echo, count=2)
        one.call("tell", other, 40, 1 << 18, str(fifo)).result()
        assert other.call("sums").result() == []
        assert engine.statistics().grown == 0


def _descriptors() -> int:
    return sum("memfd:rollstream" in os.readlink(link) for link in _links_of_descriptors())


def _links_of_descriptors() -> list[str]:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.islink(link)]


@pytest.mark.filterwarnings("ignore:.*ran out of its:RuntimeWarning")
def test_memory_beyond_the_pool_is_given_back_on_both_sides() -> None:
    with ProcessesEngine(pool_bytes=1 << 16) as engine:
        [echo] = engine.spawn(Echo)
        before = _descriptors()
        for _ in range(5):
            echo.call("keep", np.zeros(1 << 20, np.uint8)).result()
        made = [echo.call("fresh", 1 << 20).result() for _ in range(5)]
        assert echo.apply(lambda _: _descriptors()).result() == 2 * 11  # two a segment
        assert _descriptors() == before + 2 * 11
        del made
        echo.call("drop").result()
        for _ in range(3):  # what is free is noticed when memory is needed, and told with what is sent
            echo.call("same", np.zeros(1 << 14, np.uint8)).result()
        assert echo.apply(lambda _: _descriptors()).result() == 2 * 4  # a pool and a spare of each side
        assert _descriptors() == before + 2 * 4


def test_an_item_larger_than_the_pool_works() -> None:
    with warnings.catch_warnings(), rs.engine("processes", pool_bytes=1 << 20) as engine:
        warnings.simplefilter("ignore", RuntimeWarning)
        [echo] = engine.spawn(Echo)
        for value in range(5):
            large = np.full(9_000_000, value, np.uint8)
            assert (echo.call("same", large).result() == value).all()


def test_jax_may_keep_what_it_was_given() -> None:
    """In a process of its own: Ray forks when it starts, and JAX warns of that for as long as it is there."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("needs JAX")
    script = """
        import jax, numpy as np
        import rollstream as rs

        class Maker:
            def make(self, value):
                return np.full(1 << 20, value, np.uint8)

        with rs.engine("processes") as engine:
            [maker] = engine.spawn(Maker)
            kept = [jax.device_put(maker.call("make", value).result()) for value in range(1, 6)]
            for value in range(100, 120):
                maker.call("make", value).result()
            print([int(array[-1]) for array in kept])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[1, 2, 3, 4, 5]\n", done.stderr


def test_where_there_is_no_shared_memory_files_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.warns(UserWarning, match=r"arrays travel through files in .*: not permitted"):
        segment = Segment.create("x/1", 1 << 16)
    segment.array[:] = 3
    with open(f"/proc/self/fd/{segment.fd}", "rb") as file:
        assert file.read() == b"\x03" * (1 << 16)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40_000)), max_size=60))
def test_an_arena_keeps_blocks_apart_and_takes_them_back(steps: list[tuple[int, int]]) -> None:
    """Blocks never overlap, keep what is in them, and all memory is free again in one piece at the end."""
    arena, held = Arena("test", 1 << 17), {}
    for number, (slot, size) in enumerate(steps):
        held.pop(slot, None)
        block = arena.store([memoryview(np.full(size, number % 256, np.uint8).data)])
        held[slot] = (block, number % 256, size)
        for block, value, size in held.values():
            assert bytes(block.views()[0]) == bytes([value]) * size
    held.clear()
    block = None
    assert arena.fits(1 << 17)
    assert arena.used == 0


# Errors ------------------------------------------------------------------------------------------


def test_an_error_shows_where_it_was_raised(echo: rs.Actor[Echo]) -> None:
    with pytest.raises(KeyError, match="no such key") as caught:
        echo.call("fail", KeyError("no such key")).result()
    cause = str(caught.value.__cause__)
    assert "on Echo, process" in cause
    assert "in fail" in cause
    assert "raise error" in cause


class Awkward(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, one: int, two: int):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_travel_is_described(engine: ProcessesEngine) -> None:
    [awkward] = engine.spawn(RaisesAwkward)
    with pytest.raises(RemoteError, match="Awkward: 1 and 2") as caught:
        awkward.call("fail").result()
    assert "raise Awkward(1, 2)" in str(caught.value.__cause__)


class RaisesAwkward:
    def fail(self) -> None:
        raise Awkward(1, 2)


def test_what_cannot_be_pickled_is_named(engine: ProcessesEngine) -> None:
    [echo] = engine.spawn(Echo)
    lock = threading.Lock()
    with pytest.raises(rs.EngineError, match=r"argument 1 of Echo.same\['x'\]\[1\] is a lock, which cannot"):
        echo.call("same", {"x": [1, lock]})
    with pytest.raises(rs.EngineError, match=r"argument 1 of Locked.__init__ is a lock"):
        engine.spawn(Echo, (lock,), name="Locked")
    with pytest.raises(rs.EngineError, match=r"\(its variable 'lock'\) is a lock"):
        echo.apply(lambda instance: lock)
    with pytest.raises(rs.EngineError, match=r"the result\['a'\]\[1\] is a lock, which cannot be sent"):
        echo.call("unpicklable").result()
    with pytest.raises(rs.EngineError, match=r"\(its variable '_LOCK'\) is a lock"):
        echo.apply(eval("lambda instance: _LOCK", {"_LOCK": lock, "__name__": "__main__"}))
    with pytest.raises(rs.EngineError, match=r"argument 1 of Echo.same: an engine .* does not travel; open"):
        echo.call("same", engine)
    with rs.engine("inline") as other:
        [foreign] = other.spawn(Echo)
        with pytest.raises(rs.EngineError, match="Echo is an actor of another engine"):
            echo.call("same", foreign)
    assert echo.call("same", 1).result() == 1


def test_an_operator_that_cannot_travel_is_named_with_its_line(engine: ProcessesEngine) -> None:
    lock = threading.Lock()
    sources = engine.spawn(Maker, (3, 10))
    plan = flow.from_actors(sources, "make").for_each(lambda item: lock, name="locked").gather_async()
    with pytest.raises(rs.PlanError, match=r"locked \(.*test_processes.py:\d+\) cannot be copied"):
        next(plan)


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # by JAX, if it is running
def test_a_fork_of_the_driver_does_not_talk_to_its_actors(engine: ProcessesEngine) -> None:
    [echo] = engine.spawn(Echo)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            echo.call("same", 1)
        except rs.EngineError as error:
            engine.close()
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == (
            f"this engine belongs to process {os.getpid()}, of which this one is a fork; open one here"
        )
    assert echo.call("same", 1).result() == 1


class Threaded:
    def __init__(self) -> None:
        threading.Thread(target=threading.Event().wait, name="forgotten").start()


def test_a_thread_that_an_actor_left_behind_does_not_keep_it(capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessesEngine() as engine:
        engine.spawn(Threaded)
    assert "Threaded has ended and left a thread running: forgotten" in capfd.readouterr().err


class Terminated(Echo):
    def terminate(self) -> list[int]:
        """SIGTERM to this process, to a fork of it and to a program: how the others ended."""
        os.kill(os.getpid(), signal.SIGTERM)
        forked = os.fork()
        if not forked:
            signal.pause()
        program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        for pid in (forked, program.pid):
            os.kill(pid, signal.SIGTERM)
        return [os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), program.wait()]


def test_sigterm_is_for_the_driver_and_not_for_its_actors(engine: ProcessesEngine) -> None:
    """It goes to a whole group of processes, where `timeout` or a scheduler sends it."""
    [actor] = engine.spawn(Terminated)
    assert actor.call("terminate").result() == [-signal.SIGTERM, -signal.SIGTERM]
    assert actor.call("same", 1).result() == 1


class Forking(Echo):
    def fork(self, other: rs.Actor[Any]) -> int:
        """Whether a forked copy is refused: 3 if so."""
        pid = os.fork()
        if not pid:
            try:
                other.send("keep", np.full(10_000, 9, np.uint8))
            except rs.EngineError:
                os._exit(3)
            os._exit(4)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_of_an_actor_keeps_out_of_its_memory(engine: ProcessesEngine) -> None:
    forking, other = engine.spawn(Forking, count=2)
    made = forking.call("fresh", 10_000).result()
    assert forking.call("fork", other).result() == 3
    assert (made == 1).all()
    assert other.call("sums").result() == []


def test_a_reference_belongs_to_its_engine(engine: ProcessesEngine) -> None:
    [echo] = engine.spawn(Echo)
    own = engine.put(np.full(10_000, 7, np.uint8))
    with ProcessesEngine() as other:
        foreign = other.put(np.full(10_000, 1, np.uint8))
        for argument in (foreign, [foreign]):
            with pytest.raises(rs.EngineError, match=r"argument 1 of Echo\.same: <Ref of the processes en"):
                echo.call("same", argument)
    assert int(echo.call("same", own).result()[0]) == 7


class Late(Echo):
    def pair(self, other: rs.Actor[Any]) -> Any:
        return [np.zeros(100_000, np.uint8), other.call("same", 1)]


def test_a_result_may_hold_replies_and_does_not_hold_memory() -> None:
    with ProcessesEngine(pool_bytes=1 << 19) as engine:
        late, other = engine.spawn(Late, count=2)
        for _ in range(20):
            assert late.call("pair", other).result()[1].get() == 1
        assert engine.statistics().grown == 0


class Talkative(Echo):
    def talk(self, other: rs.Actor[Any]) -> None:
        def work() -> None:
            for _ in range(3000):
                other.send("same", b"x" * 4000)

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def listen(self) -> None:
        self.thread.join()


def test_a_thread_of_an_actor_may_send(engine: ProcessesEngine) -> None:
    talkative, other = engine.spawn(Talkative, count=2)
    talkative.call("talk", other).result()
    for _ in range(5):
        engine.results([talkative.call("same", 1) for _ in range(300)])
    talkative.call("listen").result()


def test_output_is_passed_on_whole(engine: ProcessesEngine, capfd: pytest.CaptureFixture[str]) -> None:
    [echo] = engine.spawn(Echo)
    echo.call("say", "€" * 50_000).result()
    engine.close()
    assert capfd.readouterr().out == "€" * 50_000 + "\n"


# Actors among themselves -------------------------------------------------------------------------


def test_actors_talk_while_the_driver_is_busy(engine: ProcessesEngine, tmp_path: Path) -> None:
    one, other = engine.spawn(Echo, count=2)
    marker = tmp_path / "done"
    one.send("converse", other, 200, str(marker))
    deadline = time.monotonic() + 30
    while not marker.exists():
        assert time.monotonic() < deadline, "messages between actors need the driver's attention"


class Holder:
    def __init__(self) -> None:
        self.guests: list[Deferred[str]] = []

    def enter(self) -> Deferred[str]:
        self.guests.append(Deferred())
        return self.guests[-1]

    def admit(self, value: str) -> int:
        for guest in self.guests:
            guest.resolve(value)
        return len(self.guests)


def test_an_actor_may_wait_for_a_reply_held_back(engine: ProcessesEngine) -> None:
    [holder], [asker] = engine.spawn(Holder), engine.spawn(Echo)
    reply = asker.call("ask", holder, "enter")
    while not holder.call("admit", "come in").result():
        pass
    assert reply.result() == "come in"


def test_actors_that_wait_for_each_other_are_a_deadlock_of_the_flow() -> None:
    with rs.engine("processes") as engine:
        holders = engine.spawn(Holder, count=1)
        askers = engine.spawn(Asker, (holders[0],), count=2)
        plan = flow.from_actors(askers, "sample").gather_async()
        with pytest.raises(rs.Deadlock, match=r"gather_async waits for Asker\[0\]"):
            next(plan)


class Asker:
    def __init__(self, holder: rs.Actor[Holder]):
        self.holder = holder

    def sample(self) -> str:
        return self.holder.call("enter").result()


def test_a_reply_that_cannot_come_is_a_deadlock_also_as_an_argument() -> None:
    with rs.engine("processes") as engine:
        [holder], [maker] = engine.spawn(Holder), engine.spawn(Maker, (9, 10))
        plan = flow.from_actors(maker, "make").gather_async()
        next(plan)
        maker.apply(lambda instance, guest: None, holder.call("enter"))  # what follows is behind this
        with pytest.raises(rs.Deadlock, match="gather_async waits for Maker"):
            list(plan)
        engine.close(drain=False)


def test_an_actor_that_waits_for_itself_is_told(engine: ProcessesEngine) -> None:
    [echo] = engine.spawn(Echo, name="narcissus")
    with pytest.raises(ReentryError, match=r"narcissus waits for narcissus.same"):
        echo.call("ask", echo, "same", 1).result()


def test_an_actor_does_not_spawn_on_the_engine_it_lives_on(engine: ProcessesEngine) -> None:
    [echo], [other] = engine.spawn(Echo, name="one"), engine.spawn(Echo)
    with pytest.raises(rs.EngineError, match="one cannot spawn actors on the engine it lives on; open one"):
        echo.apply(lambda instance, handle: handle.engine.spawn(Echo), other).result()


def test_a_mailbox_is_bounded() -> None:
    with rs.engine("processes") as engine:
        [slow] = engine.spawn(Slow)
        for number in range(1500):
            slow.send("take", [number])
            assert slow.outstanding <= engine.mailbox_size
        engine.close(drain=False)


# The script, the terminal and the environment ----------------------------------------------------


def test_an_unguarded_script_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        print("the script runs")
        import rollstream as rs
        from rollstream import flow

        FACTOR = 3

        def triple(x):
            return FACTOR * x

        class Worker:
            def __init__(self):
                self.count = 0
            def sample(self):
                self.count += 1
                return Item(self.count)

        class Item:
            def __init__(self, number):
                self.number = number

        with rs.engine("processes") as engine:
            workers = engine.spawn(Worker, count=2)
            plan = flow.from_actors(workers, "sample").for_each(lambda item: Item(triple(item.number)))
            items = list(plan.gather_sync().take(2))
            assert all(isinstance(item, Item) for row in items for item in row)
            print([[item.number for item in row] for row in items])
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("the script runs\n[[3, 3], [6, 6]]\n", "")


def test_numeric_libraries_get_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"):
        monkeypatch.delenv(variable, raising=False)
    with rs.engine("processes") as engine:
        [one] = engine.spawn(Echo)
        assert [one.call("variable", name).result() for name in ("NPROC", "OMP_NUM_THREADS")] == ["2", "1"]
        assert engine.statistics().environment["NPROC"] == "2"
    with rs.engine("processes", threads=3) as engine:
        assert engine.spawn(Echo)[0].call("variable", "MKL_NUM_THREADS").result() == "3"
    monkeypatch.setenv("NPROC", "5")
    with rs.engine("processes") as engine:
        assert engine.statistics().environment["NPROC"] == "5"


def test_what_actors_print_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    with rs.engine("processes") as engine:
        engine.spawn(Echo)[0].call("say", "hello").result()
    assert capfd.readouterr() == ("hello\n", "HELLO\n")


def test_options_are_checked() -> None:
    with pytest.raises(rs.EngineError, match=r"engine\('processes'\) has no option 'pool'; it has: pool_byt"):
        rs.engine("processes", pool=3)
    with pytest.raises(rs.EngineError, match="pool_bytes=10"):
        rs.engine("processes", pool_bytes=10)
    with pytest.raises(rs.EngineError, match="threads=0"):
        rs.engine("processes", threads=0)
    with rs.engine("processes") as engine:
        with pytest.raises(rs.EngineError, match="on_failure='panic': choose one of raise, restart, drop"):
            engine.spawn(Echo, on_failure="panic")  # pyright: ignore[reportArgumentType]
        with pytest.raises(rs.EngineError, match="deadline=0"):
            engine.spawn(Echo, deadline=0)
        with pytest.raises(rs.EngineError, match="max_restarts=-1"):
            engine.spawn(Echo, max_restarts=-1)


def test_an_actor_that_dies_while_it_is_built_is_named() -> None:
    with rs.engine("processes") as engine, pytest.raises(rs.ActorDied, match=r"(?s)exit code 3.*no rom"):
        engine.spawn(Stillborn, name="player")


class Stillborn:
    def __init__(self) -> None:
        print("no rom", flush=True)
        os._exit(3)


def test_ctrl_c_at_any_moment_leaves_the_engine_whole() -> None:
    """Caught inside the scope, it does no harm: no message is lost in the middle of being taken in."""
    script = """
        import os, signal, threading, time
        import rollstream as rs

        class Echo:
            def same(self, value):
                return value

        def interrupt():
            while not over.wait(0.003):
                os.kill(os.getpid(), signal.SIGINT)

        over = threading.Event()
        with rs.engine("processes") as engine:
            [echo] = engine.spawn(Echo)
            threading.Thread(target=interrupt, daemon=True).start()
            caught = number = 0
            while caught < 100:
                try:
                    while True:
                        reply = echo.call("same", number)
                        assert reply.result() == number
                        number += 1
                except KeyboardInterrupt:
                    caught += 1
            over.set()
            while True:
                try:
                    assert echo.call("same", "last").result(20) == "last"
                    break
                except KeyboardInterrupt:
                    pass
        print("whole")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "whole\n", done.stderr


def test_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of items of mixed sizes, some held: each intact, in order, and no memory left behind."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "bench")
    report = importlib.import_module("soak").soak(6_000, quiet=True)
    assert (report.items, report.left_behind) == (6_000, [])
    assert report.held > 500
