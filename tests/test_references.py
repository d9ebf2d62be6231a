"""Items by reference: the driver passes them on unopened, on every engine."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rollstream as rs
from rollstream import flow
from rollstream.engine import ActorContext
from rollstream.engine.errors import ValueLost
from rollstream.engine.serialization import PayloadRef
from rollstream.flow import Stored
from rollstream.state_codec import decode_state, encode_state
from rollstream.testing import chaos_engine, kill

MakeEngine = Callable[[], rs.Engine]


@pytest.fixture(params=["inline", "threads", "chaos", "processes", "ray"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    return lambda: chaos_engine(7) if request.param == "chaos" else rs.engine(request.param)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Iterator[rs.Engine]:
    with make_engine() as opened:
        yield opened


class Opened:
    """Counts in its own process how often it was unpickled there."""

    count = 0

    def __init__(self, number: int, size: int = 2_000):
        self.number = number
        self.data = np.full(size, number, np.float32)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Opened.count += 1
        self.__dict__.update(state)


class Source:
    def __init__(self, *, context: ActorContext):
        self._next = context.index

    def sample(self) -> Opened:
        self._next += 10
        return Opened(self._next)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Sum:
    """Adds up what it receives, and publishes the total by reference."""

    def __init__(self, *, context: ActorContext):
        self._put = context.put
        self.total = 0.0

    def add(self, items: list[Opened]) -> dict[str, Any]:
        self.total += sum(float(item.data.mean()) for item in items)
        return {"total": self.total, "published": self._put(np.full(1_000, self.total))}

    def receive(self, value: Any) -> None:
        assert isinstance(value, np.ndarray), type(value)
        self.received = float(value[0])

    def last(self) -> float:
        return self.received

    def one(self, item: Opened) -> int:
        return item.number


def number(item: Opened) -> int:
    return item.number


def test_a_via_opens_references_and_the_driver_does_not(engine: rs.Engine) -> None:
    sources, [learner] = engine.spawn(Source, count=2), engine.spawn(Sum)
    Opened.count = 0
    stored = flow.from_actors(sources, "sample").put(metadata=number).gather_sync().flatten()
    plan = stored.batch(2).via(learner, "add", in_flight=2)

    assert [next(plan)["total"] for _ in range(3)] == [21.0, 62.0, 123.0]
    in_this_process = 6 if engine.name == "chaos" else 0  # each is opened once, where the learner is
    assert Opened.count == in_this_process


def test_facts_and_a_part_of_the_item_travel_as_asked(engine: rs.Engine) -> None:
    sources = engine.spawn(Source, count=2)
    plan = flow.from_actors(sources, "sample").put(lambda item: item.data[:3], metadata=number).gather_sync()
    first = next(plan)

    assert [item.metadata for item in first] == [10, 11]
    assert all(isinstance(item, Stored) for item in first)
    assert first[1].ref.get().tolist() == [11.0, 11.0, 11.0]


def test_a_reference_in_a_message_arrives_as_its_value(engine: rs.Engine) -> None:
    sources, [learner, other] = engine.spawn(Source), engine.spawn(Sum, count=2)
    plan = flow.from_actors(sources, "sample").put().gather_async().batch(1).via(learner, "add")
    for report in plan.take(3):
        other.send("receive", report["published"])

    assert other.call("last").result() == 10.0 + 20.0 + 30.0


def test_references_are_saved_as_values_and_stored_anew(make_engine: MakeEngine) -> None:

    with make_engine() as engine:
        sources = engine.spawn(Source, count=2)
        shards = flow.from_actors(sources, "sample").put(lambda item: item.data, metadata=number)
        plan = shards.gather_sync().flatten().batch(3)
        whole = [_opened(next(plan)) for _ in range(3)]
    with make_engine() as engine:
        sources = engine.spawn(Source, count=2)
        shards = flow.from_actors(sources, "sample").put(lambda item: item.data, metadata=number)
        plan = shards.gather_sync().flatten().batch(3)
        begun = [_opened(next(plan))]
        state = decode_state(*encode_state(plan.state_dict()))
    with make_engine() as engine:
        sources = engine.spawn(Source, count=2)
        shards = flow.from_actors(sources, "sample").put(lambda item: item.data, metadata=number)
        plan = shards.gather_sync().flatten().batch(3)
        plan.load_state_dict(copy.deepcopy(state))
        begun += [_opened(next(plan)) for _ in range(2)]

    assert begun == whole


def _opened(batch: list[Stored[Any, int]]) -> list[tuple[int, float]]:
    return [(item.metadata, float(item.ref.get().mean())) for item in batch]


class Columns:
    """Makes many small arrays and a large one; adds them up."""

    def __init__(self, count: int, *, context: ActorContext):
        self._count, self._put = count, context.put

    def make(self) -> Any:
        small = {f"column {i}": np.full(20, i, np.float32) for i in range(self._count)}
        return self._put(small | {"large": np.ones(100_000, np.float32)})

    def add(self, columns: dict[str, Any]) -> float:
        return float(sum(column.sum() for column in columns.values()))


@pytest.mark.parametrize("make_engine", ["processes", "ray"], indirect=True)
def test_a_reference_costs_the_driver_the_same_whatever_the_value(engine: rs.Engine) -> None:
    costs = []
    for count in (4, 400):
        [source], [other] = (engine.spawn(Columns, (count,)) for _ in range(2))
        assert other.call("add", source.call("make").result()).result() > 0  # memory is shown once
        before = engine.statistics().bytes_moved
        total = other.call("add", source.call("make").result()).result()
        costs.append(engine.statistics().bytes_moved - before)
        assert total == 100_000 + 20 * sum(range(count))
    assert max(costs) < 1_000
    assert abs(costs[0] - costs[1]) < 100


def test_a_snapshot_leaves_out_what_was_lost_with_a_dead_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray loses large values some time after their actor's death."""

    def lose(_: Any) -> Any:
        raise ValueLost("lost")

    with rs.engine("processes") as engine:
        [source] = engine.spawn(Source, on_failure="restart")
        batches = flow.from_actors([source], "sample").put().gather_async().batch(3)
        plan = flow.union_async([batches, flow.from_items(range(10**9))])
        assert next(plan) == 0
        while plan.statistics()["batch"].queue != 2:
            next(plan)
        plan.state_dict()  # waits for the third
        kill(source)
        with pytest.raises(rs.ActorDied):
            source.call("sample").result()
        with monkeypatch.context() as patch:
            patch.setattr(PayloadRef, "get", lose)
            state = plan.state_dict()
        statistics = plan.statistics()
        batch = next(item for item in plan if isinstance(item, list))
        numbers = [item.ref.get().number for item in batch]
        plan.close()

    assert (statistics["batch"].lost, statistics["gather_async"].lost) == (2, 1)
    assert numbers[1:] == [numbers[0] + 10, numbers[0] + 20], "the new instance's"
    [stages] = [node["stages"] for node in state["nodes"].values() if "stages" in node]
    assert stages["batch"]["partial"] == state["nodes"]["gather_async"]["ready"] == []


@pytest.mark.parametrize("name", ["chaos", "processes"])
def test_what_a_dead_actor_stored_can_still_be_read(name: str) -> None:
    with chaos_engine(3) if name == "chaos" else rs.engine(name) as engine:
        [source], [learner] = engine.spawn(Source, on_failure="restart"), engine.spawn(Sum)
        plan = flow.from_actors([source], "sample").put().gather_async()
        stored = next(plan)
        kill(source)

        assert learner.call("one", stored.ref).result() == 10
        assert stored.ref.get().data[0] == 10.0
