"""Particular to actors that are processes: shared memory, forks, signals, scripts, the environment."""

import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripts
from faulty import Worker
from hypothesis import given
from hypothesis import strategies as st

import rollstream as rs
from rollstream import flow
from rollstream.engine import ActorContext, Engine
from rollstream.engine.memory import Arena, Segment


@pytest.fixture
def engine() -> Iterator[Engine]:
    with rs.engine("processes") as opened:
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

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text)
        print(text.upper(), file=sys.stderr)

    def tell(self, other: rs.Actor[Any], times: int, size: int, fifo: str) -> None:
        for _ in range(times):
            other.send("same", np.zeros(size, np.uint8))
            other.send("touch", fifo)
            Path(fifo).read_text()  # no word from the driver meanwhile

    def touch(self, fifo: str) -> None:
        Path(fifo).write_text("read")


# Memory ------------------------------------------------------------------------------------------


def test_large_arrays_do_not_go_over_the_socket(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    [echo] = engine.spawn(Echo)
    sent: list[int] = []
    send = socket.socket.send
    monkeypatch.setattr(socket.socket, "send", lambda self, data: sent.append(len(data)) or send(self, data))
    assert echo.call("same", {"x": np.zeros(1_000_000)}).result()["x"].shape == (1_000_000,)
    assert 0 < max(sent) < 2000


def test_memory_is_not_reused_while_a_view_of_it_lives(engine: Engine) -> None:
    [echo] = engine.spawn(Echo)
    first = echo.call("fresh", 300_000, 1).result()
    part = first[1000:2000].reshape(10, 100)[3:4]
    del first
    for value in range(2, 30):
        assert (echo.call("fresh", 250_000, value).result() == value).all()
    assert (part == 1).all()


def test_memory_is_given_back_when_the_last_view_dies() -> None:
    with rs.engine("processes", pool_bytes=1 << 20) as engine:
        [keeper] = engine.spawn(Echo)
        for _ in range(4):  # three fit into the pool, and no more
            for value in (1, 2, 3):
                keeper.call("keep", np.full(300_000, value, np.uint8)).result()
            assert keeper.call("sums").result() == [300_000, 600_000, 900_000]
            keeper.call("drop").result()
            keeper.call("sums").result()
        assert engine.statistics().grown == 0


def test_put_writes_once_for_all_readers() -> None:
    with rs.engine("processes", pool_bytes=1 << 20) as engine:
        keepers = engine.spawn(Echo, count=3)
        for _ in range(4):  # one fits into the pool, and no more
            stored = engine.put({"weights": np.ones(700_000, np.uint8)})
            for keeper in keepers:
                keeper.apply(lambda echo, weights: echo.keep(weights["weights"]), stored).result()
            assert [keeper.call("sums").result() for keeper in keepers] == [[700_000]] * 3
            assert (stored.get()["weights"] == 1).all()
            del stored
            for keeper in keepers:
                keeper.call("drop").result()
                keeper.call("sums").result()
        assert engine.statistics().grown == 0


def test_views_outlive_the_engine() -> None:
    with rs.engine("processes") as engine:
        kept = engine.spawn(Echo)[0].call("fresh", 100_000, 7).result()
    assert (kept == 7).all()


def test_results_go_from_actor_to_actor_without_a_copy_in_the_driver() -> None:
    with rs.engine("processes", pool_bytes=1 << 20) as engine:
        *makers, keeper = engine.spawn(Echo, count=4)
        for maker in makers:  # each fits into the pool of its maker, and not all into the driver's
            keeper.send("keep", maker.call("fresh", 700_000, 2))
        assert keeper.call("sums").result() == [1_400_000] * 3
        assert engine.statistics().grown == 0


def test_a_pool_that_is_full_of_messages_makes_the_sender_wait() -> None:
    with rs.engine("processes", pool_bytes=4 << 20) as engine:
        [slow] = engine.spawn(Slow)
        for value in range(60):
            slow.send("take", np.full(1 << 20, value % 100, np.uint8))
        assert slow.call("taken").result() == [value % 100 for value in range(60)]
        assert engine.statistics().grown == 0


class Slow:
    def __init__(self) -> None:
        self.values: list[int] = []

    def take(self, array: Any) -> None:
        threading.Event().wait(0.002)  # slower than the sender
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
    with rs.engine("processes", pool_bytes=1 << 20) as engine:
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
    with rs.engine("processes", pool_bytes=1 << 16) as engine:
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
    assert scripts.run_code(script).stdout == "[1, 2, 3, 4, 5]\n"


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


def test_what_a_dead_actor_was_lent_is_free_again() -> None:
    with rs.engine("processes", pool_bytes=1 << 20) as engine:
        holder, other = engine.spawn(Worker, count=2, on_failure="drop")
        large = np.zeros(3 << 18, np.uint8)
        holder.apply(lambda worker, array: setattr(worker, "held", array), large).result()
        with pytest.raises(rs.ActorDied):
            holder.call("die").result()
        other.apply(lambda worker, array: None, large).result()
        assert engine.statistics().grown == 0


class Victim(Worker):
    def take(self, fifo: str, array: Any) -> None:
        Path(fifo).read_text()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_driver_that_waits_for_room_continues_when_the_actor_that_held_it_dies(tmp_path: Path) -> None:
    """Another thread serves meanwhile, so nothing but the death can wake the one that waits."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    os.mkfifo(first)
    os.mkfifo(second)
    with rs.engine("processes", pool_bytes=1 << 20) as engine:
        other, victim = engine.spawn(Victim, count=2, on_failure="drop")
        blocked = other.call("read", first)
        serving = threading.Thread(target=blocked.result)
        serving.start()
        large = np.zeros(3 << 18, np.uint8)
        victim.send("take", second, large)
        threading.Thread(target=lambda: Path(second).write_text("die")).start()
        victim.send("take", second, large)  # does not fit before the first is gone
        Path(first).write_text("continue")
        serving.join()
        assert engine.statistics().grown == 0


def test_failing_calls_do_not_hold_memory() -> None:
    with rs.engine("processes", pool_bytes=8 << 20) as engine:
        [echo] = engine.spawn(Echo)
        for _ in range(20):
            with pytest.raises(AttributeError):
                echo.apply(lambda instance, array: array.nothing, np.zeros(1 << 18)).result()
        assert engine.statistics().grown == 0


# Forks, threads and signals -----------------------------------------------------------------------


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # by JAX, if it is running
def test_a_fork_of_the_driver_does_not_talk_to_its_actors(engine: Engine) -> None:
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
    with rs.engine("processes") as engine:
        engine.spawn(Threaded)
    assert "Threaded has ended and left a thread running: forgotten" in capfd.readouterr().err


class Terminated(Echo):
    def signal(self, number: int) -> list[int]:
        """A signal to this process, to forks of it and to a program: how the others ended."""
        os.kill(os.getpid(), number)
        ends = []
        for _ in range(50):  # some are terminated before they have run at all
            forked = os.fork()
            if not forked:
                signal.pause()
            os.kill(forked, number)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
        program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        program.send_signal(number)
        return [*ends, program.wait()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_to_a_group_are_for_the_driver_and_not_for_its_actors(engine: Engine, number: int) -> None:
    """They go to a whole group of processes, where `timeout`, a scheduler or a terminal sends them."""
    before = signal.signal(number, signal.SIG_DFL)  # else actors inherit that it is ignored
    try:
        [actor] = engine.spawn(Terminated)
    finally:
        signal.signal(number, before)
    assert actor.call("signal", number).result() == [-number] * 51
    assert actor.call("same", 1).result() == 1


class Debugged:
    def debug(self) -> None:
        breakpoint()


def test_breakpoint_says_where_it_works(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    [actor] = engine.spawn(Debugged)
    with pytest.raises(rs.EngineError, match=r"breakpoint\(\) in Debugged: .* engine='inline'"):
        actor.call("debug").result()


def test_an_actor_outlives_the_thread_that_spawned_it(engine: Engine) -> None:
    spawned: list[rs.Actor[Echo]] = []
    thread = threading.Thread(target=lambda: spawned.extend(engine.spawn(Echo)))
    thread.start()
    thread.join()
    assert spawned[0].call("same", 1).result() == 1


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


def test_a_fork_of_an_actor_keeps_out_of_its_memory(engine: Engine) -> None:
    forking, other = engine.spawn(Forking, count=2)
    made = forking.call("fresh", 10_000).result()
    assert forking.call("fork", other).result() == 3
    assert (made == 1).all()
    assert other.call("sums").result() == []


class Talkative(Echo):
    def talk(self, other: rs.Actor[Any]) -> None:
        def work() -> None:
            for _ in range(3000):
                other.send("same", b"x" * 4000)

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def listen(self) -> None:
        self.thread.join()


def test_a_thread_of_an_actor_may_send(engine: Engine) -> None:
    talkative, other = engine.spawn(Talkative, count=2)
    talkative.call("talk", other).result()
    for _ in range(5):
        engine.results([talkative.call("same", 1) for _ in range(300)])
    talkative.call("listen").result()


def test_output_is_passed_on_whole(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    [echo] = engine.spawn(Echo)
    echo.call("say", "€" * 50_000).result()
    engine.close()
    assert capfd.readouterr().out == "€" * 50_000 + "\n"


def test_a_mailbox_is_bounded(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with rs.engine("processes") as engine:
        [worker] = engine.spawn(Worker)
        worker.send("read", str(fifo))
        sender = threading.Thread(
            target=lambda: [worker.send("set_version", number) for number in range(engine.mailbox_size + 100)]
        )
        sender.start()
        scripts.eventually(lambda: worker.outstanding == engine.mailbox_size)
        fifo.write_text("continue")
        sender.join()
        assert worker.apply(lambda own: own.version).result() == engine.mailbox_size + 99


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
    done = scripts.run(str(script))
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
        import os, random, signal, threading, time
        import rollstream as rs

        class Echo:
            def same(self, value):
                return value

        def interrupt():
            dice = random.Random(0)
            while os.read(armed, 1):  # so that each interrupt comes where it is caught
                time.sleep(dice.uniform(0, 0.006))
                os.kill(os.getpid(), signal.SIGINT)

        armed, arm = os.pipe()
        threading.Thread(target=interrupt, daemon=True).start()
        with rs.engine("processes") as engine:
            [echo] = engine.spawn(Echo)
            caught = number = 0
            while caught < 100:
                try:
                    os.write(arm, b"!")
                    while True:
                        reply = echo.call("same", number)
                        assert reply.result() == number
                        number += 1
                except KeyboardInterrupt:
                    caught += 1
            assert echo.call("same", "last").result() == "last"
        print("whole")
    """
    assert scripts.run_code(script).stdout == "whole\n"


@pytest.mark.slow
def test_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of items of mixed sizes, some held: each intact, in order, and no memory left behind."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "bench")
    report = importlib.import_module("soak").soak(6_000, quiet=True)
    assert (report.items, report.left_behind) == (6_000, [])
    assert report.held > 500
