"""Actors in other processes: values, errors and messages are the same, whichever engine brings them there."""

import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scripts

import rollstream as rs
from rollstream import flow
from rollstream.engine import Actor, Deferred, RemoteError
from rollstream.testing import ScriptedSource

everywhere = pytest.mark.parametrize("name", ["processes", "ray"])


class Echo:
    def __init__(self) -> None:
        self.guests: list[Deferred[Any]] = []

    def same(self, value: Any) -> Any:
        return value

    def total(self, array: Any) -> int:
        return int(array.sum())

    def first(self, *arrays: Any) -> list[int]:
        return [int(array[0]) for array in arrays]

    def writeable(self, array: Any) -> bool:
        return bool(array.flags.writeable)

    def fail(self, error: BaseException) -> None:
        raise error

    def fail_awkwardly(self) -> None:
        raise Awkward(1, 2)

    def unpicklable(self) -> Any:
        return {"a": [1, threading.Lock()]}

    def traced(self) -> "Traced":
        return Traced()

    def opened(self, value: Any) -> int:
        return Traced.opened

    def tell(self, other: Actor[Any], method: str, *args: Any) -> None:
        other.send(method, *args)

    def count_to(self, other: Actor[Any], count: int, fifo: str) -> None:
        for number in range(count):
            other.send("same", number)
        other.send("write", fifo)

    def write(self, fifo: str) -> None:
        Path(fifo).write_text("written")

    def enter(self) -> Deferred[Any]:
        self.guests.append(Deferred())
        return self.guests[-1]

    def admit(self, value: Any) -> None:
        while self.guests:
            self.guests.pop(0).resolve(value)


class Traced:
    """Counts how often a process has serialized and deserialized one."""

    written = opened = 0

    def __init__(self) -> None:
        self.array = np.arange(100_000)

    def __getstate__(self) -> Any:
        Traced.written += 1
        return self.array

    def __setstate__(self, state: Any) -> None:
        Traced.opened += 1
        self.array = state


class Awkward(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, one: int, two: int):
        super().__init__(f"{one} and {two}")


@dataclasses.dataclass
class Batch:
    observations: Any
    more: dict[str, Any]


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.fixture(scope="module", params=["processes", "ray"])
def echo(request: pytest.FixtureRequest) -> Iterator[Actor[Echo]]:
    """An actor for tests that only talk to it."""
    if request.param == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("ray_cluster")
    with rs.engine(request.param) as engine:
        [actor] = engine.spawn(Echo)
        actor.call("same", np.zeros(10_000)).result()  # both sides have their memory now
        yield actor


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


@pytest.mark.quick
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_arrive_as_they_are_and_read_only(echo: Actor[Echo], kind: str) -> None:
    array = ARRAYS[kind]
    back = echo.call("same", array).result()
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)
    assert not back.flags.writeable
    assert not echo.call("writeable", array).result()


@pytest.mark.quick
def test_arrays_travel_in_any_nesting(echo: Actor[Echo]) -> None:
    large, small = np.arange(50_000), np.arange(3)
    value = {"batch": Batch(large, {"x": (small, [large * 2])}), 1: Pair(large, None), "objects": [object]}
    back = echo.call("same", value).result()
    assert np.array_equal(back["batch"].observations, large)
    assert np.array_equal(back["batch"].more["x"][1][0], large * 2)
    assert isinstance(back[1], Pair)
    assert np.array_equal(back[1].left, large)
    again = np.array([None, "x", 3], dtype=object)
    assert list(echo.call("same", again).result()) == [None, "x", 3]


@pytest.mark.quick
@pytest.mark.parametrize("text", ["rollstream.engine", "quick", "array", ""])
def test_any_text_travels(echo: Actor[Echo], text: str) -> None:
    assert echo.call("same", text).result() == text
    assert echo.call("same", [text]).result() == [text]


@pytest.mark.quick
def test_large_plain_values_travel(echo: Actor[Echo]) -> None:
    text = os.urandom(3_000_000)
    assert echo.call("same", text).result() == text
    numbers = list(range(200_000))
    assert echo.call("same", numbers).result() == numbers


@pytest.mark.quick
@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_message_is_what_it_was_when_it_was_sent(echo: Actor[Echo], size: int) -> None:
    array = np.ones(size, int)
    reply = echo.call("total", array)
    stored = echo.engine.put(array)
    array[:] = 7
    assert reply.result() == size
    assert (stored.get() == 1).all()


@pytest.mark.quick
@everywhere
def test_a_result_for_another_actor_is_not_opened_by_the_driver(name: str) -> None:
    with rs.engine(name) as engine:
        one, other = engine.spawn(Echo, count=2)
        before = Traced.opened
        reply = one.call("traced")
        assert other.call("opened", reply).result() == 1
        assert Traced.opened == before
        assert reply.result().array[-1] == 99_999, "whoever asks for it has it"
        assert Traced.opened == before + 1


@everywhere
def test_put_serializes_once_for_all_readers(name: str) -> None:
    with rs.engine(name) as engine:
        actors = engine.spawn(Echo, count=3)
        before = Traced.written
        stored = engine.put(Traced())
        assert engine.results([actor.call("opened", stored) for actor in actors]) == [1, 1, 1]
        assert Traced.written == before + 1


@everywhere
def test_arrays_of_several_actors_in_one_message_are_not_mixed_up(name: str) -> None:
    with rs.engine(name) as engine:
        *makers, reader = engine.spawn(Echo, count=4)
        made = [maker.call("same", np.full(20_000, number)) for number, maker in enumerate(makers)]
        assert reader.call("first", *made).result() == [0, 1, 2]


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_an_error_shows_where_it_was_raised(echo: Actor[Echo]) -> None:
    with pytest.raises(KeyError, match="no such key") as caught:
        echo.call("fail", KeyError("no such key")).result()
    cause = str(caught.value.__cause__)
    assert "on Echo, process" in cause
    assert "in fail" in cause
    assert "raise error" in cause


@pytest.mark.quick
def test_an_error_that_cannot_travel_is_described(echo: Actor[Echo]) -> None:
    with pytest.raises(RemoteError, match="Awkward: 1 and 2") as caught:
        echo.call("fail_awkwardly").result()
    assert "raise Awkward(1, 2)" in str(caught.value.__cause__)


@pytest.mark.quick
def test_what_cannot_be_pickled_is_named(echo: Actor[Echo]) -> None:
    lock = threading.Lock()
    with pytest.raises(rs.EngineError, match=r"argument 1 of Echo.same\['x'\]\[1\] is a lock, which cannot"):
        echo.call("same", {"x": [1, lock]})
    with pytest.raises(rs.EngineError, match=r"argument 1 of Locked.__init__ is a lock"):
        echo.engine.spawn(Echo, (lock,), name="Locked")
    with pytest.raises(rs.EngineError, match=r"\(its variable 'lock'\) is a lock"):
        echo.apply(lambda instance: lock)
    with pytest.raises(rs.EngineError, match=r"the result\['a'\]\[1\] is a lock, which cannot be sent"):
        echo.call("unpicklable").result()
    with pytest.raises(rs.EngineError, match=r"\(its variable '_LOCK'\) is a lock"):
        echo.apply(eval("lambda instance: _LOCK", {"_LOCK": lock, "__name__": "__main__"}))
    with pytest.raises(rs.EngineError, match=r"argument 1 of Echo.same: an engine .* cannot be sent; open"):
        echo.call("same", echo.engine)
    with rs.engine("inline") as other:
        [foreign] = other.spawn(Echo)
        with pytest.raises(rs.EngineError, match="Echo is an actor of another engine"):
            echo.call("same", foreign)
    assert echo.call("same", 1).result() == 1


@everywhere
def test_a_reference_belongs_to_its_engine(name: str) -> None:
    with rs.engine(name) as engine, rs.engine(name) as other:
        [echo] = engine.spawn(Echo)
        own, foreign = (each.put(np.full(10_000, 7, np.uint8)) for each in (engine, other))
        for argument in (foreign, [foreign]):
            with pytest.raises(rs.EngineError, match=r"argument 1 of Echo\.same: <Ref of the \w+ en"):
                echo.call("same", argument)
        assert int(echo.call("same", own).result()[0]) == 7


@everywhere
def test_an_operator_that_cannot_travel_is_named_with_its_line(name: str) -> None:
    lock = threading.Lock()
    with rs.engine(name) as engine:
        sources = engine.spawn(ScriptedSource, ([[1, 2, 3]],))
        plan = flow.from_actors(sources, "next").for_each(lambda item: lock, name="locked").gather_async()
        with pytest.raises(rs.PlanError, match=r"locked \(.*test_remote.py:\d+\) cannot be copied"):
            next(plan)


# Messages ----------------------------------------------------------------------------------------


@everywhere
def test_actors_send_to_each_other_while_the_driver_is_busy(name: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with rs.engine(name) as engine:
        one, other = engine.spawn(Echo, count=2)
        one.send("count_to", other, 200, str(fifo))
        assert fifo.read_text() == "written"
        engine.close()
        assert [row.messages for row in engine.statistics().actors] == [1, 201]


@everywhere
def test_the_failure_of_a_message_from_another_actor_surfaces(name: str) -> None:
    with pytest.raises(ValueError, match="told"), rs.engine(name) as engine:  # noqa: PT012
        one, other = engine.spawn(Echo, count=2)
        one.call("tell", other, "fail", ValueError("told")).result()


@everywhere
def test_replies_nobody_waits_for_are_taken_in_all_the_same(name: str) -> None:
    with rs.engine(name) as engine:
        reply = engine.spawn(Echo)[0].call("same", 1)
        scripts.eventually(lambda: reply.done)


@everywhere
def test_a_reply_that_cannot_come_is_a_deadlock_also_as_an_argument(name: str) -> None:
    with rs.engine(name) as engine:
        [echo], [source] = engine.spawn(Echo), engine.spawn(ScriptedSource, ([[1, 2, 3]],))
        plan = flow.from_actors(source, "next").gather_async()
        next(plan)
        source.apply(lambda instance, guest: None, echo.call("enter"))  # what follows is behind this
        with pytest.raises(rs.Deadlock, match="gather_async waits for ScriptedSource"):
            list(plan)
        engine.close(drain=False)


@everywhere
def test_a_dataclass_of_the_script_that_a_metaclass_made_arrives_whole(name: str) -> None:
    """As an argument, by its own constructor, as the class of a method's result, and beside a handle."""
    script = """
        import sys, warnings
        from typing import ClassVar

        warnings.simplefilter("ignore")  # of JAX, about Ray's forks
        import equinox as eqx, jax
        import rollstream as rs

        class Base(eqx.Module):
            scale: float = 2.0
            kind: ClassVar[str] = "base"

        class Network(Base):
            weight: jax.Array
            name: str = eqx.field(static=True)
            bias: jax.Array = eqx.field(converter=lambda bias: Network.twice(bias))

            def __init__(self, size):
                self.weight, self.name, self.bias = jax.numpy.ones(size), "network", jax.numpy.ones(size)

            @staticmethod
            def twice(bias):
                return 2 * bias

        class Worker:
            def leaves(self, network, _):
                mine = Network(3)
                return [float(sum(map(jax.numpy.sum, jax.tree.leaves(each)))) for each in (network, mine)]

            def make(self):
                return Network(2), Base(scale=3.0)

        with rs.engine(sys.argv[1]) as engine:
            other, worker = engine.spawn(Worker, count=2)
            print(worker.call("leaves", Network(1), other).result())
            network, base = worker.call("make").result()
            print(type(network) is Network, len(jax.tree.leaves(network)), network.name, base == Base(3.0))
    """
    assert scripts.run_code(script, name).stdout == "[3.0, 9.0]\nTrue 2 network True\n"
