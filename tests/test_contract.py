"""The contract of DESIGN.md, line by line, on every engine."""

import copy
import json
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rollstream as rs
from rollstream import flow
from rollstream.engine import ActorContext
from rollstream.engine.sinks import QueueSink
from rollstream.flow import Context, Provenance
from rollstream.testing import Fail, Pause, ScriptedSource, chaos_engine, kill

MakeEngine = Callable[[], rs.Engine]


@pytest.fixture(params=["inline", "threads", "chaos", "processes", "ray"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    return lambda: chaos_engine(7) if request.param == "chaos" else rs.engine(request.param)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Iterator[rs.Engine]:
    with make_engine() as opened:
        yield opened


class Worker:
    """Counts its items, and says with each which version it has been told."""

    def __init__(self, items: int = 10**9, *, context: ActorContext):
        self.index = context.index
        self.restarts = context.restarts
        self.left = items
        self.count = 0
        self.version = 0

    def sample(self, context: Context) -> dict[str, int]:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        self.count += 1
        context.note(steps=10, version=self.version)
        return {"shard": self.index, "count": self.count, "version": self.version}

    def sampled(self) -> int:
        return self.count

    def set_version(self, version: int) -> None:
        self.version = version

    def fail(self) -> None:
        raise ValueError("no such thing")


def scripted(engine: rs.Engine, *scripts: list[Any]) -> flow.ParIter[Any]:
    return flow.from_actors(engine.spawn(ScriptedSource, (scripts,), count=len(scripts)), "next")


# 1. Lazy


def test_1_lazy(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, count=2)
    plan = flow.from_actors(workers, "sample").gather_async(2).batch(2)

    assert [worker.call("sampled").result() for worker in workers] == [0, 0]
    next(plan)
    plan.close()
    done = [worker.call("sampled").result() for worker in workers]
    assert all(1 <= count <= 4 for count in done)
    assert next(plan, "over") == "over"
    assert [worker.call("sampled").result() for worker in workers] == done


def test_1_a_shard_ends_when_its_source_says_so_and_only_then(engine: rs.Engine) -> None:
    def stop(item: int) -> int:
        raise StopIteration

    assert sorted(scripted(engine, [1, 2], [3]).gather_async()) == [1, 2, 3]
    assert list(scripted(engine, [1, 2], [3]).gather_sync()) == [[1, 3], [2]]
    with pytest.raises(rs.OperatorError, match="StopIteration"):
        list(scripted(engine, [1]).for_each(stop).gather_async())
    with pytest.raises(rs.OperatorError, match="StopIteration"):
        list(flow.from_items([1]).for_each(stop))


def test_1_closed_before_its_start_it_never_starts() -> None:
    for close in (lambda plan: plan.close(), lambda plan: plan.__enter__().__exit__()):
        plan = flow.from_items([1, 2]).for_each(str)
        close(plan)
        assert list(plan) == []


# 2. One consumer


def test_2_one_consumer(engine: rs.Engine) -> None:
    shards = scripted(engine, [1])
    items = shards.gather_async()
    with pytest.raises(rs.PlanError, match=r"gather_async at .*test_contract.py:\d+ consumes already.*split"):
        shards.gather_sync()
    items.for_each(str)
    with pytest.raises(rs.PlanError, match=r"a, b = stream.split\(2\)"):
        items.for_each(int)
    with pytest.raises(rs.PlanError, match="split"):
        next(items)
    running = flow.from_items([1, 2])
    next(running)
    with pytest.raises(rs.PlanError, match="too late"):
        running.for_each(str)


# 3. Barrier


def test_3_barrier(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, count=3)
    rows = flow.from_actors(workers, "sample").gather_sync()
    for step in range(5):
        row = next(rows)
        assert (
            [item["version"] for item in row] == [step * 100 + index for index in range(3)] if step else True
        )
        assert [worker.call("sampled").result() for worker in workers] == [step + 1] * 3, "a shard ran on"
        for index, worker in enumerate(workers):
            worker.send("set_version", (step + 1) * 100 + index)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_3_the_barrier_ends_at_an_asynchronous_edge(engine: rs.Engine, ahead: int) -> None:
    workers = engine.spawn(Worker, count=2)
    rows = flow.from_actors(workers, "sample").gather_sync().prefetch(ahead)
    next(rows)
    for worker in workers:
        worker.send("set_version", 1)
    versions = [[item["version"] for item in next(rows)] for _ in range(ahead + 1)]
    stale = versions.count([0, 0])
    assert versions == [[0, 0]] * stale + [[1, 1]] * (ahead + 1 - stale)
    assert 1 <= stale <= ahead, "up to so many rows were asked for ahead"
    assert stale == ahead or engine.name != "inline"


# 4. Bounded asynchrony


class Broadcast:
    """Sends every worker the number of items seen so far, or what a learner published, for every item."""

    def __init__(self, workers: list[Any], *, only_source: bool = False):
        self.workers = workers
        self.only_source = only_source
        self.version = 0
        self.sent: dict[str, list[tuple[int, int, bool]]] = {worker.name: [] for worker in workers}
        """Per worker: the version, its items handled so far, and whether the last was one of them."""
        self.handled: dict[str, int] = {worker.name: 0 for worker in workers}

    def __call__(self, item: dict[str, Any], context: Context) -> tuple[str, dict[str, Any]]:
        [source] = context.actors
        self.handled[source.name] += 1
        self.version += 1
        for worker in [source] if self.only_source else self.workers:
            worker.send("set_version", item.get("published", self.version), sticky=True)
            self.sent[worker.name].append((self.version, self.handled[worker.name], worker is source))
        return source.name, item


class Publisher:
    """A learner that publishes the number of items it has seen, by reference."""

    def __init__(self, *, context: ActorContext):
        self._put = context.put
        self.version = 0

    def train(self, item: dict[str, int]) -> dict[str, Any]:
        self.version += 1
        return item | {"published": self._put(self.version)}


def sent_back(
    workers: list[Any], num_async: int, in_flight: int | None, broadcast: Broadcast
) -> flow.Iter[tuple[str, dict[str, Any]]]:
    """A plan that sends versions back: the driver's, or those that a learner publishes."""
    items = flow.from_actors(workers, "sample")
    if in_flight is None:
        return items.gather_async(num_async).for_each(broadcast)
    learner = workers[0].engine.spawn(Publisher, name="learner")
    return items.put().gather_async(num_async).via(learner, "train", in_flight=in_flight).for_each(broadcast)


@pytest.mark.parametrize("num_async", [1, 2, 4])
@pytest.mark.parametrize("in_flight", [None, 1, 3], ids=["driver", "learner", "learner, 3 in flight"])
def test_4_lag(engine: rs.Engine, num_async: int, in_flight: int | None) -> None:
    """A message takes effect k-1 items later for the shard whose item is handled, k for others."""
    workers = engine.spawn(Worker, count=3)
    broadcast, held = Broadcast(workers), (in_flight or 1) - 1
    for source, item in sent_back(workers, num_async, in_flight, broadcast).take(60):
        for version, handled, own in broadcast.sent[source][:-1]:  # all sent before this item was handled
            later = item["count"] - handled
            if item["version"] < version:
                assert later <= num_async + held - own, f"version {version} was not seen {later} items later"


@pytest.mark.parametrize("num_async", [1, 2, 4])
@pytest.mark.parametrize("in_flight", [None, 1], ids=["driver", "learner"])
def test_4_lag_is_exact_for_the_shard_whose_item_is_handled(
    engine: rs.Engine, num_async: int, in_flight: int | None
) -> None:
    workers = engine.spawn(Worker, count=3)
    broadcast = Broadcast(workers, only_source=True)
    sent_at = {worker.name: {0: 0} for worker in workers}
    for source, item in sent_back(workers, num_async, in_flight, broadcast).take(60):
        sent_at[source][item["count"]] = broadcast.version
        expected = sent_at[source].get(item["count"] - num_async, 0)
        assert item["version"] == expected, f"item {item['count']} of {source}"


@pytest.mark.parametrize("num_async", [1, 2, 4])
@pytest.mark.parametrize("in_flight", [2, 3])
def test_4_batches_at_a_learner_add_to_the_lag(engine: rs.Engine, num_async: int, in_flight: int) -> None:
    """By exactly n-1 if the learner always has n; a slow source may leave it with fewer."""
    workers = engine.spawn(Worker)
    for _, item in sent_back(workers, num_async, in_flight, Broadcast(workers)).take(40):
        newest, oldest = (max(0, item["count"] - num_async - held) for held in (0, in_flight - 1))
        assert oldest <= item["version"] <= newest
        assert item["version"] == oldest or engine.name != "inline"


@pytest.mark.parametrize(("stage", "held"), [("batch", 2), ("prefetch", 3), ("via", 2), ("split", 2)])
def test_4_stages_in_between_add_what_they_hold(engine: rs.Engine, stage: str, held: int) -> None:
    [worker] = engine.spawn(Worker)
    [echo] = engine.spawn(Echo)
    items = flow.from_actors([worker], "sample").gather_async()
    between = {
        "batch": lambda: items.batch(3).flatten(),
        "prefetch": lambda: items.prefetch(3),
        "via": lambda: items.via(echo, "same", in_flight=3),
        "split": lambda: flow.union_async([b.for_each(lambda x: x) for b in items.split(2, buffer=2)]),
    }[stage]()
    broadcast = Broadcast([worker])
    for source, item in between.for_each(broadcast).take(40):
        for version, handled, _ in broadcast.sent[source][:-1]:
            if item["version"] < version:
                assert item["count"] - handled <= held


class Echo:
    def same(self, item: Any) -> Any:
        return item


def test_4_lag_counts_whole_items_also_when_they_are_flattened(engine: rs.Engine) -> None:
    """A shard is not asked again before the last element of its item is handled."""
    [worker] = engine.spawn(Worker)
    triples = flow.from_actors([worker], "sample").for_each(lambda item: [item] * 3).gather_async()
    versions: list[int] = []

    def count(item: dict[str, int]) -> int:
        versions.append(item["version"])
        worker.send("set_version", len(versions))
        return 0

    others = flow.from_iterable(iter(lambda: "other", None))
    plan = flow.union_async([triples.flatten().for_each(count), others])
    while len(versions) < 12:
        next(plan)
    assert versions[:12] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]


def test_4_bounded_and_fair(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, count=4)
    plan = flow.from_actors(workers, "sample").gather_async(3)
    served: dict[int, int] = dict.fromkeys(range(4), 0)
    for _ in range(200):
        item = next(plan)
        served[item["shard"]] += 1
        assert item["count"] == served[item["shard"]], "a shard's items came out of order"
        for worker in workers:
            in_flight = worker.call("sampled").result() - served[worker.index]
            assert in_flight <= 3, f"{in_flight} items of {worker.name} in flight"
    assert min(served.values()) > 0, "a shard was starved"


def test_4_no_shard_is_starved_beside_one_that_is_always_ready(engine: rs.Engine) -> None:
    slow = flow.from_actors(engine.spawn(Worker), "sample").gather_async().for_each(lambda item: "slow")
    always = flow.from_iterable(iter(lambda: "always", None))
    plan = flow.union_async([always, slow])
    assert "slow" in plan, "or this goes on until the test is ended"


def test_4_a_slow_shard_costs_its_own_items_only(engine: rs.Engine) -> None:
    """It makes one item while another makes ten: nobody waits for it, and it is not starved."""
    many, slow = 10**9, [line for item in range(6) for line in (Pause(), item)]
    scripts = [range(many, 2 * many), range(2 * many, 3 * many), slow]
    sources, seen = engine.spawn(ScriptedSource, (scripts,), count=3), [list[int]() for _ in scripts]

    def resume_slow(item: int) -> int:
        shard = item // many - 1  # -1, the last, is the slow one
        seen[shard].append(item % many)
        if shard == 0 and item % 10 == 9:
            sources[2].send("resume")
        return shard

    stored = flow.from_actors(sources, "next", name="rollouts").put().gather_async(2).batch(2)
    plan = stored.via(engine.spawn(Echo), "same", in_flight=2).flatten().for_each(resume_slow)
    while len(seen[2]) < 6:  # or this is a Deadlock, if anybody waits for the slow one
        if next(plan) == -1 and engine.name == "inline":
            assert len(seen[0]) < 10 * (len(seen[2]) + 1), "it came ten items of another late"
            assert abs(len(seen[0]) - len(seen[1])) <= 2
    plan.close()

    assert all(items == [*range(len(items))] for items in seen), "in each shard's order, none lost"
    assert len(seen[0]) >= 60
    made = [shard.items for shard in plan.statistics()["rollouts"].shards]
    held = 2 + 1 + 2 * 2 + 1  # requested, in half a batch, at the learner, the other half of a batch
    assert all(len(items) <= count <= len(items) + held for items, count in zip(seen, made, strict=True))


def test_4_a_barrier_waits_for_a_slow_shard(engine: rs.Engine) -> None:
    """What `test_4_a_slow_shard_costs_its_own_items_only` would show if somebody waited."""
    rows = scripted(engine, [1, 2], [Pause(), 3]).gather_sync()
    with pytest.raises(rs.Deadlock, match=r"ScriptedSource\[1\]"):
        next(rows)


@pytest.mark.parametrize(("size", "kept"), [(1, [5, 4, 3]), (2, [5, 4])])
def test_4_max_staleness_drops_and_counts(engine: rs.Engine, size: int, kept: list[int]) -> None:
    """What is more than 2 versions behind goes; of a batch its oldest item counts."""

    def note(version: int, context: Context) -> int:
        context.note(version=version)
        return version

    batches = scripted(engine, [5, 4, 3, 2, 1, 0]).for_each(note).gather_async().batch(size)
    plan = batches.max_staleness(2, newest=lambda: 5).flatten()
    assert list(plan) == kept
    counted = plan.statistics()["max_staleness"]
    assert (counted.items, counted.dropped) == (len(kept) // size, (6 - len(kept)) // size)


# 5. Messages


def test_5_a_failed_message_nobody_awaits_surfaces(make_engine: MakeEngine) -> None:
    with make_engine() as engine:
        workers = engine.spawn(Worker, count=2)

        def send(item: dict[str, int]) -> dict[str, int]:
            if item == {"shard": 0, "count": 3, "version": 0}:
                workers[0].send("fail")
            return item

        with pytest.raises((ValueError, rs.OperatorError), match="no such thing"):
            for _ in flow.from_actors(workers, "sample").gather_async().for_each(send).take(10_000):
                pass


@pytest.mark.parametrize("make_engine", ["chaos", "processes", "ray"], indirect=True)
def test_5_sticky_messages_are_delivered_again_to_a_restarted_actor(engine: rs.Engine) -> None:
    [worker] = engine.spawn(Worker, on_failure="restart")
    plan = flow.from_actors([worker], "sample").gather_async()
    first = next(plan)
    worker.send("set_version", 3, sticky=True)
    worker.send("set_version", 4, sticky=True)
    kill(worker)
    second = next(plan)
    assert (first["version"], second["version"]) == (0, 4)
    assert second["count"] == 1, "a fresh instance"


def test_5_a_weight_message_installs_exactly_its_version(engine: rs.Engine) -> None:
    [worker] = engine.spawn(Worker)
    plan = flow.from_actors([worker], "sample").gather_async()
    seen = []
    for version in range(1, 6):
        worker.send("set_version", engine.put(version))
        seen.append(next(plan)["version"])
    assert seen == [1, 2, 3, 4, 5]


# 6. Union


def test_6_union_deals_credits(engine: rs.Engine) -> None:
    left = scripted(engine, ["a"] * 5).gather_async()
    right = scripted(engine, ["b"] * 4).gather_sync().flatten()
    assert "".join(flow.union([left, right], weights=[2, 1])) == "aabaababb"


def test_6_union_runs_streams_whose_items_are_not_given(engine: rs.Engine) -> None:
    seen: list[str] = []
    left = scripted(engine, list("abcdef")).gather_async().for_each(lambda x: seen.append(x) or x)
    right = scripted(engine, list("xyz")).gather_async()
    assert "".join(flow.union([left, right], weights=[2, 1], output=[1])) == "xyz"
    assert "".join(seen) == "abcdef"


def test_6_a_stream_that_cannot_run_yet_forfeits_its_turn(engine: rs.Engine) -> None:
    sources = engine.spawn(ScriptedSource, ([[Pause(), "late"], ["a", "b", "c", "d"]],), count=2)
    late = flow.from_actors(sources[:1], "next").gather_async()
    steady = flow.from_actors(sources[1:], "next").gather_async()

    def resume_at_c(item: str) -> str:
        if item == "c":
            sources[0].send("resume")
        return item

    assert "".join(flow.union([late, steady.for_each(resume_at_c)])) == "abclated"


def test_6_a_union_of_streams_that_pause_and_end_is_a_deadlock(engine: rs.Engine) -> None:
    paused, ended = engine.spawn(ScriptedSource, ([[Pause(), "late"], ["b"]],), count=2)
    plan = flow.union([flow.from_actors(actor, "next").gather_async() for actor in (paused, ended)])
    assert next(plan) == "b"
    with pytest.raises(rs.Deadlock):
        next(plan)


def test_6_a_failure_surfaces_beside_a_busy_side_stream(engine: rs.Engine) -> None:
    [worker] = engine.spawn(Worker)
    busy = flow.from_iterable(range(10**9)).for_each(lambda item: item == 99 and worker.send("fail"))
    paused = scripted(engine, [Pause()]).gather_async()
    with pytest.raises((ValueError, rs.OperatorError), match="no such thing"):
        next(flow.union_async([busy, paused], output=[1]))


def test_6_union_asks_again_when_the_consumer_is_back() -> None:
    with rs.engine("inline") as engine:
        workers = engine.spawn(Worker, count=2)
        streams = [flow.from_actors(worker, "sample").gather_async() for worker in workers]
        plan = flow.union(streams, weights=[1, 5])
        assert len([next(plan), next(plan)]) == 2
        assert workers[0].call("sampled").result() == 2, "while the other has its turn"

        rows = engine.spawn(Worker, count=2)
        plan = flow.union([flow.from_actors(worker, "sample").gather_sync() for worker in rows])
        assert len([next(plan), next(plan)]) == 2
        assert rows[0].call("sampled").result() == 1, "but not across a barrier"


def test_8_a_flow_inside_an_actor_needs_its_own_engine(engine: rs.Engine) -> None:
    class Nester:
        def run(self, actors: list[Any]) -> list[int]:
            return list(flow.from_actors(actors, "next").gather_async())

    sources = engine.spawn(ScriptedSource, ([[1]],))
    with pytest.raises(rs.PlanError, match="open an engine of its own"):
        engine.spawn(Nester)[0].call("run", sources).result()


def test_13_the_end_of_a_run_can_be_saved(engine: rs.Engine) -> None:
    learner = engine.spawn(Learner)
    plan = scripted(engine, list(range(50))).gather_async(2).via(learner, "train", in_flight=3).take(4)
    assert len(list(plan)) == 4
    assert plan.state_dict()["nodes"]["Learner.train"]["stopped"]


def test_6_union_async_takes_what_is_ready(engine: rs.Engine) -> None:
    sources = engine.spawn(ScriptedSource, ([[Pause(), "late"], ["a", "b"]],), count=2)
    late = flow.from_actors(sources[:1], "next").gather_async()
    steady = flow.from_actors(sources[1:], "next").gather_async()
    plan = flow.union_async([late, steady])
    first = [next(plan), next(plan)]
    sources[0].send("resume")
    assert [*first, *plan] == ["a", "b", "late"]


def test_6_a_served_stream_goes_on_while_the_others_are_looked_at() -> None:
    with rs.engine("inline") as engine:
        [worker] = engine.spawn(Worker)
        sampled = flow.from_actors([worker], "sample").gather_async().for_each(lambda item: "sampled")
        plan = flow.union_async([sampled, flow.from_items(["other"] * 9)])
        assert [next(plan), next(plan)] == ["sampled", "other"]
        assert worker.call("sampled").result() == 2, "it was asked again before the other was served"


def test_6_waiting_has_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float | None] = []

    def spy(sink: QueueSink, timeout: float | None) -> Any:
        timeouts.append(timeout)
        return take(sink, timeout)

    take = QueueSink._take
    monkeypatch.setattr(QueueSink, "_take", spy)
    with rs.engine("threads") as engine:
        list(flow.from_actors(engine.spawn(Worker, (20,), count=2), "sample").gather_async())
    assert timeouts
    assert set(timeouts) == {None}


class Table:
    """A replay-like actor: it holds what was stored, and a sample has to wait until there is something."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.samples = 0
        self.empty_samples = 0

    def store(self, item: Any) -> None:
        self.stored.append(item)

    def sample(self) -> Any:
        if not self.stored:
            self.empty_samples += 1
            return None
        self.samples += 1
        return self.stored[self.samples % len(self.stored)]

    def counts(self) -> tuple[int, int, int]:
        return len(self.stored), self.samples, self.empty_samples


@pytest.mark.parametrize(("ratio", "min_size", "buffer"), [(4, 10, 4), (0.5, 3, 1), (1, 1, 2)])
def test_6_a_rate_limiter_keeps_its_ratio_from_an_empty_table(
    engine: rs.Engine, ratio: float, min_size: int, buffer: float
) -> None:
    workers, [table] = engine.spawn(Worker, count=2), engine.spawn(Table)
    rollouts = flow.from_actors(workers, "sample").gather_async(2)
    replayed = flow.from_actors([table], "sample").gather_async(4)
    rollouts, replayed = flow.limit_ratio(rollouts, replayed, ratio, min_size=min_size, error_buffer=buffer)
    store = rollouts.for_each(lambda item: table.send("store", item))
    plan = flow.union_async([store, replayed.for_each(lambda item: item)], output=[1])
    for _ in range(100):
        assert next(plan) is not None
        inserts, samples, _ = table.call("counts").result()
        assert inserts >= min_size
        assert abs(samples - ratio * (inserts - min_size)) <= buffer + max(1, ratio)
    assert table.call("counts").result()[2] == 0, "a sample was asked of an empty table"


def test_6_inserts_that_a_filter_drops_do_not_count_and_no_more_are_requested(engine: rs.Engine) -> None:
    sources, [table] = engine.spawn(Numbers, count=2), engine.spawn(Table)
    inserts = (
        flow.from_actors(sources, "sample", name="numbers").gather_async(2).filter(lambda number: number % 3)
    )
    samples = flow.from_actors([table], "sample").gather_async(4)
    inserts, samples = flow.limit_ratio(inserts, samples, 2, min_size=4)
    store = inserts.for_each(lambda number: table.send("store", number))
    plan = flow.union_async([store, samples.for_each(lambda _: "sample")], output=[1])
    for _ in range(60):
        next(plan)
        stored, taken, _ = table.call("counts").result()
        assert abs(taken - 2 * (stored - 4)) <= 4
    plan.state_dict()  # waits for what was requested
    made = sum(source.call("sample").result() - 1 for source in sources)
    assert made - plan.statistics()["filter"].dropped - table.call("counts").result()[0] <= 4
    plan.close()


class Numbers:
    def __init__(self) -> None:
        self.count = 0

    def sample(self) -> int:
        self.count += 1
        return self.count


def test_6_when_one_limited_stream_ends_so_does_the_other(engine: rs.Engine) -> None:
    inserts = flow.from_items(range(10)).for_each(lambda x: "i")
    samples = flow.from_iterable(iter(lambda: "s", None))
    inserts, samples = flow.limit_ratio(inserts, samples, 2, min_size=2, error_buffer=2)
    outputs = list(flow.union_async([inserts, samples]))
    assert outputs.count("i") == 10
    assert outputs.count("s") == 18


@pytest.mark.parametrize("gather", ["gather_async", "gather_sync", "chain"])
def test_6_a_limiter_has_its_counts_right_at_the_end_and_after_a_pause(
    make_engine: MakeEngine, gather: str
) -> None:
    """Requests that end a shard, or whose replies are deferred when a snapshot is taken, do not count."""

    def build(engine: rs.Engine) -> tuple[Any, flow.Iter[Any]]:
        sources = engine.spawn(ScriptedSource, ([["i", Pause(), "i", "i"], ["i", "i", "i"]],), count=2)
        parallel = flow.from_actors(sources, "next")
        inserts = parallel.gather_sync() if gather == "gather_sync" else parallel.gather_async(2)
        if gather == "chain":
            inserts = inserts.for_each(lambda x: x)
        [paused] = engine.spawn(ScriptedSource, ([[Pause(), *["s"] * 99]],), name="paused")
        samples = flow.from_actors(paused, "next").gather_async(2)
        if gather == "chain":
            samples = samples.for_each(lambda x: x)
        inserts, samples = flow.limit_ratio(inserts, samples, 2, error_buffer=4)
        return [*sources, paused], flow.union_async([inserts, samples, flow.from_items("xxx")])

    def until_it_pauses(plan: flow.Iter[Any]) -> tuple[list[Any], Any]:
        outputs, state = [], plan.state_dict()
        try:
            for item in plan:
                outputs.append(item)
                state = plan.state_dict()
        except rs.Deadlock:
            return outputs, state
        raise AssertionError("two sources pause")

    def counts(state: Any) -> tuple[int, int, int]:
        inserts, samples = state["nodes"]["limit_ratio.inserts"], state["nodes"]["limit_ratio.samples"]
        return inserts["inserts"], inserts["pending"], samples["samples"]

    with make_engine() as engine:
        _, plan = build(engine)
        before, state = until_it_pauses(plan)
    with make_engine() as engine:
        sources, plan = build(engine)
        plan.load_state_dict(state)
        for source in sources:
            source.send("resume")
        outputs = before + list(plan)
        rows = [item for item in outputs if item not in ("s", "x")]
        last = plan.state_dict()
    assert len(rows) == (3 if gather == "gather_sync" else 6)
    assert counts(last) == (len(rows), 0, outputs.count("s"))


def test_6_credits_and_a_limiter_at_once_are_refused() -> None:
    left, right = flow.limit_ratio(flow.from_items([1]), flow.from_items([2]), 1)
    with pytest.raises(rs.PlanError, match=r"rate limiter and by the union's weights.*union_async"):
        flow.union([left, right])


# 7. Split


def test_7_branches_may_consume_16_to_1_over_buffers_of_4(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, (40,), count=2)
    left, right = flow.from_actors(workers, "sample").gather_async(2).split(2, buffer=4)
    slow, fast = left.batch(16, name="slow"), right.for_each(lambda item: item, name="fast")
    plan = flow.union_async([slow.for_each(len), fast])
    outputs = []
    for item in plan:
        outputs.append(item)
        assert plan.statistics()["split"].queue <= 4
    assert [item for item in outputs if isinstance(item, int)] == [16] * 5
    assert len([item for item in outputs if not isinstance(item, int)]) == 80


def test_7_the_larger_backlog_is_served_first() -> None:
    left, right = flow.from_items(range(8)).split(2, buffer=8)
    plan = flow.union_async([left.batch(4).for_each(lambda x: "L"), right.for_each(lambda x: "r")])
    assert "".join(plan) == "LrrrrLrrrr"


def test_7_a_branch_that_ended_holds_nobody_up(engine: rs.Engine) -> None:
    left, right = scripted(engine, list(range(50))).gather_async().split(2, buffer=2)
    plan = flow.union_async([left.take(3).for_each(lambda x: "left"), right])
    outputs = list(plan)
    assert outputs.count("left") == 3
    assert [item for item in outputs if item != "left"] == list(range(50))


def test_7_a_union_with_credits_over_one_split_is_refused() -> None:
    left, right = flow.from_items([1, 2]).split(2)
    with pytest.raises(
        rs.PlanError, match=r"split at .*test_contract.py:\d+\) could block itself.*union_async"
    ):
        flow.union([left.batch(2), right.for_each(str)])


def test_7_branches_can_be_iterated_by_hand(engine: rs.Engine) -> None:
    left, right = scripted(engine, [1, 2, 3]).gather_async().split(2, buffer=3)
    assert [next(left), next(right), next(left), next(left)] == [1, 1, 2, 3]
    assert list(right) == [2, 3]
    assert list(left) == []

    left, right = scripted(engine, [1, 2, 3]).gather_async().split(2, buffer=4)
    assert next(left) == 1
    right.for_each(str).close()
    assert list(left) == [2, 3], "closing a branch that was not begun stopped the other"


def test_7_a_buffer_nobody_empties_is_named(engine: rs.Engine) -> None:
    left, _ = scripted(engine, list(range(9))).gather_async().split(2, buffer=4, name="fork")
    assert [next(left) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(rs.Deadlock, match=r"fork \(.*test_contract.py:\d+\) holds 4 of 4 items for branch 1"):
        next(left)


def test_7_a_reply_that_never_comes_is_named(engine: rs.Engine) -> None:
    plan = scripted(engine, [1, Pause(), 2]).gather_async()
    assert next(plan) == 1
    with pytest.raises(rs.Deadlock, match=r"gather_async waits for ScriptedSource.*deferred"):
        next(plan)


def test_7_an_actor_handles_one_message_at_a_time_also_when_replies_are_deferred(engine: rs.Engine) -> None:
    class Table:
        def __init__(self) -> None:
            self.inserting = False
            self.items: list[int] = []
            self.waiting: list[rs.Deferred[int]] = []

        def sample(self) -> Any:
            assert not self.inserting, "in the middle of an insert"
            if self.items:
                return self.items.pop(0)
            self.waiting.append(rs.Deferred())
            return self.waiting[-1]

        def insert(self, item: int) -> None:
            self.inserting = True
            if self.waiting:
                self.waiting.pop(0).resolve(item)
            else:
                self.items.append(item)
            self.inserting = False

    [table] = engine.spawn(Table)
    inserts = flow.from_items(range(8)).for_each(lambda item: table.send("insert", item))
    samples = flow.from_actors(table, "sample").gather_async(2)
    plan = flow.union_async([inserts, samples], output=[1])
    assert [next(plan) for _ in range(8)] == list(range(8))


def test_7_a_limiter_that_admits_nothing_is_named(engine: rs.Engine) -> None:
    inserts = scripted(engine, [1, Pause()]).gather_async()
    inserts, samples = flow.limit_ratio(inserts, flow.from_items([1]), 1, min_size=5)
    plan = flow.union_async([inserts, samples])
    assert next(plan) == 1
    with pytest.raises(
        rs.Deadlock, match=r"limit_ratio.samples .* withholds samples: 1 inserts and 0 samples"
    ):
        next(plan)


# 8. A learner is a node


class Learner:
    def __init__(self, *, context: ActorContext):
        self.index = context.index
        self.running = 0

    def train(self, item: Any) -> tuple[int, Any]:
        return self.index, item


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_8_via_keeps_order_and_deals_items_in_turn(engine: rs.Engine, in_flight: int) -> None:
    learners = engine.spawn(Learner, count=3)
    results = list(
        scripted(engine, list(range(10))).gather_async().via(learners, "train", in_flight=in_flight)
    )
    assert results == [(index % 3, index) for index in range(10)]


def test_8_via_keeps_at_most_so_many_in_flight(engine: rs.Engine) -> None:
    [learner] = engine.spawn(Learner)
    pulled = 0

    def count(item: int) -> int:
        nonlocal pulled
        pulled += 1
        return item

    plan = flow.from_items(range(50)).for_each(count).via(learner, "train", in_flight=3)
    for given, _ in enumerate(plan):
        assert pulled - given <= 3


def test_8_one_engine_per_flow(engine: rs.Engine) -> None:
    with rs.engine("inline") as other:
        [learner] = other.spawn(Learner)
        items = scripted(engine, [1]).gather_async()
        with pytest.raises(rs.PlanError, match="one engine"):
            items.via(learner, "train")


# 9. Provenance


def test_9_provenance_travels_with_the_item(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, (6,), count=2, name="worker")
    plan = flow.from_actors(workers, "sample").gather_async(2).for_each(lambda x: x).zip_with_source()
    for item, provenance in plan:
        assert provenance.sources == (f"worker[{item['shard']}]",)
        assert provenance.sequence == item["count"] - 1
        assert provenance.total("steps") == 10


def test_9_flatten_copies_and_batch_merges(engine: rs.Engine) -> None:
    items = scripted(engine, [["a", "b"], ["c"], ["d"]]).gather_async().flatten()
    flat = [(item, provenance.sequence) for item, provenance in items.zip_with_source()]
    assert flat == [("a", 0), ("b", 0), ("c", 1), ("d", 2)]

    workers = engine.spawn(Worker, (4,), count=2, name="worker")
    [(_, provenance)] = flow.from_actors(workers, "sample").gather_async().batch(8).zip_with_source()
    assert {span.source: (span.first, span.last, span.items) for span in provenance.spans} == {
        "worker[0]": (0, 3, 4),
        "worker[1]": (0, 3, 4),
    }
    assert provenance.total("steps") == 80
    assert provenance.least("version") == provenance.most("version") == 0
    assert provenance.least("colour") is None


def test_9_combine_merges_all_inputs_since_its_last_output(engine: rs.Engine) -> None:
    kept: list[Any] = []

    def three(item: Any) -> list[list[Any]]:
        kept.append(item)
        return [list(kept)] if len(kept) % 3 == 0 else []

    plan = scripted(engine, list("abcdef")).gather_async().combine(three).zip_with_source()
    spans = [(provenance.spans[0].first, provenance.spans[0].last) for _, provenance in plan]
    assert spans == [(0, 2), (3, 5)]


def test_9_elements_of_a_row_keep_their_own_source(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, (3,), count=2, name="worker")
    plan = flow.from_actors(workers, "sample").gather_sync().flatten().zip_with_source()
    assert [(item["shard"], provenance.sources) for item, provenance in plan] == [
        (0, ("worker[0]",)),
        (1, ("worker[1]",)),
    ] * 3


def test_9_copies_of_an_item_count_once(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, (2,), name="worker")
    twice = flow.from_actors(workers, "sample").gather_async().combine(lambda item: [item, item])
    [(_, provenance)] = twice.batch(4).zip_with_source()
    assert provenance.total("steps") == 20
    assert provenance.spans[0].items == 2


class AddVersion:
    """A shard-side operator that reaches its worker's own instance: what ComputeGradients does."""

    def __call__(self, item: dict[str, int], context: Context) -> tuple[int, int, str]:
        assert isinstance(context.instance, Worker)
        return item["count"], context.instance.count, context.node


def test_9_an_operator_that_asks_gets_a_context(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, (2,), count=2)
    plan = flow.from_actors(workers, "sample").for_each(AddVersion()).gather_sync().flatten()
    assert list(plan) == [
        (1, 1, "AddVersion"),
        (1, 1, "AddVersion"),
        (2, 2, "AddVersion"),
        (2, 2, "AddVersion"),
    ]


def test_9_an_operator_may_add_to_the_provenance(engine: rs.Engine) -> None:
    def note(item: Any, context: Context) -> Any:
        context.note(loss=float(item))
        return item

    plan = scripted(engine, [1, 2, 3]).for_each(note).gather_async().batch(3).zip_with_source()
    [(_, provenance)] = plan
    assert isinstance(provenance, Provenance)
    assert (provenance.total("loss"), provenance.least("loss"), provenance.most("loss")) == (6, 1, 3)


def test_9_a_context_may_be_keyword_only_and_via_has_one_too(engine: rs.Engine) -> None:
    def double(item: int, *, context: Context) -> int:
        return 2 * item + context.provenance.sequence

    class Learner:
        def train(self, item: int, context: Context) -> tuple[int, int, str]:
            assert context.instance is self
            return item, context.provenance.sequence, context.node

    items = scripted(engine, [10, 20]).for_each(double).gather_async()
    plan = items.filter(lambda item, context: True).via(engine.spawn(Learner), "train", name="learn")
    assert list(plan) == [(20, 0, "learn"), (41, 1, "learn")]


def test_9_notes_are_numbers() -> None:
    def note(item: int, context: Context) -> int:
        context.note(tag="a")  # pyright: ignore[reportArgumentType]
        return item

    with pytest.raises(rs.OperatorError, match="notes are numbers"):
        list(flow.from_items([1]).for_each(note))


def test_9_overlapping_merges_count_once(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, (6,), name="worker")
    left, right = flow.from_actors(workers, "sample").gather_async().split(2, buffer=6)
    [(_, provenance)] = flow.union_async([left.batch(3), right.batch(2)]).batch(5).zip_with_source()
    assert (provenance.total("steps"), provenance.count) == (60, 6)
    assert [(span.first, span.last) for span in provenance.spans] == [(0, 5)]


@pytest.mark.parametrize("make_engine", ["chaos", "processes", "ray"], indirect=True)
def test_9_streams_and_incarnations_of_one_actor_are_distinct(engine: rs.Engine) -> None:
    [worker] = engine.spawn(Worker, name="worker", on_failure="restart")
    streams = [flow.from_actors(worker, "sample", name=name).gather_async() for name in ("train", "test")]
    [(_, provenance)] = flow.union(streams).take(4).batch(4).zip_with_source()
    assert (provenance.total("steps"), provenance.sources) == (40, ("worker",))

    plan = flow.from_actors(worker, "sample").gather_async().batch(4).zip_with_source()
    next(plan)
    kill(worker)
    assert next(plan)[1].total("steps") == 40


def test_9_a_row_made_into_something_else_is_one_item(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, (1,), count=2, name="worker")
    halves = flow.from_actors(workers, "sample").gather_sync().for_each(lambda row: [row, row]).flatten()
    for _, provenance in halves.zip_with_source():
        assert provenance.sources == ("worker[0]", "worker[1]")


@pytest.mark.parametrize("operator", ["for_each", "filter", "combine"])
def test_9_any_operator_may_note(operator: str) -> None:
    def note(item: int, context: Context) -> list[int]:
        context.note(loss=item)
        return [item]

    plan = getattr(flow.from_items([5]), operator)(note)
    [(_, provenance)] = plan.zip_with_source()
    assert provenance.total("loss") == 5


# 10. "Not ready" is control flow


def test_10_no_operator_ever_sees_not_ready(engine: rs.Engine) -> None:
    seen: list[Any] = []
    sources = engine.spawn(ScriptedSource, ([[1, Pause(), 2], [3, 4, 5]],), count=2)
    stream = flow.from_actors(sources, "next").gather_async().for_each(lambda x: seen.append(x) or x)
    left, right = stream.split(2, buffer=2)

    def resume(item: int) -> int:
        if item == 5:
            sources[0].send("resume")
        return item

    plan = flow.union_async([left.batch(5).flatten(), right.for_each(resume)])
    outputs = list(plan)
    assert sorted(seen) == [1, 2, 3, 4, 5]
    assert sorted(outputs) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


class Buffer:
    """A shard of a replay buffer: it defers samples until something is stored."""

    def __init__(self, *, context: ActorContext):
        self.index = context.index
        self.stored = 0
        self.samples = 0
        self.waiting: list[rs.Deferred[list[int]]] = []

    def store(self, _: Any) -> None:
        self.stored += 1
        while self.waiting:
            self.waiting.pop(0).resolve(self.draw())

    def sample(self) -> Any:
        if self.stored:
            return self.draw()
        self.waiting.append(rs.Deferred())
        return self.waiting[-1]

    def draw(self) -> list[int]:
        self.samples += 1
        return [self.index, self.samples]

    def state_dict(self) -> dict[str, int]:
        return {"stored": self.stored, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.stored, self.samples = state["stored"], state["samples"]


def is_given(item: Any) -> bool:
    return item is not None


def test_10_a_source_that_is_not_ready_defers_its_reply(make_engine: MakeEngine) -> None:
    """A shard without items holds nobody up: not the other shard, nor a rate limiter, nor a snapshot."""

    def build(engine: rs.Engine) -> tuple[list[rs.Actor[Buffer]], flow.Iter[Any]]:
        shards = engine.spawn(Buffer, count=2)
        samples = flow.from_actors(shards, "sample").gather_async(2)
        inserts, samples = flow.limit_ratio(flow.from_items(range(10**6)), samples, 1, error_buffer=4)
        store = inserts.for_each(lambda item: shards[0].send("store", item))
        return shards, flow.union_async([store, samples.filter(is_given, name="filter")], output=[1])

    with make_engine() as engine:
        _, plan = build(engine)
        outputs = [next(plan) for _ in range(6)]
        assert outputs == [[0, count] for count in range(1, 7)]
        state = plan.state_dict()
        assert plan.statistics()["filter"].dropped == 0, "an operator saw a value that means not ready"
        ready = state["nodes"]["gather_async"]["ready"]
        assert state["nodes"]["limit_ratio.samples"]["samples"] == len(outputs) + len(ready)
    with make_engine() as engine:
        shards, plan = build(engine)
        plan.load_state_dict(state)
        outputs += [next(plan) for _ in range(3)]
        shards[1].send("store", 0)
        while outputs[-1][0] == 0:
            outputs.append(next(plan))
    for index in range(2):
        counts = [count for shard, count in outputs if shard == index]
        assert counts == list(range(1, len(counts) + 1)), "a sample was lost or came twice"


# 11. Errors


def boom(item: int) -> int:
    if item == 2:
        raise ValueError("two is too many")
    return item


BOOM_LINE = boom.__code__.co_firstlineno + 2


@pytest.mark.parametrize("where", ["source", "shard", "driver", "via"])
def test_11_errors_name_operator_line_shard_and_cause(make_engine: MakeEngine, where: str) -> None:
    class Trainer:
        def train(self, item: int) -> int:
            return boom(item)

    with make_engine() as engine:
        script = [1, Fail(ValueError("two is too many")), 3] if where == "source" else [1, 2, 3]
        sources = engine.spawn(ScriptedSource, ([script],), name="worker")
        items = flow.from_actors(sources, "next", name="rollouts")
        plan = {
            "source": lambda: items.gather_async(),
            "shard": lambda: items.for_each(boom).gather_async(),
            "driver": lambda: items.gather_async().for_each(boom),
            "via": lambda: items.gather_async().via(
                engine.spawn(Trainer, name="learner"), "train", name="boom"
            ),
        }[where]()
        assert next(plan) == 1
        with pytest.raises(rs.OperatorError) as caught:
            next(plan)
        operator = "rollouts" if where == "source" else "boom"
        shard = {"via": "learner", "driver": None}.get(where, "worker")
        message = str(caught.value)
        assert (caught.value.operator, caught.value.shard) == (operator, shard)
        assert "test_contract.py" in caught.value.location
        assert message.startswith(f"{operator} ({caught.value.location})")
        assert "ValueError: two is too many" in message
        if where != "source":
            assert f'test_contract.py", line {BOOM_LINE}, in boom' in message
            remote = engine.remote and where == "shard"
            assert remote or isinstance(caught.value.original, ValueError)
        assert next(plan, "over") == "over", "the first error stops the flow"


def test_11_the_line_is_the_plans_own(engine: rs.Engine) -> None:
    items = scripted(engine, [2]).gather_async()
    plan, line = items.for_each(boom), sys._getframe().f_lineno
    with pytest.raises(rs.OperatorError) as caught:
        list(plan)
    assert caught.value.location.endswith(f"test_contract.py:{line}")


def test_11_a_debugger_lands_in_the_operator(engine: rs.Engine) -> None:
    if engine.remote:
        pytest.skip("a debugger cannot walk into another process")
    for plan in (
        scripted(engine, [2]).for_each(boom).gather_async(),
        scripted(engine, [2]).gather_async().for_each(boom),
    ):
        with pytest.raises(rs.OperatorError) as caught:
            next(plan)
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "boom"


def test_11_inline_puts_the_worker_on_the_stack_of_the_plan() -> None:
    class Deep:
        def sample(self) -> list[str]:
            return [frame.name for frame in traceback.extract_stack()]

    with rs.engine("inline") as engine:
        stack = next(flow.from_actors(engine.spawn(Deep), "sample").gather_async())
    assert "test_11_inline_puts_the_worker_on_the_stack_of_the_plan" in stack
    assert stack[-1] == "sample"


def test_an_operator_that_cannot_be_copied_to_its_shards_is_named(engine: rs.Engine) -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, item: int) -> int:
            return item

    plan = scripted(engine, [1]).for_each(Locked()).gather_async()
    with pytest.raises(rs.PlanError, match=r"Locked \(.*\) cannot be copied.*each shard has its own"):
        next(plan)


def test_11_leaving_the_debugger_is_not_a_failure(engine: rs.Engine) -> None:
    def leave(item: int) -> int:
        raise BdbQuit

    with pytest.raises(BdbQuit):
        list(scripted(engine, [1]).for_each(leave).gather_async())


# 13. State


def test_13_a_snapshot_keeps_items_in_flight(make_engine: MakeEngine) -> None:
    def build(engine: rs.Engine) -> flow.Iter[Any]:
        shards = scripted(engine, list(range(10)), list(range(10, 20)))
        return shards.filter(lambda x: x % 5).batch(2).gather_async(3).flatten().prefetch(2).batch(3)

    with make_engine() as engine:
        positions = range(0, 6, 2) if engine.remote else range(6)  # processes take their time to start
    for position in positions:
        with make_engine() as engine:
            plan = build(engine)
            before = [next(plan) for _ in range(position)]
            state = plan.state_dict()
            rest = list(plan)
        with make_engine() as engine:
            plan = build(engine)
            plan.load_state_dict(state)
            resumed = list(plan)
        everything = [item for part in before + resumed for item in part]
        assert sorted(everything) == [x for x in range(20) if x % 5]
        for shard in (range(10), range(10, 20)):
            assert [x for x in everything if x in shard] == [x for x in shard if x % 5]
        if engine.name == "inline":
            assert resumed == rest


def test_13_provenance_and_turns_go_on(make_engine: MakeEngine) -> None:
    def build(engine: rs.Engine) -> flow.Iter[Any]:
        workers = engine.spawn(ScriptedSource, ([list(range(12))],), name="worker")
        left, right = flow.from_actors(workers, "next").gather_async().split(2, buffer=1)
        pairs = left.batch(4).zip_with_source().for_each(lambda pair: ["L", *span_of(pair[1])])
        trained = right.via(engine.spawn(Learner, count=3), "train").for_each(list)
        return flow.union_async([pairs, trained])

    def span_of(provenance: Provenance) -> list[int]:
        [span] = provenance.spans
        return [span.first, span.last, span.items]

    expected = [["L", first, first + 3, 4] for first in (0, 4, 8)], [[i % 3, i] for i in range(12)]
    with make_engine() as engine:
        positions = range(1, 15, 10) if engine.remote else range(15)  # processes take their time to start
    for position in positions:
        with make_engine() as engine:
            plan = build(engine)
            outputs = [next(plan) for _ in range(position)]
            state = json.loads(json.dumps(plan.state_dict()))
        with make_engine() as engine:
            plan = build(engine)
            plan.load_state_dict(state)
            outputs += list(plan)
        assert [x for x in outputs if x[0] == "L"] == expected[0], f"resumed at {position}"
        assert [x for x in outputs if x[0] != "L"] == expected[1], f"resumed at {position}"


def test_13_actors_are_asked_for_their_state(make_engine: MakeEngine) -> None:
    def build(engine: rs.Engine) -> tuple[Any, flow.Iter[int]]:
        sources = engine.spawn(ScriptedSource, ([[1, 2, 3, 4]],), name="source")
        [aside] = engine.spawn(ScriptedSource, ([[]],), name="aside")
        return aside, flow.from_actors(sources, "next").gather_async().for_each(
            lambda x: aside.send("tell", x) or x
        )

    with make_engine() as engine:
        _, plan = build(engine)
        assert [next(plan), next(plan)] == [1, 2]
        state = plan.state_dict()
    with make_engine() as engine:
        aside, plan = build(engine)
        plan.load_state_dict(state)
        assert list(plan) == [3, 4]
        assert aside.call("heard").result() == [1, 2, 3, 4]


def test_13_a_state_of_another_plan_is_refused(engine: rs.Engine) -> None:
    state = flow.from_items([1, 2]).for_each(str).state_dict()
    with pytest.raises(
        rs.StateError, match=r"another plan.*saved but not here: str; here but not saved: int"
    ):
        flow.from_items([1, 2]).for_each(int).load_state_dict(state)
    started = flow.from_items([1, 2]).for_each(str)
    next(started)
    with pytest.raises(rs.StateError, match="fresh flow"):
        started.load_state_dict(state)
    with pytest.raises(rs.StateError, match="format"):
        flow.from_items([1, 2]).for_each(str).load_state_dict({**state, "format": 99})


def test_13_a_state_of_other_operators_is_refused(engine: rs.Engine) -> None:
    def plan(*names: str) -> flow.Iter[int]:
        shards = scripted(engine, [1, 2, 3])
        for name in names:
            shards = shards.for_each(lambda x: x, name=name)
        return shards.gather_async()

    state = plan("a", "b").state_dict()
    for names in (("a",), ("a", "c"), ("b", "a"), ("a", "b", "c")):
        other = plan(*names)
        with pytest.raises(rs.StateError, match="another plan"):
            other.load_state_dict(state)
        assert list(other) == [], "it is not half loaded"


@pytest.mark.parametrize("broken", [None, {}, {"format": 2}, {"format": 2, "operators": []}])
def test_13_what_is_no_state_is_refused(broken: Any) -> None:
    with pytest.raises(rs.StateError, match=r"damaged|another plan"):
        flow.from_items([1]).load_state_dict(broken)


def test_13_a_snapshot_is_a_copy(make_engine: MakeEngine) -> None:
    def grow(item: list[int]) -> list[int]:
        item.append(len(item))
        return item

    def build(engine: rs.Engine) -> flow.Iter[Any]:
        return scripted(engine, [[] for _ in range(6)]).gather_async(3).for_each(grow).batch(2)

    with make_engine() as engine:
        plan = build(engine)
        next(plan)
        state = plan.state_dict()
        before = copy.deepcopy(state)
        list(plan)
        assert state == before
    for _ in range(2):
        with make_engine() as engine:
            plan = build(engine)
            plan.load_state_dict(state)
            assert list(plan) == [[[0], [0]], [[0], [0]]]
            assert state == before


def test_13_a_failure_that_was_handled_is_not_raised_again(make_engine: MakeEngine) -> None:
    with make_engine() as engine:
        plan = flow.from_actors(engine.spawn(Unsavable, count=2), "sample").gather_async()
        next(plan)
        with pytest.raises(ValueError, match="cannot be saved"):
            plan.state_dict()


class Unsavable:
    def sample(self) -> int:
        return 1

    def state_dict(self) -> None:
        raise ValueError("cannot be saved")


def test_13_an_operator_that_cannot_be_saved_is_named() -> None:
    class Stubborn(Unsavable):
        def __call__(self, item: int) -> int:
            return item

    plan = flow.from_items([1]).for_each(Stubborn())
    with pytest.raises(rs.StateError, match=r"Stubborn \(.*test_contract.py:\d+\) could not be saved"):
        plan.state_dict()


def test_13_names_do_not_depend_on_having_been_drawn() -> None:
    def plan(*, draw: bool) -> flow.Iter[int]:
        first = flow.from_items([1, 2]).for_each(str).for_each(int)
        if draw:
            flow.graph(first)
        return flow.union([flow.from_items([3]).for_each(str).for_each(int), first])

    plan(draw=False).load_state_dict(plan(draw=True).state_dict())


def test_13_actors_of_a_local_flow_have_state_too(make_engine: MakeEngine) -> None:
    with make_engine() as engine:
        [aside] = engine.spawn(ScriptedSource, ([[]],), name="aside")
        plan = flow.from_items([1, 2, 3]).for_each(lambda item: aside.send("tell", item))
        next(plan)
        assert plan.state_dict()["actors"]["aside"]["told"] == [1]
        worker = engine.spawn(Worker)[0]
        with pytest.raises((ValueError, rs.OperatorError), match="no such thing"):
            list(flow.from_iterable(range(10**6)).for_each(lambda item: item or worker.send("fail")))


def test_13_a_snapshot_inside_an_operator_is_refused() -> None:
    plan = flow.from_items([1]).for_each(lambda x: plan.state_dict())
    with pytest.raises(rs.OperatorError, match="between two items"):
        next(plan)


# 14. Statistics: tests/test_statistics.py


# Misuse


def test_misuse_is_caught_when_the_plan_is_built(engine: rs.Engine) -> None:
    workers = engine.spawn(Worker, count=2)
    shards = flow.from_actors(workers, "sample")
    with pytest.raises(rs.PlanError, match=r"cannot be iterated.*gather_sync"):
        iter(shards)
    with pytest.raises(rs.PlanError, match="num_async=0"):
        shards.gather_async(0)
    with pytest.raises(rs.PlanError, match="1 weights for 2 streams"):
        flow.union([flow.from_items([1]), flow.from_items([2])], weights=[1])
    with pytest.raises(rs.PlanError, match=r"weights=0\.5: give a whole number"):
        flow.union([flow.from_items([1]), flow.from_items([2])], weights=[1, 0.5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(rs.PlanError, match=r"weights=0: .*at least 1"):
        flow.union([flow.from_items([1]), flow.from_items([2])], weights=[1, 0])
    with pytest.raises(rs.PlanError, match="output"):
        flow.union_async([flow.from_items([1])], output=[1])
    with pytest.raises(rs.EngineError, match=r"no method 'smple'; it has: .*sample"):
        flow.from_actors(workers, "smple")
    with pytest.raises(rs.PlanError, match="at least one actor"):
        flow.from_actors([], "sample")
    untyped: Any = flow  # a type checker would refuse most of these, too
    for build in (
        lambda s: s.batch(0),
        lambda s: s.batch(2.5),
        lambda s: s.take(2.5),
        lambda s: s.for_each(None),
        lambda s: s.for_each(lambda x, y: x),
        lambda s: s.filter(5),
        lambda s: untyped.union([s, shards]),
        lambda s: untyped.union_async([[1]]),
        lambda s: untyped.limit_ratio(s, shards, 1),
        lambda s: untyped.graph(shards),
        lambda s: next(shards),
        lambda s: untyped.from_actors([Worker], "sample"),
        lambda s: untyped.from_items(None),
        lambda s: s.take(-1),
        lambda s: s.prefetch(0),
        lambda s: s.split(1),
        lambda s: s.split(2, buffer=0),
        lambda s: s.via(workers, "sample", in_flight=0),
        lambda s: s.max_staleness(-1, newest=lambda: 0),
        lambda s: flow.limit_ratio(s, flow.from_items([1]), 2, error_buffer=1),
        lambda s: flow.limit_ratio(s, flow.from_items([1]), 0),
    ):
        with pytest.raises(rs.PlanError):
            build(flow.from_items([1]))
    with rs.engine("inline") as closed:
        gone = closed.spawn(Worker)
    with pytest.raises(rs.PlanError, match="ended with its engine"):
        flow.from_actors(gone, "sample")


def test_a_flow_cannot_be_pulled_from_inside_itself() -> None:
    plan = flow.from_items([1, 2]).for_each(lambda x: next(plan))
    with pytest.raises(rs.OperatorError, match="inside one of its own operators"):
        next(plan)
