"""Line 14 of the contract: every node knows what it did, the bottleneck has a name, a run can be traced."""

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rollstream as rs
from rollstream import flow
from rollstream.engine import ActorContext
from rollstream.flow import ShardStatistics
from rollstream.testing import ScriptedSource

ENGINES = ["inline", "threads", "processes", "ray"]


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Busy:
    """Works for a given time an item."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __call__(self, item: Any) -> Any:
        spin(self.seconds)
        return item


def len_told(source: ScriptedSource) -> int:
    return len(source.told)


class Learner:
    def train(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize("name", ENGINES)
def test_14_counters_are_exact(name: str) -> None:
    with rs.engine(name) as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(10)), list(range(10))],), count=2, name="worker")
        shards = flow.from_actors(sources, "next", name="rollouts").filter(lambda x: x % 2, name="odd")
        learner = engine.spawn(Learner, name="learner")
        plan = shards.gather_async().batch(3).via(learner, "train").flatten()
        assert plan.statistics() == flow.Statistics(0.0, ()), "nothing ran yet"
        assert len(list(plan)) == 10
        statistics = plan.statistics()
    counted = {node.name: (node.place, node.copies, node.items, node.dropped) for node in statistics.nodes}
    assert counted == {
        "rollouts": ("worker[0..1]", 2, 20, 0),
        "odd": ("worker[0..1]", 2, 10, 10),
        "gather_async": ("driver", 1, 10, 0),
        "batch": ("driver", 1, 4, 0),
        "Learner.train": ("learner", 1, 4, 0),
        "flatten": ("driver", 1, 10, 0),
    }
    assert all(node.queue == 0 for node in statistics.nodes)
    assert statistics.elapsed > 0
    with pytest.raises(KeyError, match="the nodes are: rollouts, odd"):
        statistics["rollout"]


@pytest.mark.parametrize(("shard", "driver", "slowest"), [(0.004, 0.001, "shard"), (0.001, 0.004, "driver")])
def test_14_the_bottleneck_has_a_name(shard: float, driver: float, slowest: str) -> None:
    with rs.engine("threads") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(5))] * 2,), count=2)
        shards = flow.from_actors(sources, "next").for_each(Busy(2 * shard), name="shard").gather_async()
        plan = shards.for_each(Busy(driver), name="driver")
        assert plan.statistics().bottleneck is None
        list(plan)
        statistics = plan.statistics()
    assert statistics.bottleneck == slowest
    assert statistics["shard"].busy >= 10 * 2 * shard
    assert statistics["driver"].busy >= 10 * driver
    assert f"{slowest} *" in str(statistics)


def test_14_on_inline_all_share_one_thread() -> None:
    with rs.engine("inline") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(5))] * 4,), count=4)
        shards = flow.from_actors(sources, "next").for_each(Busy(0.004), name="shard").gather_async()
        plan = shards.for_each(Busy(0.002), name="driver")
        list(plan)
        statistics = plan.statistics()
    assert statistics.bottleneck == "shard"
    assert statistics.share(statistics["shard"]) > 0.5


def test_14_waiting_is_counted_where_it_happens() -> None:
    with rs.engine("threads") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(3))],))
        plan = flow.from_actors(sources, "next").for_each(Busy(0.01)).gather_async(name="slow")
        list(plan)
        assert plan.statistics()["slow"].waiting >= 0.02


class Clock:
    """Time that passes only where an actor says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Steady:
    """Takes a second per item, or as many as it is told by its index."""

    def __init__(self, clock: Clock, seconds: dict[int, float], *, context: ActorContext):
        self.clock, self.seconds = clock, seconds.get(context.index, 1.0)

    def sample(self) -> int:
        self.clock.now += self.seconds
        return 1

    def slow_down(self) -> None:
        self.seconds = 10.0


@pytest.mark.parametrize(
    ("seconds", "stragglers"),
    [
        ({}, {}),
        ({1: 2.0}, {}),
        ({2: 10.0}, {"worker[2]": 10.0}),
        ({0: 4.0, 2: 2.5}, {"worker[0]": 4.0, "worker[2]": 2.5}),
    ],
)
def test_14_stragglers_have_a_name(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], stragglers: dict[str, float]
) -> None:
    """Whose items take more than twice the median, on a clock that only they move."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    with rs.engine("inline") as engine:
        workers = engine.spawn(Steady, (clock, seconds), count=4, name="worker")
        plan = flow.from_actors(workers, "sample", name="rollouts").gather_async(2)
        list(itertools.islice(plan, 20))
        statistics = plan.statistics()
        plan.close()
    assert statistics.stragglers == stragglers
    times = {shard.actor: shard.busy / shard.items for shard in statistics["rollouts"].shards}
    assert times == {f"worker[{index}]": seconds.get(index, 1.0) for index in range(4)}
    told = [line for line in str(statistics).splitlines() if "as long as the median" in line]
    assert told == [f"{name} takes {by:.1f} times as long as the median" for name, by in stragglers.items()]


def test_14_a_worker_that_becomes_slow_is_a_straggler_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    with rs.engine("inline") as engine:
        workers = engine.spawn(Steady, (clock, {}), count=3, name="worker")
        plan = flow.from_actors(workers, "sample").gather_async()
        list(itertools.islice(plan, 300))
        assert not plan.statistics().stragglers
        workers[1].apply(Steady.slow_down).result()
        list(itertools.islice(plan, 60))
        assert plan.statistics().stragglers == {"worker[1]": 10.0}
        plan.close()


def test_14_of_two_shards_the_slower_may_be_a_straggler() -> None:
    shards = (
        ShardStatistics("a", 10, 1.0, 0.1),
        ShardStatistics("b", 10, 3.0, 0.3),
        ShardStatistics("c", 0, 0.0),
    )
    node = flow.NodeStatistics("rollouts", "source", "a, b", 2, 20, 0, 0, 4.0, 0.0, 0, shards)
    assert node.stragglers == {"b": pytest.approx(3.0)}


def test_14_queue_depths() -> None:
    with rs.engine("inline") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(20))] * 3,), count=3)
        left, right = flow.from_actors(sources, "next").gather_async(2).split(2, buffer=4)
        plan = flow.union_async([left.batch(3), right.batch(16)])
        next(plan)
        statistics = plan.statistics()
        assert statistics["gather_async"].queue == 5
        assert statistics["split"].queue + statistics["batch-2"].queue == 3
        plan.close()


def test_14_what_waits_on_a_shard_is_counted() -> None:
    with rs.engine("inline") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(20))] * 2,), count=2)
        shards = flow.from_actors(sources, "next").batch(3).for_each(lambda x: [x, x]).flatten()
        plan = shards.gather_sync()
        next(plan)
        assert plan.statistics()["flatten"].queue == 2, "the other half, on each of two shards"
        plan.close()


def test_14_statistics_can_be_read_from_another_thread_while_the_flow_runs() -> None:
    enough, seen = threading.Event(), []

    def watch() -> None:
        while not enough.is_set():
            seen.append(plan.statistics())

    with rs.engine("threads") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(500))] * 2,), count=2)
        plan = flow.from_actors(sources, "next").for_each(str).gather_async(2).batch(2)
        next(plan)
        watcher = threading.Thread(target=watch)
        watcher.start()
        list(plan)
        enough.set()
        watcher.join()
    counts = [statistics["gather_async"].items for statistics in seen]
    assert counts == sorted(counts)
    assert counts[0] >= 1


def test_names_come_from_functions_and_can_be_set() -> None:
    def double(item: int) -> int:
        return 2 * item

    plan = flow.from_items([1]).for_each(double).for_each(double).for_each(Busy(0)).for_each(lambda x: x)
    plan = plan.filter(bool, name="positive")
    assert [node.name for node in flow.graph(plan).nodes] == [
        "from_items",
        "double",
        "double-2",
        "Busy",
        "for_each",
        "positive",
    ]
    list(plan)
    assert plan.statistics()["double-2"].items == 1


@pytest.mark.parametrize("name", ENGINES)
def test_14_a_trace_opens_in_perfetto(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with rs.engine(name) as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(4))] * 2,), count=2, name="worker")

        def tell(item: int) -> int:
            sources[0].send("tell", item)
            return item

        shards = flow.from_actors(sources, "next", name="rollouts").for_each(str, name="shard-side")
        plan = shards.gather_async().for_each(int).for_each(tell).trace(path)
        assert not path.exists()
        assert len(list(itertools.islice(plan, 8))) == 8
        sources[0].apply(len_told).result()  # so all it was told has come before the trace is written
        assert list(plan) == []
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {"driver", "worker[0]", "worker[1]"} <= set(tracks)

    spans = [event for event in events if event["ph"] == "X"]
    for operator, place, count in [
        ("rollouts", "worker[0]", 4),
        ("shard-side", "worker[1]", 4),
        ("tell", "driver", 8),
    ]:
        assert len([s for s in spans if s["name"] == operator and s["tid"] == tracks[place]]) == count
    assert all(span["dur"] >= 0 for span in spans)

    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[key]["ts"] <= ends[key]["ts"] for key in starts)
    told = [key for key, event in starts.items() if event["name"] == "worker[0].tell"]
    assert len(told) == 8
    assert {starts[key]["tid"] for key in told} == {tracks["driver"]}
    assert {ends[key]["tid"] for key in told} == {tracks["worker[0]"]}
    replies = [key for key, event in starts.items() if event["name"].endswith("reply")]
    assert {ends[key]["tid"] for key in replies} == {tracks["driver"]}


def test_14_a_trace_is_written_when_the_scope_is_left(tmp_path: Path) -> None:
    with rs.engine("threads") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(9))],))
        items = flow.from_actors(sources, "next").gather_async().trace(tmp_path / "trace.json")
        for item in flow.union([flow.from_items([7]), items]):
            if item == 3:
                break
        assert not (tmp_path / "trace.json").exists()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_14_a_trace_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(rs.PlanError, match="no such folder"):
        flow.from_items([1]).trace(tmp_path / "none" / "trace.json")


def test_14_a_run_does_not_end_for_want_of_its_trace(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with rs.engine("threads") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(2000))] * 2,), count=2)
        plan = flow.from_actors(sources, "next").gather_async(2).trace(tmp_path / "folder" / "trace.json")
        (tmp_path / "folder").rmdir()
        with pytest.warns(UserWarning, match="no trace was written"):
            assert len(list(plan)) == 4000


def test_14_a_trace_must_be_asked_for_before_the_run(tmp_path: Path) -> None:
    plan = flow.from_items([1, 2])
    next(plan)
    with pytest.raises(rs.PlanError, match="before the first item"):
        plan.trace(tmp_path / "trace.json")
    plan.close()


def test_14_local_sources_are_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    list(flow.from_items([1, 2, 3], name="numbers").for_each(str).trace(path))
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert (names.count("numbers"), names.count("str")) == (3, 3)


def test_14_a_trace_is_written_when_the_flow_fails(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    plan = flow.from_items([1, 0]).for_each(lambda x: 1 // x).trace(path)
    with pytest.raises(rs.OperatorError, match="ZeroDivisionError"):
        list(plan)
    assert json.loads(path.read_text())["traceEvents"]
